"""Numbers that stop being finite on the last rank: at which step ranks stop, who is named, what is left unharmed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from facts import leave
from uneven import LOSS, ROWS, group, rank, size

from horovod_train.config.settings import TrainConfig
from horovod_train.data.pipeline.batch import Batch
from horovod_train.data.pipeline.chunks import Batches
from horovod_train.distributed import consistency
from horovod_train.distributed.optimizer import DistributedOptimizer
from horovod_train.errors import RunError
from horovod_train.training.parts.losses import Loss, LossFunction, Term, build_loss
from horovod_train.training.parts.metrics import Accumulator
from horovod_train.training.parts.per_record import RecordLosses
from horovod_train.training.state import TrainState
from horovod_train.training.steps.objective import Objective
from horovod_train.training.steps.step import TrainStep
from horovod_train.training.sync import build_strategy
from horovod_train.training.sync.strategy import SyncParts

WEIRD = 2
"""A label to which `jumpy` gives an infinite loss, and finite gradients."""

STALE = TrainConfig(synchronization="stale")
SKIP_STALE = TrainConfig(synchronization="stale", non_finite="skip")
LOCAL = TrainConfig(synchronization="local", average_every_steps=4)


def batches(bad: range, *, inputs: bool) -> Iterator[Batch]:
    """Of the steps `bad` the last rank's hold a NaN in their inputs, or else WEIRD labels, which no others have."""
    rng = np.random.default_rng(rank)
    for step in range(1, 100):
        is_bad = step in bad and rank == size - 1
        x = rng.normal(size=(ROWS, 6)).astype(np.float32)
        labels = np.full(ROWS, WEIRD) if is_bad and not inputs else (x.sum(axis=1) > 0).astype(int)
        if is_bad and inputs:
            x[0, 0] = np.nan
        yield Batch(
            inputs=tf.constant(x),
            targets=tf.constant(labels, tf.int64),
            weights=tf.ones(ROWS),
            ids=tf.zeros(ROWS, tf.int64),
            count=tf.constant(ROWS * size, tf.int64),
        )


def jumpy(targets: tf.Tensor, outputs: tf.Tensor) -> RecordLosses:
    plain = build_loss(LOSS)(targets, outputs)["loss"].values
    return RecordLosses(plain + tf.where(targets == WEIRD, np.inf, 0.0), None)


def steep(targets: tf.Tensor, outputs: tf.Tensor) -> RecordLosses:
    """Of WEIRD labels finite, and its gradient is not: that of a root at 0."""
    plain = build_loss(LOSS)(targets, outputs)["loss"].values
    return RecordLosses(plain + tf.sqrt(tf.where(targets == WEIRD, 0.0 * tf.reduce_sum(outputs, axis=-1), 1.0)), None)


def why_not_saved(state: TrainState) -> str:
    """What a save or a check says that comes after the last step; "" where nothing is wrong."""
    try:
        consistency.check(group, state.settle(group).digests(), "at the end")
    except RunError as error:
        return str(error)
    return ""


def train(
    bad: range,
    steps: int,
    config: TrainConfig = TrainConfig(),  # noqa: B008  frozen
    *,
    max_skips: int = 0,
    inputs: bool = True,
    half: bool = False,
    spoil: bool = False,
    odd: LossFunction = jumpy,
) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.ReLU(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    plain = keras.optimizers.SGD(0.05)
    optimizer = DistributedOptimizer(keras.optimizers.LossScaleOptimizer(plain) if half else plain)
    optimizer.build(model.trainable_variables)
    state = TrainState(model, optimizer, synchronization=build_strategy(SyncParts(config, group, model, optimizer)))
    loss = build_loss(LOSS) if inputs else Loss({"loss": Term(1.0, odd)})
    step = TrainStep(
        state,
        Objective(model, optimizer, loss, size=size),
        Accumulator(loss, [], also=["penalty"]),
        rank=rank,
        seed=1,
        max_skips_in_a_row=max_skips,
        count_over_ranks=lambda batch: batch.count,
    )
    spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, next(batches(bad, inputs=inputs)))
    stream = tf.data.Dataset.from_generator(lambda: batches(bad, inputs=inputs), output_signature=spec)
    done, goes_on, _ = step.run(Batches(stream.batch(2)), steps)
    if spoil and rank == size - 1:
        model.trainable_weights[0].assign(model.trainable_weights[0] / 0.0)
    return {
        "done": done,
        "goes_on": goes_on,
        "why": why_not_saved(state) if goes_on else str(state.failure.divergence(group)),
        "loss": step.metrics.result(group)["loss"],
        "skipped": int(step.skipped),
        "is_finite": all(np.all(np.isfinite(weight.numpy())) for weight in model.weights),
        "moved": float(np.abs(model.non_trainable_weights[0].numpy()).max()),
    }


found = {
    "every_step": train(range(3, 4), 6),
    "loss_alone": train(range(3, 4), 6, inputs=False),
    "gradients_alone": train(range(3, 4), 6, inputs=False, odd=steep),
    "stale": train(range(3, 4), 6, STALE),
    "local": train(range(3, 4), 6, LOCAL),
    "local_at_its_end": train(range(3, 4), 3, LOCAL),
    "skip": train(range(3, 4), 6, max_skips=2),
    "stale_at_its_end": train(range(3, 4), 3, STALE),
    "weight": train(range(0), 3, spoil=True),
    "skip_stale": train(range(3, 4), 6, SKIP_STALE, max_skips=2),
    "skip_stale_at_its_end": train(range(3, 4), 3, SKIP_STALE, max_skips=2),
    "skip_in_vain": train(range(3, 9), 9, max_skips=2),
    "float16": train(range(3, 4), 6, half=True),
    "float16_in_vain": train(range(3, 99), 80, half=True),
}
leave(rank, found)
group.close()
