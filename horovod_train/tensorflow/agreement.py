"""Count exchanges of gradients, and check at the tenth and at later ones that all ranks hold the same weights.

A script that never broadcasts root's weights trains another model on each rank, and no other check would notice. The
check waits for the tenth exchange, because a script may broadcast after its first step, when all variables exist, and
may exchange several times in a step; while no rank has changed its weights, it waits longer. It is repeated at the
hundredth and at every thousandth, because a script may change a learning rate on one rank alone, and from the start
after hvd.join, because ranks that joined early have older weights. Ranks with equal gradients, as of a script that
gives each the same rows, are told at the tenth.
Also numbers variables alike on all ranks, and holds which checks `init` has switched off.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from horovod_train.distributed.allreduce import exchange_name, is_alone, make_outside_graphs, number_of_ranks
from horovod_train.distributed.consistency import of_equal_rows
from horovod_train.distributed.group import name_of
from horovod_train.distributed.launch import launcher
from horovod_train.errors import RanksDisagree
from horovod_train.shown_text import listed

T = TypeVar("T")

log = logging.getLogger(__name__)

FIRST_CHECK, SECOND_CHECK, CHECK_EVERY = 10, 100, 1000
"""The exchanges at which weights are compared. On a GPU each time costs a copy of all weights to the host."""
_ADVICE = (
    "Give fit hvd.callbacks.BroadcastGlobalVariablesCallback(0), or call hvd.broadcast_variables(model.variables, "
    "root_rank=0) after the first step at the latest"
)
_ADVICE_LATER = (
    "A rank has changed its weights or its learning rate alone, or has never been sent root's. Let all ranks change "
    "them, by figures that hvd.allreduce has averaged, and call hvd.broadcast_variables(model.variables, root_rank=0)"
)


@dataclass
class Guards:
    """What ranks check and do together; `init` sets the first three."""

    check_weights: bool = True
    """Compare weights over the ranks at the tenth exchange and at later ones, and after each epoch of model.fit."""
    files_on_root_only: bool = True
    """Let callbacks that write files run on one rank of model.fit."""
    end_epochs_together: bool = True
    """End an epoch of model.fit on all ranks where the data of one has ended."""
    awaits_broadcast: bool = False
    """Whether `fit` is still to broadcast: until then a tenth exchange in it is not checked. Alike on all ranks."""


guards = Guards()


class PerVariable(Generic[T]):
    """One value for each variable, made at the first lookup and dropped with the variable."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}

    def __getitem__(self, variable: Any) -> T:
        if id(variable) not in self._values:
            self._values[id(variable)] = self._make()
            weakref.finalize(variable, self._values.pop, id(variable), None)
        return self._values[id(variable)]


def _new_number() -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="exchanges")


def _new_counter() -> tf.Variable:
    counter = make_outside_graphs(_new_number)
    _all_counters.append(counter)
    return counter


_numbers: defaultdict[int | None, PerVariable[int]] = defaultdict(lambda: PerVariable(itertools.count().__next__))
_counters: defaultdict[int | None, PerVariable[Any]] = defaultdict(lambda: PerVariable(_new_counter))
"""By process set, then by the first of the variables that are exchanged together: the number of their exchanges."""
_all_counters: list[Any] = []
"""Also those of models that are freed, on each rank at a time of its own: the sum never falls."""
_at_first: defaultdict[int | None, PerVariable[Any]] = defaultdict(
    lambda: PerVariable(lambda: make_outside_graphs(_new_number))
)
"""By process set and variable as the counters, the digest of the variables at their first exchange."""
_disagreement: RanksDisagree | None = None


def number_of(variable: Any, process_set: hvd.ProcessSet = hvd.global_process_set) -> int:
    """Return the number of a variable in a process set. Variables are numbered in the order of their first lookup.

    All ranks of the set look up in the same order. Names would not do: Keras numbers layers and optimizers by how many
    there have been in the process, and rank 0 may have made more of them.
    """
    return _numbers[process_set.process_set_id][variable]


def exchange_count() -> int:
    """Return how many exchanges of gradients this rank has begun. May be called from any thread, during a step."""
    # Not counter.numpy(), which copies to the default device: on a GPU, after all that it has to compute.
    return sum(int(counter) for counter in list(_all_counters))


def reset_counts() -> None:
    """Count the next exchange as the first, where ranks have made different numbers of them."""
    for counter in _all_counters:
        counter.assign(0)


def forget_process_sets() -> None:
    """Forget the numbers and counts of all process sets that a shutdown of Horovod has removed."""
    for process_set_id in {*_numbers, *_counters} - {hvd.global_process_set.process_set_id}:
        forget_process_set(process_set_id)


def forget_process_set(process_set_id: int | None) -> None:
    """Forget the numbers and counts of a process set that is removed: Horovod gives its id to another."""
    for kept in (_numbers, _counters, _at_first):
        kept.pop(process_set_id, None)


def cause_of(error: BaseException) -> BaseException:
    """Return the RanksDisagree that ended a step, if TensorFlow has raised its own error in its place."""
    is_disagreement = isinstance(error, tf.errors.OpError) and RanksDisagree.__name__ in str(error)
    return _disagreement if is_disagreement and _disagreement is not None else error


