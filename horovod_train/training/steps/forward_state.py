"""Weights that are not trained and that the forward pass assigns: averages, scales, codebooks, counters.

Each rank computes them on its own records, so they are combined over the ranks in each step, by what they are; under
local SGD at its exchanges, see sync.local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_train.distributed.group import WorkerGroup, as_tf_variable
from horovod_train.training.steps.shares import Shares


class ForwardState:
    """Makes them equal on all ranks after a pass.

    Floating-point ones become their mean by the ranks' shares; others are rank 0's. Keras' `aggregation` of a variable
    decides where it is set: "sum" adds up what the ranks have added, "only_first_replica" is rank 0's.
    """

    def __init__(self, group: WorkerGroup, variables: Sequence[Any], *, in_each_step: bool = True) -> None:
        """variables: Keras' or TensorFlow's, in the same order on all ranks. in_each_step: whether `combine` acts."""
        self._group, self._variables, self.in_each_step = group, list(variables), in_each_step
        # Not a constant: other ranks would send constants, and TensorFlow would move their exchange out of the loop
        # over steps, there alone.
        self._is_root = tf.Variable(group.is_root, trainable=False)

    @property
    def variables(self) -> list[tf.Variable]:
        return [as_tf_variable(variable) for variable in self._variables]

    def values(self) -> list[tf.Tensor]:
        """In the compiled step, before the pass: return what `combine` needs."""
        return [variable.read_value() for variable in self.variables]

    def combine(self, before: Sequence[tf.Tensor], shares: Shares) -> None:
        """Collective, in the compiled step, after the pass: one exchange for each dtype. before: from `values`."""
        if self._group.size == 1 or not self.in_each_step:
            return
        by_dtype: dict[tf.DType, list[tuple[tf.Variable, tf.Tensor, str]]] = {}
        for variable, old, kind in zip(self.variables, before, self._kinds(), strict=True):
            sent = tf.int32 if variable.dtype == tf.bool else variable.dtype
            by_dtype.setdefault(sent, []).append((variable, old, kind))
        for dtype, entries in by_dtype.items():
            parts = [self._part(*entry, shares) for entry in entries]
            flat = tf.concat([tf.reshape(tf.cast(part, dtype), [-1]) for part in parts], axis=0)
            total = self._group.sum_in_step(flat, f"forward_state.{dtype.name}")
            sums = tf.split(total, [variable.shape.num_elements() for variable, _, _ in entries])
            for (variable, old, kind), value in zip(entries, sums, strict=True):
                value = tf.reshape(value, variable.shape)
                if kind == "mean":
                    value *= tf.constant(1 / self._group.size, value.dtype)  # see allreduce.over_ranks
                elif kind == "sum":
                    value = old + value
                variable.assign(tf.cast(value, variable.dtype))

    def _kinds(self) -> list[str]:
        return [_kind(variable) for variable in self._variables]

    def _part(self, variable: tf.Variable, old: tf.Tensor, kind: str, shares: Shares) -> tf.Tensor:
        """Return this rank's part of the sum that the exchange makes."""
        value = variable.read_value()
        if kind == "mean":
            return shares.scaled(value)
        if kind == "sum":
            return value - old if shares.share is None else (value - old) * tf.cast(shares.share > 0, value.dtype)
        return tf.where(self._is_root, value, tf.zeros_like(value))


def _kind(variable: Any) -> str:
    aggregation = getattr(variable, "aggregation", None)
    aggregation = getattr(aggregation, "name", aggregation)  # of a tf.Variable it is an enum
    mean = "mean" if as_tf_variable(variable).dtype.is_floating else "first"  # integers have no mean
    named = {"mean": mean, "sum": "sum", "only_first_replica": "first"}
    return named.get(str(aggregation).lower(), mean)
