"""A file in an object store as a Python file object, for libraries that seek and read. Does not know the file's format.

Small pieces that a library reads, such as headers, come from cached pages. Ranges that the caller knows in advance are
loaded before, by several threads at the same time, because most libraries let only one thread read at a time.
"""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from horovod_train.data.storage import Storage
from horovod_train.errors import UserError

_PAGE = 1 << 18
_GAP = 1 << 16
"""Ranges no further apart than this are loaded in one request: a request takes longer than so many bytes."""

Buffer: TypeAlias = "bytearray | memoryview"
Range = tuple[int, int]
"""(offset, length) of bytes of a file."""


class Pages:
    """Reads pieces of a remote file, and caches the pages that contain short pieces. Several threads may use it."""

    def __init__(self, storage: Storage, url: str, max_pages: int = 4) -> None:
        """max_pages: cached pages, of 256 KiB each. Raises UserError for a file that cannot be read."""
        self._storage, self.url = storage, url
        self._page = functools.lru_cache(max_pages)(lambda number: self.read(number * _PAGE, _PAGE))
        try:
            self.size = storage.stamp(url).size
        except OSError as error:
            raise UserError(f"{url}: cannot be read: {error.strerror}.") from error

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes in one request, fewer at the end of the file. Raises UserError."""
        try:
            return self._storage.read(self.url, offset, max(min(length, self.size - offset), 0))
        except OSError as error:
            raise UserError(f"{self.url}: cannot be read any more: {error.strerror}.") from error

    def read_by_page(self, offset: int, length: int) -> bytes:
        """Do as read, but take short pieces from cached pages."""
        if length > _PAGE:
            return self.read(offset, length)
        first, last = offset // _PAGE, (offset + max(length, 1) - 1) // _PAGE
        joined = b"".join(self._page(number) for number in range(first, last + 1))
        return joined[offset - first * _PAGE : offset - first * _PAGE + length]


class RemoteFile(io.RawIOBase):
    """A remote file that is open for reading. Methods raise UserError if it cannot be read.

    Only one thread at a time may seek and read. All may use `loaded` at the same time.
    """

    def __init__(self, pages: Pages) -> None:
        """pages: of the file; several RemoteFiles may share them."""
        self._pages, self._position = pages, 0
        self._of_thread = threading.local()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._pages.size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Buffer) -> int:  # type: ignore[override]
        data = self._read(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    @contextmanager
    def loaded(self, ranges: Sequence[Range]) -> Iterator[None]:
        """Load ranges. What this thread reads of them inside the block comes from memory."""
        self._of_thread.pieces = [(offset, self._pages.read(offset, length)) for offset, length in _join(ranges)]
        try:
            yield
        finally:
            self._of_thread.pieces = []

    def _read(self, offset: int, length: int) -> bytes:
        for start, piece in getattr(self._of_thread, "pieces", []):
            if start <= offset and offset + length <= start + len(piece):
                return bytes(piece[offset - start : offset - start + length])
        return self._pages.read_by_page(offset, length)


def _join(ranges: Sequence[Range]) -> list[Range]:
    """Return the ranges sorted, with ranges near each other joined."""
    joined: list[Range] = []
    for offset, length in sorted(ranges):
        if joined and offset <= sum(joined[-1]) + _GAP:
            start, joined_length = joined[-1]
            joined[-1] = (start, max(joined_length, offset + length - start))
        else:
            joined.append((offset, length))
    return joined
