"""Checks the paths of a config: which of them are remote, such as s3://, and which settings may have those.

Also checks every text of a config: it must have no secret in an address, and no character that a file cannot hold.
Opens no file.
"""

from __future__ import annotations

import difflib
import glob
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from horovod_train.config.settings import Config, DataConfig
from horovod_train.shown_text import without_secrets

READABLE = ("s3", "gs", "hdfs", "memory")
"""Schemes of the URLs from which records are read; see data.storage."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_PATHS = ("output_dir", "data.index_dir", "data.stage_dir", "data.preprocess", "checkpoint.resume", "model.init_from")
_MOST_BYTES, _MOST_IN_A_NAME = 4095, 255
"""Of a path and of a name in it: what Linux and its file systems take."""


def text_problem(key: str, text: str) -> str | None:
    """Return what is wrong with a text at `section.key`, whatever the setting means; None if nothing is."""
    if (shown := without_secrets(text)) != text:
        advice = (
            "The driver finds" if takes_remote_paths(key) else "config.yaml and reports show settings. Libraries find"
        )
        return (
            f"must not hold a password or a key; received {shown}. {advice} credentials themselves: in environment "
            "variables, their configuration files, or the machine's role."
        )
    if "\0" in text:
        return f"must not hold a NUL character, which no name or path can have; received {text!r}."
    return None


def did_you_mean(path: str) -> str:
    """Return a question that names the most similar local path; "" if there is none."""
    found = "/" if os.path.isabs(path) else ""
    for part in filter(None, path.split("/")):
        names = [name for name in os.listdir(found or ".") if not name.startswith(".")] if _is_open(found) else []
        near = [part] if part in (".", "..", *names) else difflib.get_close_matches(part, names, n=1, cutoff=0.6)
        if not near:
            return ""
        found = os.path.join(found, near[0])
    return f" Did you mean {found}?" if found else ""


def _is_open(folder: str) -> bool:
    return os.path.isdir(folder or ".") and os.access(folder or ".", os.R_OK | os.X_OK)


def missing_paths(config: DataConfig, made_by: str) -> Iterator[str]:
    """Yield a sentence for each local path of data.train and data.eval that does not exist, or is a link to nothing.

    What cannot be looked at now is left to what reads it, which says why.

    made_by: the command that makes the records; "" if none is known.
    """
    for split in ("train", "eval"):
        for path in config.paths(split) if not (config.source or config.dataset) else ():
            if _URL.match(path) or glob.has_magic(path) or not _is_missing(path):
                continue
            hint = did_you_mean(path) or (f" Make it by: {made_by}" if made_by else "")
            missing = f"{path} does not exist.{hint or f' It is looked for in {os.getcwd()}.'}"
            yield f"data.{split}: {link_to_nothing(path) or missing}"


def link_to_nothing(path: str | Path) -> str:
    """Return what is wrong with a path that is, or is below, a link to what does not exist; "" if it is not."""
    for place in map(str, (Path(path), *Path(path).parents)):
        if os.path.islink(place) and _is_missing(place):
            return f"{place} is a link to nothing: is its disk mounted?"
    return ""


def _is_missing(path: str) -> bool:
    """Return whether nothing is there. A path in a folder that may not be entered, or does not answer, may exist."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return True
    except OSError:
        return False
    return False


def path_problem(key: str, text: str) -> str | None:
    """Return why the path at `section.key` can name nothing on this machine; None if it can, or is no path."""
    if key not in _PATHS and key not in ("model", "model.name") and not takes_remote_paths(key):
        return None
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and not text.isascii():  # one path would name two files
        return (
            f"expected a path in ASCII, because the encoding of this locale is {encoding}, and TensorFlow's is UTF-8; "
            f"received {text!a}. Set LC_ALL=C.UTF-8."
        )
    try:
        longest = max(len(os.fsencode(name)) for name in text.split("/"))
        is_too_long = longest > _MOST_IN_A_NAME or len(os.fsencode(text)) > _MOST_BYTES
    except UnicodeEncodeError:
        return f"expected a path in {encoding}, the encoding of this locale; received {text!a}. Set LC_ALL=C.UTF-8."
    # Records are read by Python, which takes any bytes as a name.
    if not takes_remote_paths(key) and any("\ud800" <= character <= "\udfff" for character in text):
        return f"expected a path in UTF-8, because TensorFlow takes no other; received {text!r}. Rename it."
    if is_too_long:
        return (
            f"expected a path of at most {_MOST_BYTES} bytes, with names of at most {_MOST_IN_A_NAME}; received "
            f"{len(text)} characters, {text}."
        )
    return None


def is_remote(path: str) -> bool:
    """Return whether a path is a URL from which records are read."""
    url = _URL.match(path)
    return url is not None and url[1] in READABLE


def remote_problem(text: str) -> str | None:
    """Return what is wrong with a path that is not on a local file system; None if it may be local."""
    if _URL.match(text):
        return (
            f"expected a local path; received {without_secrets(text)}. Only data.train, data.eval and predict's --data "
            "may name a store: mount it, or copy it."
        )
    return None


def takes_remote_paths(key: str) -> bool:
    """Return whether the setting at `section.key` may name records in an object store."""
    return key in ("data.train", "data.train.path", "data.eval")


def record_path_problem(key: str, text: str) -> str | None:
    """Return why no records can be read from the path at `section.key`; None if they may be."""
    url = _URL.match(text)
    if url and url[1] not in READABLE:
        schemes = ", ".join(f"{scheme}://" for scheme in READABLE)
        return f"expected a local path, or one that begins with {schemes}; received {without_secrets(text)}."
    if url and not url[2].strip("/"):
        return f"names no folder or file; received {text}."
    return path_problem(key, text)


def record_path_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the paths of records, and with settings that are about object stores: (key, problem)."""
    data, watch = config.data, config.watch
    if not data.source:  # whose class does what it likes with its entries
        for split in ("train", "eval"):
            found = (record_path_problem(f"data.{split}", path) for path in data.paths(split))
            yield from ((f"data.{split}", problem) for problem in found if problem)
    if data.source or not any(map(is_remote, (*data.paths("train"), *data.paths("eval")))):
        if data.retry_s != DataConfig.retry_s:
            yield "data.retry_s", "is for s3:// and other remote paths, and there are none. Leave it out."
        return
    if watch.enabled and data.retry_s >= watch.stop_after_s:
        yield (
            "data.retry_s",
            f"must be less than watch.stop_after_s ({watch.stop_after_s:g}), after which a rank that waits is ended; "
            f"received {data.retry_s:g}.",
        )
