"""Leaving before the end, together: signals, walltime and the stop file, agreed on by one tiny reduction.

Knows why a rank wants to leave and makes it all ranks' wish. Does not save and does not end the process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from horovod_train.distributed.group import WorkerGroup
from horovod_train.lease import NoLease

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOP_FILE = "STOP"
SECONDS_BETWEEN_VOTES = 1.0


class Leaving:
    """Collects this rank's reasons to leave. `vote` gives the first one that any rank has, the same on all.

    deadline: seconds since 1970 by which the process must be gone, or None.
    run_dir: on root, the folder where a file named STOP asks the run to end; None elsewhere.
    """

    def __init__(self, group: WorkerGroup, *, deadline: float | None, run_dir: Path | None, lease: NoLease) -> None:
        self.group, self.deadline, self.lease = group, deadline, lease
        self.stop_file = run_dir / STOP_FILE if run_dir else None
        self.seconds_in_hand = 0.0
        """How long before the deadline to leave: what saving takes; see `keep_in_hand`."""
        self.last_write_s: Callable[[], float] = lambda: 0.0
        """How long the last save took in the background: it may have ended long after it began."""
        self._received: set[int] = set()
        self._last_vote = time.monotonic()
        self._calls_between_votes, self._calls = 1, 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals become reasons instead of ending the process; a second SIGINT ends it at once."""
        before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def keep_in_hand(self, seconds: float) -> None:
        """Notes how long a save took: twice the longest is kept before the deadline."""
        self.seconds_in_hand = max(self.seconds_in_hand, 2 * seconds)

    def vote(self) -> str | None:
        """Collective: why the run must stop now, or None; the same answer on all ranks."""
        own = self._reasons()
        counts = self.group.sum([[float(reason in own) for reason in _ALL], time.monotonic() - self._last_vote])
        self._last_vote, calls, self._calls = time.monotonic(), self._calls, 0
        # How often is decided on a mean, so that all ranks vote after the same call.
        mean_seconds = float(counts[1]) / self.group.size
        self._calls_between_votes = max(1, int(calls * SECONDS_BETWEEN_VOTES / max(mean_seconds, 1e-6)))
        agreed = [reason for reason, count in zip(_ALL, counts[0], strict=True) if count]
        return agreed[0] if agreed else None

    def vote_now_and_then(self) -> str | None:
        """Collective: after each compiled call. Votes about once a second, whatever a call takes."""
        self._calls += 1
        return self.vote() if self._calls >= self._calls_between_votes else None

    def _reasons(self) -> set[str]:
        reasons = {signal.Signals(number).name for number in self._received}
        self.keep_in_hand(self.last_write_s())
        if self.deadline is not None and time.time() + self.seconds_in_hand >= self.deadline:
            reasons.add(_WALLTIME)
        if self.stop_file is not None and os.path.exists(self.stop_file):  # False too where the disk has gone
            reasons.add(_STOP_FILE)
        if self.lease.lost:
            reasons.add(_LEASE)
        return reasons

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and signal.SIGINT in self._received:
            os._exit(128 + signal.SIGINT)
        self._received.add(number)


_WALLTIME, _STOP_FILE, _LEASE = "walltime", f"{STOP_FILE} file", "another run has taken the run directory"
_ALL = (*(number.name for number in SIGNALS), _WALLTIME, _STOP_FILE, _LEASE)
