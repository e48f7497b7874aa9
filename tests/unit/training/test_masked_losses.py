"""Positions that a mask leaves out count neither in losses nor in metrics, as in Keras."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from horovod_train.config.settings import Config, LossSpec, MetricSpec, Spec
from horovod_train.data.pipeline.batch import Batch
from horovod_train.training.parts.compiled import choose_loss
from horovod_train.training.parts.losses import Loss, build_loss
from horovod_train.training.parts.metrics import Accumulator, build_metrics
from horovod_train.training.steps.objective import Objective, check_fits

TOKENS = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [4, 1, 2, 3]])
TAGS = np.array([[1, 2, 0, 0], [2, 1, 1, 1], [0, 0, 1, 2]])
ENTROPY = {"from_logits": True}
IGNORING = {"from_logits": True, "ignore_class": 0}
RECORDS = tf.ones(len(TAGS))


def tagger(mask_zero: bool) -> keras.Model:
    """[4] tokens → [4, 3] logits."""
    keras.utils.set_random_seed(1)
    tokens = keras.Input((4,), dtype="int64")
    x = layers.Embedding(5, 4, mask_zero=mask_zero)(tokens)
    return keras.Model(tokens, layers.Dense(3)(x))


def confident(targets: Any, outputs: Any) -> Any:
    """A user's loss of each position."""
    return keras.ops.square(keras.ops.max(outputs, -1) - keras.ops.cast(targets, outputs.dtype))


def loss_of(kind: str, options: dict[str, Any]) -> Loss:
    """As the config names it, as compiled, and as a function of a user."""
    if kind == "named":
        return build_loss(Spec("sparse_categorical_crossentropy", options))
    model = tagger(False)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(**options))
    return choose_loss(Config(), model)


def mean_and_gradient(loss: Loss, model: keras.Model, tags: np.ndarray = TAGS) -> tuple[float, np.ndarray]:
    with tf.GradientTape() as tape:
        weighed = loss.weigh(tf.constant(tags), model(TOKENS), RECORDS)
        mean = loss.means(weighed.sums, tf.stack(list(weighed.totals.values())))["loss"]
    return float(mean), tape.gradient(mean, model.layers[-1].kernel.value).numpy()


@pytest.mark.parametrize("kind", ["named", "compiled"])
@pytest.mark.parametrize(
    ("mask_zero", "options"), [(True, ENTROPY), (False, IGNORING), (True, IGNORING)], ids=["outputs", "class", "both"]
)
def test_a_masked_mean_is_that_of_keras(kind: str, mask_zero: bool, options: dict[str, Any]) -> None:
    model, expected = tagger(mask_zero), keras.losses.SparseCategoricalCrossentropy(**options)
    with tf.GradientTape() as tape:
        mean = expected(TAGS, model(TOKENS))
    mean_here, gradient_here = mean_and_gradient(loss_of(kind, options), model)
    assert mean_here == pytest.approx(float(mean), rel=1e-6)
    gradient = tape.gradient(mean, model.layers[-1].kernel.value)
    assert gradient_here == pytest.approx(gradient.numpy(), rel=1e-5, abs=1e-7)
    unmasked = mean_and_gradient(loss_of(kind, ENTROPY), tagger(False))[0]
    assert abs(mean_here - unmasked) > 0.001


def test_a_mask_applies_to_a_users_function_and_to_weights_of_records() -> None:
    loss, model = build_loss(Spec("test_masked_losses:confident")), tagger(True)
    outputs, records = model(TOKENS), tf.constant([2.0, 0.0, 0.5])
    weighed = loss.weigh(tf.constant(TAGS), outputs, records)
    weights = (TOKENS > 0) * records.numpy()[:, None]
    expected = np.average(confident(TAGS, outputs), weights=weights)
    assert float(weighed.sums["loss"] / weighed.totals["loss"]) == pytest.approx(expected, rel=1e-6)
    assert np.array_equal(weighed.weights["loss"], weights)


def test_a_class_of_whole_records_can_be_ignored() -> None:
    """Targets [batch]: the mask has no axis but that of the records."""
    logits, labels = tf.random.stateless_normal((6, 3), (1, 2)), tf.constant([0, 1, 2, 0, 1, 1])
    expected = keras.losses.SparseCategoricalCrossentropy(**IGNORING)(labels, logits)
    weighed = loss_of("named", IGNORING).weigh(labels, logits, tf.ones(6))
    assert float(weighed.totals["loss"]) == 4
    assert float(weighed.sums["loss"]) / 4 == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_metrics_count_what_the_mask_keeps(jit_compile: bool) -> None:
    """As `evaluate` does. Weighted ones count the records' weights too, which `evaluate` cannot do with a mask."""
    names = [{"name": "plain"}, {"name": "weighted"}]
    plain, weighted = (build_metrics([MetricSpec("sparse_categorical_accuracy", name)]) for name in names)
    loss, model = loss_of("named", ENTROPY), tagger(True)
    accumulator, records = Accumulator(loss, plain, weighted), tf.constant([2.0, 0.0, 0.5])

    @tf.function(jit_compile=jit_compile, autograph=False)
    def forward() -> Any:
        outputs = model(tf.constant(TOKENS))
        return loss.weigh(tf.constant(TAGS), outputs, records), outputs

    weighed, outputs = forward()
    accumulator.add(weighed, tf.constant(TAGS), outputs, RECORDS)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(**ENTROPY), metrics=["accuracy"])
    expected = model.evaluate(TOKENS, TAGS, batch_size=3, verbose=0, return_dict=True)
    assert float(plain[0].result()) == pytest.approx(expected["accuracy"])
    right = np.argmax(outputs, -1) == TAGS
    assert float(plain[0].result()) == pytest.approx(np.average(right, weights=TOKENS > 0))
    assert float(weighted[0].result()) == pytest.approx(
        np.average(right, weights=(TOKENS > 0) * records.numpy()[:, None])
    )


