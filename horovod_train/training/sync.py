"""When ranks exchange, and what: gradients at every step, gradients one step late, or weights every few steps.

Each strategy is a SyncStrategy; build chooses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from horovod_train.distributed.allreduce import add_up_rows
from horovod_train.distributed.group import WorkerGroup, as_tf_variable
from horovod_train.distributed.layer_contents import by_unique_name
from horovod_train.errors import UserError
from horovod_train.models.model_parallel import variable_beside

CombineList = Callable[[Sequence[Any]], list[Any]]
"""(gradients) → gradients combined over the ranks."""


class Exchanged(NamedTuple):
    """Gradients of a step. Each list has one entry for each trainable variable, or None."""

    gradients: list[Any]
    """Combined gradients, to apply now."""
    local: Sequence[Any]
    """This rank's part of them."""


class Drift(NamedTuple):
    """How far ranks had moved apart at their last average."""

    ranks_apart: float
    """The root mean square over ranks of ‖value − mean‖."""
    moves: Mapping[str, Mapping[str, list[float]]]
    """By the path of each parameter, only on root: by rank, how far it had moved since the average before.

    "changed": the change of the mean of its elements; 0.0 if unchanged. "apart": the root mean square, over its
    elements, of value − mean over ranks.
    """


def settled_step() -> tf.Variable:
    """Create the variable for the step at which ranks were last made equal; the broadcast does it before step 1."""
    return tf.Variable(0, dtype=tf.int64, trainable=False, name="settled_step")


def by_path(weights: Iterable[Any]) -> dict[str, tf.Variable]:
    """Return weights by path, as a checkpoint names them: of two layers with one name, the second's end in #2."""
    return by_unique_name((weight.path, as_tf_variable(weight)) for weight in weights)


