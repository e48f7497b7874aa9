"""Files in object stores and other file systems of fsspec, by URL. Does not know what they hold.

Each request to a server is repeated if it fails; see retries. Credentials, endpoints and time limits are the drivers'
settings: their environment variables and files, or fsspec's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

from horovod_train.config.registry import import_extra
from horovod_train.data.storage.retries import Retries, describe
from horovod_train.errors import UserError

_DRIVERS: dict[str, Callable[[str], object]] = {
    "s3": lambda where: import_extra("s3fs", "s3", where),
    "gs": lambda where: import_extra("gcsfs", "gs", where),
    "hdfs": lambda where: import_extra("pyarrow", "hdfs", where),
    "memory": lambda where: import_extra("fsspec", "s3", where),
}
"""Scheme of a URL → what imports its driver, or says how to install it."""

_OF_BOTOCORE = {
    "max_pool_connections": 64,  # for all threads that read, not ten
    "retries": {"total_max_attempts": 1},  # requests are repeated here; its own pauses would hold a process that ends
}

_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "mtime", "modified", "LastModified", "created")
"""What drivers say of a file that changes when it does, best first. All of them have one of these."""


class _Place(NamedTuple):
    """A URL: its file system, its path in that, and what comes before the path."""

    files: Any
    path: str
    prefix: str


class RemoteFiles:
    """Reads files by URL. Several threads may use it. Methods raise OSError, and UserError if a driver is missing."""

    def __init__(self, retry_s: float) -> None:
        """retry_s: how long a request that fails is repeated."""
        self._retries = Retries(retry_s)
        self._names: dict[str, list[str]] = {}

    def facts(self, url: str) -> tuple[int, int]:
        """Return a file's size, and for its version a number of 63 bits: another one for another content."""
        info = self._ask(url, lambda place: place.files.info(place.path))
        version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
        digest = hashlib.sha256(version.encode()).digest()
        return int(info["size"]), int.from_bytes(digest[:8], "little") >> 1

    def is_folder(self, url: str) -> bool:
        return bool(self._ask(url, lambda place: place.files.isdir(place.path)))

    def exists(self, url: str) -> bool:
        return bool(self._ask(url, lambda place: place.files.exists(place.path)))

    def names(self, url: str) -> list[str]:
        """Return the names of what is in a folder, sorted; as they were when this was first called."""
        if url not in self._names:
            found = self._ask(url, lambda place: place.files.ls(place.path, detail=False))
            folder = _open(url).path.rstrip("/")
            inside = {str(path).rstrip("/") for path in found} - {folder}  # some stores list an object for the folder
            self._names[url] = sorted(path.rpartition("/")[2] for path in inside)
        return self._names[url]

    def glob(self, url: str) -> list[str]:
        """Return the URLs of files that fit a pattern, sorted."""
        found = self._ask(url, lambda place: place.files.glob(place.path))
        prefix = _open(url).prefix
        return sorted(f"{prefix}{path}" for path in found)

    def read(self, url: str, offset: int, length: int) -> bytes:
        """Return bytes of a file, fewer at its end."""
        if not length:
            return b""
        return bytes(self._ask(url, lambda place: place.files.cat_file(place.path, start=offset, end=offset + length)))

    def read_all(self, url: str) -> bytes:
        return bytes(self._ask(url, lambda place: place.files.cat_file(place.path)))

    def _ask(self, url: str, question: Callable[[_Place], Any]) -> Any:
        place = _open(url)
        return self._retries.call(url, lambda: question(place))


def _open(url: str) -> _Place:
    """Find the file system of a URL. fsspec keeps one for each server and process, so this is quick."""
    scheme = url.partition("://")[0]
    _DRIVERS[scheme](url)
    fsspec = import_extra("fsspec", "s3", url)
    try:
        # A listing that a driver keeps would hide that files have changed.
        options = _options(fsspec) if scheme == "s3" else {}
        files, path = fsspec.core.url_to_fs(url.rstrip("/"), use_listings_cache=False, **options)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # a driver may raise anything, such as for a profile that does not exist
        raise UserError(f"{url}: {scheme}:// cannot be opened: {describe(error)}.") from error
    return _Place(files, path, url.rstrip("/").removesuffix(path))


def _options(fsspec: Any) -> dict[str, Any]:
    """Return what s3fs is opened with. The user's own settings win."""
    users = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    return {"config_kwargs": _OF_BOTOCORE | users}
