"""What a run that diverged says: which numbers, where, and nothing that is not the reason."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from horovod_train.data.batch_source import Batch
from horovod_train.training.nonfinite import (
    Failure,
    are_finite,
    nonfinite_names,
    restored_if_nonfinite,
    seem_finite,
    small_gradient_values,
    variables_are_finite,
)


class Group:
    """Three ranks, of which rank 0 asks, and the others have said what they have to say."""

    def __init__(self, *others: list[Any]) -> None:
        self.others = others

    def gather(self, own: list[Any]) -> list[list[Any]]:
        return [own, *self.others]

    def name(self, rank: int) -> str:
        return f"rank {rank} (node{rank})"


FINE = [0, False, True, "0", 0, "", ""]


def said(failure: Failure, *others: list[Any]) -> str:
    return str(failure.divergence(Group(*others)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("loss", "shown"), [(math.nan, "NaN"), (math.inf, "inf")])
def test_a_loss_that_is_not_finite_is_shown(loss: float, shown: str) -> None:
    failure = Failure()
    failure.note(tf.constant(7, tf.int64), tf.constant(True), tf.constant(loss), tf.constant(0), None, {})
    expected = f"Model diverged with loss = {shown} at step 7: loss or gradients are not finite on rank 0 (node0). N"
    assert said(failure, FINE, FINE).startswith(expected)


def test_a_finite_loss_is_not_given_as_the_reason() -> None:
    failure = Failure()
    failure.note(tf.constant(7, tf.int64), tf.constant(True), tf.constant(0.25), tf.constant(0), None, {})
    line = said(failure, FINE, FINE)
    assert line.startswith("Model diverged at step 7: gradients, but not the loss, are not finite on rank 0 (node0).")
    assert "0.25" not in line


def test_where_every_rank_has_finite_gradients_it_is_their_exchange_that_overflows() -> None:
    failure = Failure()
    failure.note(tf.constant(7, tf.int64), tf.constant(False), tf.constant(0.25), tf.constant(10), None, {})
    line = said(failure, [7, False, True, "0.25", 10, "", ""], [7, False, True, "0.5", 10, "", ""])
    assert "gradients are finite on each rank, but not once they are combined, after 10 skipped updates" in line
    assert "horovod.compression: fp16 overflows above 65504" in line
    assert "rank 0" not in line


def test_a_variable_is_named_with_its_rank() -> None:
    failure = Failure()
    others = [8, True, True, "0.5", 0, "model/dense/kernel", ""]
    line = said(failure, FINE, others)
    assert line.startswith(
        "Model diverged at step 8: model/dense/kernel is not finite on rank 2 (node2). Nothing of it has been"
    )


def test_the_first_failure_is_the_one_that_is_kept() -> None:
    failure = Failure()
    failure.note(tf.constant(7, tf.int64), tf.constant(True), tf.constant(math.nan), tf.constant(0), None, {})
    failure.note_variables(9, {"model/dense/kernel": tf.Variable([math.nan])})
    assert "at step 7: loss or gradients" in said(failure, FINE, FINE)


def test_a_rank_that_is_not_the_cause_is_not_the_one_that_is_heard() -> None:
    failure = Failure()
    failure.note(tf.constant(7, tf.int64), tf.constant(False), tf.constant(0.25), tf.constant(0), None, {})
    line = said(failure, FINE, [7, True, False, "NaN", 0, "", ""])
    assert line.startswith("Model diverged with loss = NaN at step 7: loss or gradients are not finite on rank 2 (node")


def test_a_variable_of_the_model_that_a_run_begins_with_is_a_failure_too() -> None:
    """With the loss of the step before it, which may tell more."""
    failure = Failure()
    failure.last_loss.assign(math.inf)
    failure.note_variables(0, {"counter": tf.Variable(1), "kernel": tf.Variable([math.nan])})
    assert said(failure, FINE).startswith("Model diverged with loss = inf at step 1: kernel is not finite on rank 0")


def test_what_overflows_when_ranks_combine_it_is_laid_to_none_of_them() -> None:
    failure = Failure()
    failure.note_variables(8, {"the gradient of dense/kernel": tf.Variable([math.inf])}, is_cause=False)
    line = said(failure, [8, False, True, "0", 0, "the gradient of dense/kernel", ""])
    assert "at step 8: gradients are finite on each rank, but not once they are combined" in line


NAN, INF = math.nan, math.inf
GOOD: dict[str, Any] = {"inputs": [0.0] * 4, "targets": [0.0] * 4, "weights": [1.0] * 4}


def note(failure: Failure, ids: list[int], outputs: int = 5, **values: Any) -> None:
    parts = {name: tf.convert_to_tensor(part) for name, part in {**GOOD, **values}.items()}
    labels = {"": outputs} if parts["targets"].dtype.is_integer else {}
    batch = Batch(**parts, ids=tf.constant(ids, tf.int64), count=tf.constant(4, tf.int64))
    noted = tf.function(failure.note, autograph=False)
    noted(tf.constant(7, tf.int64), tf.constant(True), tf.constant(NAN), tf.constant(0), batch, labels)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"inputs": [0.0, NAN, -INF, 0.0]}, "record 12: an input is not finite."),
        ({"inputs": [[[0.0, 1.0]], [[0.0, INF]], [[0.0, 1.0]], [[0.0, 1.0]]]}, "record 12: an input is not finite."),
        ({"targets": [0.0, 0.0, 0.0, NAN]}, "record 14: a target or the weight is not finite."),
        ({"weights": [1.0, 1.0, 0.0, INF]}, "record 14: a target or the weight is not finite."),
        ({"targets": [4, 0, -1, 5]}, "record 13: the model has no output for its label."),
        ({"targets": [4, 0, 5, 4]}, "record 13: the model has no output for its label."),
        ({"inputs": [0.0, NAN, 0.0, 0.0], "targets": [0, 0, 0, 5]}, "record 12: an input is not finite."),
    ],
    ids=str,
)
def test_a_record_that_is_to_blame_is_named_in_place_of_the_rate(values: dict[str, Any], problem: str) -> None:
    failure = Failure()
    note(failure, [11, 12, 13, 14], **values)
    line = said(failure, FINE, FINE)
    assert f"at step 7: loss or gradients are not finite on rank 0 (node0), because of a record: {problem}" in line
    assert "base_lr" not in line


@pytest.mark.parametrize("dtype", [tf.uint8, tf.int8, tf.uint16, tf.int64], ids=lambda dtype: dtype.name)
def test_labels_are_compared_with_more_outputs_than_their_dtype_can_count(dtype: tf.DType) -> None:
    """1000 is 232 in uint8, and -24 in int8."""
    failure = Failure()
    note(
        failure, [11, 12, 13, 14], 1000, targets=tf.constant([0, 1, 127, dtype.max if dtype.size == 1 else 999], dtype)
    )
    assert "lower lr_schedule.base_lr" in said(failure, FINE)


def test_a_record_is_named_as_its_source_names_it() -> None:
    failure = Failure()
    failure.name_record = lambda record, problem: f"a.csv:{record}: {problem}."
    note(failure, [11, 12, 13, 14], inputs=[NAN] * 4)
    assert "because of a record: a.csv:11: an input is not finite." in said(failure, FINE)
    failure.name_record = lambda record, problem: str(1 / 0)
    assert "because of a record: record 11: an input is not finite." in said(failure, FINE)


def test_a_rank_whose_record_is_to_blame_is_heard_before_the_first_one() -> None:
    failure = Failure()
    note(failure, [1, 2, 3, 4])
    line = said(failure, [7, True, False, "NaN", 0, "", "b.csv: record 3: an input is not finite."])
    assert "on rank 0 (node0), rank 1 (node1), because of a record: b.csv: record 3" in line


@pytest.mark.parametrize("values", [{}, {"inputs": [0.0, NAN, 0.0, 0.0]}], ids=["good", "padding"])
def test_without_a_bad_record_the_rate_is_advised(values: dict[str, Any]) -> None:
    """What padding holds is of no record that this step has."""
    failure = Failure()
    note(failure, [11, -1, 13, -14], **values)
    assert "lower lr_schedule.base_lr" in said(failure, FINE)


@pytest.mark.parametrize("worst", [1.0, 1e19, 3e38, INF, -INF, NAN], ids=str)
def test_the_look_at_all_variables_finds_what_the_names_do(worst: float) -> None:
    values = np.full((1000, 10), 1e18, np.float32)
    values[3, 4] = worst
    variables = {"kernel": tf.Variable(values), "bias": tf.Variable([1.0])}
    look = tf.function(lambda: variables_are_finite(list(variables.values())), autograph=False)
    assert bool(look()) == (not nonfinite_names(variables)) == math.isfinite(worst)


@pytest.mark.parametrize("worst", [1.0, 1e19, 3e38, INF, -INF, NAN], ids=str)
def test_a_gradient_is_not_finite_if_a_number_of_it_is_not(worst: float) -> None:
    values = np.full((1000, 10), 1e18, np.float32)
    values[3, 4] = worst
    rows = tf.IndexedSlices(tf.constant(values), tf.range(1000), tf.constant([2000, 10]))
    half = tf.constant([6e4, 6e4], tf.float16)
    for gradients in ([tf.constant(values), None], [half, rows]):
        assert bool(are_finite(gradients)) == bool(seem_finite(gradients)) == math.isfinite(worst)
    assert bool(are_finite([tf.constant([3e38, 3e38])]))


def test_of_large_gradients_alone_the_smallest_is_looked_at() -> None:
    large = [tf.fill((rows, 100), float(rows)) for rows in (900, 500, 700)]
    assert [float(value[0, 0]) for value in small_gradient_values([*large, None])] == [500.0]
    assert [float(value[0]) for value in small_gradient_values([*large, tf.ones(3)])] == [1.0]


@pytest.mark.parametrize(
    ("moved", "ends"), [(2.0, (-INF, 2.0, 7.0)), (NAN, (-INF, 1.0, 1.0))], ids=["fine", "poisoned"]
)
def test_what_a_pass_poisons_is_restored_and_a_maximum_that_has_seen_nothing_is_no_poison(
    moved: float, ends: tuple[float, ...]
) -> None:
    largest, average, counter = (tf.Variable(value) for value in (-INF, 1.0, 1.0))

    @tf.function(autograph=False)
    def step() -> None:
        with restored_if_nonfinite([largest, average, counter], [largest, average]):
            largest.assign(-INF)
            average.assign(moved)
            counter.assign(7.0)

    step()
    assert tuple(float(each) for each in (largest, average, counter)) == ends
