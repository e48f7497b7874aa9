"""Steps per second of ranks on synthetic records, with and without exchange. Started by exchange.py and growth.py.

The step is the trainer's own; a step alone omits only the exchange. Both are measured in turns, so that other load
affects both. Root writes the rates, by system.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import keras
import tensorflow as tf
from rank_programs.timing import SYSTEMS

from horovod_train.config.settings import Config, DeviceConfig, HorovodConfig, Spec
from horovod_train.data.batch_source import Batch, Batches, BatchSource, StepSize
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.start import start
from horovod_train.models import build_model
from horovod_train.optim.schedules import Horizon
from horovod_train.training.build import build_training
from horovod_train.training.compiled import compile_model
from horovod_train.training.steps.shares import Shares
from horovod_train.training.sync import CombineList, Exchanged, SyncStrategy

WINDOWS = 5
"""Number of parts of the measured time."""
SHAPES = {"convnet": (28, 28, 1), "mlp": (5,)}
"""Of one record."""
LOSSES = {"convnet": "SparseCategoricalCrossentropy", "mlp": "BinaryCrossentropy"}


class Alone(SyncStrategy):
    """Each rank applies its own gradients, without any exchange."""

    def exchange(self, combine: CombineList, local_gradients: Sequence[Any], *more: Any) -> Exchanged:
        return Exchanged(list(local_gradients), local_gradients)


KINDS = {"exchange": SyncStrategy, "alone": Alone}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, required=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, required=True)
    arguments = parser.parse_args()
    group = start(HorovodConfig(), DeviceConfig())
    measured = {name: measure(group, name, arguments.seconds, arguments.kinds) for name in arguments.systems}
    if group.is_root:
        with arguments.out.open("x", encoding="utf-8") as file:
            json.dump(measured, file)
    group.close()


def measure(group: WorkerGroup, system: str, seconds: float, kinds: Sequence[str]) -> dict[str, Any]:
    """Collective: measure each kind for so many seconds; return its steps per second in each of WINDOWS.

    Also returns `gradient_bytes`, what a step exchanges.
    """
    trainers = {kind: Trainer(group, system, KINDS[kind]()) for kind in kinds}
    for trainer in trainers.values():
        trainer.settle_calls(seconds / WINDOWS)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(WINDOWS):
        for kind, trainer in trainers.items():
            rates[kind].append(trainer.window())
    weights = trainers[kinds[0]].model.trainable_variables
    return {**rates, "gradient_bytes": sum(math.prod(weight.shape) * 4 for weight in weights)}


class Trainer:
    """Trains a system on synthetic records."""

    def __init__(self, group: WorkerGroup, name: str, synchronization: SyncStrategy) -> None:
        keras.utils.set_random_seed(1)
        rows, self._steps, rate, momentum = SYSTEMS[name]
        self._group, self._calls, self._size = group, 1, StepSize(rows, is_full=True)
        self.model = model = build_model(Spec(name))
        model.compile(
            keras.optimizers.SGD(rate, momentum=momentum, nesterov=bool(momentum)),
            keras.losses.get({"class_name": LOSSES[name], "config": {"from_logits": True}}),
        )
        config, batch = Config(), build_batch(name, group.size)
        compiled = compile_model(config, model, Horizon(rows * group.size, 1, 1))
        spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, batch)
        source = SimpleNamespace(scaled_spec=spec, has_weights=False, scaled=lambda batch: batch)
        self._step = build_training(config, group, compiled, cast(BatchSource, source), Shares(group), {})
        self._step.state.synchronization = self._step.update.synchronization = synchronization
        chunk = tf.nest.map_structure(lambda values: tf.stack([values] * self._steps), batch)
        self._batches = Batches(tf.data.Dataset.from_tensors(chunk).repeat())

    def settle_calls(self, seconds: float) -> None:
        """Collective: compile, and find how many calls take so many seconds."""
        self._step.run(self._batches, self._steps, self._size)  # compiles
        while (took := self._group.broadcast_object(self._calls * self._steps / self.window())) < 0.2:
            self._calls *= 2
        self._calls = max(1, round(self._calls * seconds / took))

    def window(self) -> float:
        """Collective: return the steps per second of one window, which ends when all ranks are done.

        Ranks that share cores and do not exchange are done at different moments.
        """
        self._group.barrier()
        began = time.perf_counter()
        for _ in range(self._calls):
            self._step.run(self._batches, self._steps, self._size)
        self._group.barrier()
        return self._calls * self._steps / (time.perf_counter() - began)


def build_batch(name: str, size: int) -> Batch:
    rows = SYSTEMS[name].batch
    inputs = tf.random.stateless_uniform((rows, *SHAPES[name]), (1, 2))
    targets = tf.range(rows, dtype=tf.int64) % 2
    if name == "mlp":
        targets = targets[:, None]
    return Batch(inputs, targets, tf.ones(rows), tf.range(rows, dtype=tf.int64), tf.constant(rows * size, tf.int64))


if __name__ == "__main__":
    main()
