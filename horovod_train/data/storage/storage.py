"""Files by their path, on a local disk or in an object store: what is there, and pieces of it.

Knows no format. Blocks of local files are read without this; see tfrecord.blocks.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from horovod_train.config.remote_paths import is_remote
from horovod_train.config.settings import DataConfig
from horovod_train.data.storage.remote_files import RemoteFiles

_PIECE = 1 << 20
_REMOTE_PIECE = 4 << 20

ReadAt = Callable[[int, int], bytes]
"""(length, offset) → bytes of a file, fewer at its end."""


class Stamp(NamedTuple):
    """What tells whether a file is still the same."""

    size: int
    mtime_ns: int
    """Of a remote file a number that stands for its version instead, such as its ETag."""
    inode: tuple[int, int] = (0, 0)
    """Device and inode; zeros for a remote file."""

    @classmethod
    def of(cls, stat: os.stat_result) -> Stamp:
        return cls(stat.st_size, stat.st_mtime_ns, (stat.st_dev, stat.st_ino))


Stamps = Mapping[str, Stamp]
"""By a file's path, in the order of the files."""


def parent(folder: str) -> str | None:
    """Return the folder that a folder is in; None for a bucket."""
    if not is_remote(folder):
        return os.path.dirname(os.path.abspath(folder))
    above, _, name = folder.rstrip("/").rpartition("/")
    return above if name and not above.endswith("/") else None


def unique(path: str) -> str:
    """Return the same text for two spellings of a path; symbolic links are not followed."""
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{os.path.normpath(rest)}" if is_remote(path) else os.path.normpath(path)


def real(path: str) -> str:
    """Return the same text for all local paths to a file; for a remote one as unique does."""
    return unique(path) if is_remote(path) else os.path.realpath(path)


class Storage:
    """Several threads may use it. Methods raise OSError with a text, and UserError if a driver is missing."""

    def __init__(self, retry_s: float = DataConfig.retry_s) -> None:
        """retry_s: how long a request to a remote file system that fails is repeated."""
        self._remote = RemoteFiles(retry_s)

    def stamp(self, path: str) -> Stamp:
        return Stamp(*self._remote.facts(path)) if is_remote(path) else Stamp.of(os.stat(path))

    def is_folder(self, path: str) -> bool:
        return self._remote.is_folder(path) if is_remote(path) else os.path.isdir(path)

    def exists(self, path: str) -> bool:
        return self._remote.exists(path) if is_remote(path) else os.path.exists(path)

    def names(self, folder: str) -> list[str]:
        """Return the names of what is in a folder, sorted."""
        return self._remote.names(folder) if is_remote(folder) else sorted(os.listdir(folder))

    def glob(self, pattern: str) -> list[str]:
        """Return the paths that fit a pattern, sorted."""
        return self._remote.glob(pattern) if is_remote(pattern) else sorted(glob.glob(pattern, recursive=True))

    def read_all(self, path: str) -> bytes:
        if is_remote(path):
            return self._remote.read_all(path)
        with open(path, "rb") as file:
            return file.read()

    def read(self, path: str, offset: int, length: int) -> bytes:
        """Return bytes of a file, fewer at its end."""
        if is_remote(path):
            return self._remote.read(path, offset, length)
        # Opened again each time, because there may be more files than a process may have open.
        with open(path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), length, offset)

    @contextmanager
    def opened(self, path: str) -> Iterator[tuple[Stamp, ReadAt]]:
        """Open a file that is to be read mostly from its start to its end."""
        if is_remote(path):
            stamp = self.stamp(path)
            with ThreadPoolExecutor(1, thread_name_prefix="read-on") as thread:
                yield stamp, _ReadOn(self._remote, path, stamp.size, thread)
        else:
            with open(path, "rb", buffering=0) as file:
                fd = file.fileno()
                yield Stamp.of(os.fstat(fd)), lambda length, offset: os.pread(fd, length, offset)

    def pieces(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file from its start to its end."""
        with self.opened(path) as (_, read):
            offset = 0
            while piece := read(_PIECE, offset):
                yield piece
                offset += len(piece)


DEFAULT = Storage()


class _ReadOn:
    """Reads a remote file piece by piece, each while the one before it is used."""

    def __init__(self, files: RemoteFiles, url: str, size: int, thread: ThreadPoolExecutor) -> None:
        self._files, self._url, self._size, self._thread = files, url, size, thread
        self._pieces: dict[int, Future[bytes]] = {}

    def __call__(self, length: int, offset: int) -> bytes:
        end = min(offset + length, self._size)
        if end <= offset:
            return b""
        first, last = offset // _REMOTE_PIECE, (end - 1) // _REMOTE_PIECE
        self._pieces = {number: piece for number, piece in self._pieces.items() if first - 1 <= number <= last + 1}
        for number in range(first, last + 2):
            if number not in self._pieces and number * _REMOTE_PIECE < self._size:
                self._pieces[number] = self._thread.submit(
                    self._files.read, self._url, number * _REMOTE_PIECE, _REMOTE_PIECE
                )
        joined = b"".join(self._pieces[number].result() for number in range(first, last + 1))
        return joined[offset - first * _REMOTE_PIECE : end - first * _REMOTE_PIECE]
