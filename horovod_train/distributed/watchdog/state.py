"""What the threads of a rank's watchdog share: why the run ends, which rank shows its exception, when to exit.

Also which rank of a host prints a line that all of its ranks know. Does not send or decide; see watch_thread.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_train.config.settings import WatchConfig
from horovod_train.distributed.watchdog.heartbeat import Beat, StallDetector, intervals
from horovod_train.distributed.watchdog.transport import Message, Transport
from horovod_train.errors import Stalled
from horovod_train.output.console import let_go, to_stderr
from horovod_train.output.rank_log import RankLog
from horovod_train.output.removal import Artifact, remove

if TYPE_CHECKING:  # Commands plan with the watchdog before TensorFlow is loaded.
    from horovod_train.distributed.group import WorkerGroup

ANSWER_WITHIN_S = 3.0
PAUSED_AFTER_S = 2.0
"""If a turn of the watchdog's thread is late by this, the process was frozen or short of CPU."""

DISAPPEARED = "disappeared: killed or out of memory?"
LEFT = "ended by itself, by sys.exit or at the end of its script, while other ranks still exchange"

_FILE = Artifact("a file that the ranks of a host share", r"horovod_train-[0-9a-f]{16}-\d+")
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Cause:
    """Why a run ends early: what happened to a rank. `what` continues a sentence that begins with the rank's name."""

    rank: int
    what: str
    exit_code: int


class WatchState:
    """`changed` guards all attributes, and sending."""

    def __init__(
        self,
        group: WorkerGroup,
        log: RankLog,
        limits: WatchConfig,
        transport: Transport,
        watched: Sequence[int],
        host_claim: HostClaim | None = None,
    ) -> None:
        """watched: the ranks whose heartbeats arrive here.

        host_claim: decides which rank of this host prints why the run ends; without it the first remaining rank does.
        """
        self.group, self.log, self.limits, self.transport = group, log, limits, transport
        self.intervals = intervals(limits, group.size)
        self.names = [group.name(rank) for rank in range(group.size)]
        self.detector = StallDetector(self.names, watched, limits)
        self.changed = threading.Condition()
        self.speaker: int | None = None
        """The rank that shows its exception: the first that failed."""
        self.cause: Cause | None = None
        self.exit_code = 1
        self.exits_since: float | None = None
        """When this process began to exit; None if it has not."""
        self.is_closed = False
        self.finished: list[int] = []
        """The ranks that have said that they end, as far as this one is told, in that order."""
        self.paused_until = 0.0
        """Until this time the process counts as recently frozen, or short of CPU."""
        self._host_claim = host_claim
        self._has_printed = False

    def hear(self, rank: int, message: Message, now: float) -> None:
        """Process a heartbeat that has arrived."""
        self.detector.hear(rank, Beat(**message["beat"]), now)

    def discount_pause(self, seconds: float, now: float) -> None:
        """Do not count other ranks as silent for a time in which this process could not hear them."""
        self.detector.discount_pause(seconds)
        self.paused_until = now + PAUSED_AFTER_S

    def set_speaker(self, rank: int) -> None:
        self.speaker = rank
        self.changed.notify_all()

    def announce_cause(self, cause: Cause) -> None:
        """Tell all ranks why the run ends, unless this rank knows of an earlier cause."""
        if self.cause is None and not self.is_closed:
            self.transport.send({"kind": "cause", "cause": vars(cause)})
        self.record_cause(cause)

    def record_cause(self, cause: Cause) -> None:
        """Record why the run ends. Only the first cause counts."""
        if self.cause is None and not self.is_closed:
            self.cause = cause
            self.start_exit_timer(cause.exit_code)
            self.changed.notify_all()
            if cause.what == DISAPPEARED:
                # Immediately, because a launcher may end this process too in a moment.
                self.print_once_per_host(f"stopped: {self.names[cause.rank]} {cause.what}")
            if cause.rank != self.group.rank:
                in_background(lambda: self.log.write("cause", f"{self.names[cause.rank]} {cause.what}"))

    def report_silent(self, now: float) -> None:
        """Name a silent rank as the cause, after Horovod has given up.

        gloo gives up after HOROVOD_GLOO_TIMEOUT_SECONDS, maybe before this watchdog would.
        """
        silent = self.detector.silent_ranks(now, after_s=4 * self.intervals.beat_s)
        if self.cause is None and silent:
            self.announce_cause(Cause(silent[0], self.detector.describe_silence(silent[:1], now), Stalled.exit_code))

    def report_finished(self) -> None:
        """Name the first rank that has finished as the cause, after Horovod has given up: the others need it."""
        if self.cause is None and self.finished:
            self.announce_cause(Cause(self.finished[0], LEFT, 1))

    def start_exit_timer(self, exit_code: int) -> None:
        """Let the watchdog's thread end this process if it does not end by itself in time."""
        if self.exits_since is None:
            self.exits_since, self.exit_code = time.monotonic(), exit_code

    def close(self) -> None:
        """Tell the other ranks that this one has finished, so that they do not count it as lost."""
        if self.cause is None:
            self.transport.send({"kind": "bye"})
        self.is_closed = True

    def print_once_per_host(self, line: str) -> None:
        """Print a line that all ranks of this host know, unless one of them has printed why the run ends."""
        if self._is_first_of_host():
            to_stderr(line)

    def _is_first_of_host(self) -> bool:
        if self._host_claim is not None:
            with suppress(OSError):
                return self._host_claim.take()
        hosts, this_rank = self.group.hosts, self.group.rank
        lost_rank = self.cause.rank if self.cause else None
        neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[this_rank] and rank != lost_rank]
        is_first = this_rank == min(neighbours, default=this_rank) and not self._has_printed
        self._has_printed |= is_first
        return is_first

    def record_end(self, ended: str, exit_code: int, **facts: Any) -> None:
        beat = self.group.heartbeat.last()
        self.log.end(ended, exit_code, **{"step": beat.step, "phase": beat.phase, "error": None, **facts})

    def record_stall(self, text: str) -> None:
        """Write the log, the stacks and the end. A file system that hangs does not delay the process for long."""

        def record() -> None:
            self.log.write("stall", text)
            self.log.write_stacks("stalled")
            self.record_end("stalled", Stalled.exit_code, error=text)

        in_background(record).join(ANSWER_WITHIN_S - 1)


