"""Losses give one value a record, and several outputs add up by their weights."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_train.config.settings import MetricSpec, Spec
from horovod_train.data.pipeline import Batch
from horovod_train.errors import UserError
from horovod_train.training.losses import build_loss
from horovod_train.training.metrics import Accumulator, build_metrics
from horovod_train.training.objective import check_fits

LOGITS = tf.constant(np.random.default_rng(0).normal(size=(6, 5)), tf.float32)
LABELS = tf.constant([0, 1, 2, 3, 4, 0], tf.int64)
ENTROPY = {"name": "sparse_categorical_crossentropy", "options": {"from_logits": True}}


def test_smoothing_is_that_of_keras_on_one_hot_labels() -> None:
    loss = build_loss(Spec("smoothed_sparse_categorical_crossentropy", {"label_smoothing": 0.2}))
    ours = loss(LABELS, LOGITS)["loss"]
    keras_loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2, reduction="none")
    assert np.allclose(ours, keras_loss(tf.one_hot(LABELS, 5), LOGITS), atol=1e-6)
    plain = build_loss(Spec(**ENTROPY))(LABELS, LOGITS)["loss"]
    assert not np.allclose(ours, plain, atol=1e-2)


def test_losses_of_several_outputs_add_up_by_their_weights() -> None:
    terms = {"one": {**ENTROPY, "weight": 0.25}, "other": {**ENTROPY, "target": "one"}}
    outputs = {"one": LOGITS, "other": -LOGITS}
    loss, alone = build_loss(Spec("per_output", terms)), build_loss(Spec(**ENTROPY))
    one, other = alone(LABELS, LOGITS)["loss"], alone(LABELS, -LOGITS)["loss"]
    found = loss({"one": LABELS}, outputs)
    assert loss.names == ["loss", "one_loss", "other_loss"] == sorted(found)
    assert np.allclose(found["loss"], 0.25 * one + other, atol=1e-6)
    assert np.array_equal(found["one_loss"], one)
    assert np.array_equal(found["other_loss"], other)
    weights = np.arange(6, dtype=np.float32)
    assert np.allclose(loss.sums({"one": LABELS}, outputs, weights)["one_loss"], np.sum(one * weights))


def test_a_metric_looks_at_its_own_output() -> None:
    (metric,) = build_metrics([MetricSpec("sparse_categorical_accuracy", {}, output="other", target="label")])
    right = tf.one_hot(LABELS, 5)
    metric.update_state({"label": LABELS}, {"one": -right, "other": right}, sample_weight=tf.ones(6))
    assert float(metric.result()) == 1.0


def one_number(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(outputs)


WRONG = {
    "no outputs": (Spec("per_output"), "per_output needs a loss for each output"),
    "unknown key": (Spec("per_output", {"one": {"nam": "x"}}), "loss.options.one: nam: unknown key; known here: name."),
    "no mapping": (Spec("per_output", {"one": 3}), "loss.options.one: expected a mapping of name, options, target, "),
    "weight": (
        Spec("per_output", {"one": {**ENTROPY, "weight": "half"}}),
        "loss.options.one: weight: expected a number; received 'half'.",
    ),
    "unknown loss": (Spec("per_output", {"one": "crossentropy"}), "loss.options.one.name: Keras has no 'crossentropy'"),
    "option": (
        Spec("smoothed_sparse_categorical_crossentropy", {"smoothing": 1}),
        "got an unexpected keyword argument 'smoothing'; it takes: label_smoothing",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_one_line(name: str) -> None:
    spec, expected = WRONG[name]
    with pytest.raises(UserError) as found:
        build_loss(spec)
    assert expected in str(found.value)


def test_a_loss_that_is_one_number_is_refused() -> None:
    with pytest.raises(ValueError, match="must give one value a record"):
        build_loss(Spec("test_losses:one_number"))(LABELS, LOGITS)


def test_an_output_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="there is no output 'two'; there are one"):
        build_loss(Spec("per_output", {"two": ENTROPY}))({"two": LABELS}, {"one": LOGITS})


def test_a_target_without_an_output_is_refused() -> None:
    with pytest.raises(UserError, match="needs an output to be compared with"):
        build_metrics([MetricSpec("accuracy", {}, target="label")])


def test_a_metric_may_not_take_the_name_of_an_outputs_loss() -> None:
    loss = build_loss(Spec("per_output", {"one": ENTROPY}))
    metrics = build_metrics([MetricSpec("accuracy", {"name": "one_loss"}, output="one")])
    with pytest.raises(UserError, match="metrics: names must differ, also from loss, one_loss; received"):
        Accumulator(loss.names, metrics)


def test_a_row_that_weighs_nothing_adds_nothing_whatever_its_loss() -> None:
    """A record that was left out is all zeros, and a model may divide by its norm."""
    loss = build_loss(Spec(**ENTROPY))
    outputs = tf.concat([LOGITS[:5], tf.fill([1, 5], math.nan)], axis=0)
    weights = tf.constant([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    found = loss.sums(LABELS, outputs, weights)["loss"]
    assert np.array_equal(found, loss.sums(LABELS[:5], LOGITS[:5], weights[:5])["loss"])
    weighed = loss.sums(LABELS, outputs, tf.ones(6))["loss"]
    assert np.isnan(weighed)


@pytest.mark.parametrize(
    ("options", "are_own"),
    [({}, False), ({"kernel_regularizer": "l2"}, False), ({"activity_regularizer": "l2"}, True)],
    ids=["none", "of weights", "of records"],
)
def test_losses_that_layers_make_of_records_are_told_from_those_of_weights(options: dict, are_own: bool) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, **options)])
    loss = build_loss(Spec(**ENTROPY))
    spec = Batch(
        tf.TensorSpec((None, 4)),
        tf.TensorSpec((None,), tf.int64),
        tf.TensorSpec((None,)),
        (),
        (),  # type: ignore[arg-type]
    )
    assert check_fits(model, loss, Accumulator(loss.names, []), spec, "data.train") == are_own
