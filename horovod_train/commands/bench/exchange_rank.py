"""What each rank of `bench exchange` runs: trains one of SYSTEMS on synthetic records; root writes how fast that was.

The step is the trainer's own. `--alone` omits only the exchange: the ceiling. `--both` measures steps with and without
exchange in turns, so that other load affects both.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from horovod_train.output import logs

logs.load_tensorflow()

import keras  # noqa: E402  TensorFlow speaks when it is first loaded
import tensorflow as tf  # noqa: E402

from horovod_train.commands.bench.peer_programs.timing import SYSTEMS  # noqa: E402
from horovod_train.config.settings import Config, DeviceConfig, HorovodConfig, Spec  # noqa: E402
from horovod_train.data.pipeline.batch_source import Batch, Batches, StepSize  # noqa: E402
from horovod_train.distributed.group import WorkerGroup  # noqa: E402
from horovod_train.distributed.start import start  # noqa: E402
from horovod_train.models import build_model  # noqa: E402
from horovod_train.optim.schedules import Horizon  # noqa: E402
from horovod_train.training.build import build_training  # noqa: E402
from horovod_train.training.compiled import compile_model  # noqa: E402
from horovod_train.training.state import TrainState  # noqa: E402
from horovod_train.training.sync import (  # noqa: E402
    CombineList,
    EveryStep,
    Exchanged,
)

WINDOWS = 5
"""Number of parts of the measured time; the median counts."""


SHAPES = {"convnet": (28, 28, 1), "mlp": (5,)}
"""Of one record."""
LOSSES = {"convnet": "SparseCategoricalCrossentropy", "mlp": "BinaryCrossentropy"}


class Alone(EveryStep):
    """Each rank applies its own gradients, without any exchange."""

    def exchange(
        self, combine: CombineList, local_gradients: Sequence[Any], variables: Sequence[Any] | None, step: tf.Tensor
    ) -> Exchanged:
        return Exchanged(list(local_gradients), local_gradients)


class Measured(NamedTuple):
    """Steps per second of all ranks together, in each of WINDOWS; without exchange, if that was measured too."""

    steps_per_s: list[float]
    alone_per_s: list[float]
    gradient_bytes: int


def measure(group: WorkerGroup, system: str, seconds: float, kinds: Sequence[type[EveryStep]]) -> Measured:
    """Measure steps of each kind, in turns, `seconds` of each. kinds: EveryStep and Alone, or one of them."""
    rates: dict[type[EveryStep], list[float]] = {EveryStep: [], Alone: []}
    trainers = {kind: _Trainer(group, system, kind) for kind in kinds}
    for trainer in trainers.values():
        trainer.settle_calls(seconds / WINDOWS)
    for _ in range(WINDOWS):
        for kind, trainer in trainers.items():
            rates[kind].append(trainer.window())
    weights = trainers[kinds[0]].state.model.trainable_variables
    size = sum(math.prod(weight.shape) * 4 for weight in weights)
    return Measured(rates[EveryStep], rates[Alone], size)


class _Trainer:
    """Trains a system on synthetic records."""

    def __init__(self, group: WorkerGroup, name: str, kind: type[EveryStep]) -> None:
        keras.utils.set_random_seed(1)
        _, self._steps, rate, momentum = SYSTEMS[name]
        self._group = group
        model = build_model(Spec(name))
        model.compile(
            keras.optimizers.SGD(rate, momentum=momentum, nesterov=bool(momentum)),
            keras.losses.get({"class_name": LOSSES[name], "config": {"from_logits": True}}),
        )
        batch = _batch(name, group.size)
        config = Config()
        compiled = compile_model(config, model, Horizon(SYSTEMS[name].batch * group.size, 1, 1))
        training = build_training(
            config, group, compiled, _Synthetic(tf.nest.map_structure(tf.TensorSpec.from_tensor, batch))
        )
        self.state = TrainState(model, training.optimizers, synchronization=kind())
        self._step = training.make_step(self.state)
        self._size = StepSize(SYSTEMS[name].batch, is_full=True)
        self._batches = _batches(name, group.size)
        self._calls = 1

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


@dataclass(frozen=True)
class _Synthetic:
    """What a step is built for."""

    scaled_spec: Batch
    has_weights: bool = False

    def scaled(self, batch: Batch) -> Batch:
        return batch


def _batch(name: str, size: int) -> Batch:
    rows = SYSTEMS[name].batch
    inputs = tf.random.stateless_uniform((rows, *SHAPES[name]), (1, 2))
    targets = tf.range(rows, dtype=tf.int64) % 2
    if name == "mlp":
        targets = targets[:, None]
    return Batch(inputs, targets, tf.ones(rows), tf.range(rows, dtype=tf.int64), tf.constant(rows * size, tf.int64))


def _batches(name: str, size: int) -> Batches:
    _, steps, *_ = SYSTEMS[name]
    chunk = tf.nest.map_structure(lambda values: tf.stack([values] * steps), _batch(name, size))
    return Batches(tf.data.Dataset.from_tensors(chunk).repeat())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--systems", nargs="+", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--alone", dest="kinds", action="store_const", const=[Alone], default=[EveryStep])
    parser.add_argument("--both", dest="kinds", action="store_const", const=[EveryStep, Alone])
    arguments = parser.parse_args()
    group = start(HorovodConfig(), DeviceConfig())
    measured = {
        name: measure(group, name, arguments.seconds, arguments.kinds)._asdict() | {"rows": SYSTEMS[name].batch}
        for name in arguments.systems
    }
    if group.is_root:
        with Path(arguments.out).open("x", encoding="utf-8") as file:
            json.dump({"exchange": group.exchange, "systems": measured}, file)
    group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
