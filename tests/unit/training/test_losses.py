"""Losses give one value a record, and several outputs add up by their weights."""

from __future__ import annotations

import math
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_train.config.settings import LossSpec, MetricSpec, Spec
from horovod_train.data.features import Feature
from horovod_train.data.pipeline.batch import Batch
from horovod_train.data.schema import Schema
from horovod_train.errors import UserError
from horovod_train.training.parts.losses import build_loss
from horovod_train.training.parts.metrics import Accumulator, build_metrics
from horovod_train.training.steps.objective import check_fits

LOGITS = tf.constant(np.random.default_rng(0).normal(size=(6, 5)), tf.float32)
LABELS = tf.constant([0, 1, 2, 3, 4, 0], tf.int64)
ENTROPY: dict[str, Any] = {"name": "sparse_categorical_crossentropy", "options": {"from_logits": True}}


def test_smoothing_is_that_of_keras_on_one_hot_labels() -> None:
    loss = build_loss(Spec("smoothed_sparse_categorical_crossentropy", {"label_smoothing": 0.2}))
    ours = loss(LABELS, LOGITS)["loss"].values
    keras_loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2, reduction="none")
    assert np.allclose(ours, keras_loss(tf.one_hot(LABELS, 5), LOGITS), atol=1e-6)
    plain = build_loss(Spec(**ENTROPY))(LABELS, LOGITS)["loss"].values
    assert not np.allclose(ours, plain, atol=1e-2)


def test_losses_of_several_outputs_add_up_by_their_weights() -> None:
    terms = {"one": {**ENTROPY, "weight": 0.25}, "other": {**ENTROPY, "target": "one"}}
    outputs = {"one": LOGITS, "other": -LOGITS}
    loss, alone = build_loss(Spec("per_output", terms)), build_loss(Spec(**ENTROPY))
    one, other = (alone(LABELS, logits)["loss"].values for logits in (LOGITS, -LOGITS))
    found = loss({"one": LABELS}, outputs)
    assert loss.names == ["loss", *loss.terms] == ["loss", "one_loss", "other_loss"]
    assert np.array_equal(found["one_loss"].values, one)
    assert np.array_equal(found["other_loss"].values, other)
    weights = tf.range(6, dtype=tf.float32)
    weighed = loss.weigh({"one": LABELS}, outputs, weights)
    assert np.allclose(weighed.sums["one_loss"], np.sum(one * weights))
    means = loss.means(weighed.sums, tf.reduce_sum(weights))
    assert np.allclose(means["loss"], 0.25 * np.average(one, weights=weights) + np.average(other, weights=weights))


def test_a_metric_looks_at_its_own_output() -> None:
    (metric,) = build_metrics([MetricSpec("sparse_categorical_accuracy", {}, output="other", target="label")])
    right = tf.one_hot(LABELS, 5)
    metric.update_state({"label": LABELS}, {"one": -right, "other": right}, sample_weight=tf.ones(6))
    assert float(metric.result()) == 1.0


