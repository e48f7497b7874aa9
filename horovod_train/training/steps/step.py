"""The compiled training and evaluation steps; one call runs several steps.

A training step computes gradients, exchanges and applies them. This module does not know epochs, hooks or files. The
minimised function is in objective, the exchange between ranks in sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_train.data.order.counter_rng import mix
from horovod_train.data.pipeline.batch import Batch
from horovod_train.data.pipeline.chunks import Batches, Cursor, for_each_batch
from horovod_train.distributed.watchdog.phase_variable import BatchCounter, PhaseVariable
from horovod_train.training.nonfinite import are_finite, gradient_values, poison_if_nonfinite, restored_if_nonfinite
from horovod_train.training.parts.losses import Loss
from horovod_train.training.parts.metrics import Accumulator
from horovod_train.training.state import TrainState
from horovod_train.training.steps.objective import Objective
from horovod_train.training.sync.strategy import Exchanged

DRAWS_PER_STEP = 1 << 10
"""Counter values reserved per step for the random draws of one layer, which draws once or twice."""

MAX_OVERFLOWS_IN_A_ROW = 50
"""Updates in a row that a loss scale may leave out: halved 50 times, a scale of 2^15 is about 1e-11."""


def _unscaled(batch: Batch) -> Batch:
    return batch


class Seeds:
    """Sets the model's random generators, such as dropout's, by (seed, rank, layer, step).

    Masks differ between ranks, and a resumed run draws the same again.
    """

    def __init__(self, variables: Sequence[tf.Variable], seed: int, rank: int) -> None:
        """variables: the states of the generators, uint32 [2] each."""
        self._variables = variables
        self.keys = [_seed_key(seed, rank, index) for index in range(len(variables))]

    def set(self, step: tf.Tensor) -> None:
        """In the compiled step: set all of them. step: int64 scalar."""
        with tf.name_scope("dropout_seeds"):
            for variable, key in zip(self._variables, self.keys, strict=True):
                counter = tf.cast(step * DRAWS_PER_STEP, tf.uint32)
                variable.assign(tf.cast(tf.stack([tf.constant(key, tf.uint32), counter]), variable.dtype))


def _seed_key(seed: int, rank: int, index: int) -> int:
    """Return 32 well-mixed bits."""
    bits = (seed * 0x9E3779B97F4A7C15 + rank * 0xBF58476D1CE4E5B9 + index * 0x94D049BB133111EB) % 2**64
    return int(mix(np.array([bits], np.uint64))[0]) % 2**32


@dataclass(eq=False, repr=False)
class Steps:
    """Runs training steps on a TrainState, several in one compiled call; `train_on` of a subclass is a step."""

    state: TrainState
    _: KW_ONLY
    rank: int
    seed: int
    scaled: Callable[[Batch], Batch] = _unscaled
    """Casts and scales a batch of the iterator; see Pipeline.scaled."""
    placement: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The scope in which an update is traced; for a model in stages, see model_parallel.follow_inputs."""

    def __post_init__(self) -> None:
        self.seeds = Seeds(self.state.seeds, self.seed, self.rank)
        self.skipped = tf.Variable(0, trainable=False)
        """int32: updates that were left out."""
        self.phase_variable = PhaseVariable(self.state.step)
        self.traces = 0
        self.retrace()

    def retrace(self) -> None:
        """Compile the step when it runs next: for when other variables are trained than before."""
        self._run = tf.function(self._run_steps, autograph=False)
        self.traces += 1

    def run(self, batches: Batches, steps: int) -> tuple[int, bool, np.ndarray]:
        """Train on the next `steps` batches in one compiled call; stop early where gradients are no longer finite.

        Returns the steps done, whether to continue, and the ids of the records used by this rank, int64 [steps, rows].
        """
        continues, ids = batches.call(self._run, tf.constant(steps, tf.int32))
        return len(ids), bool(continues), ids.numpy()

    def _run_steps(self, cursor: Cursor, steps: tf.Tensor) -> tuple[Cursor, tuple[tf.Tensor, tf.Tensor]]:
        def one_step(
            batch: Batch, number: tf.Tensor, _: tf.Tensor, ids: tf.TensorArray
        ) -> tuple[tf.Tensor, tf.TensorArray]:
            with tf.name_scope("input_data"):
                batch = self.scaled(batch)
            with self.placement():
                continues = self.train_on(batch)
            return continues, ids.write(number, batch.ids)

        ids = tf.TensorArray(tf.int64, size=0, dynamic_size=True, element_shape=[None])
        cursor, (continues, ids) = for_each_batch(
            cursor,
            steps,
            one_step,
            (tf.constant(True), ids),
            continues=lambda continues, _: continues,
            waiting=self._waiting,
        )
        return cursor, (continues, ids.stack())

    def _waiting(self) -> AbstractContextManager[Any]:
        return tf.control_dependencies([self.phase_variable.enter("input")])

    def train_on(self, batch: Batch) -> tf.Tensor:
        """Run one update. Return whether to continue; the same on all ranks."""
        raise NotImplementedError


