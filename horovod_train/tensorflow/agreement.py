"""Count exchanges of gradients, and see at the tenth one that all ranks hold the same weights.

A script that never broadcasts root's weights trains another model on each rank, and nothing else would tell. The tenth
exchange, because a script may broadcast after its first step, when all variables exist, and exchange several times in a
step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_train.distributed.allreduce import exchange_name, is_alone
from horovod_train.errors import RanksDisagree
from horovod_train.tensorflow.guards import guards
from horovod_train.tensorflow.names import PerVariable, made_outside, name_of

CHECKED_AT = 10
_found: RanksDisagree | None = None
_ADVICE = (
    "Give fit hvd.callbacks.BroadcastGlobalVariablesCallback(0), or call hvd.broadcast_variables(model.variables, "
    "root_rank=0) after the first step at the latest"
)


def _new_count() -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="exchanges")


_counts: defaultdict[int | None, PerVariable[Any]] = defaultdict(lambda: PerVariable(lambda: made_outside(_new_count)))
"""By process set, of the first of the variables that are exchanged together: how often they were in it."""


def exchanges_begun() -> int:
    """Return how many exchanges of gradients this rank has begun. May be called from any thread, during a step."""
    return sum(int(count.numpy()) for counts in list(_counts.values()) for count in counts.values())


def count_anew() -> None:
    """Let the next exchange be the first, so that ranks that join count as the others do."""
    for counts in list(_counts.values()):
        for count in counts.values():
            count.assign(0)


def forget(process_set_id: int) -> None:
    """Forget the counts of a process set that is removed: Horovod gives its number to another."""
    _counts.pop(process_set_id, None)


def cause_of(error: BaseException) -> BaseException:
    """Return the RanksDisagree that ended a step, if TensorFlow has raised an error of its own in its place."""
    is_it = isinstance(error, tf.errors.OpError) and RanksDisagree.__name__ in str(error)
    return _found if is_it and _found is not None else error


def count_exchange(variables: Sequence[Any], name: str, ranks: hvd.ProcessSet) -> None:
    """Collective at its tenth run: count, and raise RanksDisagree in the step if ranks hold different values."""
    count = _counts[ranks.process_set_id][variables[0]].assign_add(1)
    if guards().check_weights and not is_alone(ranks):
        name = exchange_name(f"{name}.agreement")
        with tf.device("CPU:0"):  # or the host would wait for the GPU in every step, to learn what to do
            is_due = tf.equal(count, CHECKED_AT)
        tf.cond(is_due, lambda: _compare(variables, name, ranks), lambda: tf.constant(True))


def _compare(variables: Sequence[Any], name: str, ranks: hvd.ProcessSet) -> tf.Tensor:
    names = [name_of(variable) for variable in variables]

    def check(digests: np.ndarray) -> bool:
        global _found
        try:
            check_equal(digests, names, ranks, _ADVICE)
        except RanksDisagree as error:
            _found = error
            raise
        return True

    with tf.device("CPU:0"):
        own = tf.stack([digest(variable) for variable in variables])[tf.newaxis]
        digests = hvd.allgather(own, name=name, ignore_name_scope=True, process_set=ranks)
        return tf.ensure_shape(tf.numpy_function(check, [digests], tf.bool), [])


def digest(variable: Any) -> tf.Tensor:
    """Return an int64 [] that differs for values that differ: a sum of all words, each times its place."""
    value = tf.reshape(tf.convert_to_tensor(variable), [-1])
    word = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}[value.dtype.size]
    words = tf.cast(tf.cast(value, tf.int8) if value.dtype == tf.bool else tf.bitcast(value, word), tf.int64)
    return tf.reduce_sum(words * (2 * tf.range(tf.size(words, out_type=tf.int64)) + 1))


def check_equal(digests: np.ndarray, names: Sequence[str], ranks: hvd.ProcessSet, advice: str) -> None:
    """Raise RanksDisagree, on all ranks, for the first variable whose digests [rank, variable] differ."""
    for name, column in zip(names, digests.T, strict=True):
        if len(set(column.tolist())) > 1:
            members = ranks.ranks or range(len(column))
            others = [rank for rank, own in zip(members, column, strict=True) if own != column[0]]
            shown = ", ".join(map(str, others[:4])) + (", …" if len(others) > 4 else "")
            raise RanksDisagree(
                f"ranks hold different weights: {name} on rank {shown} differs from that on rank {members[0]}. "
                f"{advice}; hvd.init(check_weights=False) does not check."
            )
