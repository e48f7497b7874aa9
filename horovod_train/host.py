"""This host and process: the user's cache, cores to keep busy, GPUs, processes, open files, the environment.

Binds no process to cores, nor shares them among ranks; see device. Does not look at what files hold. In the lowest
layer, because the watchdog asks which open files no thread is reading.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import subprocess
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

_MAX_OPEN = 256
_MAX_SHARE = 4
"""Keep open at most 1 / _MAX_SHARE of the descriptors that the process may have."""


def cache_folder() -> Path | None:
    """Return the user's cache folder for this package; None if there is no place for one.

    A relative XDG_CACHE_HOME is invalid, and passed over: XDG Base Directory Specification.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):
        return Path(cache) / "horovod_train"
    with suppress(RuntimeError):  # in a container a user may have neither HOME nor an entry in passwd
        return Path.home() / ".cache" / "horovod_train"
    return None


_CGROUPS = Path("/sys/fs/cgroup")


def cpu_quota(folder: Path = _CGROUPS) -> float:
    """Return how many cores' worth of time the container may use; infinite without a limit."""
    with suppress(OSError, ValueError):  # of cgroup version 2
        quota, period = (folder / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):  # of version 1, in which -1 is no limit
        quota, period = ((folder / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return math.inf if int(quota) < 0 else int(quota) / int(period)
    return math.inf


def usable_memory(folder: Path = _CGROUPS) -> int:
    """Return the bytes that the container may use; those of the host without a limit."""
    of_host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of versions 2 and 1
        with suppress(OSError, ValueError):  # "max" is no limit
            return min(of_host, int((folder / name).read_text()))
    return of_host


def usable_cores(cores: int | None = None) -> int:
    """Return how many of so many cores the container may keep busy together; default: those that this process has."""
    return max(1, math.ceil(min(cores or len(os.sched_getaffinity(0)), cpu_quota())))


def sees_gpu() -> bool:
    """Return whether this host has an NVIDIA GPU that its processes could use."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


# --- processes -----------------------------------------------------------------------------------------------
# By hand, because psutil counts another user's process as gone where /proc is mounted with hidepid=2, and its start
# times move when the host's clock is set.


def boot_id() -> str:
    """Return an identifier of this host that lasts until it boots again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; None for one that has ended (also a zombie).

    Fields 3 and 22 of proc_pid_stat(5); field 2, the name, is in parentheses and may itself contain any. Raises OSError
    if they cannot be read.
    """
    fields_from_3 = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None if fields_from_3[0] in "ZX" else fields_from_3[19]


def is_running(pid: int, started: str) -> bool:
    """Return whether the process that started at these ticks runs; True if it cannot be checked."""
    try:
        os.kill(pid, 0)
        return start_ticks(pid) == started
    except ProcessLookupError:
        return False
    except OSError:
        return True


def has_run_since(pid: int, moment: float) -> bool:
    """Return whether a process runs that started before `moment`, in seconds since 1970."""
    try:
        started = start_ticks(pid)
    except OSError:
        return False
    if started is None:
        return False
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s <= moment + 1


def answer_of(
    command: Sequence[str | Path], *, within_s: float | None = None, given: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a program and return how it ended and what it said, which may be in any encoding.

    given: its input. Raises OSError; subprocess.TimeoutExpired, after killing it.
    """
    return subprocess.run(
        command,
        input=given,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=within_s,
        check=False,
    )


# --- open files: on a shared file system, opening costs more than reading -------------------------------------

_instances: weakref.WeakSet[OpenFiles] = weakref.WeakSet()
_instances_lock = threading.Lock()


def idle_descriptors() -> set[int]:
    """Return the descriptors of open files that no thread is reading; may be called from any thread."""
    with _instances_lock:
        instances = list(_instances)
    return {number for files in instances for number in files.idle()}


Opened = tuple[Any, Callable[[], object]]
"""What reads a file, such as its descriptor or the object of a library; and what closes it."""


def _open_descriptor(path: str) -> Opened:
    descriptor = os.open(path, os.O_RDONLY)
    return descriptor, partial(os.close, descriptor)


class _OpenFile:
    """A file, and how many reads use it."""

    def __init__(self, path: str, open_file: Callable[[str], Opened]) -> None:
        self.users = 0
        self.opened, close = open_file(path)
        self.close = weakref.finalize(self, close)


class OpenFiles:
    """Files by path, opened at their first use. The most recently used ones stay open.

    A file that is removed or replaced stays readable as it was. Several threads may use them.
    """

    def __init__(self, max_open: int | None = None) -> None:
        """max_open: files to keep open; files in use are open besides."""
        self._max_open = max_open or min(_MAX_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _MAX_SHARE)
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        with _instances_lock:
            _instances.add(self)

    def idle(self) -> list[int]:
        """Return the descriptors of files that are not being read, as far as they are known."""
        with self._lock:
            files = [file.opened for file in self._files.values() if not file.users]
        return [opened for opened in files if isinstance(opened, int)]

    @contextmanager
    def opened(self, path: str, open_file: Callable[[str], Opened] = _open_descriptor) -> Iterator[Any]:
        """Give what reads a file, by default its descriptor; it stays open inside the block. Raises OSError.

        open_file: opens it, where it is not open yet, or raises the OSError of the system.
        """
        file = self._acquire(path, open_file)
        try:
            yield file.opened
        finally:
            with self._lock:
                file.users -= 1
                self._close_oldest(self._max_open)

    def forget(self, path: str) -> None:
        """Open a file anew at its next use. Reads under way end on the descriptor that they have."""
        with self._lock:
            self._files.pop(path, None)

    def _acquire(self, path: str, open_file: Callable[[str], Opened]) -> _OpenFile:
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                file.users += 1
                self._files.move_to_end(path)
                return file
        new_file = self._open(path, open_file)  # not under the lock: it may take long
        with self._lock:
            file = self._files.setdefault(path, new_file)  # another thread may have opened it meanwhile
            file.users += 1
            self._files.move_to_end(path)
        if file is not new_file:
            new_file.close()
        return file

    def _open(self, path: str, open_file: Callable[[str], Opened]) -> _OpenFile:
        try:
            return _OpenFile(path, open_file)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
        with self._lock:  # others in this process have taken the descriptors
            self._close_oldest(0)
        return _OpenFile(path, open_file)

    def _close_oldest(self, keep: int) -> None:
        surplus = len(self._files) - keep
        if surplus > 0:
            for path in [path for path, file in self._files.items() if not file.users][:surplus]:
                self._files.pop(path).close()


@contextmanager
def environment_kept(of: Callable[[str], bool] = lambda name: True) -> Iterator[None]:
    """Undo what a block changes in the environment. of: which variables."""
    before = {name: value for name, value in os.environ.items() if of(name)}
    try:
        yield
    finally:
        for name in [name for name in os.environ if of(name) and name not in before]:
            del os.environ[name]
        os.environ |= before
