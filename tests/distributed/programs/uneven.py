"""A few uneven steps through TrainStep, and the same by plain Keras in one process that sees all records at once.

Shared by the rank programs; starts the group when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_train.config.settings import DeviceConfig, HorovodConfig, Spec, TrainConfig
from horovod_train.data.pipeline.batch import Batch
from horovod_train.data.pipeline.chunks import Batches
from horovod_train.distributed.optimizer import DistributedOptimizer
from horovod_train.distributed.start import start
from horovod_train.training.parts.averages import MovingAverages
from horovod_train.training.parts.losses import build_loss
from horovod_train.training.parts.metrics import Accumulator, build_metrics
from horovod_train.training.state import TrainState
from horovod_train.training.steps.objective import Objective
from horovod_train.training.steps.step import TrainStep
from horovod_train.training.sync import build_strategy
from horovod_train.training.sync.strategy import SyncParts

ROWS = 8
group = start(HorovodConfig(), DeviceConfig())
rank, size = group.rank, group.size

# Records over all ranks in each step: whole, one that leaves the last rank with less, one that is root's alone.
COUNTS = [ROWS * size, ROWS * (size - 1) + 3, 5]


def records(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    x = rng.normal(size=(COUNTS[step], 6)).astype(np.float32)
    return x, (np.abs(x.sum(axis=1)) % 3).astype(np.int64)


def share(step: int) -> Batch:
    """This rank's rows of a step; those past the end weigh nothing and hold numbers that must not matter."""
    x, y = records(step)
    real = max(0, min(ROWS, COUNTS[step] - rank * ROWS))
    mine = slice(rank * ROWS, rank * ROWS + real)
    pad = ROWS - real
    return Batch(
        inputs=tf.constant(np.concatenate([x[mine], np.full((pad, 6), 9.0, np.float32)])),
        targets=tf.constant(np.concatenate([y[mine], np.zeros(pad, np.int64)])),
        weights=tf.constant([1.0] * real + [0.0] * pad),
        ids=tf.constant([0] * real + [-1] * pad, tf.int64),
        count=tf.constant(COUNTS[step], tf.int64),
    )


def batches() -> Batches:
    first = share(0)
    spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, first)
    shares = tf.data.Dataset.from_generator(lambda: (share(step) for step in range(3)), output_signature=spec)
    return Batches(shares.batch(2))


def build_model(dropout: float = 0.0, l2: float = 0.0, l2_of_output: float = 0.0) -> keras.Model:
    keras.utils.set_random_seed(3)
    hidden, output = (keras.regularizers.L2(value) if value else None for value in (l2, l2_of_output))
    head = [keras.Input((6,)), keras.layers.Dense(8, activation="relu", kernel_regularizer=hidden)]
    mask = [MaskKeeper(dropout)] if dropout else []
    return keras.Sequential([*head, *mask, keras.layers.Dense(3, kernel_regularizer=output)])


def build_sparse_model() -> keras.Model:
    """With an Embedding, whose gradient is IndexedSlices."""
    keras.utils.set_random_seed(3)
    x = keras.Input((6,))
    tokens = keras.ops.cast(keras.ops.clip(keras.ops.abs(x) * 4.0, 0.0, 15.0), "int32")
    return keras.Model(x, keras.layers.Dense(3)(keras.layers.Flatten()(keras.layers.Embedding(16, 4)(tokens))))


class MaskKeeper(keras.layers.Layer):
    """Dropout that notes which units it let through in its last call."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(rate)

    def build(self, shape: Any) -> None:
        self.mask = self.add_weight(shape=(ROWS, shape[-1]), trainable=False, initializer="zeros", name="mask")

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        ones = self.dropout(keras.ops.ones_like(x), training=training)
        if training:
            self.mask.assign(ones)
        return x * ones


LOSS = Spec("sparse_categorical_crossentropy", {"from_logits": True})
METRICS = [Spec("sparse_categorical_accuracy", {"name": "accuracy"})]


EVERY_STEP = TrainConfig()


def train(
    optimizer: keras.optimizers.Optimizer,
    model: keras.Model,
    config: TrainConfig = EVERY_STEP,
    *,
    first_step: int = 0,
    sparse_as_dense: bool = False,
    jit_compile: bool = False,
) -> tuple[TrainState, Accumulator]:
    """Three steps in two calls, as `config` says."""
    optimizer = DistributedOptimizer(optimizer, sparse_as_dense=sparse_as_dense)
    optimizer.build(model.trainable_variables)
    averages = MovingAverages(model, config.ema_decay)
    exchange = build_strategy(SyncParts(config, group, model, optimizer, list(averages.variables.values())))
    state = TrainState(model, optimizer, averages=averages, synchronization=exchange)
    state.step.assign(first_step)
    seen = Accumulator(build_loss(LOSS), build_metrics(METRICS), also=["penalty"])
    objective = Objective(
        model,
        state.optimizer,
        build_loss(LOSS),
        size=size,
        accumulate_steps=config.accumulate_steps,
        l2=config.l2,
        jit_compile=jit_compile,
    )
    step = TrainStep(state, objective, seen, rank=rank, seed=5, count_over_ranks=lambda batch: batch.count)
    step.run(batches(), 2)
    step.run(stream_from(2), 1)
    return state, seen


def stream_from(step: int) -> Batches:
    found = batches()
    for _ in range(step):
        next(found)
    return found


CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train_alone(
    optimizer: keras.optimizers.Optimizer, model: keras.Model, after_step: Callable[[int], None] = lambda step: None
) -> list[float]:
    """Plain Keras in one process on the records of all ranks, with dense gradients; returns the mean losses."""
    means = []
    for step in range(3):
        mean, gradients = gradients_alone(model, *records(step))
        optimizer.apply([tf.convert_to_tensor(gradient) for gradient in gradients], model.trainable_variables)
        after_step(step + 1)
        means.append(mean)
    return means


def gradients_alone(model: keras.Model, x: np.ndarray, y: np.ndarray) -> tuple[float, list[Any]]:
    with tf.GradientTape() as tape:
        mean = CROSS_ENTROPY(y, model(x, training=True))
        objective = mean + (tf.add_n(model.losses) if model.losses else 0.0)
    return float(mean), tape.gradient(objective, model.trainable_variables)


def weights(model: keras.Model) -> np.ndarray:
    return flat(model.trainable_variables)


def flat(variables: Sequence[Any]) -> np.ndarray:
    return np.concatenate([np.ravel(variable.numpy()) for variable in variables])