def count_exchange(variables: Sequence[Any], gradients: Sequence[Any], name: str, ranks: hvd.ProcessSet) -> None:
    """Count; collective where that is checked: raise RanksDisagree in the step if ranks hold different values.

    gradients: of the variables, this rank's. If they are equal on all ranks at the tenth, the first one says so. While
    no rank has changed its weights since the first exchange, because gradients are added up, a script may still be to
    broadcast them: they are compared later.
    """
    count = _counters[ranks.process_set_id][variables[0]].assign_add(1)
    if guards.check_weights and not is_alone(ranks):
        name = exchange_name(f"{name}.agreement")
        with tf.device("CPU:0"):  # on a GPU the host would wait for the result in every step
            is_early = tf.equal(count, FIRST_CHECK) | tf.equal(count, SECOND_CHECK)
            is_due = is_early | tf.equal(count % CHECK_EVERY, 0)
            is_first = tf.equal(count, 1)
        dense = [each for each in gradients if isinstance(each, tf.Tensor) and each.dtype.is_floating]
        largest = max(dense, key=lambda each: each.shape.num_elements() or 0, default=tf.zeros(1))
        at_first = _at_first[ranks.process_set_id][variables[0]]
        tf.cond(is_first, lambda: at_first.assign(_digest_of(variables)), at_first.read_value)
        tf.cond(is_due, lambda: _compare(variables, largest, name, ranks, count, at_first), lambda: tf.constant(True))


def _digest_of(variables: Sequence[Any]) -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.add_n([digest(variable) for variable in variables])


def _compare(
    variables: Sequence[Any],
    gradient: tf.Tensor,
    name: str,
    ranks: hvd.ProcessSet,
    count: tf.Tensor,
    at_first: tf.Tensor,
) -> tf.Tensor:
    names = [name_of(variable) for variable in variables]
    may_await_broadcast = guards.awaits_broadcast and _is_in_fit()  # a `fit` that has failed leaves it True

    def check(rows: np.ndarray, count: np.ndarray) -> bool:
        global _disagreement
        if may_await_broadcast and guards.awaits_broadcast:
            return True
        taking_part = np.flatnonzero(rows[:, 0])
        is_early = count == FIRST_CHECK
        if is_early and (said := of_equal_rows(rows[taking_part, -1].tolist())):
            _warn_of_equal_rows(said)
        if rows[taking_part, 1].all():  # no rank has changed its weights yet
            return True
        advice, members = _ADVICE if is_early else _ADVICE_LATER, np.array(members_of(ranks))
        try:
            check_equal(rows[taking_part, 2:-1], names, members[taking_part].tolist(), advice)
        except RanksDisagree as error:
            _disagreement = error
            raise
        return True

    with tf.device("CPU:0"):
        # Weights of NaN make equal gradients of any rows.
        is_finite = tf.reduce_all(tf.math.is_finite(gradient))
        of_rows = tf.where(is_finite, digest(gradient), tf.constant(0, tf.int64))
        digests = [digest(variable) for variable in variables]
        is_unchanged = tf.cast(tf.equal(tf.add_n(digests), at_first), tf.int64)
        own = tf.stack([tf.constant(1, tf.int64), is_unchanged, *digests, of_rows])
        position = hvd.rank_op() if launcher.detect().is_elastic else ranks.rank()
        own_row = tf.one_hot(position, number_of_ranks(ranks), dtype=tf.int64)[:, tf.newaxis] * own
    # A sum, and on the device of the gradients' sums: ranks that are in hvd.join take part in those only, with zeros.
    rows = hvd.allreduce(own_row, op=hvd.Sum, name=name, ignore_name_scope=True, process_set=ranks)
    with tf.device("CPU:0"):
        return tf.ensure_shape(tf.numpy_function(check, [rows, count], tf.bool), [])


@functools.cache
def _warn_of_equal_rows(said: str) -> None:
    """Say on rank 0, the first time, that ranks have computed the same gradients."""
    if hvd.rank() == 0:
        log.warning(
            f"{said}: a gradient is equal to the bit. x, y, weights = "
            "hvd.shard(x, y) gives each rank its own; or shuffle with another seed on each."
        )


def _is_in_fit() -> bool:
    callers = (frame for frame, _ in traceback.walk_stack(inspect.currentframe()) if frame.f_code.co_name == "fit")
    return any(isinstance(frame.f_locals.get("self"), keras.Model) for frame in callers)


def members_of(ranks: hvd.ProcessSet) -> list[int]:
    return ranks.ranks or list(range(hvd.size()))


def digest(variable: Any) -> tf.Tensor:
    """Return an int64 [] that differs for values that differ: the sum of (2 i + 1) · word i."""
    value = tf.reshape(tf.convert_to_tensor(variable), [-1])
    word = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}[value.dtype.size]
    words = tf.cast(tf.cast(value, tf.int8) if value.dtype == tf.bool else tf.bitcast(value, word), tf.int64)
    return tf.reduce_sum(words * (2 * tf.range(tf.size(words, out_type=tf.int64)) + 1))


def check_equal(digests: np.ndarray, names: Sequence[str], ranks: Sequence[int], advice: str) -> None:
    """Raise RanksDisagree for the first variable whose digests [rank, variable] differ."""
    for name, column in zip(names, digests.T, strict=True):
        if len(set(column.tolist())) > 1:
            differing = [rank for rank, value in zip(ranks, column, strict=True) if value != column[0]]
            raise RanksDisagree(
                f"ranks hold different weights: {name} on rank {listed(differing, 4)} differs from that on rank "
                f"{ranks[0]}. {advice}. Where weights differ on purpose when gradients are exchanged, as with SAM, "
                "hvd.init(check_weights=False) does not check."
            )
