"""The compiled steps of a model that has its own: they call its train_step and test_step.

Optimizers exchange and apply inside it; see optimizers. Everything around a step is as in training.step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import keras
import tensorflow as tf

from horovod_train.data.pipeline.batch import Batch
from horovod_train.data.pipeline.chunks import Batches, Cursor, for_each_batch
from horovod_train.distributed.sync_batch_norm import rows_that_count
from horovod_train.distributed.watchdog.phase_variable import BatchCounter
from horovod_train.training.steps.own.logs import Logs
from horovod_train.training.steps.own.optimizers import Optimizers
from horovod_train.training.steps.own.trial import data_of
from horovod_train.training.steps.step import Seeds, Steps


@dataclass(eq=False, repr=False)
class OwnTrainStep(Steps):
    """Updates a TrainState by the model's train_step, with (x, y, sample_weight).

    sample_weight is scaled so that the average over ranks of `mean over rows of value · sample_weight` is the mean over
    the records of all ranks in the step, by their weights if they have any.
    """

    optimizers: Optimizers
    metrics: Logs
    _: KW_ONLY
    size: int
    count_over_ranks: Callable[[Batch], tf.Tensor]
    """Returns the records of all ranks in the step of a batch, or the sum of their weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.optimizers.enter = self.phase_variable.enter

    def train_on(self, batch: Batch) -> tf.Tensor:
        """Run one update. Return whether to continue; the same on all ranks."""
        state = self.state
        self.seeds.set(state.step)
        with tf.control_dependencies([self.phase_variable.enter("exchange", after=batch)]):  # counting may communicate
            count = tf.cast(self.count_over_ranks(batch), tf.float32)
        with tf.control_dependencies([self.phase_variable.enter("compute", after=count)]):
            batch = tf.nest.map_structure(tf.identity, batch)
        rows = batch.weights.shape[0] * self.size
        # The scope must be the same on all ranks: Horovod builds the names of exchanges from it.
        with tf.name_scope("rank"), rows_that_count(batch.real):
            logs = state.model.train_step(data_of(batch, tf.math.divide_no_nan(float(rows), count)))
        self.metrics.add(logs)
        failed = self.optimizers.failed.read_value()
        with tf.control_dependencies([failed]):  # counts a step only after its exchanges
            state.step.assign_add(1)
        with tf.name_scope("update_parameters"):
            state.averages.update(state.step)
        failure = state.failure
        failure.step.assign(tf.where(failed, state.step, failure.step))
        failure.is_cause.assign(tf.where(failed, self.optimizers.is_cause, failure.is_cause))
        return tf.logical_not(failed)


class OwnEvalStep:
    """Evaluates batches by the model's test_step, with (x, y, sample_weight): adds what it returns to `metrics`.

    sample_weight is scaled by one number for the whole evaluation, so that the average over ranks and steps of `mean
    over rows of value · sample_weight` is that over records, and so is a Keras metric that gets sample_weight.
    """

    def __init__(
        self, model: keras.Model, metrics: Logs, seeds: Seeds, scale: float, scaled: Callable[[Batch], Batch]
    ) -> None:
        """scale: the rows of all ranks in all steps, padding included, by the number of records."""
        self.model, self.metrics, self._scale, self.scaled = model, metrics, scale, scaled
        self.counter = BatchCounter()
        self._run = tf.function(self._run_steps, autograph=False)
        self._begin = tf.function(lambda: seeds.set(tf.constant(0, tf.int64)), autograph=False)

    def run(self, batches: Batches, steps: int) -> None:
        """Evaluate the next `steps` batches in one compiled call. Draws the same numbers in each evaluation."""
        if self.metrics.begin():
            self._begin()
        batches.call(self._run, tf.constant(steps, tf.int32))

    def _run_steps(self, cursor: Cursor, steps: tf.Tensor) -> tuple[Cursor, tuple[()]]:
        def one_step(batch: Batch, _: tf.Tensor) -> tuple[()]:
            batch = self.scaled(batch)
            self.metrics.add(self.model.test_step(data_of(batch, tf.constant(self._scale, tf.float32))))
            self.counter.count()
            return ()

        return for_each_batch(cursor, steps, one_step, ())