@dataclass(eq=False, repr=False)
class TrainStep(Steps):
    """Updates a TrainState from batches and adds losses and metrics to `metrics`.

    The update is the gradient of the mean loss over exactly the records that all ranks together use in a step, by their
    weights if they have any. Each rank divides its sum by the global count or weight, so ranks may have different
    numbers of records.
    """

    objective: Objective
    metrics: Accumulator
    _: KW_ONLY
    count_over_ranks: Callable[[Batch], tf.Tensor]
    """Returns what the sums of the losses are divided by in the step of a batch: the records of all ranks, or their
    weights for each term of the loss.
    """
    max_skips_in_a_row: int = 0
    """Non-finite updates to skip before `run` ends; 0: end at the first.

    With a LossScaleOptimizer the limit is at least MAX_OVERFLOWS_IN_A_ROW: it finds its scale by skipping.
    """

    def __post_init__(self) -> None:
        self.scales_loss = isinstance(self.state.optimizer, keras.optimizers.LossScaleOptimizer)
        if self.scales_loss:
            self.max_skips_in_a_row = max(self.max_skips_in_a_row, MAX_OVERFLOWS_IN_A_ROW)
        self.skipped_in_a_row = tf.Variable(0, trainable=False)
        super().__post_init__()

    def retrace(self) -> None:
        self.objective.retrace()
        super().retrace()

    def train_on(self, batch: Batch) -> tf.Tensor:
        """Run one update. Return whether to continue; the same on all ranks."""
        self.seeds.set(self.state.step)
        with tf.control_dependencies([self.phase_variable.enter("exchange", after=batch)]):  # counting may communicate
            batch = batch._replace(count=self.count_over_ranks(batch))
        computing = self.phase_variable.enter("compute", after=batch.count)
        with tf.control_dependencies([computing]):
            batch = tf.nest.map_structure(tf.identity, batch)  # what computes must wait until the phase is recorded
        # The scope must be the same on all ranks: Horovod builds the names of exchanges from it.
        with tf.name_scope("rank"), self._without_poison():
            gradients, scaled_losses = self.objective.gradients(batch, self.metrics)
            total = scaled_losses["loss"] + scaled_losses["penalty"]
            losses = (total, self.state.failure.last_loss.read_value())
            self.state.failure.last_loss.assign(total)
            self.state.note_losses(scaled_losses)
        # Not after `waiting`: each gradient is exchanged as soon as it is computed, beside the rest of the pass.
        with tf.name_scope("exchange"), tf.control_dependencies([computing]):
            waiting = self.phase_variable.enter("exchange", after=gradients)
            gradients = poison_if_nonfinite(total, gradients)
            exchanged = self.state.synchronization.exchange(gradients, tf.identity(self.state.step))
        # A step counts only after its exchange.
        with tf.control_dependencies([waiting, *gradient_values(exchanged.gradients)]):
            self.state.step.assign_add(1)
            self.phase_variable.enter("compute")
        with tf.name_scope("update_parameters"):
            self._apply(exchanged, losses[self.state.synchronization.delay])
            failed = self.state.failure.step > 0
        with tf.name_scope("exchange"):
            return tf.logical_not(self.state.synchronization.end_step(failed, tf.identity(self.state.step)))

    def _apply(self, exchanged: Exchanged, loss: tf.Tensor) -> None:
        """Update the weights unless gradients are not finite; note a failure after too many skips in a row.

        loss: of the step in which the gradients were computed.
        """
        gradients, variables = exchanged.gradients, self.state.model.trainable_variables
        failure, delay = self.state.failure, self.state.synchronization.delay
        if self.scales_loss:  # skips non-finite gradients itself and lowers its scale
            self.state.optimizer.apply_combined(gradients, variables)

        def update() -> tf.Tensor:
            if not self.scales_loss:
                self.state.optimizer.apply_combined(gradients, variables)
            self.state.averages.update(self.state.step)
            return tf.constant(0)

        def skip() -> tf.Tensor:
            self.skipped.assign_add(1)
            skips, step = self.skipped_in_a_row, self.state.step - delay
            is_first = tf.logical_and(skips >= self.max_skips_in_a_row, failure.step == 0)
            tf.cond(is_first, lambda: failure.note(step, exchanged.local, loss, skips), lambda: None)
            return skips + 1

        self.skipped_in_a_row.assign(tf.cond(are_finite(gradients), update, skip))

    def _without_poison(self) -> AbstractContextManager[Any]:
        """In the compiled step: undo non-finite values that this rank's pass leaves in averages and sums."""
        contexts = ExitStack()
        if self.max_skips_in_a_row:  # otherwise the run ends at the first such step without saving
            contexts.enter_context(restored_if_nonfinite(self.state.statistics, self.state.finite_statistics))
            contexts.enter_context(restored_if_nonfinite(self.metrics.variables, list(self.metrics.sums.values())))
        return contexts


class EvalStep:
    """Evaluates batches: adds their loss and metrics to `metrics`."""

    def __init__(
        self, model: keras.Model, loss: Loss, metrics: Accumulator, scaled: Callable[[Batch], Batch] = _unscaled
    ) -> None:
        self.model, self.loss, self.metrics, self.scaled = model, loss, metrics, scaled
        self.counter = BatchCounter()
        self._run = tf.function(self._run_steps, autograph=False)

    def run(self, batches: Batches, steps: int) -> None:
        """Evaluate the next `steps` batches in one compiled call."""
        batches.call(self._run, tf.constant(steps, tf.int32))

    def _run_steps(self, cursor: Cursor, steps: tf.Tensor) -> tuple[Cursor, tuple[()]]:
        def one_step(batch: Batch, _: tf.Tensor) -> tuple[()]:
            batch = self.scaled(batch)
            outputs = self.model(batch.inputs, training=False)
            losses = self.loss.weigh(batch.targets, outputs, batch.weights)
            self.metrics.add(losses, batch.targets, outputs, batch.real)
            self.counter.count()
            return ()

        return for_each_batch(cursor, steps, one_step, ())
