"""Averages of weights take the place of the weights, and leave it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_train.config.rules import broken_rules
from horovod_train.config.settings import Config, OptimizerSpec, TrainConfig
from horovod_train.errors import UserError
from horovod_train.training.state import AverageSlots, MovingAverages


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_constraint="non_neg")])


def steps(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
    """Five updates by gradients that are the same each time."""
    rng = np.random.default_rng(1)
    for _ in range(5):
        own = model.trainable_weights
        optimizer.apply([tf.constant(rng.normal(size=weight.shape), tf.float32) for weight in own], own)


@pytest.mark.parametrize(
    "build",
    [
        lambda: keras.optimizers.SGD(0.3, momentum=0.9, use_ema=True, ema_momentum=0.7),
        lambda: keras.optimizers.Adam(0.1, use_ema=True, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.7)),
    ],
    ids=["sgd", "adam, accumulating", "in a loss scale"],
)
def test_the_slots_of_an_optimizer_are_what_keras_ends_with(build: Callable[[], keras.optimizers.Optimizer]) -> None:
    keras.utils.set_random_seed(1)
    model, optimizer = dense(), build()
    slots = AverageSlots(optimizer)
    optimizer.build(model.trainable_variables)
    steps(optimizer, model)
    trained = model.get_weights()
    averages = slots.averages()
    assert averages is not None
    averages.put_in()
    averages.put_in()  # does nothing
    shown = model.get_weights()
    averages.put_back()
    assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), trained, strict=True))
    optimizer.finalize_variable_values(model.trainable_variables)
    assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), shown, strict=True))
    assert not np.array_equal(shown[0], trained[0])
    assert list(averages.variables) == [weight.path for weight in model.weights]


def test_weights_return_bit_for_bit_however_large_their_averages() -> None:
    """Where a sum and a difference would round."""
    model = dense()
    model.set_weights([np.full((3, 2), 0.1, np.float32), np.zeros(2, np.float32)])
    averages = MovingAverages(model, 0.9)
    for average in averages.variables.values():
        average.assign(tf.fill(average.shape, 1e8))
    with averages.in_place():
        assert model.get_weights()[0].max() == 1e8
    assert np.array_equal(model.get_weights()[0], np.full((3, 2), 0.1, np.float32))
    averages.put_back()  # does nothing
    assert np.array_equal(model.get_weights()[1], np.zeros(2))


OPTIONS: dict[str, tuple[dict[str, Any], float | None, tuple[str, str]]] = {
    "two kinds": ({"use_ema": True}, 0.9, ("train.ema_decay", "optimizer.options.use_ema keeps averages too; give")),
    "a momentum of none": ({"ema_momentum": 0.9}, None, ("optimizer.options.ema_momentum", "has no effect without")),
    "a frequency of none": (
        {"use_ema": False, "ema_overwrite_frequency": 2},
        None,
        ("optimizer.options.ema_overwrite_frequency", "has no effect without use_ema: true."),
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_settings_of_averages_that_have_no_effect_are_one_line(name: str) -> None:
    options, decay, (key, expected) = OPTIONS[name]
    config = Config(optimizer=OptimizerSpec("sgd", options), train=TrainConfig(epochs=1, ema_decay=decay))
    assert expected in dict(broken_rules(config))[key]
    right = OptimizerSpec("sgd", options | {"use_ema": True})
    found = dict(broken_rules(Config(optimizer=right, train=TrainConfig(epochs=1))))
    assert not [key for key in found if "ema" in key]


def test_an_optimizer_without_averages_or_built_before_has_no_slots() -> None:
    assert not AverageSlots(keras.optimizers.SGD()).are_kept
    optimizer = keras.optimizers.SGD(use_ema=True)
    optimizer.build(dense().trainable_variables)
    with pytest.raises(UserError, match="is built already"):
        AverageSlots(optimizer)
