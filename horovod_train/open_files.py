"""Keeps files open for reading, the most recently used ones: on a shared file system, opening costs more than reading.

Several threads may use it. Does not look at what files hold. In the lowest layer, because the watchdog asks which open
files no thread is reading.
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

_MAX_OPEN = 256
_MAX_SHARE = 4
"""Keep open at most 1 / _MAX_SHARE of the descriptors that the process may have."""


_instances: weakref.WeakSet[OpenFiles] = weakref.WeakSet()
_instances_lock = threading.Lock()


def idle_descriptors() -> set[int]:
    """Return the descriptors of open files that no thread is reading; may be called from any thread."""
    with _instances_lock:
        instances = list(_instances)
    return {number for files in instances for number in files.idle()}


class _OpenFile:
    """A descriptor, and how many reads use it."""

    def __init__(self, path: str) -> None:
        self.descriptor, self.users = os.open(path, os.O_RDONLY), 0
        self.close = weakref.finalize(self, os.close, self.descriptor)


class OpenFiles:
    """Files by path, opened at their first use. A file that is removed or replaced stays readable as it was."""

    def __init__(self, max_open: int | None = None) -> None:
        """max_open: files to keep open; files in use are open besides."""
        self._max_open = max_open or min(_MAX_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _MAX_SHARE)
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        with _instances_lock:
            _instances.add(self)

    def idle(self) -> list[int]:
        """Return the descriptors of files that are not being read."""
        with self._lock:
            return [file.descriptor for file in self._files.values() if not file.users]

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """Give the descriptor of a file, which stays open inside the block. Raises OSError."""
        file = self._acquire(path)
        try:
            yield file.descriptor
        finally:
            with self._lock:
                file.users -= 1
                self._close_oldest(self._max_open)

    def forget(self, path: str) -> None:
        """Open a file anew at its next use. Reads under way end on the descriptor that they have."""
        with self._lock:
            self._files.pop(path, None)

    def _acquire(self, path: str) -> _OpenFile:
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                file.users += 1
                self._files.move_to_end(path)
                return file
        new_file = self._open(path)  # not under the lock: it may take long
        with self._lock:
            file = self._files.setdefault(path, new_file)  # another thread may have opened it meanwhile
            file.users += 1
            self._files.move_to_end(path)
        if file is not new_file:
            new_file.close()
        return file

    def _open(self, path: str) -> _OpenFile:
        try:
            return _OpenFile(path)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
        with self._lock:  # others in this process have taken the descriptors
            self._close_oldest(0)
        return _OpenFile(path)

    def _close_oldest(self, keep: int) -> None:
        surplus = len(self._files) - keep
        if surplus > 0:
            for path in [path for path, file in self._files.items() if not file.users][:surplus]:
                self._files.pop(path).close()
