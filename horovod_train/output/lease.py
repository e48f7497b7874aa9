"""One run per directory: `lease.json`, kept fresh while a run writes there.

Only root has a lease. It does not stop a run that loses its lease, but reports that in `lost`.

filelock's SoftFileLease (4.2.11) keeps less: on a file system that cannot exchange two names, such as NFS, it never
takes over a stale lease, and on any it replaces a file of this name that is no lease.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

from horovod_train.errors import InUse, UserError
from horovod_train.host import boot_id, is_running, start_ticks
from horovod_train.output.files import Artifact, must_be_writable, parse_json, remove, replace

NAME = "lease.json"
REFRESH_S = 5.0
STALE_S = 30.0
"""Leases not refreshed for this long are stale: six missed refreshes. It stays below the 60 s after which Horovod warns
of a stall, because ranks wait for root to take the lease.
"""
CLOSE_WITHIN_S = 10.0
POLL_S = 0.1
SETTLE_S = 1.0
UNNAMED = "an unnamed process"
"""In messages: the holder of a lease that names none, as in the instant after its creation."""
_LEASE = Artifact("a run's lease", re.escape(NAME), content_matches=lambda path: _is_lease(path.read_bytes()))
_PROBE = Artifact("a run's lease", rf"\.{re.escape(NAME)}\.[0-9a-f]{{16}}")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease. machine and started distinguish processes with the same host name and pid.

    folder: the inode of the run directory, which a copy of it does not have; 0: not known.
    """

    host: str
    pid: int
    job: str
    since: str
    machine: str
    started: str
    token: str
    folder: int = 0

    @property
    def is_of_this_machine(self) -> bool:
        """Whether its process has its number from the machine, or the container, in which this one runs."""
        return self.machine == _machine()

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"pid {self.pid} on {self.host}{job}, since {self.since}"


class Lease:
    """A lease of nothing, which ranks other than root have: nothing to keep, nothing to lose."""

    @property
    def lost(self) -> str | None:
        """Which run has taken the directory from this run; None if none has."""
        return None

    def is_ours(self) -> bool:
        """Read the file now; return whether no other run has taken the directory. If unreadable, nothing changes."""
        return True

    def must_be_ours(self) -> None:
        """Raise InUse if another run has taken the directory; see is_ours."""
        if not self.is_ours():
            raise InUse(
                "output_dir: another run has taken the directory, so this one ends and saves nothing more. "
                f"The other: {self.lost}."
            )

    def close(self) -> None:
        """End the lease; remove the file, unless another run owns it by now."""


class FileLease(Lease):
    """The lease of root. A thread updates the file's modification time every REFRESH_S."""

    def __init__(self, path: Path, holder: Holder, refreshed: float, refresh_s: float, stale_s: float) -> None:
        self._path, self._holder, self._refresh_s, self._stale_s = path, holder, refresh_s, stale_s
        self._refreshed = self._looked = refreshed
        self._lost: str | None = None
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep_fresh, name="lease", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str | None:
        # Without a refresh for so long this process may have been suspended, and another run may have the directory.
        is_overdue = _now() - max(self._refreshed, self._looked) > 2 * self._refresh_s
        if is_overdue and not self._released.is_set():
            self._looked = _now()  # a disk that refuses refreshes is not read at each call
            self.is_ours()
        return self._lost

    def is_ours(self) -> bool:
        with suppress(OSError):
            self._check(refresh=False)
        return self._lost is None

    def close(self) -> None:
        self._released.set()
        self._thread.join(CLOSE_WITHIN_S)
        if self._thread.is_alive():  # in a file system that hangs: it would write the lease again after its removal
            log.warning(f"{self._path} stays, because its file system does not answer; it is stale soon")
            return
        with suppress(OSError), _opened(self._path) as descriptor, _locked(self._path, descriptor) as is_current:
            holder = _read(descriptor)
            if is_current and holder is not None and holder.token == self._holder.token:
                remove(self._path, _LEASE)

    def _keep_fresh(self) -> None:
        while self._lost is None and not self._released.wait(self._refresh_s):
            # A full or vanished disk does not end the run here: checkpoints report the problem.
            with suppress(OSError):
                try:
                    self._check(refresh=True)
                except FileNotFoundError:
                    if self._lost is None:
                        _create(self._path, self._holder)
        self.is_ours()  # the process may have been suspended until now: what is closed next depends on this

    def _check(self, *, refresh: bool) -> None:
        # Taken before the file is touched: if the process is frozen in between, the file is the older of the two.
        now = _now()
        try:
            with _opened(self._path) as lease:
                holder = _read(lease)
                if holder is not None and holder.token != self._holder.token:
                    self._lost = str(holder)
                elif refresh:
                    os.utime(lease)  # the file just read, even if another is at the path by now
                    self._refreshed = now
        except FileNotFoundError:
            # Another run may have taken the stale lease and have ended since.
            silent_s = _now() - self._refreshed
            if silent_s > self._stale_s and self._path.parent.is_dir():
                self._lost = f"one that has ended: this run did not refresh its lease for {silent_s:.0f} s"
            raise


