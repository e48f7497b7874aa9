"""Moving averages, and exchange now and then or one step late, against the same written out in one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from facts import rel_error
from uneven import (
    COUNTS,
    CROSS_ENTROPY,
    ROWS,
    build_model,
    flat,
    gradients_alone,
    group,
    records,
    size,
    train,
    train_alone,
    weights,
)

from horovod_train.config.settings import TrainConfig


def build_momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.2, momentum=0.9)


def build_sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.5)


def facts() -> dict[str, Any]:
    """ends: negative, the ways do not all end alike."""
    ends: dict[str, np.ndarray] = {}
    return {"modes": _averages(ends) | _stale(ends) | _local(ends), "ends": ends}


def _averages(ends: dict[str, np.ndarray]) -> dict[str, float]:
    """By themselves, and while they are lent to the model, which holds what it would without them otherwise."""
    state = train(build_momentum(), build_model(), TrainConfig(ema_decay=0.3)).state
    expected, trained = _averages_alone()
    with state.averages.in_place():
        lent = weights(state.model)
    ends["every_step"] = weights(state.model)
    return {
        "ema": rel_error(flat(list(state.averages.variables.values())), expected),
        "ema_in_place": rel_error(lent, expected) + rel_error(ends["every_step"], trained),
    }


def _averages_alone() -> tuple[np.ndarray, np.ndarray]:
    """The averages, and the weights that they are of."""
    alone = build_model()
    averages = [weights(alone)]

    def follow(step: int) -> None:
        decay = min(0.3, (1 + step) / (10 + step))
        averages.append(decay * averages[-1] + (1 - decay) * weights(alone))

    train_alone(build_momentum(), alone, follow)
    return averages[-1], weights(alone)


def _stale(ends: dict[str, np.ndarray]) -> dict[str, float]:
    state = train(build_momentum(), build_model(), TrainConfig(synchronization="stale")).state
    alone, optimizer = build_model(), build_momentum()
    late = [tf.zeros(variable.shape) for variable in alone.trainable_variables]
    for step in range(3):
        _, gradients = gradients_alone(alone, *records(step))
        optimizer.apply(late, alone.trainable_variables)
        late = gradients
    before = ends["stale"] = weights(state.model)
    state.settle(group)  # what is pending becomes its mean, and the weights stay
    pending = flat(list(state.synchronization.variables.values())[:-1])
    after = weights(state.model)
    errors = (rel_error(before, weights(alone)), rel_error(pending, flat(late)), rel_error(after, before))
    return {"stale": max(errors)}


def local_at_every_step() -> float:
    config = TrainConfig(synchronization="local", average_every_steps=1)
    state = train(build_sgd(), build_model(), config).state
    alone = build_model()
    train_alone(build_sgd(), alone)
    return rel_error(weights(state.model), weights(alone))


def _local(ends: dict[str, np.ndarray]) -> dict[str, float]:
    """Averages every two steps, of which the last is taken by `settle`."""
    config = TrainConfig(synchronization="local", average_every_steps=2, ema_decay=0.3)
    state = train(build_momentum(), build_model(), config).state
    ends["local"] = weights(state.model)
    state.settle(group)
    return {"local_2": rel_error(weights(state.model), _local_by_hand())}


def _local_by_hand() -> np.ndarray:
    models = [build_model() for _ in range(size)]
    optimizers = [build_momentum() for _ in range(size)]
    for step in range(3):
        x, y = records(step)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = slice(rank * ROWS, (rank + 1) * ROWS)
            with tf.GradientTape() as tape:
                losses = CROSS_ENTROPY.call(y[mine], model(x[mine], training=True))
                objective = tf.reduce_sum(losses) * size / COUNTS[step]
            optimizer.apply(tape.gradient(objective, model.trainable_variables), model.trainable_variables)
        if step % 2 or step == 2:
            pairs = zip(models, optimizers, strict=True)
            holders = [[*model.trainable_variables, *_slots(optimizer)] for model, optimizer in pairs]
            for same in zip(*holders, strict=True):
                mean = np.mean([variable.numpy() for variable in same], axis=0)
                for variable in same:
                    variable.assign(mean)
    return weights(models[0])


def _slots(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    return [variable for variable in optimizer.variables if len(variable.shape)]
