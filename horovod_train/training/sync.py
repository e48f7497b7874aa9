"""When ranks exchange, and what: gradients at every step, gradients one step late, or weights every few steps.

Each strategy is a class with the same methods. It keeps its state in variables, so that a run can resume. Does not
compute or apply gradients; see step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from horovod_train.config.settings import TrainConfig
from horovod_train.distributed.allreduce import add_up_rows
from horovod_train.distributed.group import WorkerGroup, as_tf_variable
from horovod_train.distributed.optimizer import CombiningOptimizer
from horovod_train.errors import UserError
from horovod_train.models.model_parallel import variable_beside


class Exchanged(NamedTuple):
    """Gradients of a step. Each list has one entry for each trainable variable, or None."""

    gradients: list[Any]
    """Combined gradients, to apply now."""
    own: Sequence[Any]
    """This rank's part of them."""


class Moves(NamedTuple):
    """How far one parameter moved on each rank between two averages. Each list has one entry per rank."""

    changed: list[float]
    """Change of the mean of its elements; 0.0 if unchanged."""
    apart: list[float]
    """Root mean square, over its elements, of own − mean over ranks."""


class EveryStep:
    """Combines gradients before they are applied: ranks have the same weights after every step."""

    delay = 0
    """Steps between computing and applying a gradient."""

    def __init__(self, optimizer: CombiningOptimizer) -> None:
        self.optimizer = optimizer
        self.variables: dict[str, tf.Variable] = {}
        """Variables that a checkpoint needs for this strategy, by name; equal on all ranks after `settle`."""
        self.must_be_finite: list[tf.Variable] = []
        """Those of `variables` that hold numbers not applied yet."""

    def exchange(self, own: Sequence[Any], step: tf.Tensor) -> Exchanged:
        """Collective, in the compiled step: return the gradients to apply now, given this rank's own.

        own: one for each trainable variable, or None; the same ones are None on every rank. step: int64, steps done.
        """
        return Exchanged(list(self.optimizer.combine(own)), own)

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

    def figures(self, group: WorkerGroup) -> dict[str, float]:
        """Collective: return figures about the exchange, for the log."""
        return {}

    def parameters(self, group: WorkerGroup) -> dict[str, Moves]:
        """Collective: return, on root and if ranks diverge between steps, how far each parameter moved, by its path."""
        return {}


class Stale(EveryStep):
    """Combines the gradients of a step while the next step computes, and applies them one step late.

    The exchange costs no time if it is shorter than a step (pipelined SGD: Li et al. 2018, arXiv:1811.03619). Step 1
    applies zeros; the last gradients of a run are never applied.
    """

    delay = 1

    def __init__(
        self,
        model: keras.Model,
        optimizer: CombiningOptimizer,
        *,
        sparse_as_dense: bool = True,
        skips: bool = False,
    ) -> None:
        """sparse_as_dense: whether sparse gradients may become dense tables; only dense gradients can wait a step.

        skips: whether non-finite gradients are skipped when they are due to be applied.
        """
        super().__init__(optimizer)
        self._sparse_as_dense = sparse_as_dense
        self.pending = [
            variable_beside(variable, tf.zeros(variable.shape, variable.dtype))
            for variable in model.trainable_variables
        ]
        self.settled = _settled_step()
        self._paths = paths = [variable.path for variable in model.trainable_variables]
        self.variables = dict(
            by_unique_name((f"pending/{path}", own) for path, own in zip(paths, self.pending, strict=True))
        )
        self.variables["settled_step"] = self.settled
        self.must_be_finite = [] if skips else self.pending

    def exchange(self, own: Sequence[Any], step: tf.Tensor) -> Exchanged:
        present = [index for index, gradient in enumerate(own) if gradient is not None]
        sparse = [index for index in present if isinstance(own[index], tf.IndexedSlices)]
        if sparse and not self._sparse_as_dense:
            raise UserError(
                "horovod.sparse_as_dense: must be true with train.synchronization: stale: the gradient of "
                f"{self._paths[sparse[0]]} waits for a step, and is then exchanged, as a whole table."
            )
        # Nothing here waits for `own`, so that `own` is computed during the exchange.
        before = [tf.convert_to_tensor(self.pending[index]) for index in present]
        late = tf.cond(tf.equal(self.settled, step), lambda: before, lambda: self.optimizer.combine(before))
        combined: list[Any] = [None] * len(own)
        for index, gradient in zip(present, late, strict=True):
            self.pending[index].assign(tf.convert_to_tensor(own[index]))
            combined[index] = gradient
        return Exchanged(combined, before)

    def settle(self, step: int) -> bool:
        if int(self.settled) == step:
            return False
        own = [tf.convert_to_tensor(variable) for variable in self.pending]
        for variable, mean in zip(self.pending, self.optimizer.combine(own), strict=True):
            variable.assign(mean)
        self.settled.assign(step)
        return True


