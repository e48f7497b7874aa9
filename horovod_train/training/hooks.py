"""Hooks decide when something happens between steps: every(n, action), at(steps, action). Also the run's stopwatch.

What they run is in actions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Action = Callable[[int], str | None]
"""step → stop reason, or None. Decided on reduced values, so that every rank returns the same."""


@dataclass(frozen=True)
class Hook:
    """Calls `action(step)` after every step that is a multiple of `every_steps` and, if asked, at the end.

    at_end: "done" calls it when training is complete; "always" also when the run stops early, to be restarted.
    """

    every_steps: int | None
    action: Action
    at_end: Literal["no", "done", "always"] = "no"
    is_done: Callable[[int], bool] = lambda step: True
    """Whether the action has been done at `step`; if not, a run that resumes there runs it first."""

    def next_step(self, step: int) -> float:
        """Return the first step after `step` at which the hook is due."""
        return math.inf if self.every_steps is None else (step // self.every_steps + 1) * self.every_steps

    def is_due(self, step: int) -> bool:
        return self.every_steps is not None and step % self.every_steps == 0


def every(steps: int | None, action: Action, **options: Any) -> Hook:
    return Hook(steps, action, **options)


@dataclass(frozen=True)
class HookAt(Hook):
    """Calls `action(step)` after each of the given steps."""

    steps: tuple[int, ...] = ()

    def next_step(self, step: int) -> float:
        return min((at for at in self.steps if at > step), default=math.inf)

    def is_due(self, step: int) -> bool:
        return step in self.steps


def at(steps: Sequence[int], action: Action, **options: Any) -> Hook:
    return HookAt(None, action, steps=tuple(steps), **options)


@dataclass
class Stopwatch:
    """Measures training time, without evaluation, saving and the first call, which compiles."""

    seconds: float = 0.0
    steps: int = 0
    records: int = 0
    _lap: float = field(default=0.0, repr=False)
    _runs: bool = field(default=False, repr=False)

    def count(self, steps: int, records: int) -> None:
        """Add a finished call; the first one only starts the watch."""
        if self._runs:
            self.steps += steps
            self.records += records
        else:
            self._lap, self._runs = time.perf_counter(), True

    @property
    def is_running(self) -> bool:
        return self._runs

    def read(self) -> tuple[float, int, int]:
        """Return seconds, steps and records so far."""
        if self._runs:
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