class Positions(keras.metrics.Sum):
    """A user's metric, which gets a weight for each record."""

    def update_state(self, targets: Any, outputs: Any, sample_weight: Any = None) -> None:
        super().update_state(keras.ops.ones_like(targets), sample_weight=sample_weight[:, None])


def test_a_metric_that_is_no_mean_of_a_function_counts_all_positions_unless_weighted() -> None:
    """In `fit` too, a mask is followed by the wrapper that makes a metric of a function."""
    loss, model, plain = loss_of("named", ENTROPY), tagger(True), Positions(dtype="float64")
    weighted = keras.metrics.SparseCategoricalAccuracy(name="weighted")
    accumulator, outputs = Accumulator(loss, [plain], [weighted]), model(TOKENS)
    targets = tf.constant(TAGS)
    accumulator.add(loss.weigh(targets, outputs, RECORDS), targets, outputs, tf.constant([1.0, 1.0, 0.0]))
    assert float(plain.result()) == 8  # positions of two records
    assert float(weighted.count) == pytest.approx(7 / 4)  # of each record, the share that counts


def test_each_output_has_its_own_mask() -> None:
    tokens = keras.Input((4,), dtype="int64")
    x = layers.Embedding(5, 4, mask_zero=True)(tokens)
    model = keras.Model(tokens, {"tags": layers.Dense(3)(x), "label": layers.Dense(3)(layers.Flatten()(x))})
    term = {"name": "sparse_categorical_crossentropy", "options": ENTROPY}
    loss = build_loss(Spec("per_output", {"tags": term, "label": term}))
    metrics = [MetricSpec("sparse_categorical_accuracy", {"name": n}, output=n) for n in ("tags", "label")]
    accumulator = Accumulator(loss, build_metrics(metrics))
    targets, outputs = {"tags": tf.constant(TAGS), "label": tf.constant(TAGS[:, 0])}, model(TOKENS)
    weighed = loss.weigh(targets, outputs, RECORDS)
    accumulator.add(weighed, targets, outputs, RECORDS)
    assert {name: float(total) for name, total in weighed.totals.items()} == {"tags_loss": 7, "label_loss": 3}
    right = np.argmax(outputs["tags"], -1) == TAGS
    assert float(accumulator.metrics[0].result()) == pytest.approx(np.average(right, weights=TOKENS > 0))


class FailsToCompute(layers.Layer):
    """Passes masks on; the values cannot be computed."""

    supports_masking = True

    def call(self, x: Any) -> Any:
        zero = tf.cast(tf.reduce_sum(x) * 0, tf.int32)
        return x + tf.cast(1 // zero, x.dtype)


def test_the_weights_of_a_step_are_counted_without_computing_the_model() -> None:
    tokens = keras.Input((4,), dtype="int64")
    x = FailsToCompute()(layers.Embedding(5, 4, mask_zero=True)(tokens))
    model = keras.Model(tokens, layers.Dense(3)(layers.LSTM(4, return_sequences=True)(x)))
    loss = build_loss(LossSpec("sparse_categorical_crossentropy", ENTROPY))
    batch: Any = Batch(tf.constant(TOKENS), tf.constant(TAGS), RECORDS, tf.range(3, dtype=tf.int64), ())
    assert check_fits(model, loss, Accumulator(loss, []), batch, "data.train", training=True).has_masks
    objective = Objective(model, SimpleNamespace(), loss, size=1, has_masks=True)
    assert tf.function(objective.total_weights, autograph=False)(batch).numpy().tolist() == [7]
    with pytest.raises(tf.errors.InvalidArgumentError):
        model(TOKENS)


def test_a_mask_of_another_shape_than_the_values_is_refused() -> None:
    loss = build_loss(Spec("test_masked_losses:of_whole_records"))
    with pytest.raises(ValueError, match=r"gives values of shape \(3,\), but the mask of its outputs has \(3, 4\)"):
        loss(TAGS, tagger(True)(TOKENS))


def of_whole_records(targets: Any, outputs: Any) -> Any:
    return keras.ops.mean(confident(targets, outputs), axis=1)


def test_masks_of_several_outputs_in_one_function_are_refused() -> None:
    loss = build_loss(Spec("test_masked_losses:of_two"))
    outputs = tagger(True)(TOKENS)
    with pytest.raises(
        ValueError, match="takes several outputs with Keras masks; use per_output, with a loss for each"
    ):
        loss(TAGS, {"one": outputs, "other": outputs})


def of_two(targets: Any, outputs: Any) -> Any:
    return of_whole_records(targets, outputs["one"])
