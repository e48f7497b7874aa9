"""Which paths name files that are not on a local file system, and where a config may have them. Opens nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from horovod_train.config.settings import Config, DataConfig

READABLE = ("s3", "gs", "hdfs", "memory")
"""Schemes of the URLs from which records are read; see data.storage."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_SECRET = re.compile(r"[^/]*:[^/]*@")


def is_remote(path: str) -> bool:
    """Return whether a path is a URL from which records are read."""
    url = _URL.match(path)
    return url is not None and url[1] in READABLE


def remote_problem(text: str) -> str | None:
    """Return what is wrong with a path that is not on a local file system; None if it may be local."""
    if _URL.match(text):
        return (
            f"expected a local path; received {_without_secret(text)}. Remote ones are not read: mount it, or copy it."
        )
    return None


def unreadable_problem(text: str) -> str | None:
    """Return why no records can be read from a path; None for a local one, or a URL that storage can read."""
    url = _URL.match(text)
    if url is None:
        return None
    if url[1] not in READABLE:
        schemes = ", ".join(f"{scheme}://" for scheme in READABLE)
        return f"expected a local path, or one that begins with {schemes}; received {_without_secret(text)}."
    if _SECRET.match(url[2]):
        return (
            f"must not hold a password or a key; received {_without_secret(text)}. The driver finds credentials "
            "itself: in environment variables, its configuration files, or the machine's role."
        )
    if not url[2].strip("/"):
        return f"names no folder or file; received {text}."
    return None


def takes_remote_paths(key: str) -> bool:
    """Return whether the setting at `section.key` may name records in an object store."""
    return key in ("data.train", "data.train.path", "data.eval")


def remote_path_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with settings that are about object stores: (key, problem)."""
    data, watch = config.data, config.watch
    if not reads_remote_files(data):
        if data.retry_s != DataConfig.retry_s:
            yield "data.retry_s", "is for s3:// and other remote paths, and there are none. Leave it out."
        return
    if watch.enabled and data.retry_s >= watch.stop_after_s:
        yield (
            "data.retry_s",
            f"must be less than watch.stop_after_s ({watch.stop_after_s:g}), after which a rank that waits is ended; "
            f"received {data.retry_s:g}.",
        )


def reads_remote_files(data: DataConfig) -> bool:
    """Return whether records are read by storage; a class of data.source does what it likes with its entries."""
    return data.source is None and any(map(is_remote, (*data.paths("train"), *data.paths("eval"))))


def _without_secret(text: str) -> str:
    url = _URL.match(text)
    return f"{url[1]}://{_SECRET.sub('…@', url[2], count=1)}" if url else text
