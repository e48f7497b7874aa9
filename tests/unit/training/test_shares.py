"""The mean over ranks of share · loss is the loss that Keras gives for the records of all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from horovod_train.distributed.group import WorkerGroup
from horovod_train.training.steps.shares import Shares

TOKENS = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [4, 1, 2, 3], [2, 2, 1, 0], [1, 0, 0, 0]])
TAGS = np.array([[1, 2, 0, 0], [2, 1, 1, 1], [0, 0, 1, 2], [1, 1, 2, 2], [0, 1, 2, 0]])
WEIGHTS = np.array([2.0, 0.0, 0.5, 1.0, 3.0], np.float32)
IGNORING = {"from_logits": True, "ignore_class": 0}
REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight")
SPLITS = {"one rank": (5,), "two ranks": (3, 2), "three, of which one has no record": (1, 4, 0)}


def group_of(size: int, total: Callable[[tf.Tensor], tf.Tensor] = lambda value: value) -> WorkerGroup:
    """A group in which sums over ranks come from `total`."""
    return cast(WorkerGroup, SimpleNamespace(size=size, rank=0, sum_in_step=lambda value, name: total(value)))


def tagger(mask_zero: bool) -> keras.Model:
    """[4] tokens → [4, 3] logits."""
    keras.utils.set_random_seed(1)
    tokens = keras.Input((4,), dtype="int64")
    return keras.Model(tokens, layers.Dense(3)(layers.Embedding(5, 4, mask_zero=mask_zero)(tokens)))


def split_loss(build: Callable[[], keras.losses.Loss], model: keras.Model, split: Sequence[int], weighted: bool) -> Any:
    """Return the mean over simulated ranks of share · loss. A rank without records computes on the first."""
    parts, first = [], 0
    for rows in split:
        mine = slice(first, first + rows) if rows else slice(0, 1)
        weights = tf.constant(WEIGHTS[mine, None]) if weighted else None
        share = tf.constant(len(split) * rows / len(TAGS), tf.float32)
        parts.append((tf.constant(TAGS[mine]), model(TOKENS[mine]), weights, share))
        first += rows
    shares, loss = Shares(group_of(len(split))), build()
    shares.take_on(loss)
    divisors: list[Any] = []
    for targets, outputs, weights, share in parts:
        with shares.noting_divisors() as noted:
            loss(targets, outputs, weights)
        divisors.append([divisor * tf.cast(share > 0, tf.float32) for divisor in noted])
    totals = [tf.add_n(list(each)) for each in zip(*divisors, strict=True)]
    terms = []
    for targets, outputs, weights, share in parts:
        with shares.of_pass(share, totals):
            terms.append(shares.scaled(loss(targets, outputs, weights)) / len(split))
    return tf.add_n(terms)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("mask_zero", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("options", [{"from_logits": True}, IGNORING], ids=["", "ignore_class"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ranks_together_have_the_loss_of_keras_and_its_gradient(
    reduction: str, options: dict[str, Any], mask_zero: bool, weighted: bool, split: tuple[int, ...]
) -> None:
    def build() -> keras.losses.Loss:
        return keras.losses.SparseCategoricalCrossentropy(**options, reduction=reduction)

    model = tagger(mask_zero)
    with tf.GradientTape(persistent=True) as tape:
        together = build()(TAGS, model(TOKENS), WEIGHTS[:, None] if weighted else None)
        by_ranks = split_loss(build, model, split, weighted)
    assert float(by_ranks) == pytest.approx(float(together), rel=1e-5)
    expected, found = (tape.gradient(each, model.layers[-1].kernel.value) for each in (together, by_ranks))
    assert found.numpy() == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-6)


def test_without_divisors_of_all_ranks_masked_losses_are_wrong() -> None:
    """What the test above would not see if each rank's own mean were enough."""
    model = tagger(True)
    model.layers[-1].kernel.assign(20 * model.layers[-1].kernel)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    together = float(loss(TAGS, model(TOKENS)))
    alone = [0.6 * float(loss(TAGS[:3], model(TOKENS[:3]))), 0.4 * float(loss(TAGS[3:], model(TOKENS[3:])))]
    assert abs(sum(alone) - together) > 0.001


def test_a_loss_without_divisors_of_all_ranks_exchanges_its_own() -> None:
    """And a rank whose row is borrowed adds nothing to the sum."""
    model, sent = tagger(True), []

    def total(value: tf.Tensor) -> tf.Tensor:
        sent.append(value)
        return value + 3.0

    shares = Shares(group_of(2, total))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    plain = float(loss(TAGS, model(TOKENS)))
    shares.take_on(loss)

    @tf.function(autograph=False)
    def value_of(share: tf.Tensor) -> Any:
        with shares.of_pass(share):
            return loss(tf.constant(TAGS), model(tf.constant(TOKENS))), sent.pop()

    value, divisor = value_of(tf.constant(1.25))
    assert float(divisor) == np.count_nonzero(TOKENS)
    assert float(value) == pytest.approx(plain * 2 * 11 / (14 * 1.25), rel=1e-6)
    value, divisor = value_of(tf.constant(0.0))
    assert (float(value), float(divisor)) == (0.0, 0.0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_rank_has_the_bits_of_keras(reduction: str) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model, shares = tagger(True), Shares(group_of(1))
    plain = loss(TAGS, model(TOKENS), WEIGHTS[:, None])
    shares.take_on(loss)
    with shares.of_pass(None):
        assert np.array_equal(loss(TAGS, model(TOKENS), WEIGHTS[:, None]), plain)


def test_a_loss_is_what_it_was_outside_of_steps_and_when_it_is_saved() -> None:
    loss, shares = keras.losses.MeanSquaredError(reduction="sum"), Shares(group_of(3))
    assert shares.take_on(loss) is shares
    assert Shares(group_of(2)).take_on(loss) is shares  # as an evaluation beside a training run has it
    loaded = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(loaded) is keras.losses.MeanSquaredError
    assert loaded.reduction == "sum"
    targets, outputs = tf.zeros((2, 1)), tf.ones((2, 1))
    assert float(loss(targets, outputs)) == 2.0
    with shares.of_pass(tf.constant(1.0)):
        assert float(loss(targets, outputs)) == 6.0  # of three ranks, whose mean is taken


def test_a_gradient_with_share_0_is_0_whatever_was_computed() -> None:
    shares = Shares(group_of(2))
    rows = tf.IndexedSlices(tf.fill([2, 3], np.nan), tf.constant([1, 4]), tf.constant([5, 3]))
    with shares.of_pass(tf.constant(0.0)):
        assert shares.scaled(None) is None
        assert not np.any(shares.scaled(tf.constant([np.nan, np.inf])))
        sparse = shares.scaled(rows)
    assert not np.any(sparse.values)
    assert sparse.indices is rows.indices
    with shares.of_pass(None):
        assert shares.scaled(rows) is rows


class Squared(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return (y_true - y_pred) ** 2


def test_a_loss_of_pairs_of_records_is_refused() -> None:
    loss = Squared(name="squared")
    Shares(group_of(1)).take_on(loss)
    expected = r"squared compares each record with all others: it gave \(8, 8\) for targets \[8\] and outputs \[8, 1\]"
    with pytest.raises(ValueError, match=expected):
        loss(tf.zeros(8), tf.zeros((8, 1)))
    assert float(loss(tf.zeros((8, 1)), tf.ones((8, 1)))) == 1.0
