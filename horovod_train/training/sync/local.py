"""Each rank applies its own gradients; every `average_every_steps` steps the ranks average their variables.

Local SGD (Stich 2019, arXiv:1805.09767). Weights, floating-point slots and moving averages are averaged. Where ranks
must be equal in between, such as for an evaluation, they are averaged there too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_train.distributed.allreduce import add_up_rows
from horovod_train.distributed.group import as_tf_variable
from horovod_train.training.sync.strategy import CombineList, Drift, Exchanged, Moves, SyncParts, settled_step


class Local:
    """See SyncStrategy for the methods."""

    delay = 0

    def __init__(self, parts: SyncParts) -> None:
        assert parts.config.average_every_steps is not None
        self.group, self.every = parts.group, parts.config.average_every_steps
        model = parts.model
        rates = {id(rate) for rate in parts.rates}
        slots = [variable for variable in parts.slots if id(variable) not in rates]
        more = (*slots, *parts.averages, *parts.forward_state)
        variables = [as_tf_variable(variable) for variable in (*model.trainable_variables, *more)]
        self.weights = {weight.path: as_tf_variable(weight) for weight in model.trainable_variables}
        self.averaged = [variable for variable in variables if variable.dtype.is_floating]
        self.settled = settled_step()
        self.squared_distance = tf.Variable(0.0, trainable=False)
        """float32: squared distance of this rank's variables from the mean, at the last average."""
        zeros = tf.zeros([len(self.weights)], tf.float64)
        self.sums_at_start, self.changes, self.squared_distances = (
            tf.Variable(zeros, trainable=False) for _ in range(3)
        )
        """float64 [weights]: sums when ranks were last equal; their change and squared distance at the last average."""
        self.has_averaged = tf.Variable(False, trainable=False)
        self.variables = {"settled_step": self.settled}
        self.must_be_finite: list[tf.Variable] = []
        self._average_now = tf.function(self._average, autograph=False)

    def exchange(
        self, combine: CombineList, local_gradients: Sequence[Any], variables: Sequence[Any] | None, step: tf.Tensor
    ) -> Exchanged:
        # Ranks diverge from here on.
        tf.cond(tf.equal(self.settled, step), self._note_start, lambda: None)
        rows_once = [add_up_rows(part) if isinstance(part, tf.IndexedSlices) else part for part in local_gradients]
        return Exchanged(rows_once, local_gradients)

    def end_step(self, failed: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        # Other ranks learn about a failed rank at the next average.
        def meet() -> tf.Tensor:
            self._average()
            self.settled.assign(step)
            return self.group.sum_in_step(tf.cast(failed, tf.float32), "local.failed") > 0

        return tf.cond(tf.equal(step % self.every, 0), meet, lambda: tf.constant(False))

    def settle(self, step: int) -> bool:
        if int(self.settled) == step:
            return False
        self._average_now()
        self.settled.assign(step)
        return True

    def next_sync_step(self, step: int) -> int:
        return -(-step // self.every) * self.every

    def drift(self) -> Drift:
        (mean,) = self.group.average([self.squared_distance.numpy()])
        moves = self._moves() if bool(self.has_averaged) else {}
        return Drift(math.sqrt(float(mean)), moves)

    def _moves(self) -> dict[str, Moves]:
        moves = np.stack([self.changes.numpy(), self.squared_distances.numpy()])
        by_rank = self.group.to_root(moves[np.newaxis])
        counts = [max(1, math.prod(weight.shape)) for weight in self.weights.values()]
        return {
            path: Moves((by_rank[:, 0, index] / count).tolist(), np.sqrt(by_rank[:, 1, index] / count).tolist())
            for index, (path, count) in enumerate(zip(self.weights, counts, strict=True))
            if len(by_rank)
        }

    def _note_start(self) -> None:
        self.sums_at_start.assign(self._sums())

    def _sums(self) -> tf.Tensor:
        return tf.stack([tf.reduce_sum(tf.cast(weight, tf.float64)) for weight in self.weights.values()])

    def _average(self) -> None:
        self.changes.assign(self._sums() - self.sums_at_start)
        squares = []
        for index, variable in enumerate(self.averaged):
            mean = self.group.average_in_step(variable, f"local.{index}")
            squares.append(tf.cast(tf.reduce_sum(tf.square(variable - mean)), tf.float32))
            variable.assign(mean)
        self.squared_distance.assign(tf.add_n(squares))
        self.has_averaged.assign(True)
        self.squared_distances.assign(tf.cast(tf.stack(squares[: len(self.weights)]), tf.float64))
