"""The momentum correction of the learning rate callbacks: for optimizers whose accumulated updates contain the rate."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import horovod_train.keras as hvd
from horovod_train.optim.lars import LARS


@pytest.mark.parametrize(
    ("optimizer", "slot", "factor"),
    [
        (keras.optimizers.SGD(0.1, momentum=0.9), "momentum", 2),
        (keras.optimizers.RMSprop(0.1, momentum=0.9), "momentum", 2),
        (keras.optimizers.RMSprop(0.1, momentum=0.9), "velocity", 1),
        (LARS(0.1, momentum=0.9), "velocity", 2),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "momentum", 2),
        (keras.optimizers.Adam(0.1), "momentum", 1),
        (keras.optimizers.Muon(0.1, momentum=0.9), "momentum", 1),
    ],
    ids=["sgd", "rmsprop", "rmsprop-squares", "lars", "loss-scale", "adam", "muon"],
)
def test_accumulated_updates_follow_the_rate_if_they_contain_it(
    optimizer: keras.optimizers.Optimizer, slot: str, factor: float
) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(optimizer, "mse")
    model.optimizer.build(model.trainable_variables)
    slots = [variable for variable in model.optimizer.variables if variable.path.endswith(f"_{slot}")]
    assert slots
    for variable in slots:
        variable.assign(np.full(variable.shape, 0.5, np.float32))
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 2.0)
    callback.set_model(model)
    callback.on_epoch_begin(0)
    callback.on_train_batch_begin(0)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.2)
    for variable in slots:
        np.testing.assert_allclose(variable.numpy(), np.full(variable.shape, 0.5 * factor), rtol=1e-6)
