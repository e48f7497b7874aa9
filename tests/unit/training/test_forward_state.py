"""What the forward pass assigns becomes equal on all ranks, by what it is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_train.distributed.group import WorkerGroup
from horovod_train.training.steps.figures import ForwardState
from horovod_train.training.steps.shares import Shares

RECORDS = (6.0, 2.0)
"""Of two ranks in a step."""


def variable(aggregation: str = "none", dtype: str = "float32", initial: Any = 1.0) -> keras.Variable:
    return keras.Variable(initial, dtype=dtype, trainable=False, aggregation=aggregation)


def combined(
    make: Callable[[], Any], changes: tuple[Any, Any], records: tuple[float, float] = RECORDS, **options: Any
) -> list[Any]:
    """Return a variable's value on both of two ranks after a step in which each has assigned its change."""
    sent: list[tf.Tensor] = []

    def run(rank: int, total: Callable[[tf.Tensor, str], tf.Tensor]) -> Any:
        group = SimpleNamespace(size=2, rank=rank, is_root=rank == 0, sum_in_step=total)
        kept, shares = make(), Shares(cast(WorkerGroup, group))
        state = ForwardState(cast(WorkerGroup, group), [kept], **options)

        @tf.function(autograph=False)
        def step() -> tf.Tensor:
            with shares.of_pass(tf.constant(2 * records[rank] / sum(records))):
                before = state.values()
                state.variables[0].assign(changes[rank])
                state.combine(before, shares)
                return state.variables[0].read_value()

        return step().numpy()

    def note(value: tf.Tensor, name: str) -> tf.Tensor:
        tf.numpy_function(lambda array: sent.append(array), [value], [])
        return value

    for rank in range(2):
        run(rank, note)
    total = np.sum(sent, axis=0) if sent else None
    return [run(rank, lambda value, name: tf.constant(total, value.dtype)) for rank in range(2)]


KINDS: dict[str, tuple[Callable[[], Any], tuple[Any, Any], Any]] = {
    "a float is the mean by shares": (variable, (3.0, 7.0), (6 * 3.0 + 2 * 7.0) / 8),
    "a half too": (lambda: variable(dtype="float16"), (3.0, 7.0), 4.0),
    "a count is rank 0's": (lambda: variable(dtype="int64", initial=1), (5, 9), 5),
    "a flag is rank 0's": (lambda: variable(dtype="bool", initial=False), (True, False), True),
    "a sum adds up what was added": (lambda: variable("sum", "int32", 1), (5, 9), 1 + 4 + 8),
    "a sum of floats": (lambda: variable("sum"), (5.0, 9.0), 13.0),
    "a mean": (lambda: variable("mean"), (3.0, 7.0), 4.0),
    "the first": (lambda: variable("only_first_replica"), (3.0, 7.0), 3.0),
    "one of TensorFlow's": (
        lambda: tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM, trainable=False),
        (5.0, 9.0),
        13.0,
    ),
    "one of TensorFlow's without": (lambda: tf.Variable(1.0, trainable=False), (3.0, 7.0), 4.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_have_one_value(kind: str) -> None:
    make, changes, expected = KINDS[kind]
    assert combined(make, changes) == [expected] * 2


def test_a_rank_without_records_has_no_part_in_it() -> None:
    """Even if its numbers are not finite."""
    assert combined(variable, (3.0, np.nan), (4.0, 0.0)) == [3.0] * 2
    assert combined(lambda: variable("sum"), (3.0, 7.0), (4.0, 0.0)) == [3.0] * 2


def test_a_state_that_is_combined_at_other_times_keeps_its_own_values() -> None:
    assert combined(variable, (3.0, 7.0), in_each_step=False) == [3.0, 7.0]
