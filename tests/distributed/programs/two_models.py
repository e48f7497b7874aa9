"""Two models in one step, each in a tf.function of its own: nothing orders their exchanges, so names must differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from facts import leave, rel_error

import horovod_train.keras as hvd

hvd.init()
ROWS = 8
rows = np.random.default_rng(3).normal(5.0, 2.0, size=(ROWS * hvd.size(), 4)).astype(np.float32)
Step = Callable[[tf.Tensor], Any]


def models(*inner: Any) -> list[keras.Model]:
    """Two, of different widths, with the same weights in each call."""
    keras.utils.set_random_seed(1)
    made = []
    for width in (5, 7):
        parts = [keras.layers.Dense(width), *(layer() for layer in inner), keras.layers.Dense(1)]
        made.append(keras.Sequential([keras.Input((4,)), *parts]))
    return made


def step_of(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Step:
    variables = [variable.value for variable in model.trainable_variables]

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 1.0))
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)

    optimizer.build(model.trainable_variables)
    return tf.function(step, autograph=False)


def train(steps: list[Step], x: np.ndarray) -> None:
    def together(x: tf.Tensor) -> None:
        for step in steps:
            step(x)

    in_one_call = tf.function(together, autograph=False)
    for _ in range(3):
        in_one_call(tf.constant(x))


def error_of(mine: list[keras.Model], optimizers: list[keras.optimizers.Optimizer], *inner: Any) -> Any:
    """How far these models are from those that one process trains on the rows of all ranks; or what is raised."""
    whole, begin = models(*inner), hvd.rank() * ROWS
    try:
        train([step_of(*pair) for pair in zip(mine, optimizers, strict=True)], rows[begin : begin + ROWS])
    except tf.errors.OpError as error:
        return str(error)
    train([step_of(model, keras.optimizers.SGD(0.001)) for model in whole], rows)
    return rel_error(weights(mine), weights(whole))


def weights(of: list[keras.Model]) -> np.ndarray:
    return np.concatenate([weight.numpy().ravel() for model in of for weight in model.weights])


def distributed(name: str | None) -> list[keras.optimizers.Optimizer]:
    return [hvd.DistributedOptimizer(keras.optimizers.SGD(0.001), name=name) for _ in range(2)]


synchronised = [hvd.synchronise_batch_norm(model) for model in models(keras.layers.BatchNormalization)]
facts = {
    "batch_norm": error_of(synchronised, distributed(None), keras.layers.BatchNormalization),
    "one_name": error_of(models(), distributed("ours")),
}
leave(hvd.rank(), facts)
hvd.shutdown()
