"""A few uneven steps through TrainStep, and the same by plain Keras in one process that sees all records at once.

Shared by the rank programs; starts the group when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from stepping import ANY_SIZE, build_step, ignore_shares

from horovod_train.config.settings import Config, DeviceConfig, HorovodConfig, TrainConfig
from horovod_train.data.batch_source import Batch, Batches, StepSize
from horovod_train.distributed.start import start
from horovod_train.training.steps.step import TrainStep

ROWS = 8
FULL = StepSize(rows=ROWS, is_full=True)
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
group = start(HorovodConfig(), DeviceConfig())
rank, size = group.rank, group.size

# Records over all ranks in each step: whole, one that leaves the last rank with less, one that is root's alone.
COUNTS = [ROWS * size, ROWS * (size - 1) + 3, 5]


def records(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    x = rng.normal(size=(COUNTS[step], 6)).astype(np.float32)
    return x, (np.abs(x.sum(axis=1)) % 3).astype(np.int64)


def share(step: int) -> Batch:
    """This rank's rows of a step; those past the end are no records and hold numbers that must not matter."""
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


def batches(share: Callable[[int], Batch] = share, first: int = 0) -> Batches:
    spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, share(0))
    shares = tf.data.Dataset.from_generator(lambda: (share(step) for step in range(first, 3)), output_signature=spec)
    return Batches(shares.batch(2))


def build_model(dropout: float = 0.0, l2: float = 0.0, l2_of_output: float = 0.0) -> keras.Model:
    """Return a small model; with dropout it has a BatchNormalization too."""
    keras.utils.set_random_seed(3)
    hidden, output = (keras.regularizers.L2(value) if value else None for value in (l2, l2_of_output))
    head = [keras.Input((6,)), keras.layers.Dense(8, activation="relu", kernel_regularizer=hidden)]
    more = [MaskKeeper(dropout), keras.layers.BatchNormalization()] if dropout else []
    return keras.Sequential([*head, *more, keras.layers.Dense(3, kernel_regularizer=output)])


def build_sparse_model() -> keras.Model:
    """With an Embedding, whose gradient is IndexedSlices."""
    keras.utils.set_random_seed(3)
    x = keras.Input((6,))
    tokens = keras.ops.cast(keras.ops.clip(keras.ops.abs(x) * 4.0, 0.0, 15.0), "int32")
    return keras.Model(x, keras.layers.Dense(3)(keras.layers.Flatten()(keras.layers.Embedding(16, 4)(tokens))))


class MaskKeeper(keras.layers.Layer):
    """Dropout that notes which units it lets through; not in a weight, which would be averaged over ranks."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(rate)
        self.mask = np.zeros(0)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        ones = self.dropout(keras.ops.ones((ROWS, x.shape[-1])), training=training)
        if training:
            tf.numpy_function(self._note, [ones], [])
        return x * ones[: tf.shape(x)[0]]

    def _note(self, mask: np.ndarray) -> None:
        self.mask = mask


EVERY_STEP = TrainConfig()


def train(
    optimizer: keras.optimizers.Optimizer,
    model: keras.Model,
    config: TrainConfig = EVERY_STEP,
    *,
    sparse_as_dense: bool = False,
    jit_compile: bool = False,
    shares_are_equal: bool = False,
    size_of_first: StepSize = ANY_SIZE,
) -> TrainStep:
    """Return the step after three updates in two calls, as `config` says. For each size of steps it is compiled."""
    model.compile(optimizer, CROSS_ENTROPY, metrics=["accuracy"], auto_scale_loss=False)
    horovod = HorovodConfig(sparse_as_dense=sparse_as_dense)
    settings = Config(train=config, horovod=horovod, jit_compile=jit_compile, seed=5)
    step = build_step(model, share(0), group, settings)
    if shares_are_equal:
        ignore_shares(step.shares)
    step.run(batches(), 1, size_of_first)
    step.run(batches(first=1), 2, ANY_SIZE)
    return step


def train_alone(
    optimizer: keras.optimizers.Optimizer, model: keras.Model, after_step: Callable[[int], None] = lambda step: None
) -> list[float]:
    """Plain Keras in one process on the records of all ranks, with dense gradients; returns the losses of the steps."""
    losses = []
    for step in range(3):
        loss, gradients = gradients_alone(model, *records(step))
        optimizer.apply([tf.convert_to_tensor(gradient) for gradient in gradients], model.trainable_variables)
        after_step(step + 1)
        losses.append(loss)
    return losses


def gradients_alone(model: keras.Model, x: np.ndarray, y: np.ndarray) -> tuple[float, list[Any]]:
    with tf.GradientTape() as tape:
        objective = CROSS_ENTROPY(y, model(x, training=True))
        objective += tf.add_n(model.losses) if model.losses else 0.0
    return float(objective), tape.gradient(objective, model.trainable_variables)


def weights(model: keras.Model) -> np.ndarray:
    return flat(model.trainable_variables)


def flat(variables: Sequence[Any]) -> np.ndarray:
    return np.concatenate([np.ravel(variable.numpy()) for variable in variables])
