"""A loss, compiled or of the config, gives each record what it gives in `fit`; others are refused."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from horovod_train.config.settings import Config, Spec
from horovod_train.errors import UserError
from horovod_train.training.parts.compiled import choose_loss
from horovod_train.training.parts.losses import build_loss

ROWS = 8
RNG = np.random.default_rng(0)
NUMBERS = RNG.normal(size=(ROWS, 6)).astype("float32")
CLASSES = RNG.integers(0, 2, size=ROWS)


@keras.saving.register_keras_serializable("test_compiled_losses")
def squared(targets: Any, outputs: Any) -> Any:
    return (targets - outputs) ** 2


@keras.saving.register_keras_serializable("test_compiled_losses")
class Squared(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return squared(y_true, y_pred)


def compiled(loss: Any, outputs: tuple[int, ...] = (1,)) -> keras.Model:
    keras.utils.set_random_seed(0)
    dense = layers.Dense(int(np.prod(outputs)), activation="sigmoid")
    model = keras.Sequential([keras.Input((6,)), dense, layers.Reshape(outputs)])
    model.compile("sgd", loss)
    return model


def mean_of(model: keras.Model, targets: Any) -> float:
    return float(tf.reduce_mean(choose_loss(Config(), model)(tf.constant(targets), model(NUMBERS))["loss"].values))


@pytest.mark.parametrize("loss", [squared, "binary_crossentropy", "hinge", keras.losses.kl_divergence])
def test_a_function_compares_record_by_record(loss: Any) -> None:
    """Targets [batch] with outputs [batch, 1]."""
    model = compiled(loss)
    expected = model.evaluate(NUMBERS, CLASSES, batch_size=ROWS, verbose=0)
    assert mean_of(model, CLASSES) == pytest.approx(expected, rel=1e-6)
    assert mean_of(model, CLASSES[:, None]) == pytest.approx(expected, rel=1e-6)


def test_a_function_gets_no_last_axis_that_only_outputs_have() -> None:
    model, targets = compiled(squared, (4, 1)), RNG.normal(size=(ROWS, 4))
    expected = model.evaluate(NUMBERS, targets, batch_size=ROWS, verbose=0)
    assert mean_of(model, targets) == pytest.approx(expected, rel=1e-6)


def test_a_loss_of_pairs_of_records_is_refused() -> None:
    """As a class, whose `call` Keras gives what comes; and as a function that the config names."""
    expected = r"squared compares each record with all others: it gave \(8, 8\) for targets \[8\] and outputs \[8, 1\]"
    with pytest.raises(ValueError, match=expected):
        mean_of(compiled(Squared(name="squared")), CLASSES)
    targets, outputs = tf.zeros(ROWS), tf.zeros((ROWS, 1))
    with pytest.raises(ValueError, match=expected):
        build_loss(Spec("test_compiled_losses:squared"))(targets, outputs)
    assert build_loss(Spec("test_compiled_losses:squared"))(outputs, outputs)["loss"].values.shape == (ROWS,)


def test_a_loss_that_is_not_of_each_record_is_refused() -> None:
    expected = "circle compares the records of a whole batch"
    with pytest.raises(UserError, match=expected):
        build_loss(Spec("circle"))
    with pytest.raises(UserError, match=expected):
        choose_loss(Config(), compiled(keras.losses.Circle()))


def test_a_sum_is_refused() -> None:
    with pytest.raises(UserError, match="reduction: the trainer takes the mean over records; leave it out"):
        build_loss(Spec("mean_squared_error", {"reduction": "sum"}))


def test_values_of_a_batch_are_not_taken_for_those_of_records() -> None:
    """Dice over rows gives a value for each class."""
    dice = Spec("dice", {"axis": 0})
    with pytest.raises(ValueError, match=r"dice must give one value a record, \[batch\]; it gave \(1,\)"):
        build_loss(dice)(tf.ones((ROWS, 1)), tf.ones((ROWS, 1)))


def test_a_name_that_stands_for_several_losses_is_refused() -> None:
    with pytest.raises(UserError, match="is compiled with 'crossentropy'; expected the full name of a loss"):
        choose_loss(Config(), compiled("crossentropy"))
