"""Keeps files open for reading, the most recently used ones: on a shared file system, opening costs more than reading.

Several threads may use it. Does not look at what files hold. Here, below all packages, because the watchdog asks which
open files nobody reads.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

_MOST = 256
_SHARE = 4
"""One of so many of the descriptors that a process may have."""


_everywhere: weakref.WeakSet[OpenFiles] = weakref.WeakSet()
_registering = threading.Lock()


def idle_descriptors() -> set[int]:
    """Return the descriptors that are only kept open; may be called from any thread."""
    with _registering:
        found = list(_everywhere)
    return {number for files in found for number in files.idle()}


class _Open:
    """A descriptor, and how many reads use it."""

    def __init__(self, path: str) -> None:
        self.descriptor, self.users = os.open(path, os.O_RDONLY), 0
        self.close = weakref.finalize(self, os.close, self.descriptor)


class OpenFiles:
    """Files by path, opened at their first use. A file that is removed or replaced stays readable as it was."""

    def __init__(self, most: int | None = None) -> None:
        """most: files to keep open; files in use are open besides."""
        self._most = most or min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE)
        self._files: OrderedDict[str, _Open] = OrderedDict()
        self._lock = threading.Lock()
        with _registering:
            _everywhere.add(self)

    def idle(self) -> list[int]:
        """Return the descriptors of files that are not being read."""
        with self._lock:
            return [file.descriptor for file in self._files.values() if not file.users]

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """Give the descriptor of a file, which stays open inside the block. Raises OSError."""
        file = self._take(path)
        try:
            yield file.descriptor
        finally:
            with self._lock:
                file.users -= 1
                self._close_oldest()

    def _take(self, path: str) -> _Open:
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                file.users += 1
                self._files.move_to_end(path)
                return file
        made = self._open(path)  # not under the lock: it may take long
        with self._lock:
            file = self._files.setdefault(path, made)  # another thread may have opened it meanwhile
            file.users += 1
            self._files.move_to_end(path)
        if file is not made:
            made.close()
        return file

    def _open(self, path: str) -> _Open:
        try:
            return _Open(path)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
        with self._lock:  # others in this process have taken the descriptors
            self._close_oldest(keep=0)
        return _Open(path)

    def _close_oldest(self, keep: int | None = None) -> None:
        surplus = len(self._files) - (self._most if keep is None else keep)
        idle = [path for path, file in self._files.items() if not file.users] if surplus > 0 else []
        for path in idle[: max(surplus, 0)]:
            self._files.pop(path).close()
