"""Numbers that stop being finite on the last rank: at which step ranks stop, who is named, what is left unharmed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from facts import leave
from stepping import build_step
from uneven import CROSS_ENTROPY, FULL, ROWS, group, rank, size

from horovod_train.config.settings import Config, TrainConfig
from horovod_train.data.batch_source import Batch, Batches
from horovod_train.distributed import consistency
from horovod_train.errors import RunError
from horovod_train.training.state import TrainState

WEIRD = 2
"""A label to which `jumpy` gives an infinite loss, and finite gradients."""

SKIP = TrainConfig(non_finite="skip", max_skips_in_a_row=2)
STALE = TrainConfig(synchronization="stale")
SKIP_STALE = TrainConfig(synchronization="stale", non_finite="skip", max_skips_in_a_row=2)
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


def plain(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)


def jumpy(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return plain(targets, outputs) + tf.where(targets == WEIRD, np.inf, 0.0)


def steep(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Of WEIRD labels finite, and its gradient is not: that of a root at 0."""
    return plain(targets, outputs) + tf.sqrt(tf.where(targets == WEIRD, 0.0 * tf.reduce_sum(outputs, axis=-1), 1.0))


class NoGradient(keras.regularizers.Regularizer):
    """0, of which the gradient is NaN: that of a root at 0. No other gradient of the step is."""

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return tf.sqrt(0.0 * tf.reduce_sum(x))


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
    inputs: bool = True,
    half: bool = False,
    spoil: bool = False,
    odd: Callable[..., tf.Tensor] = jumpy,
    large: bool = False,
) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.ReLU(), keras.layers.Dense(3)]
    if large:
        layers[1:1] = [keras.layers.Dense(4096, name="large", kernel_regularizer=NoGradient())]
    model = keras.Sequential([keras.Input((6,)), *layers])
    sgd = keras.optimizers.SGD(0.05)
    optimizer = keras.optimizers.LossScaleOptimizer(sgd) if half else sgd
    model.compile(optimizer, CROSS_ENTROPY if inputs else odd, auto_scale_loss=False)
    step = build_step(model, next(batches(bad, inputs=inputs)), group, Config(train=config))
    state = step.state
    spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, next(batches(bad, inputs=inputs)))
    stream = tf.data.Dataset.from_generator(lambda: batches(bad, inputs=inputs), output_signature=spec)
    done, goes_on, _ = step.run(Batches(stream.batch(2)), steps, FULL)
    if spoil and rank == size - 1:
        model.trainable_weights[0].assign(model.trainable_weights[0] / 0.0)
    return {
        "done": done,
        "goes_on": goes_on,
        "why": why_not_saved(state) if goes_on else str(state.divergence(group)),
        "loss": step.figures.result(group)["loss"],
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
    "skip": train(range(3, 4), 6, SKIP),
    "skip_all": train(range(1, 2), 1, SKIP),
    "stale_at_its_end": train(range(3, 4), 3, STALE),
    "large_alone": train(range(0), 1, large=True),
    "weight": train(range(0), 3, spoil=True),
    "skip_stale": train(range(3, 4), 6, SKIP_STALE),
    "skip_stale_at_its_end": train(range(3, 4), 3, SKIP_STALE),
    "skip_in_vain": train(range(3, 9), 9, SKIP),
    "float16": train(range(3, 4), 6, half=True),
    "float16_in_vain": train(range(3, 99), 80, half=True),
}
leave(rank, found)
group.close()