class Local(EveryStep):
    """Each rank applies its own gradients; every `average_every_steps` steps the ranks average their variables.

    Local SGD (Stich 2019, arXiv:1805.09767). Weights, floating-point slots and moving averages are averaged. Where
    ranks must be equal in between, such as for an evaluation, they are averaged there too.
    """

    def __init__(
        self,
        group: WorkerGroup,
        model: keras.Model,
        optimizer: CombiningOptimizer,
        averages: Sequence[tf.Variable],
        average_every_steps: int,
    ) -> None:
        super().__init__(optimizer)
        self.group, self.every = group, average_every_steps
        slots = [variable for variable in optimizer.variables if variable is not optimizer.learning_rate]
        held = [*model.trainable_variables, *slots, *averages]
        self.weights = {weight.path: as_tf_variable(weight) for weight in model.trainable_variables}
        self.held = [as_tf_variable(variable) for variable in held if as_tf_variable(variable).dtype.is_floating]
        self.settled = _settled_step()
        self.apart = tf.Variable(0.0, trainable=False)
        """float32: squared distance of this rank's variables from the mean, at the last average."""
        nothing = tf.zeros([len(self.weights)], tf.float64)
        self.start, self.changed, self.apart_squared = (tf.Variable(nothing, trainable=False) for _ in range(3))
        """float64 [weights]: sums when ranks were last equal; their change and squared distance at the last average."""
        self.has_averaged = tf.Variable(False, trainable=False)
        self.variables = {"settled_step": self.settled}
        self._average_now = tf.function(self._average, autograph=False)

    def exchange(self, own: Sequence[Any], step: tf.Tensor) -> Exchanged:
        # Ranks diverge from here on.
        tf.cond(tf.equal(self.settled, step), self._note_start, lambda: None)
        rows_once = [add_up_rows(part) if isinstance(part, tf.IndexedSlices) else part for part in own]
        return Exchanged(rows_once, own)

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

    def figures(self, group: WorkerGroup) -> dict[str, float]:
        """Collective: return ranks_apart, the root mean square over ranks of ‖own − mean‖ of the last average."""
        (mean,) = group.average([self.apart.numpy()])
        return {"ranks_apart": math.sqrt(float(mean))}

    def parameters(self, group: WorkerGroup) -> dict[str, Moves]:
        if not bool(self.has_averaged):
            return {}
        own = np.stack([self.changed.numpy(), self.apart_squared.numpy()])
        by_rank = group.to_root(own[np.newaxis])
        counts = [max(1, math.prod(weight.shape)) for weight in self.weights.values()]
        return {
            path: Moves((by_rank[:, 0, index] / count).tolist(), np.sqrt(by_rank[:, 1, index] / count).tolist())
            for index, (path, count) in enumerate(zip(self.weights, counts, strict=True))
            if len(by_rank)
        }

    def _note_start(self) -> None:
        self.start.assign(self._sums())

    def _sums(self) -> tf.Tensor:
        return tf.stack([tf.reduce_sum(tf.cast(weight, tf.float64)) for weight in self.weights.values()])

    def _average(self) -> None:
        self.changed.assign(self._sums() - self.start)
        squares = []
        for index, variable in enumerate(self.held):
            mean = self.group.average_in_step(variable, f"local.{index}")
            squares.append(tf.cast(tf.reduce_sum(tf.square(variable - mean)), tf.float32))
            variable.assign(mean)
        self.apart.assign(tf.add_n(squares))
        self.has_averaged.assign(True)
        self.apart_squared.assign(tf.cast(tf.stack(squares[: len(self.weights)]), tf.float64))


def build_synchronization(
    config: TrainConfig,
    group: WorkerGroup,
    model: keras.Model,
    optimizer: CombiningOptimizer,
    averages: Sequence[tf.Variable],
    *,
    sparse_as_dense: bool = True,
) -> EveryStep:
    """Build the strategy that `train.synchronization` names. averages: moving averages of the weights, if any."""
    if config.synchronization == "stale":
        return Stale(model, optimizer, sparse_as_dense=sparse_as_dense, skips=config.non_finite == "skip")
    if config.synchronization == "local":
        assert config.average_every_steps is not None
        return Local(group, model, optimizer, averages, config.average_every_steps)
    return EveryStep(optimizer)


def _settled_step() -> tf.Variable:
    """Create the variable for the step at which ranks were last made equal; the broadcast does it before step 1."""
    return tf.Variable(0, dtype=tf.int64, trainable=False, name="settled_step")


def by_unique_name(named: Iterable[tuple[str, tf.Variable]]) -> Iterator[tuple[str, tf.Variable]]:
    """Append #2, #3, … to repeated names: paths can repeat if a model has two layers of one name."""
    seen: Counter[str] = Counter()
    for name, variable in named:
        seen[name] += 1
        yield (name if seen[name] == 1 else f"{name}#{seen[name]}"), variable
