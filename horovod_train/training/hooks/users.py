"""Users' hooks: functions (run, step) that a config names. What one rank returns or raises ends the run on all."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

from horovod_train.config.registry import load_function, raised_at
from horovod_train.distributed.group import WorkerGroup, is_connection_loss
from horovod_train.distributed.watchdog.heartbeat import HOOK
from horovod_train.errors import RunError, UserError, one_line
from horovod_train.training.hooks import AtEnd, Hook, StopReason, every


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
    return dataclasses.replace(hook, function=_OnAllRanks(name, hook.function))


@dataclass(frozen=True)
class _OnAllRanks:
    """Calls a user's function on every rank, and returns the first rank's reason to stop on all of them."""

    name: str
    function: Any

    def __call__(self, run: Any, step: int) -> StopReason | None:
        with run.outside_training(HOOK, f"calling {self.name}"):
            return _first_reason(run.group, self._call(run, step))

    def _call(self, run: Any, step: int) -> StopReason | None:
        # Other ranks may wait in a collective of the hook, so that only the watchdog can tell them of its failure.
        with raised_as(f"hooks: {self.name} failed after step {step}", has_stepped=run.group.heartbeat.has_stepped):
            reason = self.function(run, step)
        if reason is None or isinstance(reason, StopReason):
            return reason
        kind = type(reason).__name__
        raise RunError(f"hooks: {self.name} must return a StopReason or None; after step {step} it returned {kind}.")


@contextmanager
def raised_as(failed: str, *, has_stepped: bool) -> Iterator[None]:
    """Raise a failure of a user's code in the block as RunError, which begins with `failed`; a rank's loss as it is.

    has_stepped: whether training has begun. Before that it is a UserError.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, RunError) or is_connection_loss(error):
            raise
        text = one_line(error)
        kind = RunError if has_stepped else UserError
        raise kind(f"{failed}: {type(error).__name__}: {text}{raised_at(error)}") from error


def _first_reason(group: WorkerGroup, reason: StopReason | None) -> StopReason | None:
    """Collective: return the reason of the lowest rank that has one, the same on all ranks."""
    (count,) = group.sum([reason is not None])
    if not count:
        return None
    reasons = group.gather(None if reason is None else [reason.text, reason.restartable])
    text, restartable = next(first for first in reasons if first is not None)
    return StopReason(str(text), bool(restartable))
