"""Hooks: what a run does between steps, and when. A hook is a function (run, step) → StopReason or None.

Every rank calls all hooks, in the order of the list in hooks.build. Users' hooks come from a config; see hooks.users.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from horovod_train.training.stopping import StopReason

__all__ = ["AtEnd", "Hook", "HookFunction", "StopReason", "at", "every"]

AtEnd = Literal["no", "done", "stopped", "always"]

HookFunction = Callable[[Any, int], StopReason | None]
"""(run, step) → why the run must end, or None; the same on every rank. run: a run_record.Run."""


@dataclass(frozen=True)
class Hook:
    """Calls `function` after each step that is a multiple of `every_steps` or in `at_steps`, and, if asked, at the end.

    at_end: "done" calls it when training is complete, "stopped" when the run stops early, to be restarted, "always" at
    both.
    """

    function: HookFunction
    every_steps: int | None = None
    at_steps: tuple[int, ...] = ()
    at_end: AtEnd = "no"
    is_done: Callable[[Any, int], bool] = lambda run, step: True
    """(run, step) → whether it has been done at `step`; if not, a run that resumes there calls it first."""

    def next_step(self, step: int) -> float:
        """Return the first step after `step` at which the hook is due."""
        listed = min((number for number in self.at_steps if number > step), default=math.inf)
        return min(listed, (step // self.every_steps + 1) * self.every_steps) if self.every_steps else listed

    def is_due(self, step: int) -> bool:
        return step in self.at_steps or (self.every_steps is not None and step % self.every_steps == 0)


def every(steps: int | None, function: HookFunction, **options: Any) -> Hook:
    """Make a hook for every so many steps; None: never, except at the end if `at_end` says so."""
    return Hook(function, every_steps=steps, **options)


def at(steps: Sequence[int], function: HookFunction, **options: Any) -> Hook:
    """Make a hook for the given steps."""
    return Hook(function, at_steps=tuple(steps), **options)
