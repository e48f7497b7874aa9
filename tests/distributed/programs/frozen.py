"""What is kept of a model with a large frozen layer, and what the proof that ranks agree sees of it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
from uneven import group, rank, size

from horovod_train.checkpoint.layout import Facts
from horovod_train.checkpoint.tensors import write
from horovod_train.distributed import consistency
from horovod_train.errors import RanksDisagree
from horovod_train.training.state import Copies, TrainState
from horovod_train.training.steps.optimizers import Optimizers


def facts() -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    frozen, norm = keras.layers.Dense(1000, trainable=False, name="frozen"), keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((1000,)), frozen, norm, keras.layers.Dense(3)], name="held")
    state = TrainState(model, Optimizers({}))
    found = {"bytes": frozen.kernel.numpy().nbytes, "bytes_saved": _bytes_saved(state)}
    found["agreement"] = _agreement(state)
    if rank == size - 1:
        frozen.kernel.assign(frozen.kernel + 1.0)
    return {"frozen": found | {"agreement_after": _agreement(state)}}


def _bytes_saved(state: TrainState) -> int:
    arrays = state.settle(group).snapshot(group, Copies())
    if not arrays:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "checkpoint")
        write(place, arrays, Facts(step=0, epoch=0, records=0, ranks=size, config={}, versions={}))
        return sum(file.stat().st_size for file in place.iterdir())


def _agreement(state: TrainState) -> str:
    try:
        consistency.check(group, state.settle(group).digests(), "now")
    except RanksDisagree as error:
        return str(error)
    return "yes"