def one_number(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(outputs)


WRONG = {
    "no outputs": (Spec("per_output"), "per_output needs a loss for each output"),
    "unknown key": (
        Spec("per_output", {"one": {"nam": "x"}}),
        "loss.options.one: nam: unknown key; did you mean",
    ),
    "no mapping": (
        Spec("per_output", {"one": 3}),
        "loss.options.one: expected a mapping of name, options, class_weight, target, ",
    ),
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
        Accumulator(loss, metrics)


def test_a_row_that_weighs_nothing_adds_nothing_whatever_its_loss() -> None:
    """A record that was left out is all zeros, and a model may divide by its norm."""
    loss = build_loss(Spec(**ENTROPY))
    outputs = tf.concat([LOGITS[:5], tf.fill([1, 5], math.nan)], axis=0)
    weights = tf.constant([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    found = loss.weigh(LABELS, outputs, weights).sums["loss"]
    assert np.array_equal(found, loss.weigh(LABELS[:5], LOGITS[:5], weights[:5]).sums["loss"])
    weighed = loss.weigh(LABELS, outputs, tf.ones(6)).sums["loss"]
    assert np.isnan(weighed)


TARGETS = {
    "numbers": LABELS,
    "a column of floats": tf.cast(LABELS[:, None], tf.float32),
    "one-hot": tf.one_hot(LABELS, 5),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_record_has_the_weight_of_its_class(name: str) -> None:
    loss = build_loss(LossSpec("mean_squared_error", {}, {"0": 2.5, "3": 0}))
    records = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    weights = loss.record_weights(TARGETS[name], records)["loss"]
    assert weights.numpy().tolist() == [2.5, 2.0, 3.0, 0.0, 5.0, 15.0]  # classes 0 1 2 3 4 0
    assert not build_loss(LossSpec("mean_squared_error")).has_class_weights


def test_each_output_has_the_mean_by_its_own_weights() -> None:
    terms = {"one": {**ENTROPY, "weight": 0.25, "class_weight": {"0": 3}}, "other": {**ENTROPY, "target": "one"}}
    loss, alone = build_loss(Spec("per_output", terms)), build_loss(Spec(**ENTROPY))
    accuracy = MetricSpec("sparse_categorical_accuracy", {}, output="one")
    seen = Accumulator(loss, [], build_metrics([accuracy]))
    outputs, records = {"one": LOGITS, "other": -LOGITS}, tf.constant([1.0, 2.0, 0.5, 1.0, 0.0, 1.0])
    weighed = loss.weigh({"one": LABELS}, outputs, records)
    seen.add(weighed, {"one": LABELS}, outputs, tf.ones(6))
    found = loss.means(weighed.sums, loss.total_weights({"one": LABELS}, records))
    by_class = records * tf.where(LABELS == 0, 3.0, 1.0)
    assert float(seen.weights["one_loss"]) == pytest.approx(float(tf.reduce_sum(by_class)))
    one = np.average(alone(LABELS, LOGITS)["loss"].values, weights=by_class)
    other = np.average(alone(LABELS, -LOGITS)["loss"].values, weights=records)
    assert float(found["loss"]) == pytest.approx(0.25 * one + other, rel=1e-6)
    assert (float(found["one_loss"]), float(found["other_loss"])) == pytest.approx((one, other), rel=1e-6)
    right = np.argmax(LOGITS, axis=1) == LABELS.numpy()
    assert float(seen.metrics[0].result()) == pytest.approx(np.average(right, weights=by_class))


def weights_of(targets: Any) -> None:
    build_loss(LossSpec("mean_squared_error", {}, {"7": 2})).record_weights(targets, tf.ones(6))


UNFIT = {
    "a class for each pixel": (tf.zeros((6, 4, 4)), r"loss.class_weight needs a class for each record; .* \(4, 4\)"),
    "a class that one-hot has not": (tf.zeros((6, 5)), "there is no class 7; the target has 5 entries"),
    "several targets": ({"a": LABELS, "b": LABELS}, "loss.class_weight needs one target; there are a, b"),
    "no target": ({}, "loss.class_weight needs one target; there are none"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_targets_without_classes_are_refused(name: str) -> None:
    targets, expected = UNFIT[name]
    with pytest.raises(ValueError, match=expected):
        weights_of(targets)


def test_a_class_that_the_schema_excludes_is_refused() -> None:
    schema = Schema({"label": Feature("int64", classes=5)}, ("image",), ("label",), where="dataset.json")
    build_loss(LossSpec("mean_squared_error", {}, {"4": 2})).check_classes(schema)
    expected = "loss.class_weight: there is no class 5; dataset.json says that label has 5, from 0."
    with pytest.raises(UserError, match=re.escape(expected)):
        build_loss(LossSpec("mean_squared_error", {}, {"5": 2})).check_classes(schema)


def test_a_weighted_metric_says_which_output_it_is_of() -> None:
    loss = build_loss(Spec("per_output", {"one": ENTROPY, "other": ENTROPY}))
    with pytest.raises(UserError, match="weighted_metrics: accuracy needs an output that has a loss: one, other"):
        Accumulator(loss, [], build_metrics([MetricSpec("accuracy")]))


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
        tf.TensorSpec((None,), tf.int64),
        (),
    )
    assert check_fits(model, loss, Accumulator(loss, []), spec, "data.train").has_own_losses == are_own
