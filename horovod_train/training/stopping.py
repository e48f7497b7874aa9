"""StopCoordinator before the end, together: signals, walltime and the stop file, agreed on by one tiny reduction.

Knows why a rank wants to leave and makes it all ranks' wish. Does not save and does not end the process.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import numpy as np

from horovod_train.distributed.group import WorkerGroup
from horovod_train.output.files import STOP_FILE
from horovod_train.output.lease import NullLease

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOP_FILE_REASON = f"{STOP_FILE} file"
SECONDS_BETWEEN_VOTES = 1.0
FIRST_SAVE_S = 60.0
"""Kept before the deadline while no save has been measured; or a tenth of the time there is, if that is less."""


class PeriodicSync:
    """Picks, on all ranks the same, the calls after which to meet: about one a second, whatever a call takes."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group, self._last = group, time.monotonic()
        self._calls, self._calls_between = 0, 1
        self._recent_s: deque[float] = deque(maxlen=10)

    @property
    def longest_s(self) -> float:
        """The longest time between two of the last meetings, or from where calls of another kind began or ended."""
        return max(self._recent_s, default=0.0)

    def is_due(self) -> bool:
        """After each compiled call."""
        self._calls += 1
        return self._calls >= self._calls_between

    def meet(self, values: Sequence[float]) -> np.ndarray:
        """Collective: the sums of the values over the ranks. What it takes to set the pace travels with them."""
        own_seconds = time.monotonic() - self._last
        self._recent_s.append(own_seconds)
        sums, seconds = self.group.sum([values, own_seconds])
        mean_seconds = float(seconds) / self.group.size  # so that all ranks come to the same
        self._calls_between = max(1, int(self._calls * SECONDS_BETWEEN_VOTES / max(mean_seconds, 1e-6)))
        self._last, self._calls = time.monotonic(), 0
        return sums

    def restart(self) -> None:
        """Before calls of another kind, which may take longer: the first of them is due."""
        self._last, self._calls, self._calls_between = time.monotonic(), 0, 1

    def forget(self) -> None:
        """After what will not come again, such as the first call, which compiles."""
        self._recent_s.clear()
        self.restart()

    @contextmanager
    def other_calls(self) -> Iterator[None]:
        """In the block, calls are of another kind than before and after it."""
        self.restart()
        try:
            yield
        finally:
            self.restart()


@dataclass
class Margin:
    """How long before its deadline a run leaves: twice what each part of leaving has taken, as the run measured it.

    first_save_s: for a save, as long as none has been measured.
    """

    first_save_s: float
    save_s: float = 0.0
    """The longest that training stood still for a save, its wait for the save before included."""
    write_s: float = 0.0
    """The longest that a save was being written in the background; a run that leaves waits for its last."""
    between_votes_s: float = SECONDS_BETWEEN_VOTES
    """The longest time between two of the last votes."""
    time_to_safe_step_s: float = 0.0
    """How long it may take from here to a step at which the run can be left, and is asked whether to."""

    def seconds(self) -> float:
        saving_s = max(self.first_save_s, 2 * (self.save_s + self.write_s))
        return saving_s + 2 * (self.time_to_safe_step_s + max(self.between_votes_s, SECONDS_BETWEEN_VOTES))


class StopCoordinator:
    """Collects this rank's reasons to leave. `vote` gives the first one that any rank has, the same on all.

    deadline: seconds since 1970 by which the process must be gone, or None.
    run_dir: on root, the folder where a file named STOP asks the run to end; None elsewhere.
    """

    def __init__(self, group: WorkerGroup, *, deadline: float | None, run_dir: Path | None, lease: NullLease) -> None:
        self.deadline, self.lease = deadline, lease
        self.stop_file = run_dir / STOP_FILE if run_dir else None
        left = 0.0 if deadline is None else max(0.0, deadline - time.time())
        self.margin = Margin(min(FIRST_SAVE_S, left / 10))
        self.last_write_s: Callable[[], float] = lambda: 0.0
        """How long the last save has been written in the background so far."""
        self.at_walltime: dict[str, float] = {}
        """Once the ranks leave for the deadline: what was left, what was kept for it, and what had been measured."""
        self._received: set[int] = set()
        self.pace = PeriodicSync(group)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals become reasons instead of ending the process; a second SIGINT ends it at once."""
        before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            with _end_at_second_sigint():
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def note_save(self, seconds: float) -> None:
        """How long training stood still for a save."""
        self.margin.save_s = max(self.margin.save_s, seconds)

    def vote(self) -> str | None:
        """Collective: why the run must stop now, or None; the same answer on all ranks."""
        own = self._reasons()
        counts = self.pace.meet([float(reason in own) for reason in _ALL])
        agreed = [reason for reason, count in zip(_ALL, counts, strict=True) if count]
        if _WALLTIME in agreed and not self.at_walltime and self.deadline is not None:
            measured = {"left_s": self.deadline - time.time(), "kept_s": self.margin.seconds(), **asdict(self.margin)}
            self.at_walltime = {name: round(seconds, 3) for name, seconds in measured.items()}
        return agreed[0] if agreed else None

    def vote_periodically(self) -> str | None:
        """Collective: after each compiled call. Votes about once a second, whatever a call takes."""
        return self.vote() if self.pace.is_due() else None

    def _reasons(self) -> set[str]:
        reasons = {signal.Signals(number).name for number in self._received}
        self.margin.write_s = max(self.margin.write_s, self.last_write_s())
        self.margin.between_votes_s = self.pace.longest_s
        if self.deadline is not None and time.time() + self.margin.seconds() >= self.deadline:
            reasons.add(_WALLTIME)
        if self.stop_file is not None and os.path.exists(self.stop_file):  # False too where the disk has gone
            reasons.add(STOP_FILE_REASON)
        if self.lease.lost:
            reasons.add(_LEASE)
        return reasons

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.add(number)


@contextmanager
def _end_at_second_sigint() -> Iterator[None]:
    """By a thread, which Python tells of signals at once; a handler waits until a compiled call has come back."""
    numbers, told = socket.socketpair()
    told.setblocking(False)

    def listen() -> None:
        received = b""
        while received.count(signal.SIGINT) < 2:
            if not (number := numbers.recv(1)):
                return
            received += number
        os._exit(128 + signal.SIGINT)

    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=listen, name="second SIGINT", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        told.close()


_WALLTIME, _LEASE = "walltime", "another run has taken the run directory"
_ALL = (*(number.name for number in SIGNALS), _WALLTIME, STOP_FILE_REASON, _LEASE)
