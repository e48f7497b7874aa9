"""A pass computes on this rank's records, and on one borrowed row where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
import tensorflow as tf

from horovod_train.data.pipeline.batch_source import Batch, StepSize
from horovod_train.training.steps.shares import Part, parts_of

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


@pytest.mark.parametrize("size", [ANY, StepSize(3, is_full=False)], ids=["not known", "known"])
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_short_step_has_its_records_in_order_and_their_share(size: StepSize, passes: int) -> None:
    found = parts([3, -1, 4, -2, 5], size, total=8, passes=passes, ranks=2)
    assert np.concatenate(rows(found)).tolist() == [3, 4, 5]
    assert [float(part.count) for part in found] == [len(each) for each in rows(found)]
    assert sum(shares(found)) == pytest.approx(2 * 3 / 8)
    lengths = [len(each) for each in rows(found)]
    assert max(lengths) - min(lengths) <= 1


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


def test_more_passes_than_records_borrow_a_row_each_where_only_the_data_tells() -> None:
    """Where the plan tells, there are only as many passes as records."""
    found = parts([7, -1, -1, -1], ANY, total=4, passes=3, ranks=2)
    assert sorted(float(part.count) for part in found) == [0.0, 0.0, 1.0]
    assert sorted(shares(found)) == pytest.approx([0.0, 0.0, 0.5])
    assert len(parts([7, -1, -1, -1], StepSize(1, is_full=False), total=4, passes=3, ranks=2)) == 1


def test_the_records_of_one_rank_alone_have_share_1_exactly() -> None:
    """So that its gradients have the bits of `fit`."""
    (part,) = parts([3, 4, 5, -1], StepSize(3, is_full=False), total=3)
    assert part.share is None


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
