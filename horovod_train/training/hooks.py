"""When something happens between steps: every(n, action), at(steps, action); and the clock of a run. What: actions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Action = Callable[[int], str | None]
"""step → why the run must end, or None. Decided on reduced values, so that every rank answers the same."""


@dataclass(frozen=True)
class Hook:
    """Calls `action(step)` after every step that is a multiple of `every_steps` and, if asked, at the end.

    at_end: "done" where training came to its end; "always" also where the run leaves early, to be started again.
    """

    every_steps: int | None
    action: Action
    at_end: Literal["no", "done", "always"] = "no"
    is_done: Callable[[int], bool] = lambda step: True
    """Whether a run that goes on from a step at which the hook was due need not make up for it."""

    def next_step(self, step: int) -> float:
        """The first step after `step` at which it is due."""
        return math.inf if self.every_steps is None else (step // self.every_steps + 1) * self.every_steps

    def is_due(self, step: int) -> bool:
        return self.every_steps is not None and step % self.every_steps == 0


def every(steps: int | None, action: Action, **options: Any) -> Hook:
    return Hook(steps, action, **options)


@dataclass(frozen=True)
class HookAt(Hook):
    """Calls `action(step)` after each of some steps."""

    steps: tuple[int, ...] = ()

    def next_step(self, step: int) -> float:
        return min((at for at in self.steps if at > step), default=math.inf)

    def is_due(self, step: int) -> bool:
        return step in self.steps


def at(steps: Sequence[int], action: Action, **options: Any) -> Hook:
    return HookAt(None, action, steps=tuple(steps), **options)


@dataclass
class Stopwatch:
    """Seconds spent training, without those spent evaluating and saving, nor the first call, which compiles."""

    seconds: float = 0.0
    steps: int = 0
    records: int = 0
    _lap: float = field(default=0.0, repr=False)
    _runs: bool = field(default=False, repr=False)

    def count(self, steps: int, records: int) -> None:
        """After each call: what it did. The first only starts the watch."""
        if self._runs:
            self.steps += steps
            self.records += records
        else:
            self._lap, self._runs = time.perf_counter(), True

    @property
    def is_running(self) -> bool:
        return self._runs

    def read(self) -> tuple[float, int, int]:
        """Seconds, steps and records so far."""
        if self._runs:
            now = time.perf_counter()
            self.seconds, self._lap = self.seconds + now - self._lap, now
        return self.seconds, self.steps, self.records

    def s_per_step(self) -> float:
        """The mean so far; 0 as long as nothing has been measured."""
        seconds, steps, _ = self.read()
        return seconds / steps if steps else 0.0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.read()
        yield
        self._lap = time.perf_counter()
