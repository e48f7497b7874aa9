"""The rows of a rank in a step, one borrowed row where there are none, and how much of the step they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from horovod_train.data.batch_source import Batch, StepSize
from horovod_train.distributed.group import WorkerGroup
from horovod_train.training.steps.shares import Part, Rows, Shares, parts_of

ANY = StepSize(None, is_full=False)


def batch_of(ids: Sequence[int], count: int) -> Batch:
    """Rows with id −1 are no records."""
    rows = tf.constant(ids, tf.int64)
    return Batch({"x": rows[:, None] * 10}, rows * 100, tf.ones(len(ids)), rows, tf.constant(count, tf.int64))


def parts(ids: Sequence[int], size: StepSize, total: int, passes: int = 1, ranks: int = 1) -> list[Part]:
    """As in the compiled step. Checks that all tensors of a batch are cut alike."""

    @tf.function(autograph=False)
    def traced() -> list[Part]:
        return parts_of(batch_of(ids, total), tf.constant(float(total)), size, passes, ranks)

    found: list[Part] = traced()
    for part in found:
        inputs = cast(dict[str, tf.Tensor], part.batch.inputs)
        assert np.array_equal(inputs["x"][:, 0], part.batch.ids * 10)
        assert np.array_equal(cast(tf.Tensor, part.batch.targets), part.batch.ids * 100)
        assert int(part.batch.count) == total
    return found


def rows(found: Sequence[Part]) -> list[list[int]]:
    return [part.batch.ids.numpy().tolist() for part in found]


def shares(found: Sequence[Part]) -> list[float]:
    return [1.0 if part.share is None else float(part.share) for part in found]


def test_a_full_step_is_its_batch_with_share_1() -> None:
    (part,) = found = parts([3, 4, 5, 6], StepSize(4, is_full=True), total=8, ranks=2)
    assert rows(found) == [[3, 4, 5, 6]]
    assert (float(part.count), part.share, part.may_be_borrowed) == (4.0, None, False)


def test_a_full_step_in_passes_is_cut_evenly() -> None:
    found = parts([3, 4, 5, 6], StepSize(4, is_full=True), total=8, passes=2, ranks=2)
    assert rows(found) == [[3, 4], [5, 6]]
    assert shares(found) == [0.5, 0.5]
    found = parts([3, 4, 5, 6], StepSize(4, is_full=True), total=8, passes=3, ranks=2)
    assert rows(found) == [[3], [4], [5, 6]]
    assert shares(found) == [0.25, 0.25, 0.5]


@pytest.mark.parametrize("size", [ANY, StepSize(3, is_full=False)], ids=["not known", "known"])
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_short_step_has_its_records_in_order_and_their_share(size: StepSize, passes: int) -> None:
    found = parts([0, -1, 4, -2, 5], size, total=8, passes=passes, ranks=2)
    assert np.concatenate(rows(found)).tolist() == [0, 4, 5]
    assert [float(part.count) for part in found] == [len(each) for each in rows(found)]
    assert sum(shares(found)) == pytest.approx(2 * 3 / 8)
    lengths = [len(each) for each in rows(found)]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("known", [False, True])
def test_all_ranks_take_equally_many_passes(known: bool) -> None:
    """Since a pass may exchange, such as in a synchronised BatchNormalization."""
    for count in range(5):
        found = parts([7, 8, 9, 10][:count] or [-1], StepSize(count, False) if known else ANY, 9, passes=4, ranks=2)
        assert len(found) == 4
        of_records = [each for each in found if float(each.count)]
        assert [row for each in rows(of_records) for row in each] == [7, 8, 9, 10][:count]
        assert sum(float(tf.reduce_sum(each.row_weights())) for each in found) == count
        assert all(each.may_be_borrowed for each in found if not float(each.count))


def test_lengths_are_static_where_the_plan_knows_them() -> None:
    spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, batch_of([1, 2, -1, -1], 2))
    found: list[tf.TensorShape] = []

    @tf.function(autograph=False)
    def traced(batch: Batch) -> None:
        for size in (StepSize(2, is_full=False), StepSize(0, is_full=False), ANY):
            (part,) = parts_of(batch, tf.constant(3.0), size, 1, 2)
            found.append(part.batch.ids.shape)

    traced.get_concrete_function(spec)
    assert [shape.as_list() for shape in found] == [[2], [1], [None]]


@pytest.mark.parametrize("size", [ANY, StepSize(0, is_full=False)], ids=["not known", "known"])
def test_a_rank_without_records_borrows_a_row_with_share_0(size: StepSize) -> None:
    (part,) = parts([-1, -1], size, total=3, ranks=2)
    assert (len(part.batch.ids), float(part.count)) == (1, 0.0)
    assert part.share is not None
    assert float(part.share) == 0.0
    assert part.may_be_borrowed


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_without_records_has_share_0(ranks: int) -> None:
    for part in parts([-1, -1], ANY, total=0, passes=ranks, ranks=ranks):
        assert part.share is not None
        assert float(part.share) == 0.0


def test_more_passes_than_records_borrow_a_row_each() -> None:
    """On one rank whose plan tells, there are only as many passes as records."""
    found = parts([7, -1, -1, -1], ANY, total=4, passes=3, ranks=2)
    assert sorted(float(part.count) for part in found) == [0.0, 0.0, 1.0]
    assert sorted(shares(found)) == pytest.approx([0.0, 0.0, 0.5])
    assert len(parts([7, -1, -1, -1], StepSize(1, is_full=False), total=1, passes=3)) == 1


def test_the_records_of_one_rank_alone_have_share_1_exactly() -> None:
    """So that its gradients have the bits of `fit`."""
    (part,) = parts([3, 4, 5, -1], StepSize(3, is_full=False), total=3)
    assert part.share is None


@pytest.mark.parametrize("size", [ANY, StepSize(3, is_full=False)], ids=["not known", "known"])
def test_passes_of_one_rank_alone_are_the_step_together(size: StepSize) -> None:
    found = parts([3, 4, 5, -1], size, total=3, passes=2)
    assert shares(found) == pytest.approx([len(each) / 3 for each in rows(found)])


@pytest.mark.parametrize(("ids", "of_others", "records"), [([4, 0, -1], 1.0, 3), ([-1, -1, -1], 0.0, 0)])
def test_where_rows_are_counted_a_step_has_what_all_ranks_together_have(
    ids: list[int], of_others: float, records: int
) -> None:
    """Not what it was planned with: some are skipped, or a stream has ended."""
    batch, group = batch_of(ids, 8), group_of(3, lambda value: value + of_others)
    for are_counted, expected in ((True, records), (False, 8)):
        of_step = Rows(group, lambda batch: batch.inputs, lambda batch: batch, are_counted)
        total = of_step.total(batch, "count")
        assert float(total) == expected
        acts = of_step.unless_empty(total, lambda: tf.constant(True), lambda: tf.constant(False))
        assert bool(acts) == (not are_counted or records > 0)


@pytest.mark.parametrize(("ids", "expected"), [([-1, -1], 1.0), ([2, -1], 5.0)])
def test_a_borrowed_row_leaves_no_trace(ids: list[int], expected: float) -> None:
    variable = tf.Variable(1.0)

    @tf.function(autograph=False)
    def traced() -> None:
        (part,) = parts_of(batch_of(ids, 4), tf.constant(4.0), ANY, 1, 2)
        with part.without_borrowed([variable]):
            variable.assign(5.0)

    traced()
    assert float(variable) == expected


TOKENS = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [4, 1, 2, 3], [2, 2, 1, 0], [1, 0, 0, 0]])
TAGS = np.array([[1, 2, 0, 0], [2, 1, 1, 1], [0, 0, 1, 2], [1, 1, 2, 2], [0, 1, 2, 0]])
WEIGHTS = np.array([2.0, 0.0, 0.5, 1.0, 3.0], np.float32)
IGNORING = {"from_logits": True, "ignore_class": 0}
REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight")
SPLIT = (1, 4, 0)
"""Records of three ranks, of which one has none."""


def group_of(size: int, total: Callable[[tf.Tensor], tf.Tensor] = lambda value: value) -> WorkerGroup:
    """A group in which sums over ranks come from `total`."""
    return cast(WorkerGroup, SimpleNamespace(size=size, rank=0, sum_in_step=lambda value, name: total(value)))


def tagger(mask_zero: bool) -> keras.Model:
    """[4] tokens → [4, 3] logits."""
    keras.utils.set_random_seed(1)
    tokens = keras.Input((4,), dtype="int64")
    return keras.Model(tokens, layers.Dense(3)(layers.Embedding(5, 4, mask_zero=mask_zero)(tokens)))


def split_loss(
    build: Callable[[], keras.losses.Loss],
    model: keras.Model,
    split: Sequence[int],
    weighted: bool,
    ranks: int | None = None,
) -> Any:
    """Return the mean over simulated ranks of share · loss. A rank without records computes on the first.

    ranks: fewer than there are parts: these are passes.
    """
    parts, first, ranks = [], 0, ranks or len(split)
    for rows in split:
        mine = slice(first, first + rows) if rows else slice(0, 1)
        weights = tf.constant(WEIGHTS[mine, None]) if weighted else None
        share = tf.constant(ranks * rows / len(TAGS), tf.float32)
        parts.append((tf.constant(TAGS[mine]), model(TOKENS[mine]), weights, share))
        first += rows
    shares, loss = Shares(group_of(ranks)), build()
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
            terms.append(shares.scaled(loss(targets, outputs, weights)) / ranks)
    return tf.add_n(terms)


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("mask_zero", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("options", [{"from_logits": True}, IGNORING], ids=["", "ignore_class"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ranks_together_have_the_loss_of_keras_and_its_gradient(
    reduction: str, options: dict[str, Any], mask_zero: bool, weighted: bool
) -> None:
    def build() -> keras.losses.Loss:
        return keras.losses.SparseCategoricalCrossentropy(**options, reduction=reduction)

    model = tagger(mask_zero)
    with tf.GradientTape(persistent=True) as tape:
        together = build()(TAGS, model(TOKENS), WEIGHTS[:, None] if weighted else None)
        by_ranks = split_loss(build, model, SPLIT, weighted)
    assert float(by_ranks) == pytest.approx(float(together), rel=1e-5)
    expected, found = (tape.gradient(each, model.layers[-1].kernel.value) for each in (together, by_ranks))
    assert found.numpy() == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "mean_with_sample_weight"])
def test_passes_of_one_rank_together_have_the_loss_of_keras(reduction: str) -> None:
    def build() -> keras.losses.Loss:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)

    model = tagger(True)
    together = float(build()(TAGS, model(TOKENS), WEIGHTS[:, None]))
    assert float(split_loss(build, model, (1, 4), True, ranks=1)) == pytest.approx(together, rel=1e-5)


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
        return tf.add(value, [3.0, 0.75])

    shares = Shares(group_of(2, total))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    plain = float(loss(TAGS, model(TOKENS)))
    shares.take_on(loss)

    @tf.function(autograph=False)
    def value_of(share: tf.Tensor) -> Any:
        with shares.of_pass(share):
            return loss(tf.constant(TAGS), model(tf.constant(TOKENS))), sent.pop()

    value, divisor = value_of(tf.constant(1.25))
    assert divisor.numpy().tolist() == [np.count_nonzero(TOKENS), 1.25]
    assert float(value) == pytest.approx(plain * (1.25 + 0.75) * 11 / (14 * 1.25), rel=1e-6)
    value, divisor = value_of(tf.constant(0.0))
    assert (float(value), divisor.numpy().tolist()) == (0.0, [0.0, 0.0])


def test_passes_that_exchange_their_own_divisors_count_as_their_rows_do() -> None:
    """So that two passes on the same rows together are one."""
    model, shares = tagger(True), Shares(group_of(1))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    plain = float(loss(TAGS, model(TOKENS)))
    shares.take_on(loss)

    @tf.function(autograph=False)
    def of_passes(parts: Sequence[float]) -> Any:
        found = []
        for part in parts:
            with shares.of_pass(tf.constant(part)):
                found.append(shares.scaled(loss(tf.constant(TAGS), model(tf.constant(TOKENS)))))
        return tf.add_n(found)

    for parts in ([0.5, 0.5], [0.25, 0.75]):
        assert float(of_passes(parts)) == pytest.approx(plain, rel=1e-6)


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
    Shares(group_of(2)).take_on(loss)  # of a run before
    shares.take_on(loss)
    loaded = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(loaded) is keras.losses.MeanSquaredError
    assert loaded.reduction == "sum"
    targets, outputs = tf.zeros((2, 1)), tf.ones((2, 1))
    assert float(loss(targets, outputs)) == 2.0
    with shares.of_pass(tf.constant(1.0)):
        assert float(loss(targets, outputs)) == 6.0  # of three ranks, whose mean is taken
    assert float(loss(targets, outputs)) == 2.0
    with shares.noting_divisors():
        loss(targets, outputs)
    assert float(loss(targets, outputs)) == 2.0


class OfPairs(keras.losses.Loss):
    """Compares targets [rows] with outputs [rows, 1] as NumPy would."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return (y_true - y_pred) ** 2


