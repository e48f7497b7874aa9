"""Hooks: what a run does between steps, and when. A hook is a function (run, step) → StopReason or None.

Every rank calls all hooks, in the order of run.build_hooks. A config can name functions of users: what one rank
returns or raises there ends the run on all.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from horovod_train.config.registry import load_function, raised_at
from horovod_train.distributed.group import WorkerGroup, is_connection_loss
from horovod_train.distributed.watchdog.heartbeat import HOOK
from horovod_train.errors import RunError, UserError, one_line
from horovod_train.training.stopping import StopReason

__all__ = ["AtEnd", "Hook", "HookFunction", "StopReason", "at", "every"]

AtEnd = Literal["no", "done", "stopped", "always"]

HookFunction = Callable[[Any, int], StopReason | None]
"""(run, step) → why the run must end, or None; the same on every rank. run: an open_run.Run."""


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


def load_hooks(names: Sequence[str], every_steps: int) -> tuple[Hook, ...]:
    """Import each `package.module:function`, and check that it can be called with (run, step). Raises UserError.

    every_steps: when a plain function is due; a name can also stand for a Hook, made by `every` or `at`.
    """
    return tuple(_load(name, f"hooks[{number}]", every_steps) for number, name in enumerate(names))


def _load(name: str, where: str, every_steps: int) -> Hook:
    if ":" not in name:
        raise UserError(f"{where}: expected package.module:function; received {name!r}.")
    function = load_function(name, where)
    hook = function if isinstance(function, Hook) else every(every_steps, function)
    if not callable(hook.function):
        raise UserError(f"{where}: {name} must be a function (run, step); it is {type(function).__name__}.")
    steps = [*([] if hook.every_steps is None else [hook.every_steps]), *hook.at_steps]
    if broken := [number for number in steps if not isinstance(number, int | np.integer)]:
        raise UserError(f"{where}: {name} must be due at whole numbers of steps; received {broken[0]!r}.")
    if hook.every_steps is not None and hook.every_steps < 1:
        raise UserError(f"{where}: {name} must be due every 1 or more steps; received {hook.every_steps}.")
    if hook.at_end not in get_args(AtEnd):
        raise UserError(
            f"{where}: {name}: at_end must be one of {', '.join(get_args(AtEnd))}; received {hook.at_end!r}."
        )
    if hook.every_steps is None and not hook.at_steps and hook.at_end == "no":
        raise UserError(f"{where}: {name} is never due: give every_steps, at_steps or at_end.")
    try:
        inspect.signature(hook.function).bind(None, 0)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {name} must be a function (run, step): {error}.") from error
    return dataclasses.replace(hook, function=_on_all_ranks(name, hook.function))


def _on_all_ranks(name: str, function: HookFunction) -> HookFunction:
    """Return a hook that calls a user's function on every rank, and returns the first rank's reason to stop on all."""

    def call(run: Any, step: int) -> StopReason | None:
        with run.outside_training(HOOK, f"calling {name}"):
            # Other ranks may wait in a collective of the hook, so that only the watchdog can tell them of its failure.
            where = f"hooks: {name}", f"after step {step}"
            with failing_as(run, *where), guarded(run, *where):
                reason: Any = function(run, step)
            if reason is None or isinstance(reason, StopReason):
                return _first_reason(run.group, reason)
            kind = type(reason).__name__
            raise RunError(f"hooks: {name} must return a StopReason or None; after step {step} it returned {kind}.")

    return call


@contextmanager
def failing_as(run: Any, name: str, when: str) -> Iterator[None]:
    """Raise a failure of a hook or callback in the block as RunError, or as UserError before the first step.

    The loss of a rank is raised as it is. If the run has lost its directory, that is why it ends: raises InUse.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if is_connection_loss(error):
            raise
        run.stopping.lease.must_be_ours()
        if isinstance(error, RunError):
            raise
        text = one_line(error)
        raise _kind(run)(f"{name} failed {when}: {type(error).__name__}: {text}{raised_at(error)}") from error


def _kind(run: Any) -> type[RunError]:
    return RunError if run.group.heartbeat.has_stepped else UserError


@contextmanager
def guarded(run: Any, name: str, when: str, may_freeze: bool = False) -> Iterator[None]:
    """Undo what a user's code in the block does to metrics: it may evaluate. Raise RunError if it freezes weights.

    may_freeze: whether it may change what is trainable. Steps that are compiled would not follow, but those compiled
    later, as for a batch of another size or after a resume.
    """
    trained = run.parts.freezing.trained
    with run.parts.train_step.figures.kept():
        yield
    if run.parts.freezing.trained != trained and not may_freeze:
        raise _kind(run)(
            f"{name} changed what is trainable {when}: the compiled steps train the weights of before. Say by "
            "model.freeze and model.unfreeze what is trained when, or set it in on_train_begin of a callback."
        )


def _first_reason(group: WorkerGroup, reason: StopReason | None) -> StopReason | None:
    """Collective: return the reason of the lowest rank that has one, the same on all ranks."""
    (count,) = group.sum([reason is not None])
    if not count:
        return None
    reasons = group.gather(None if reason is None else [reason.text, reason.restartable])
    text, restartable = next(first for first in reasons if first is not None)
    return StopReason(str(text), bool(restartable))
