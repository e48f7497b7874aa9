"""Slots that begin as copies of weights are told from others, so that they can follow weights that are given later."""

from __future__ import annotations

import keras
import pytest
from keras import layers

from horovod_train.training.fine_tuning import slots_like_weights


def slots_of(optimizer: keras.optimizers.Optimizer) -> list[str]:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="dense"), layers.Dense(3, name="dense_1")])
    optimizer.build(model.trainable_variables)
    found = slots_like_weights(optimizer.variables, model.trainable_variables)
    assert [weight.path for _, weight in found] == [weight.path for weight in model.trainable_variables][: len(found)]
    return [slot.name.rpartition("_")[2] for slot, _ in found]


@pytest.mark.parametrize("scaled", [False, True])
def test_slots_that_copy_weights_are_found(scaled: bool) -> None:
    if not hasattr(keras.optimizers, "ScheduleFreeAdamW"):
        pytest.skip("this Keras has none")
    optimizer = keras.optimizers.ScheduleFreeAdamW()
    assert slots_of(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer) == ["momentum"] * 4


@pytest.mark.parametrize("optimizer", [keras.optimizers.Adam, keras.optimizers.Ftrl, keras.optimizers.Adagrad])
def test_slots_of_zeros_are_no_copies_of_a_bias_of_zeros(optimizer: type[keras.optimizers.Optimizer]) -> None:
    assert slots_of(optimizer(0.1)) == []