def open_lease(
    directory: Path | None,
    *,
    job: str = "",
    refresh_s: float = REFRESH_S,
    stale_s: float = STALE_S,
) -> Lease:
    """Take the lease of a run directory, which must exist; without one (not root) return a lease of nothing.

    A lease that is stale, or whose process has died, is taken over with a warning. A lease from another host or another
    folder, or one that looks stale because a clock was set, may be of a live run. It is watched until it is refreshed
    or stale: for at least two refreshes, however old it looks, and at most stale_s. job: the scheduler's name for this
    job.

    Raises InUse if another run has the directory, UserError if the lease cannot be written.
    """
    if directory is None:
        return Lease()
    path = directory / NAME
    with must_be_writable(path):
        mine = describe_me(job, directory)
        probe = directory / f".{NAME}.{mine.token}"
        try:
            refreshed = _acquire(path, probe, mine, stale_s, refresh_s)
        except PermissionError as error:
            if str(error.filename) == str(path) and path.exists():  # else the directory cannot be written
                raise _of_another_user(path) from error
            raise
        finally:
            remove(probe, _PROBE)
    return FileLease(path, mine, refreshed, refresh_s, stale_s)


def _of_another_user(path: Path) -> UserError:
    owner, holder = f"user {path.stat().st_uid}", None
    with suppress(KeyError):  # without an entry in passwd
        owner = path.owner()
    with suppress(OSError):
        holder, *_ = read_lease(path.parent)
    return UserError(
        f"output_dir: {path} belongs to {owner}, and only {owner} can write it; it is the lease of "
        f"{holder or UNNAMED}. If that run has ended, remove the file; or choose another directory with --output-dir."
    )


def read_lease(directory: Path) -> tuple[Holder | None, float, bool | None]:
    """Return who holds a run directory, when its lease was last refreshed, and whether the holder's process lives.

    Holder None: the file names none. Process None: see _holds. Raises OSError.
    """
    with _opened(directory / NAME, os.O_RDONLY) as descriptor:
        holder, refreshed = _read(descriptor), os.fstat(descriptor).st_mtime
    return holder, refreshed, _holds(holder, directory)


def _acquire(path: Path, probe: Path, mine: Holder, stale_s: float, refresh_s: float) -> float:
    """Wait until the lease is free or stale, then write that of this run; return the time just before (see _now).

    Raises InUse if another run keeps it.

    probe: a file of this process, whose time is set as the lease's is: under NFS by the server's clock, under Lustre or
    FUSE by each client's. Those clocks may differ, so a lease is replaced only after two refresh intervals without a
    change.
    """
    watched: tuple[Holder | None, int] | None = None
    watched_since = 0.0
    while True:
        now = _now()
        # Before this look at the file and after the first: this process may be frozen, or the disk slow, at any line.
        waited_s = time.monotonic() - watched_since if watched else 0.0
        probe.touch()
        with suppress(FileExistsError):
            _create(path, mine)
            return now
        with suppress(FileNotFoundError), _opened(path) as lease:  # may be released at any moment
            holder, refreshed_ns = _read(lease), os.fstat(lease).st_mtime_ns
            if watched is None:
                watched_since = time.monotonic()
            # Count also the time watched here: after a clock correction, the last refresh may lie in the future.
            silent_s = max((probe.stat().st_mtime_ns - refreshed_ns) / 1e9, waited_s)
            name = str(holder or UNNAMED)
            runs_here = _holds(holder, path.parent)
            has_changed = watched not in (None, (holder, refreshed_ns))
            is_silent = silent_s > stale_s and not has_changed and waited_s > 2 * refresh_s
            is_stale = runs_here is False or is_silent
            if is_stale and _replace(path, lease, refreshed_ns, probe, mine):
                _remove_old_probes(path, stale_s)
                how = "has ended" if runs_here is False else f"has not refreshed it for {silent_s:.0f} s"
                log.warning(f"{path} was held by {name}, which {how}. This run takes over.")
                return now
            is_fresh = has_changed or (bool(runs_here) and silent_s <= stale_s)
            if (is_fresh and not is_stale) or waited_s > 2 * (stale_s + refresh_s):
                raise InUse(
                    f"output_dir: {path.parent} is in use by another run: {name}. Stop that run, or choose another "
                    "directory with --output-dir."
                )
            if watched is None and not is_stale:
                wait_s = max(stale_s - silent_s, 2 * refresh_s)
                log.info(f"{path} is held by {name}. Waiting up to {wait_s:.0f} s to see whether it is refreshed.")
            watched = (holder, refreshed_ns)
        time.sleep(POLL_S)