def in_background(action: Callable[[], object]) -> threading.Thread:
    """Run an action in a separate thread: it uses a disk, which may hang, and the watchdog must not."""
    thread = threading.Thread(target=action, name="watch_disk", daemon=True)
    thread.start()
    return thread


def end_process(exit_code: int) -> None:
    """End the process immediately: Python's exit would wait for a main thread that does not return."""
    let_go()
    os._exit(exit_code)


class HostClaim:
    """Which rank of a host prints a line that all of its ranks know: the first that asks. One that died cannot ask.

    The ranks of a host share an empty file, `path`. It loses its name when all have opened it, so that nothing is left
    from then on, however they end. It lies in memory, not on a disk, which may hang when a run fails: a rank that asks
    must not wait. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        weakref.finalize(self, os.close, self._descriptor)

    def take(self) -> bool:
        """Return whether this is the first call among the ranks of the host. Does not wait. Raises OSError."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # another rank is taking it at this moment
        try:
            if os.fstat(self._descriptor).st_size:
                return False
            os.write(self._descriptor, b"taken")
            return True
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def open_host_claim(group: WorkerGroup) -> HostClaim | None:
    """Collective: open the claim that the ranks of this host share; None if there is no place for it."""
    host = group.hosts[group.rank]
    folder = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
    run_name = group.broadcast_object(secrets.token_hex(8))
    path = folder / f"horovod_train-{run_name}-{group.hosts.index(host)}"
    claim = None
    with suppress(OSError):
        claim = HostClaim(path)
    group.barrier()  # All ranks of the host have opened the file before it loses its name.
    with suppress(OSError):  # Another rank may remove it at the same time.
        remove(path, _FILE)
    return claim
