"""The compiled steps: gradients, exchange, apply; and forward, loss, metrics. Several steps to a call.

Does not know epochs, hooks or files. What is minimised is in objective, what ranks exchange in synchronization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_train.data.pipeline import Batch
from horovod_train.distributed.watchdog.phase_variable import Place
from horovod_train.training.losses import Loss
from horovod_train.training.metrics import Accumulator
from horovod_train.training.nonfinite import are_finite, present, spoilt_by, taken_back
from horovod_train.training.objective import Objective
from horovod_train.training.state import TrainState
from horovod_train.training.sync import Exchanged

DRAWS_PER_STEP = 1 << 10
"""Room in a dropout seed's counter for the draws of one step; a layer draws once or twice."""

MAX_OVERFLOWS_IN_A_ROW = 50
"""Updates that a loss scale may leave out one after the other: halved 50 times, it is 1e-11 where it began at 2^15."""


class TrainStep:
    """Updates a TrainState from batches and adds up what it saw in `seen`.

    The update is the gradient of the mean loss over exactly the records that all ranks together hold in a step: a
    rank divides its sum by the global count, which the batch carries, so ranks may hold different numbers of records.
    """

    def __init__(
        self,
        state: TrainState,
        objective: Objective,
        seen: Accumulator,
        *,
        rank: int,
        seed: int,
        max_skips_in_a_row: int = 0,
        count_over_ranks: Callable[[Batch], tf.Tensor],
        placement: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """max_skips_in_a_row: updates with a non-finite gradient that are left out before `run` ends; 0: the first.
        A LossScaleOptimizer leaves out MAX_OVERFLOWS_IN_A_ROW at least: they are how it finds its scale.

        count_over_ranks: how many records all ranks hold in the step of a batch.
        placement: the scope in which an update is traced; for a model in stages, see model_parallel.follow_inputs.
        """
        self.count_over_ranks, self.placement = count_over_ranks, placement
        self.state, self.objective, self.seen = state, objective, seen
        self.scales_loss = isinstance(state.optimizer, keras.optimizers.LossScaleOptimizer)
        self.max_skips_in_a_row = max(max_skips_in_a_row, MAX_OVERFLOWS_IN_A_ROW if self.scales_loss else 0)
        self.seed_keys = [_seed_key(seed, rank, index) for index in range(len(state.seeds))]
        self.skipped, self.skipped_in_a_row = (tf.Variable(0, trainable=False) for _ in range(2))
        self.place = Place(state.step)
        self._run = tf.function(self._run_steps, autograph=False)

    def run(self, batches: Iterator[Batch], steps: int) -> tuple[int, bool, np.ndarray]:
        """Trains on the next `steps` batches, in one compiled call; on fewer if gradients are not finite any more.

        Returns the steps done, whether to go on, and the ids of the records used by this rank, int64 [steps, rows].
        """
        done, goes_on, ids = self._run(batches, tf.constant(steps, tf.int32))
        return int(done), bool(goes_on), ids.numpy()[: int(done)]

    def _run_steps(self, batches: Iterator[Batch], steps: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        def has_more(done: tf.Tensor, goes_on: tf.Tensor, _: tf.TensorArray) -> tf.Tensor:
            return tf.logical_and(goes_on, done < steps)

        def one_step(done: tf.Tensor, _: tf.Tensor, ids: tf.TensorArray) -> tuple[tf.Tensor, tf.Tensor, tf.TensorArray]:
            with tf.name_scope("input_data"), tf.control_dependencies([self.place.enter("input")]):
                batch = next(batches)
            with self.placement():
                goes_on = self.train_on(batch)
            return done + 1, goes_on, ids.write(done, batch.ids)

        ids = tf.TensorArray(tf.int64, size=steps, element_shape=[None])
        # One after the other, or two exchanges of one name could be under way.
        done, goes_on, ids = tf.while_loop(has_more, one_step, (0, True, ids), parallel_iterations=1)
        return done, goes_on, ids.stack()

    def train_on(self, batch: Batch) -> tf.Tensor:
        """One update. Returns whether to go on: the same on all ranks."""
        self._set_dropout_seeds()
        with tf.control_dependencies([self.place.enter("exchange", after=batch)]):  # the count may be an exchange too
            batch = batch._replace(count=self.count_over_ranks(batch))
        self.place.enter("compute", after=batch.count)
        # The same scope on all ranks: Horovod takes part of an exchange's name from it.
        with tf.name_scope("rank"), self._without_poison():
            own, shares = self.objective.gradients(batch, self.seen)
            total = shares["loss"] + shares["penalty"]
            losses = (total, self.state.failure.last_loss.read_value())
            self.state.failure.last_loss.assign(total)
            self.state.note_losses(shares)
        with tf.name_scope("exchange"):
            self.place.enter("exchange", after=own)
            exchanged = self.state.synchronization.exchange(spoilt_by(total, own), tf.identity(self.state.step))
        with tf.control_dependencies(present(exchanged.gradients)):  # a step counts once it has been exchanged
            self.state.step.assign_add(1)
        with tf.name_scope("update_parameters"):
            self._apply(exchanged, losses[self.state.synchronization.delay])
            failed = self.state.failure.step > 0
        with tf.name_scope("exchange"):
            return tf.logical_not(self.state.synchronization.end_step(failed, tf.identity(self.state.step)))

    def _apply(self, exchanged: Exchanged, loss: tf.Tensor) -> None:
        """Updates the weights, unless gradients are not finite; notes a failure where that has been so for too long.

        loss: of the step that the gradients are of.
        """
        gradients, variables = exchanged.gradients, self.state.model.trainable_variables
        failure, delay = self.state.failure, self.state.synchronization.delay
        if self.scales_loss:  # leaves out by itself what is not finite, and lowers its scale
            self.state.optimizer.apply_combined(gradients, variables)

        def update() -> tf.Tensor:
            if not self.scales_loss:
                self.state.optimizer.apply_combined(gradients, variables)
            self.state.averages.update(self.state.step)
            return tf.constant(0)

        def skip() -> tf.Tensor:
            self.skipped.assign_add(1)
            before, step = self.skipped_in_a_row, self.state.step - delay
            is_first = tf.logical_and(before >= self.max_skips_in_a_row, failure.step == 0)
            tf.cond(is_first, lambda: failure.note(step, exchanged.own, loss, before), lambda: None)
            return before + 1

        self.skipped_in_a_row.assign(tf.cond(are_finite(gradients), update, skip))

    def _without_poison(self) -> AbstractContextManager[Any]:
        """In the compiled step: takes back what a pass of this rank leaves in averages and sums that is not finite."""
        without = ExitStack()
        if self.max_skips_in_a_row:  # else the run ends with the first such step, and saves nothing of it
            without.enter_context(taken_back(self.state.statistics, self.state.statistics))
            without.enter_context(taken_back(self.seen.variables, list(self.seen.sums.values())))
        return without

    def _set_dropout_seeds(self) -> None:
        """Masks are drawn from (seed, rank, layer, step): other ranks draw others, and a resumed run the same again."""
        with tf.name_scope("dropout_seeds"):
            for variable, key in zip(self.state.seeds, self.seed_keys, strict=True):
                counter = tf.cast(self.state.step * DRAWS_PER_STEP, tf.uint32)
                variable.assign(tf.cast(tf.stack([tf.constant(key, tf.uint32), counter]), variable.dtype))


class EvalStep:
    """Adds the loss and metrics of batches to `seen`."""

    def __init__(self, model: keras.Model, loss: Loss, seen: Accumulator) -> None:
        self.model, self.loss, self.seen = model, loss, seen
        self._run = tf.function(self._run_steps, autograph=False)

    def run(self, batches: Iterator[Batch], steps: int) -> None:
        """Evaluates the next `steps` batches, in one compiled call."""
        self._run(batches, tf.constant(steps, tf.int32))

    def _run_steps(self, batches: Iterator[Batch], steps: tf.Tensor) -> None:
        def one_step(done: tf.Tensor) -> list[tf.Tensor]:
            batch = next(batches)
            outputs = self.model(batch.inputs, training=False)
            losses = self.loss.sums(batch.targets, outputs, batch.weights)
            self.seen.add(losses, batch.targets, outputs, batch.weights)
            return [done + 1]

        tf.while_loop(lambda done: done < steps, one_step, [0])


def _seed_key(seed: int, rank: int, index: int) -> int:
    """32 well-mixed bits: the multiply-xorshift finaliser of splitmix64 (Steele et al. 2014)."""
    bits = (seed * 0x9E3779B97F4A7C15 + rank * 0xBF58476D1CE4E5B9 + index * 0x94D049BB133111EB) % 2**64
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
    return (bits ^ (bits >> 31)) % 2**32
