"""The gradients of a step are combined while the next step computes, and applied one step late.

The exchange costs no time if it is shorter than a step (pipelined SGD: Li et al. 2018, arXiv:1811.03619). Step 1
applies zeros; the last gradients of a run are never applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_train.distributed.group import as_tf_variable
from horovod_train.errors import UserError
from horovod_train.models.model_parallel import variable_beside
from horovod_train.training.sync.strategy import CombineList, Exchanged, SyncParts, by_unique_name, settled_step


class Stale:
    """See SyncStrategy for the methods."""

    delay = 1

    def __init__(self, parts: SyncParts) -> None:
        self._combine, self._sparse_as_dense = parts.combine, parts.sparse_as_dense
        trained = parts.model.trainable_variables
        self._index = {id(as_tf_variable(weight)): index for index, weight in enumerate(trained)}
        self.pending = [variable_beside(weight, tf.zeros(weight.shape, weight.dtype)) for weight in trained]
        self.settled = settled_step()
        self._paths = paths = [weight.path for weight in trained]
        self.variables = by_unique_name(
            (f"pending/{path}", variable) for path, variable in zip(paths, self.pending, strict=True)
        )
        self.variables["settled_step"] = self.settled
        # With non_finite: skip, non-finite gradients are skipped when they are due to be applied.
        self.must_be_finite = [] if parts.config.non_finite == "skip" else self.pending

    def exchange(
        self, combine: CombineList, local_gradients: Sequence[Any], variables: Sequence[Any] | None, step: tf.Tensor
    ) -> Exchanged:
        given = self._paths if variables is None else variables
        pairs = [
            (number, place)
            for number, (gradient, place) in enumerate(zip(local_gradients, map(self._place, given), strict=True))
            if gradient is not None
        ]
        for number, place in pairs:
            if isinstance(local_gradients[number], tf.IndexedSlices) and not self._sparse_as_dense:
                raise UserError(
                    "horovod.sparse_as_dense: must be true with train.synchronization: stale: the gradient of "
                    f"{self._paths[place]} waits for a step, and is then exchanged, as a whole table."
                )
        # Nothing here waits for `local_gradients`, so that they are computed during the exchange.
        previous = [tf.convert_to_tensor(self.pending[place]) for _, place in pairs]
        exchanged = tf.cond(tf.equal(self.settled, step), lambda: previous, lambda: combine(previous))
        combined: list[Any] = [None] * len(local_gradients)
        for (number, place), gradient in zip(pairs, exchanged, strict=True):
            self.pending[place].assign(tf.convert_to_tensor(local_gradients[number]))
            combined[number] = gradient
        return Exchanged(combined, previous)

    def _place(self, variable: Any) -> int:
        """Return the index of a weight, or of its path, among the pending gradients."""
        if isinstance(variable, str):
            return self._paths.index(variable)
        return self._index[id(as_tf_variable(variable))]

    def end_step(self, failed: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return failed  # comes from combined gradients, so ranks agree

    def settle(self, step: int) -> bool:
        if int(self.settled) == step:
            return False
        gradients = [tf.convert_to_tensor(variable) for variable in self.pending]
        for variable, mean in zip(self.pending, self._combine(gradients), strict=True):
            variable.assign(mean)
        self.settled.assign(step)
        return True

    def next_sync_step(self, step: int) -> int:
        return step

    def drift(self) -> None:
        return None