class SyncStrategy:
    """When ranks exchange, and what. Keeps its state in variables, so that a run can resume.

    As it stands, gradients are combined before they are applied: ranks have the same weights after every step. Does not
    compute or apply gradients; see steps.
    """

    delay = 0
    """Steps between computing and applying a gradient: 0 or 1."""

    settled: tf.Variable | None = None
    """int64: the step at which ranks were last made equal; None: they are after each."""

    def __init__(self) -> None:
        self.variables: dict[str, tf.Variable] = {}
        """Variables that a checkpoint needs for this strategy, by name; equal on all ranks after `settle`."""
        self.must_be_finite: list[tf.Variable] = []
        """Those of `variables` that hold numbers not applied yet."""

    def exchange(
        self, combine: CombineList, local_gradients: Sequence[Any], variables: Sequence[Any], step: tf.Tensor
    ) -> Exchanged:
        """Collective, in the compiled step: return the gradients to apply now, given those of this rank.

        combine: the exchange. local_gradients: of one optimizer, one for each of `variables`, or None; the same ones
        are None on every rank. step: int64, steps done.
        """
        return Exchanged(combine(local_gradients), local_gradients)

    def leave_out(self, step: tf.Tensor) -> None:
        """In the compiled step, in place of `exchange` where no rank has a record: ranks that were equal still are.

        step: int64, this step included.
        """
        if self.settled is not None:
            self.settled.assign(tf.where(tf.equal(self.settled, step - 1), step, self.settled))

    def end_step(self, failed: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Collective, in the compiled step, after applying gradients: return whether all ranks must stop.

        failed: bool, whether this rank has failed, in this step or before. step: int64, this step included.
        """
        return failed  # comes from combined gradients, so ranks agree

    def settle(self, step: int) -> bool:
        """Collective, between steps: make checkpointed variables equal on all ranks; return whether it had to.

        Call it only through TrainState.settle, which checks first whether a rank has failed.
        """
        return False

    def next_sync_step(self, step: int) -> int:
        """Return the first step ≥ `step` at which the run can stop and resume with identical results."""
        return step

    def drift(self) -> Drift | None:
        """Collective: return how far ranks move apart between exchanges; None if they do not, or before the first one.

        The first one of this start: a checkpoint does not say what was measured before it.
        """
        return None


class Local(SyncStrategy):
    """Each rank applies its own gradients; every `average_every_steps` steps the ranks average their variables.

    Local SGD (Stich 2019, arXiv:1805.09767). Weights, floating-point slots and moving averages are averaged; integers
    that the forward pass assigns, and what has the `aggregation` "only_first_replica", become rank 0's. Where ranks
    must be equal in between, such as for an evaluation, they are averaged there too.
    """

    def __init__(
        self,
        group: WorkerGroup,
        model: keras.Model,
        every: int,
        beside: Sequence[Any] = (),
        of_root: Sequence[tf.Variable] = (),
    ) -> None:
        """beside: what is averaged besides the trained weights. of_root: what becomes rank 0's."""
        super().__init__()
        self.group, self.every = group, every
        variables = [as_tf_variable(variable) for variable in (*model.trainable_variables, *beside)]
        self.weights = by_path(model.trainable_variables)
        self.averaged = [variable for variable in variables if variable.dtype.is_floating]
        self.of_root = list(of_root)
        self._is_root = tf.Variable(self.group.is_root, trainable=False)  # not a constant: see ForwardState
        self.settled: tf.Variable = settled_step()
        self.squared_distance = tf.Variable(0.0, trainable=False)
        """float32: squared distance of this rank's variables from the mean, at the last average."""
        zeros = tf.zeros([len(self.weights)], tf.float64)
        self.sums_at_start, self.changes, self.squared_distances = (
            tf.Variable(zeros, trainable=False) for _ in range(3)
        )
        """float64 [weights]: sums when ranks were last equal; their change and squared distance at the last average."""
        self._noted_at = tf.Variable(-1, dtype=tf.int64, trainable=False)
        """The step that `sums_at_start` are of."""
        self.has_averaged = tf.Variable(False, trainable=False)
        self.variables = {"settled_step": self.settled}
        self._average_now = tf.function(self._average, autograph=False)

    def exchange(
        self, combine: CombineList, local_gradients: Sequence[Any], variables: Sequence[Any], step: tf.Tensor
    ) -> Exchanged:
        # Ranks diverge from here on; another optimizer of the step may have been applied already.
        is_first = tf.logical_and(tf.equal(self.settled, step), tf.not_equal(self._noted_at, step))
        tf.cond(is_first, lambda: self._note_start(step), lambda: None)
        rows_once = [add_up_rows(part) if isinstance(part, tf.IndexedSlices) else part for part in local_gradients]
        return Exchanged(rows_once, local_gradients)

    def leave_out(self, step: tf.Tensor) -> None:
        tf.cond(tf.equal(self.settled, step - 1), lambda: self._note_start(step), lambda: None)
        super().leave_out(step)

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

    def drift(self) -> Drift | None:
        if not bool(self.has_averaged):  # alike on all ranks, which average at the same steps
            return None
        (mean,) = self.group.average([self.squared_distance.numpy()])
        by_rank = self.group.to_root(np.stack([self.changes.numpy(), self.squared_distances.numpy()])[np.newaxis])
        counts = np.array([max(1, math.prod(weight.shape)) for weight in self.weights.values()])
        changed, apart = by_rank[:, 0] / counts, np.sqrt(by_rank[:, 1] / counts)
        moves = {
            path: {"changed": changed[:, index].tolist(), "apart": apart[:, index].tolist()}
            for index, path in enumerate(self.weights)
            if len(by_rank)
        }
        return Drift(math.sqrt(float(mean)), moves)

    def _note_start(self, step: tf.Tensor) -> None:
        self._noted_at.assign(step)
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
        for index, variable in enumerate(self.of_root):
            sent = variable.dtype if variable.dtype.is_floating else tf.int64
            value = tf.where(self._is_root, tf.cast(variable, sent), tf.zeros(variable.shape, sent))
            variable.assign(tf.cast(self.group.sum_in_step(value, f"local.root.{index}"), variable.dtype))
        self.squared_distance.assign(tf.add_n(squares))
        self.has_averaged.assign(True)
        self.squared_distances.assign(tf.cast(tf.stack(squares[: len(self.weights)]), tf.float64))


class Stale(SyncStrategy):
    """The gradients of a step are combined while the next step computes, and applied one step late.

    The exchange costs no time if it is shorter than a step (pipelined SGD: Li et al. 2018, arXiv:1811.03619). Step 1
    applies zeros; the last gradients of a run are never applied.
    """

    delay = 1

    def __init__(
        self, model: keras.Model, combine: CombineList, *, sparse_as_dense: bool = True, skips: bool = False
    ) -> None:
        """combine: outside of a step. sparse_as_dense: whether sparse gradients may become tables, as they must.

        skips: whether non-finite gradients are skipped when they are due to be applied.
        """
        super().__init__()
        self._combine, self._sparse_as_dense = combine, sparse_as_dense
        trained = model.trainable_variables
        self._index = {id(as_tf_variable(weight)): index for index, weight in enumerate(trained)}
        """By the id of a weight: its place in `pending`."""
        self.pending = [variable_beside(weight, tf.zeros(weight.shape, weight.dtype)) for weight in trained]
        self.settled: tf.Variable = settled_step()
        self._paths = paths = [weight.path for weight in trained]
        self.variables = by_unique_name(
            (f"pending/{path}", variable) for path, variable in zip(paths, self.pending, strict=True)
        )
        self.variables["settled_step"] = self.settled
        self.must_be_finite = [] if skips else self.pending

    def exchange(
        self, combine: CombineList, local_gradients: Sequence[Any], variables: Sequence[Any], step: tf.Tensor
    ) -> Exchanged:
        pairs = [
            (number, self._index[id(as_tf_variable(variable))])
            for number, (gradient, variable) in enumerate(zip(local_gradients, variables, strict=True))
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

    def settle(self, step: int) -> bool:
        if int(self.settled) == step:
            return False
        gradients = [tf.convert_to_tensor(variable) for variable in self.pending]
        for variable, mean in zip(self.pending, self._combine(gradients), strict=True):
            variable.assign(mean)
        self.settled.assign(step)
        return True