def _replace(path: Path, lease: int, refreshed_ns: int, probe: Path, mine: Holder) -> bool:
    """Replace the open stale lease by this run's, unless it has changed or gone; return whether it was replaced."""
    with _locked(path, lease) as is_current:
        if is_current and os.fstat(lease).st_mtime_ns == refreshed_ns:
            remove(probe, _PROBE)
            _create(probe, mine)
            replace(probe, path, _LEASE)
    with _opened(path) as now:
        holder = _read(now)
    return holder is not None and holder.token == mine.token


@contextmanager
def _locked(path: Path, lease: int) -> Iterator[bool]:
    """Lock the open lease; yield whether it is still at `path`, and no other process is replacing or removing it.

    The lock is on the file itself; the kernel drops it when the process dies. On file systems without locks, the last
    of several concurrent replacers wins, and the others see that after a while.
    """
    has_locks = True
    try:
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    except OSError:
        has_locks = False
    with _opened(path) as now:
        is_there = os.path.samestat(os.fstat(now), os.fstat(lease))
    yield is_there
    if not has_locks:
        time.sleep(SETTLE_S)


def _remove_old_probes(path: Path, stale_s: float) -> None:
    """Remove probes of processes that were killed while they waited."""
    with suppress(OSError):  # probes only use space
        now = path.stat().st_mtime
        for probe in path.parent.glob(f".{path.name}.*"):
            if now - probe.stat().st_mtime > stale_s:
                remove(probe, _PROBE)


def _create(path: Path, holder: Holder) -> None:
    """Create the file; if several processes try, one succeeds and the others get FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask
    try:
        os.write(descriptor, (json.dumps(asdict(holder), indent=2) + "\n").encode())
    except OSError:
        remove(path, _LEASE if path.name == NAME else _PROBE)
        raise
    finally:
        os.close(descriptor)


@contextmanager
def _opened(path: Path, flags: int = os.O_RDWR) -> Iterator[int]:
    # Opening makes NFS ask the server for the file's current state; for writing, because NFS locks no read-only files.
    descriptor = os.open(path, flags | os.O_NONBLOCK)  # a pipe in its place is not waited for
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> Holder | None:
    """Return the holder named in a lease; None for any other content, as in the instant after its creation."""
    return _parse(os.pread(descriptor, 1 << 16, 0))


def _parse(text: bytes) -> Holder | None:
    try:
        content = parse_json(text)
        return Holder(**{field.name: content[field.name] for field in fields(Holder) if field.name in content})
    except (ValueError, KeyError, TypeError):
        return None


def _is_lease(content: bytes) -> bool:
    """Return whether a file is a lease, or the beginning of one whose process died or whose disk was full."""
    head = b'{\n  "host": '
    return content.startswith(head) or head.startswith(content) or _parse(content) is not None


def _now() -> float:
    """Return seconds of a clock that no correction changes and that runs on while the host is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def describe_me(job: str, directory: Path) -> Holder:
    """Return this process as the holder of a run directory. job: the scheduler's name for its job."""
    pid = os.getpid()
    return Holder(
        host=socket.gethostname(),
        pid=pid,
        job=job,
        since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=_machine(),
        started=start_ticks(pid) or "",
        token=secrets.token_hex(8),
        folder=directory.stat().st_ino,
    )


def _machine() -> str:
    """Return what numbers the processes: containers on one host do so separately."""
    return f"{boot_id()} {os.stat('/proc/self/ns/pid').st_ino}"


def _holds(holder: Holder | None, directory: Path) -> bool | None:
    """Return whether a holder's process holds this directory; None if that cannot be known here.

    It runs on another machine, or its lease is one of another folder, of which this is a copy.
    """
    if holder is None or not holder.is_of_this_machine:
        return None
    if not is_running(holder.pid, holder.started):
        return False
    return True if holder.folder in (0, directory.stat().st_ino) else None
