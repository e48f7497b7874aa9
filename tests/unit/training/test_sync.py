"""Strategies for exchanging: each value of the setting has one; what each applies, and when."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import keras
import pytest
import tensorflow as tf
from keras import layers

from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.layer_contents import by_unique_name
from horovod_train.errors import UserError
from horovod_train.training.sync import Local, Stale, SyncStrategy

ALONE = cast(WorkerGroup, SimpleNamespace(size=1, rank=0, is_root=True))


def test_gradients_of_embeddings_do_not_become_tables_unasked() -> None:
    tokens = keras.Input((3,), dtype="int32")
    model = keras.Model(tokens, layers.Dense(1)(layers.Flatten()(layers.Embedding(5, 2, name="words")(tokens))))
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(model(tf.zeros((2, 3), tf.int32)))
    gradients = tape.gradient(total, model.trainable_variables)
    assert isinstance(gradients[0], tf.IndexedSlices)
    stale = Stale(model, list, sparse_as_dense=False)
    with pytest.raises(
        UserError, match=r"horovod.sparse_as_dense: must be true with .* the gradient of words/embeddings"
    ):
        stale.exchange(list, gradients, model.trainable_variables, tf.constant(0))


def doubled(gradients: Sequence[Any]) -> list[Any]:
    """An exchange that can be seen."""
    return [None if gradient is None else 2 * gradient for gradient in gradients]


@pytest.fixture
def model() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), layers.Dense(1, name="first"), layers.Dense(1, name="second")])


def test_gradients_wait_a_step_each_in_the_place_of_its_variable(model: keras.Model) -> None:
    """Given in another order, and by an optimizer of some of them; None stays None."""
    stale = Stale(model, doubled)
    kernel, bias, *_ = weights = model.trainable_variables
    first = [tf.constant([3.0]), None, tf.ones((2, 1))]
    given = [bias, weights[2], kernel]
    now = stale.exchange(doubled, first, given, tf.constant(0, tf.int64))
    assert now.gradients[1] is None
    assert [float(tf.reduce_sum(now.gradients[place])) for place in (0, 2)] == [0.0, 0.0]
    stale.settled.assign(-1)
    later = stale.exchange(doubled, [tf.zeros((2, 1)), tf.zeros(1)], [kernel, bias], tf.constant(1, tf.int64))
    assert later.gradients[0].numpy().tolist() == [[2.0], [2.0]]
    assert later.gradients[1].numpy().tolist() == [6.0]
    assert [gradient.numpy().ravel().tolist() for gradient in later.local] == [[1.0, 1.0], [3.0]]


def test_settled_gradients_are_combined_once(model: keras.Model) -> None:
    stale = Stale(model, doubled)
    gradients = [tf.ones(weight.shape) for weight in model.trainable_variables]
    stale.exchange(doubled, gradients, model.trainable_variables, tf.constant(0, tf.int64))
    assert stale.settle(1)
    assert not stale.settle(1)
    assert {float(value) for pending in stale.pending for value in pending.numpy().ravel()} == {2.0}
    now = stale.exchange(doubled, gradients, model.trainable_variables, tf.constant(1, tf.int64))
    assert now.gradients[0].numpy().tolist() == [[2.0], [2.0]]


@pytest.mark.parametrize("settled", [False, True])
def test_what_waits_at_a_step_without_records_is_applied_after_it_combined_once(
    model: keras.Model, settled: bool
) -> None:
    stale = Stale(model, doubled)
    gradients = [tf.ones(weight.shape) for weight in model.trainable_variables]
    stale.exchange(doubled, gradients, model.trainable_variables, tf.constant(0, tf.int64))
    for step in (2, 3):
        stale.leave_out(tf.constant(step, tf.int64))
        if settled and step == 2:
            assert stale.settle(step)
    now = stale.exchange(doubled, gradients, model.trainable_variables, tf.constant(3, tf.int64))
    assert {float(value) for gradient in now.gradients for value in gradient.numpy().ravel()} == {2.0}


def test_in_every_step_what_is_applied_is_what_the_exchange_gives() -> None:
    now = SyncStrategy().exchange(doubled, [tf.constant(3.0), None], [], tf.constant(0, tf.int64))
    assert (float(now.gradients[0]), now.gradients[1], float(now.local[0])) == (6.0, None, 3.0)


def test_local_steps_apply_this_ranks_gradients_with_each_row_once(model: keras.Model) -> None:
    local = Local(ALONE, model, every=4)
    rows = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([1, 0, 1]), tf.constant([3, 1]))
    now = local.exchange(doubled, [rows, tf.constant(3.0)], [], tf.constant(0, tf.int64))
    assert tf.convert_to_tensor(now.gradients[0]).numpy().ravel().tolist() == [2.0, 5.0, 0.0]
    assert len(now.gradients[0].indices) == 2
    assert float(now.gradients[1]) == 3.0


def test_the_moves_of_local_steps_begin_before_the_first_of_several_optimizers(model: keras.Model) -> None:
    local = Local(ALONE, model, every=4)
    sums = [float(tf.reduce_sum(weight)) for weight in model.trainable_variables]
    for weight in model.trainable_variables:
        local.exchange(doubled, [tf.ones(weight.shape)], [weight], tf.constant(0, tf.int64))
        weight.assign(weight + 1.0)
    assert local.sums_at_start.numpy().tolist() == pytest.approx(sums)


def test_a_local_average_is_of_all_that_moves_and_tells_how_far_it_moved(model: keras.Model) -> None:
    """On rank 1 of 2, whose mean with the other rank is 0.5 above what it has."""
    group = SimpleNamespace(
        size=2,
        rank=1,
        is_root=False,
        average_in_step=lambda value, name: value + 0.5,
        sum_in_step=lambda value, name: value + 7,  # what root has
        average=lambda arrays: arrays,
        to_root=lambda array: array,
    )
    slot, rate, average, statistic = (tf.Variable(1.0) for _ in range(4))
    counters = [tf.Variable(3), tf.Variable(3.0)]
    local = Local(cast(WorkerGroup, group), model, every=4, beside=[slot, average, statistic], of_root=counters)
    before = [weight.numpy() for weight in model.trainable_variables]
    assert local.drift() is None
    for step in range(2):
        gradients = [tf.ones(weight.shape) for weight in model.trainable_variables]
        local.exchange(doubled, gradients, model.trainable_variables, tf.constant(step, tf.int64))
        for weight in model.trainable_variables:
            weight.assign(weight + 1.5)
    assert local.settle(2)
    assert not local.settle(2)
    for weight, value in zip(model.trainable_variables, before, strict=True):
        assert weight.numpy() == pytest.approx(value + 3.5)
    assert [float(each) for each in (slot, rate, average, statistic, *counters)] == [1.5, 1.0, 1.5, 1.5, 7.0, 7.0]
    drift = local.drift()
    assert drift is not None
    assert drift.ranks_apart == pytest.approx((8 * 0.5**2) ** 0.5)  # five weights and the three beside them
    assert list(drift.moves) == [weight.path for weight in model.trainable_variables]
    assert all(moves["changed"] == pytest.approx([3.0]) for moves in drift.moves.values())
    assert all(moves["apart"] == pytest.approx([0.5]) for moves in drift.moves.values())
    local.exchange(doubled, [tf.constant(0.0)], [], tf.constant(2, tf.int64))
    assert local.settle(3)
    drift = local.drift()
    assert drift is not None
    assert all(moves["changed"] == pytest.approx([0.0], abs=1e-6) for moves in drift.moves.values())


class Twins(keras.Model):
    """Two layers of one name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(1, name="twin"), layers.Dense(2, name="twin")

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


