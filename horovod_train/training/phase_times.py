"""Where the time of training steps goes: how long each rank is in each phase, and what that says of the run.

In a synchronous step every rank waits, in the exchange, for the rank that comes last. So a slow rank is known by the
time it spends elsewhere, and the cost of the exchange itself by the rank that waits least.

Measures training time, and the time for which hooks block training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from horovod_train.distributed.watchdog.heartbeat import HOOK

LOOK_EVERY_S = 0.1
"""Where all cores are busy a look takes 0.5 ms of CPU time, alone 30 µs; at 0.01 steps took 5 % longer."""

JUDGED_FROM_S = 0.5
"""Seconds of steps that each rank must have seen before they are judged: five looks."""

MEASURED_PHASES = ("input", "compute", HOOK, "exchange")
"""Those of a step, and users' hooks and Keras callbacks between steps."""

SLOW_FROM = 0.15
"""A rank is a straggler if the others wait for it during so much of a step, beyond what chance explains."""


class PhaseTimes:
    """Measures how long this rank is in each phase of training, by looking at it from a thread.

    phase: returns the present one of MEASURED_PHASES, or None in others, such as an evaluation.
    """

    def __init__(self, phase: Callable[[], str | None]) -> None:
        self._phase, self._ended, self._lock = phase, threading.Event(), threading.Lock()
        self._seconds = np.zeros(len(MEASURED_PHASES))
        self._thread = threading.Thread(target=self._look, name="phase times", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(timeout=1.0)  # a look may hang with a stuck process, which then ends without it

    def take(self) -> np.ndarray:
        """Return the seconds in each of MEASURED_PHASES since the last call."""
        with self._lock:
            taken, self._seconds = self._seconds, np.zeros(len(MEASURED_PHASES))
        return taken

    def _look(self) -> None:
        before, last = time.perf_counter(), None
        while not self._ended.wait(LOOK_EVERY_S):
            phase, now = self._phase(), time.perf_counter()
            # The whole time since the last look: a process that was stopped has looked neither before nor after.
            if phase is not None and last is not None:
                with self._lock:
                    self._seconds[MEASURED_PHASES.index(phase)] += now - before
            before, last = now, phase


def judge(seconds: np.ndarray, name: Callable[[int], str]) -> str:
    """Say what limits the run: `compute-bound`, or `straggler rank 3 (node2): 38 % slower in compute`.

    seconds: [ranks, MEASURED_PHASES], with a sum above 0. name: of a rank.
    """
    busy = seconds[:, :-1].sum(axis=1)
    slowest = int(busy.argmax())
    if len(seconds) > 1:
        others = np.delete(seconds, slowest, axis=0)
        lead = busy[slowest] - np.median(np.delete(busy, slowest))
        elapsed = seconds.sum(axis=1).max()
        if lead > (SLOW_FROM + _chance(elapsed / LOOK_EVERY_S)) * elapsed:
            reason = _describe_slow(seconds[slowest], np.median(others, axis=0))
            return f"straggler {name(slowest)}: {reason}"
    costs = np.append(seconds[:, :-1].mean(axis=0), seconds[:, -1].min())
    return f"{MEASURED_PHASES[int(costs.argmax())]}-bound"


def _chance(looks: float) -> float:
    """Return two standard deviations, at most, of the difference of two ranks' shares of time, each from `looks`."""
    return float(2 * np.sqrt(2 * 0.25 / looks))


def _describe_slow(seconds: np.ndarray, usual: np.ndarray) -> str:
    """Say in which phase a rank is slower than others usually are, and by how much. Both: [MEASURED_PHASES]."""
    phase = int((seconds - usual)[:-1].argmax())
    if usual[phase] < seconds[phase] / 10:  # a percentage of next to nothing says nothing
        return f"{seconds[phase] / seconds.sum():.0%} of its time in {MEASURED_PHASES[phase]}".replace("%", " %")
    return f"{seconds[phase] / usual[phase] - 1:.0%} slower in {MEASURED_PHASES[phase]}".replace("%", " %")


@dataclass
class Stopwatch:
    """Measures training time, without evaluation, saving and the first call, which compiles."""

    seconds: float = 0.0
    steps: int = 0
    records: int = 0
    is_running: bool = False
    _lap: float = field(default=0.0, repr=False)
    _blocked: dict[str, float] = field(default_factory=dict, repr=False)

    def count(self, steps: int, records: int) -> None:
        """Add a finished call; the first one only starts the watch."""
        if self.is_running:
            self.steps += steps
            self.records += records
        else:
            self._lap, self.is_running = time.perf_counter(), True

    def read(self) -> tuple[float, int, int]:
        """Return seconds, steps and records so far."""
        if self.is_running:
            now = time.perf_counter()
            self.seconds, self._lap = self.seconds + now - self._lap, now
        return self.seconds, self.steps, self.records

    def s_per_step(self) -> float:
        """Return the mean seconds per step; 0 if nothing has been measured yet."""
        seconds, steps, _ = self.read()
        return seconds / steps if steps else 0.0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.read()
        yield
        self._lap = time.perf_counter()

    def note_blocked(self, name: str, seconds: float) -> None:
        """Note the time for which something has blocked training."""
        self._blocked[name] = self._blocked.get(name, 0.0) + seconds

    def take_blocked(self) -> dict[str, float]:
        """Return by name what was noted since the last call."""
        taken, self._blocked = self._blocked, {}
        return taken
