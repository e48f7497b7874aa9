"""Small models, and twenty steps with them: by model.fit, in a loop, and in one process on the rows of all ranks.

Shared by the rank programs of horovod_train.keras and .tensorflow; starts Horovod when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

import horovod_train.keras as hvd
import horovod_train.tensorflow as hvd_tf
from horovod_train.distributed.launch import launcher
from horovod_train.errors import RunError

STEPS, ROWS = 20, 8
members = [1] if launcher.detect().size == 2 else [0, 1]  # Horovod takes no set that is all ranks
some = hvd.ProcessSet(members)
hvd.init(process_sets=[some])
rank, size = hvd.rank(), hvd.size()
if rank == 0:  # Keras numbers what it makes, so nothing here has the same name on all ranks
    made_before = [keras.optimizers.SGD(), keras.Sequential([keras.layers.Dense(1)])]
ALL = tuple(range(size))
Model: TypeAlias = keras.Model
Optimizer: TypeAlias = keras.optimizers.Optimizer
Wrap = Callable[[tf.GradientTape], tf.GradientTape]


def batch(step: int, ranks: Sequence[int] = (rank,)) -> tuple[np.ndarray, np.ndarray]:
    rngs = [np.random.default_rng([step, of]) for of in ranks]
    x = np.concatenate([rng.normal(size=(ROWS, 6)) for rng in rngs]).astype(np.float32)
    return x, np.tanh(x.sum(axis=1, keepdims=True))


def dense(seed: int = 0) -> Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1, name="head")])


def sgd() -> Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def mse(model: Model, x: Any, y: Any) -> tf.Tensor:
    return tf.reduce_mean(tf.square(model(x, training=True) - y))


def weights(model: Model) -> np.ndarray:
    return np.concatenate([np.ravel(variable.numpy()) for variable in model.trainable_variables])


def loop(
    model: Model,
    optimizer: Optimizer,
    wrap: Wrap = lambda tape: tape,
    *,
    persistent: bool = False,
    looks_first: bool = False,
) -> Model:
    """A custom loop, compiled. looks_first: traced without an exchange before."""
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor, trains: bool = True) -> None:
        with tf.GradientTape(persistent=persistent) as tape:
            loss = mse(model, x, y)
        if not trains:
            return
        tape = wrap(tape)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    if looks_first:
        step(*map(tf.constant, batch(0)), trains=False)
    for number in range(STEPS):
        step(*map(tf.constant, batch(number)))
    return model


def alone(model: Model, optimizer: Optimizer, ranks: Sequence[int] = ALL, passes: int = 1, scale: float = 1.0) -> Model:
    """One process on the rows of all ranks; the update is of the sum of the gradients of `passes` batches, times scale.

    Without a graph and without Horovod.
    """
    variables = model.trainable_variables
    optimizer.build(variables)
    sums = [np.zeros(variable.shape, np.float32) for variable in variables]
    for number in range(STEPS):
        with tf.GradientTape() as tape:
            loss = mse(model, *batch(number, ranks))
        for total, grad in zip(sums, tape.gradient(loss, variables), strict=True):
            total += scale * tf.convert_to_tensor(grad).numpy()
        if (number + 1) % passes == 0:
            optimizer.apply([tf.constant(total) for total in sums], variables)
            for total in sums:
                total[...] = 0
    return model


def fit(model: Model, optimizer: Optimizer, callbacks: Sequence[Any] = (), **compiled: Any) -> Model:
    model.compile(optimizer, "mse", **compiled)
    x, y = (np.concatenate(parts) for parts in zip(*(batch(step) for step in range(STEPS)), strict=True))
    model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def distributed(build: Callable[[], Optimizer] = sgd, **options: Any) -> Optimizer:
    return hvd.DistributedOptimizer(build(), **options)


def in_half(train: Callable[[], Any]) -> Any:
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        return train()
    finally:
        keras.mixed_precision.set_dtype_policy("float32")


def with_tape(**options: Any) -> Wrap:
    return lambda tape: hvd_tf.DistributedGradientTape(tape, **options)


def error_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except (RunError, AttributeError, tf.errors.OpError) as error:
        return str(error)
    return "accepted"
