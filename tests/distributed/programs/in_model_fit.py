"""A small model in `model.fit` on different data per rank, and the same in one process on the data of all ranks.

Shared by the rank programs; starts the group when it is imported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from facts import rel_error

from horovod_train.distributed.start import start
from horovod_train.errors import UserError
from horovod_train.optim.lars import LARS
from horovod_train.tensorflow import DistributedOptimizer

group = start()
rank, size = group.rank, group.size


def data(of: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(of)
    x = rng.normal(size=(32, 6)).astype(np.float32)
    return x, (x.sum(axis=1, keepdims=True) ** 2).astype(np.float32)


def build_model(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1, name="out")]
    )


def weights(model: keras.Model) -> np.ndarray:
    return np.concatenate([variable.numpy().ravel() for variable in model.trainable_variables])


def sha(model: keras.Model) -> str:
    return hashlib.sha256(weights(model).tobytes()).hexdigest()


def fit(
    optimizer: Any,
    *,
    seed: int = 0,
    callbacks: Any = (),
    model: keras.Model | None = None,
    rows: int = 32,
    compiled: Mapping[str, Any] | None = None,
    kind: Callable[[np.ndarray, np.ndarray], Any] | None = None,
) -> keras.Model:
    model = model or build_model(seed)
    model.compile(optimizer, "mse", **(compiled or {}))
    x, y = (values[:rows] for values in data(rank))
    given = {"x": kind(x, y)} if kind else {"x": x, "y": y, "batch_size": 8}
    model.fit(**given, epochs=2, verbose=0, shuffle=False, callbacks=list(callbacks))
    return model


def fit_alone(build: Callable[[], keras.optimizers.Optimizer]) -> keras.Model:
    """One process on the batches of all ranks together: what N ranks must equal."""
    model = build_model(0)
    optimizer = build()
    parts = [data(r) for r in range(size)]
    for _ in range(2):
        for start_row in range(0, 32, 8):
            x = np.concatenate([part[0][start_row : start_row + 8] for part in parts])
            y = np.concatenate([part[1][start_row : start_row + 8] for part in parts])
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return model


BUILDERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.01),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.01, global_clipnorm=0.5),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "lars": lambda: LARS(0.1, weight_decay=0.01, trust_coefficient=0.1),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=8.0),
}


def facts_of(fitted: Mapping[str, keras.Model]) -> dict[str, Any]:
    """By names of BUILDERS: the digests of what was fitted with them, and how far it is from one process."""
    alone = {name: fit_alone(BUILDERS[name]) for name in fitted if name != "loss_scale"}
    return {
        "ours": {name: sha(model) for name, model in fitted.items()},
        "error_against_one_process": {
            name: rel_error(weights(fitted[name]), weights(model)) for name, model in alone.items()
        },
    }


def fit_with(names: Iterable[str]) -> dict[str, keras.Model]:
    return {name: fit(DistributedOptimizer(BUILDERS[name]())) for name in names}


def error_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except UserError as error:
        return str(error)
    return "accepted"


def sgd() -> keras.optimizers.Optimizer:
    return DistributedOptimizer(keras.optimizers.SGD(0.01))
