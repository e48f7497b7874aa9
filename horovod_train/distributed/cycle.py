"""Shortens Horovod's pause between exchanges for a small model, whose steps would mostly wait for it.

The pause can only be chosen when Horovod starts, and the model is built later. So Horovod starts again.
"""

from __future__ import annotations

import os

from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.launch.initialize import restart_horovod
from horovod_train.distributed.launch.tuning import SMALL_MODEL_CYCLE_MS, YIELDS
from horovod_train.distributed.optimizer import SMALL_BYTES
from horovod_train.distributed.timeline import VARIABLE as TIMELINE

_NAME = "HOROVOD_CYCLE_TIME"


def suit_cycle(group: WorkerGroup, gradient_bytes: int) -> str | None:
    """Collective: shorten the pause if gradients have few bytes; return what was done and why, None if nothing.

    Only over MPI between CPUs: over gloo the threads of a short cycle take more time from the steps than they wait. A
    pause that the user has set stays. No exchange may be under way.
    """
    if group.size == 1 or group.exchange != "MPI" or any(device.gpu_keys for device in group.devices):
        return None
    may_change = any(setting.name == _NAME and setting.origin == "default" for setting in group.settings)
    may_change = may_change and TIMELINE not in os.environ  # a second start would overwrite it
    votes = group.gather(may_change and gradient_bytes <= SMALL_BYTES)
    if not all(votes):
        return None
    # Without a pause at all, threads that wait would take the cores from those that compute, unless they yield.
    yields = all(group.gather(os.environ.get(YIELDS) == "1"))
    restart_horovod({_NAME: SMALL_MODEL_CYCLE_MS[yields]})
    return f"{_NAME}={SMALL_MODEL_CYCLE_MS[yields]} (ms; a step's gradients have only {gradient_bytes} bytes)"
