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
    return {"modes": {"ema": _ema(), "ema_in_place": _in_place(), "stale": _stale(), **_local()}} | _differences()


def _ema() -> float:
    state, _ = train(build_momentum(), build_model(), TrainConfig(ema_decay=0.3))
    return rel_error(flat(list(state.averages.variables.values())), _averages_alone())


def _averages_alone() -> np.ndarray:
    alone = build_model()
    averages = [weights(alone)]

    def follow(step: int) -> None:
        decay = min(0.3, (1 + step) / (10 + step))
        averages.append(decay * averages[-1] + (1 - decay) * weights(alone))

    train_alone(build_momentum(), alone, follow)
    return averages[-1]


def _in_place() -> float:
    """The averages while they are lent to the model, and the trained weights afterwards."""
    state, _ = train(build_momentum(), build_model(), TrainConfig(ema_decay=0.3))
    trained = weights(state.model)
    with state.averages.in_place():
        lent = weights(state.model)
    return rel_error(lent, _averages_alone()) + rel_error(weights(state.model), trained)


def _stale() -> float:
    state, _ = train(build_momentum(), build_model(), TrainConfig(synchronization="stale"))
    alone, optimizer = build_model(), build_momentum()
    late = [tf.zeros(variable.shape) for variable in alone.trainable_variables]
    for step in range(3):
        _, gradients = gradients_alone(alone, *records(step))
        optimizer.apply(late, alone.trainable_variables)
        late = gradients
    before = weights(state.model)
    state.settle(group)  # what is pending becomes its mean, and the weights stay
    pending = flat(list(state.synchronization.variables.values())[:-1])
    after = weights(state.model)
    return max(rel_error(before, weights(alone)), rel_error(pending, flat(late)), rel_error(after, before))


def _local() -> dict[str, float]:
    """Averages every step and every two, of which the last is taken by `settle`."""
    config = TrainConfig(synchronization="local", average_every_steps=1)
    state, _ = train(build_sgd(), build_model(), config)
    alone = build_model()
    train_alone(build_sgd(), alone)
    errors = {"local_1": rel_error(weights(state.model), weights(alone))}

    config = TrainConfig(synchronization="local", average_every_steps=2, ema_decay=0.3)
    state, _ = train(build_momentum(), build_model(), config)
    state.settle(group)
    errors["local_2"] = rel_error(weights(state.model), _local_by_hand())
    return errors


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


def _differences() -> dict[str, Any]:
    """Negative: the ways do not all end alike."""
    ends = {
        "every_step": TrainConfig(),
        "stale": TrainConfig(synchronization="stale"),
        "local": TrainConfig(synchronization="local", average_every_steps=2),
    }
    found = {}
    for name, config in ends.items():
        state, _ = train(build_sgd(), build_model(), config)
        found[name] = weights(state.model)
    return {"ends": found}
