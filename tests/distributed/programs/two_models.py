"""Two models in one step, each in a tf.function of its own: nothing orders their exchanges, so names must differ.

And one model in a tf.function that a step calls twice: its exchanges have the same names, so they must be in order.
"""

from __future__ import annotations

import time
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


def late(outputs: tf.Tensor) -> tf.Tensor:
    """The same outputs, whose gradient rank 0 has later than the others."""

    @tf.custom_gradient
    def identity(outputs: tf.Tensor) -> Any:
        def backward(upstream: tf.Tensor) -> tf.Tensor:
            waited = tf.numpy_function(wait, [upstream], tf.float32, stateful=False)
            return tf.ensure_shape(waited, upstream.shape)

        return tf.identity(outputs), backward

    def wait(upstream: np.ndarray) -> np.ndarray:
        time.sleep(0.2 if hvd.rank() == 0 else 0)
        return upstream

    return identity(outputs)


def gradients_of_two_calls(model: keras.Model, x: np.ndarray) -> np.ndarray:
    def gradients(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(late(model(x, training=True)) - 1.0))
        return tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    function = tf.function(gradients, autograph=False)
    twice = tf.function(lambda x: [*function(x), *function(x**2)], autograph=False)
    return np.concatenate([grad.numpy().ravel() for grad in twice(tf.constant(x))])


def error_of_two_calls() -> Any:
    (mine, _), (whole, _), begin = synchronised, models(keras.layers.BatchNormalization), hvd.rank() * ROWS
    whole.set_weights(mine.get_weights())
    try:
        found = gradients_of_two_calls(mine, rows[begin : begin + ROWS])
    except tf.errors.OpError as error:
        return str(error)
    return rel_error(hvd.allreduce(found), gradients_of_two_calls(whole, rows))


synchronised = [hvd.synchronise_batch_norm(model) for model in models(keras.layers.BatchNormalization)]
facts = {
    "batch_norm": error_of(synchronised, distributed(None), keras.layers.BatchNormalization),
    "one_name": error_of(models(), distributed("ours")),
    "two_calls": error_of_two_calls(),
}
leave(hvd.rank(), facts)
hvd.shutdown()