def test_the_moves_of_layers_with_one_name_are_told_apart() -> None:
    """The mean is as far above what this rank has as a layer has outputs."""
    group = SimpleNamespace(
        size=2,
        rank=0,
        is_root=True,
        average_in_step=lambda value, name: value + tf.cast(tf.shape(value)[-1], value.dtype),
        average=lambda arrays: arrays,
        to_root=lambda array: array,
    )
    model = Twins()
    model(tf.zeros((1, 2)))
    local = Local(cast(WorkerGroup, group), model, every=4)
    local.exchange(doubled, [tf.constant(0.0)], [], tf.constant(0, tf.int64))
    model.second.kernel.assign(model.second.kernel + 3.0)
    assert local.settle(1)
    drift = local.drift()
    assert drift is not None
    assert [moves["changed"] for moves in drift.moves.values()] == [[0.0], [0.0], [pytest.approx(3.0)], [0.0]]
    assert [moves["apart"] for moves in drift.moves.values()] == [[pytest.approx(rows)] for rows in (1, 1, 2, 2)]


def test_local_steps_without_records_move_nothing(model: keras.Model) -> None:
    """Whether or not ranks were equal before them."""
    group: Any = SimpleNamespace(
        size=2, is_root=True, average_in_step=lambda value, name: value, sum_in_step=lambda value, name: value
    )
    local = Local(group, model, every=2)
    gradients = [tf.ones(weight.shape) for weight in model.trainable_variables]
    changed: list[float] = []
    for has_records in (False, False, True, False, False, False):
        step = tf.constant(len(changed), tf.int64)
        if has_records:
            local.exchange(doubled, gradients, model.trainable_variables, step)
            model.trainable_variables[0].assign_add(gradients[0])
        else:
            local.leave_out(step + 1)
        local.end_step(tf.constant(False), step + 1)
        changed.append(float(abs(local.changes.numpy()).max()))
    assert changed == [0.0, 0.0, 0.0, pytest.approx(2.0), pytest.approx(2.0), 0.0]  # of weights that are drawn


