"""What a run that diverged says: which numbers, where, and nothing that is not the reason."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tensorflow as tf

from horovod_train.training.nonfinite import Failure


class Group:
    """Three ranks, of which rank 0 asks, and the others have said what they have to say."""

    def __init__(self, *others: list[Any]) -> None:
        self.others = others

    def gather(self, own: list[Any]) -> list[list[Any]]:
        return [own, *self.others]

    def name(self, rank: int) -> str:
        return f"rank {rank} (node{rank})"


FINE = [0, False, True, "0", 0, ""]


def said(failure: Failure, *others: list[Any]) -> str:
    return str(failure.divergence(Group(*others)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("loss", "shown"), [(math.nan, "NaN"), (math.inf, "inf")])
def test_a_loss_that_is_not_finite_is_shown(loss: float, shown: str) -> None:
    failure = Failure()
    failure.note(tf.constant(7, tf.int64), tf.constant(True), tf.constant(loss), tf.constant(0))
    expected = f"Model diverged with loss = {shown} at step 7: loss or gradients are not finite on rank 0 (node0). N"
    assert said(failure, FINE, FINE).startswith(expected)


def test_a_finite_loss_is_not_given_as_the_reason() -> None:
    failure = Failure()
    failure.note(tf.constant(7, tf.int64), tf.constant(True), tf.constant(0.25), tf.constant(0))
    line = said(failure, FINE, FINE)
    assert line.startswith("Model diverged at step 7: gradients, but not the loss, are not finite on rank 0 (node0).")
    assert "0.25" not in line


def test_where_every_rank_has_finite_gradients_it_is_their_exchange_that_overflows() -> None:
    failure = Failure()
    failure.note(tf.constant(7, tf.int64), tf.constant(False), tf.constant(0.25), tf.constant(10))
    line = said(failure, [7, False, True, "0.25", 10, ""], [7, False, True, "0.5", 10, ""])
    assert "gradients are finite on each rank, but not once they are combined, after 10 skipped updates" in line
    assert "horovod.compression: fp16 overflows above 65504" in line
    assert "rank 0" not in line


def test_a_variable_is_named_with_its_rank() -> None:
    failure = Failure()
    others = [8, True, True, "0.5", 0, "model/dense/kernel"]
    line = said(failure, FINE, others)
    assert line.startswith(
        "Model diverged at step 8: model/dense/kernel is not finite on rank 2 (node2). Nothing of it has been"
    )


def test_the_first_failure_is_the_one_that_is_kept() -> None:
    failure = Failure()
    failure.note(tf.constant(7, tf.int64), tf.constant(True), tf.constant(math.nan), tf.constant(0))
    failure.note_variables(9, {"model/dense/kernel": tf.Variable([math.nan])})
    assert "at step 7: loss or gradients" in said(failure, FINE, FINE)


def test_what_overflows_when_ranks_combine_it_is_laid_to_none_of_them() -> None:
    failure = Failure()
    failure.note_variables(8, {"the gradient of dense/kernel": tf.Variable([math.inf])}, is_cause=False)
    line = said(failure, [8, False, True, "0", 0, "the gradient of dense/kernel"])
    assert "at step 8: gradients are finite on each rank, but not once they are combined" in line
