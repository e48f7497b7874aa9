"""Calls a method of all Keras callbacks of a run. Does not know when; see call_callbacks and evaluate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovod_train.config.registry import raised_at
from horovod_train.distributed.group import is_connection_loss
from horovod_train.distributed.watchdog.heartbeat import HOOK
from horovod_train.errors import RunError
from horovod_train.training.run_record import Run


def tell(run: Run, step: int, method: str, *arguments: Any) -> None:
    """Call METHOD(*arguments) of each callback, on this rank. Raises RunError if one fails."""
    for named in run.parts.callbacks.named:
        with run.outside_training(HOOK, f"calling {named.name}"):
            # Each gets values of its own, which callbacks add to.
            own = [dict(value) if isinstance(value, Mapping) else value for value in arguments]
            try:
                getattr(named.callback, method)(*own)
            except Exception as error:
                if isinstance(error, RunError) or is_connection_loss(error):
                    raise
                text = " ".join(str(error).split())
                said = f"{type(error).__name__}: {text}{raised_at(error)}"
                raise RunError(f"callbacks: {named.name} failed in {method} after step {step}: {said}") from error
