"""Calls a method of all Keras callbacks of a run. Does not know when; see call_callbacks and evaluate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovod_train.distributed.watchdog.heartbeat import HOOK
from horovod_train.training.hooks.users import raised_as
from horovod_train.training.run_record import Run


def tell(run: Run, step: int, method: str, *arguments: Any) -> None:
    """Call METHOD(*arguments) of each callback, on this rank. Raises RunError if one fails."""
    for named in run.parts.callbacks.named:
        with run.outside_training(HOOK, f"calling {named.name}"):
            # Each gets a copy, because callbacks add to it.
            copies = [dict(value) if isinstance(value, Mapping) else value for value in arguments]
            failed = f"callbacks: {named.name} failed in {method} after step {step}"
            with raised_as(failed, has_stepped=run.group.heartbeat.has_stepped):
                getattr(named.callback, method)(*copies)
