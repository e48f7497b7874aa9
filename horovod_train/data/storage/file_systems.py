"""Opens file systems of fsspec, such as object stores, by URL. Does not know what they hold.

Credentials, endpoints and time limits are the drivers' settings: their environment variables and files, or fsspec's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from horovod_train.config.registry import import_extra
from horovod_train.data.storage.retries import describe
from horovod_train.errors import UserError

_DRIVERS: dict[str, Callable[[str], object]] = {
    "s3": lambda where: import_extra("s3fs", "s3", where),
    "gs": lambda where: import_extra("gcsfs", "gs", where),
    "hdfs": lambda where: import_extra("pyarrow", "hdfs", where),
    "memory": lambda where: import_extra("fsspec", "s3", where),
}
"""Scheme of a URL → what imports its driver, or says how to install it."""

_BOTOCORE_OPTIONS = {
    "max_pool_connections": 64,  # for all threads that read, not ten
    # The module retries repeats requests; pauses of botocore would delay the end of a process.
    "retries": {"total_max_attempts": 1},
}


class FileSystem(NamedTuple):
    """The file system of a URL."""

    system: Any
    """The object of fsspec."""
    path: str
    """The URL's path in it."""
    prefix: str
    """What comes before the path."""


def open_file_system(url: str) -> FileSystem:
    """Find the file system of a URL. fsspec keeps one for each server and process, so this is quick."""
    scheme = url.partition("://")[0]
    _DRIVERS[scheme](url)
    fsspec = import_extra("fsspec", "s3", url)
    try:
        # A cached listing would hide that files have changed.
        options = _s3_options(fsspec) if scheme == "s3" else {}
        system, path = fsspec.core.url_to_fs(url.rstrip("/"), use_listings_cache=False, **options)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # a driver may raise anything, such as for a profile that does not exist
        raise UserError(f"{url}: {scheme}:// cannot be opened: {describe(error)}.") from error
    return FileSystem(system, path, url.rstrip("/").removesuffix(path))


def _s3_options(fsspec: Any) -> dict[str, Any]:
    """Return the options to open s3fs with. The user's settings take precedence."""
    user_options = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    return {"config_kwargs": _BOTOCORE_OPTIONS | user_options}