class OfBatch(keras.losses.Loss):
    """One number of all rows."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.max(y_pred)


def test_a_record_alone_is_compared_with_no_other() -> None:
    loss, shares = OfPairs(), Shares(group_of(2))
    shares.take_on(loss)
    assert float(loss(tf.zeros(1), tf.ones((1, 1)))) == 1.0
    with pytest.raises(ValueError, match="of_pairs compares each record with all others"):
        loss(tf.zeros(2), tf.ones((2, 1)))


@pytest.mark.parametrize(
    "build",
    [
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None),
        lambda: OfBatch(reduction="sum"),
    ],
    ids=["not reduced", "one number"],
)
def test_what_is_not_reduced_over_rows_counts_by_the_share_alone(build: Callable[[], keras.losses.Loss]) -> None:
    model, shares, loss = tagger(True), Shares(group_of(2)), build()
    plain = loss(TAGS, model(TOKENS))
    shares.take_on(loss)
    with shares.of_pass(tf.constant(0.5), []):
        assert np.array_equal(loss(TAGS, model(TOKENS)), plain)


def test_each_loss_has_the_total_of_its_turn() -> None:
    model, shares = tagger(True), Shares(group_of(2))
    losses_ = [keras.losses.SparseCategoricalCrossentropy(from_logits=True) for _ in range(3)]
    plain = float(losses_[0](TAGS, model(TOKENS)))
    for loss in losses_:
        shares.take_on(loss)
    with shares.of_pass(tf.constant(0.5), [tf.constant(total) for total in (22.0, 11.0, 44.0)]):
        found = [float(loss(TAGS, model(TOKENS))) for loss in losses_]
    assert found == pytest.approx([2 * plain, 4 * plain, plain])  # N · 11 positions here / total / share


@pytest.mark.parametrize(("length", "shape"), [(4, (5, 4, 1)), (4, (5, 4)), (1, (5,)), (1, (5, 1))], ids=str)
def test_weights_of_masked_positions_have_any_shape_that_keras_takes(length: int, shape: tuple[int, ...]) -> None:
    tokens = np.where(np.arange(5)[:, None] == 2, 0, TOKENS)[:, :length]  # a record without any position
    weights = np.arange(1.0, 1.0 + np.prod(shape)).reshape(shape).astype(np.float32)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    table = keras.layers.Embedding(5, 3, mask_zero=True)
    together = float(loss(TAGS[:, :length], table(tokens), weights))
    shares = Shares(group_of(2))
    shares.take_on(loss)
    with shares.noting_divisors() as noted:
        loss(TAGS[:, :length], table(tokens), weights)
    assert float(noted[0]) * together == pytest.approx(_sum_of(TAGS[:, :length], table(tokens), weights))


def _sum_of(tags: Any, logits: Any, weights: np.ndarray) -> float:
    """The sum over positions that the mask keeps of weight · cross-entropy."""
    entropies = keras.ops.sparse_categorical_crossentropy(tags, logits, from_logits=True).numpy()
    mask = logits._keras_mask.numpy()
    return float((entropies * mask * np.broadcast_to(weights.reshape(5, -1), mask.shape)).sum())


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