def test_local_steps_meet_where_their_number_says_and_stop_there_if_one_rank_has_failed(model: keras.Model) -> None:
    group = SimpleNamespace(
        size=2, rank=0, is_root=True, average_in_step=lambda value, name: value, sum_in_step=lambda value, name: value
    )
    local = Local(cast(WorkerGroup, group), model, every=4)
    stops = [bool(local.end_step(tf.constant(True), tf.constant(step, tf.int64))) for step in range(1, 9)]
    assert stops == [step % 4 == 0 for step in range(1, 9)]
    assert int(local.settled) == 8
    assert not local.end_step(tf.constant(False), tf.constant(12, tf.int64))
    assert [local.next_sync_step(step) for step in (0, 1, 4, 5)] == [0, 4, 4, 8]


@pytest.mark.parametrize("skips", [False, True])
def test_gradients_that_wait_must_be_finite_unless_such_ones_are_skipped(model: keras.Model, skips: bool) -> None:
    assert len(Stale(model, doubled, skips=skips).must_be_finite) == (0 if skips else 4)


def test_weights_with_one_path_have_names_of_their_own() -> None:
    first, second, third, other = (tf.Variable(0.0) for _ in range(4))
    named = by_unique_name([("a", first), ("a", second), ("b", other), ("a", third)])
    assert list(named) == ["a", "a#2", "b", "a#3"]
    assert all(a is b for a, b in zip(named.values(), (first, second, other, third), strict=True))


class Averaging:
    """A rank of two, of which the other has weights that are larger by 2."""

    size, rank, is_root = 2, 0, True

    def average_in_step(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tensor + 1.0

    def average(self, arrays: Sequence[Any]) -> list[Any]:
        return list(arrays)

    def to_root(self, rows: Any) -> Any:
        return rows


def test_how_far_local_steps_move_ranks_apart_is_not_told_before_the_first_average(model: keras.Model) -> None:
    """As after a start: 0 would say that they are equal, and the figure of the start before is not saved."""
    local = Local(cast(WorkerGroup, Averaging()), model, every=4)
    assert local.drift() is None
    assert local.settle(3)
    assert (drift := local.drift()) is not None
    assert drift.ranks_apart == pytest.approx(5**0.5)  # of the square root of the number of weights
    assert set(drift.moves) == {weight.path for weight in model.trainable_variables}
