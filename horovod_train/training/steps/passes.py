"""Runs the model's `train_step` on the records of one pass, and Keras' own in two pieces where XLA compiles it.

Does not know the other passes of a step; see step.

Cuts the records of this rank out of a batch of fixed size: no row is computed that is not a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from horovod_train.data.pipeline.batch_source import Batch, StepSize
from horovod_train.distributed.group import as_tf_variable
from horovod_train.distributed.sync_batch_norm import rows_that_count
from horovod_train.keras_seams import loss_tracker, mask_of, set_mask
from horovod_train.training.nonfinite import restored_if
from horovod_train.training.steps.optimizers import Update
from horovod_train.training.steps.shares import Shares
from horovod_train.training.steps.trial import Data, noting_loss


class PassResult(NamedTuple):
    """What a pass gives."""

    logs: Mapping[str, Any]
    """What `train_step` returned."""
    loss: tf.Tensor | None
    """float32 scalar: the loss of the model's `compute_loss` times the share; None if the step does not call it."""
    gradients: dict[str, list[Any]]
    """Of a pass that does not apply them: by optimizer, times the share."""

    def add_loss(self, loss: tf.Tensor | None) -> tf.Tensor | None:
        """Return the loss of the passes so far, this one included."""
        return self.loss if loss is None or self.loss is None else loss + self.loss


@dataclass(eq=False, repr=False)
class Passes:
    """The passes of a step, in the compiled step."""

    model: keras.Model
    data_of: Callable[[Batch], Data]
    shares: Shares
    update: Update
    kept_variables: Callable[[], Sequence[tf.Variable]]
    """What a borrowed row does not change: the states of metrics, and what the forward pass assigns if that is not
    combined by shares in each step."""
    _: KW_ONLY
    counts_ahead: bool = False
    """Whether ranks exchange what losses are divided by before the passes: where there are several, and for XLA."""
    jit_compile: bool = False
    """Whether XLA compiles the forward and the backward pass, and nothing else."""

    def __post_init__(self) -> None:
        self.retrace()

    def retrace(self) -> None:
        """Trace the passes anew when they run next; see TrainStep.retrace."""
        self._collect = tf.function(self._collect_in_function, autograph=False)
        self._compiled = tf.function(self._forward_backward, autograph=False, jit_compile=True)

    def apply(self, part: Part, totals: Sequence[tf.Tensor] | None) -> PassResult:
        """Run a pass whose optimizers apply what they are given."""
        self.update.begin_pass()
        with (
            part.without_borrowed(self.kept_variables()),
            self.shares.of_pass(part.share, totals),
            rows_that_count(part.batch.real, self.shares.share),
            self._noting_losses() as losses,
        ):
            logs = self._train_step(self.data_of(part.batch))
        return PassResult(logs, self._scaled(losses, part.share), {})

    def collect(self, part: Part, totals: Sequence[tf.Tensor] | None, *, is_function: bool = True) -> PassResult:
        """Run a pass whose gradients are returned. is_function: trace it once for all passes of its shape."""
        call = self._collect if is_function else self._collect_in_function
        with tf.name_scope("pass"):
            logs, loss, gradients = call(part.batch, part.count, part.share, totals, part.may_be_borrowed)
        return PassResult(logs, loss, gradients)

    def _collect_in_function(
        self,
        batch: Batch,
        count: tf.Tensor,
        share: tf.Tensor | None,
        totals: Sequence[tf.Tensor] | None,
        may_be_borrowed: bool,
    ) -> tuple[dict[str, Any], tf.Tensor | None, dict[str, list[Any]]]:
        with self.update.collecting() as gradients:
            result = self.apply(Part(batch, count, share, may_be_borrowed), totals)
        return dict(result.logs), result.loss, dict(gradients)

    def total_divisors(self, parts: Sequence[Part]) -> list[tf.Tensor] | None:
        """Collective, if `counts_ahead`: return what each loss is divided by over all ranks and passes."""
        if not self.counts_ahead:
            return None
        sums: list[tf.Tensor] | None = None
        for part in parts:
            divisors = [divisor * tf.cast(part.count > 0, tf.float32) for divisor in self.divisors(part.batch)]
            sums = divisors if sums is None else [a + b for a, b in zip(sums, divisors, strict=True)]
        if not sums:
            return None
        return tf.unstack(self.shares.group.sum_in_step(tf.stack(sums), "step.divisors"))

    def divisors(self, batch: Batch) -> list[tf.Tensor]:
        """In a tf.function: return what each loss that is not divided by rows is divided by here, float32 scalars."""
        x, y, weights = keras.utils.unpack_x_y_sample_weight(self.data_of(batch))
        # Only masks and weights are used: TensorFlow leaves out the rest of the pass, and with variables as tensors
        # also the loops of recurrent layers, which would be stateful if they read variables.
        values = [(variable, as_tf_variable(variable).read_value()) for variable in self.model.variables]
        with keras.StatelessScope(values), self.shares.noting_divisors() as noted:
            self.model.compute_loss(x, y, self.model(x, training=False), weights)
        return noted

    def _train_step(self, data: Data) -> Mapping[str, Any]:
        return self._train_step_by_xla(data) if self.jit_compile else self.model.train_step(data)

    def _train_step_by_xla(self, data: Data) -> Mapping[str, Any]:
        """Do what Keras' own `train_step` does. XLA can compile the pass, but neither the exchange nor its wait."""
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        model, totals = self.model, self.shares.totals
        gradients, outputs, masks, loss = self._compiled(x, y, weights, self.shares.share, totals)
        for output, mask in zip(keras.tree.flatten(outputs), masks, strict=True):
            set_mask(output, mask)
        self._note(loss)
        loss_tracker(model).update_state(loss, sample_weight=tf.shape(keras.tree.flatten(x)[0])[0])
        model.optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        return model.compute_metrics(x, y, outputs, sample_weight=weights)

    def _forward_backward(
        self, x: Any, y: Any, weights: Any, share: tf.Tensor | None, totals: Sequence[tf.Tensor] | None
    ) -> tuple[list[Any], Any, list[Any], tf.Tensor]:
        with tf.GradientTape() as tape, self.shares.of_pass(share, totals):
            outputs = self.model(x, training=True)
            with tf.name_scope("loss_function"):
                loss = self.model.compute_loss(x, y, outputs, weights)
            scaled = self.model.optimizer.scale_loss(loss)
        masks = [mask_of(output) for output in keras.tree.flatten(outputs)]
        return tape.gradient(scaled, self.model.trainable_weights), outputs, masks, loss

    @contextmanager
    def _noting_losses(self) -> Iterator[list[tf.Tensor]]:
        """Inside the block, note what `compute_loss` returns, for the list and for `update`."""
        losses: list[tf.Tensor] = []

        def note(loss: tf.Tensor) -> None:
            losses.append(loss)
            self.update.loss = self.shares.scaled(loss)

        self._note = note
        with nullcontext() if self.jit_compile else noting_loss(self.model, note):
            yield losses
        self.update.loss = None

    def _scaled(self, losses: Sequence[tf.Tensor], share: tf.Tensor | None) -> tf.Tensor | None:
        if not losses:
            return None
        loss = tf.cast(losses[-1], tf.float32)
        return loss if share is None else tf.math.multiply_no_nan(loss, share)


class Part(NamedTuple):
    """What one pass of a step computes on."""

    batch: Batch
    """The records; one borrowed row if there are none."""
    count: tf.Tensor
    """float32 scalar: the number of records; 0 if the row is borrowed."""
    share: tf.Tensor | None
    """float32 scalar: N · count / records of all ranks in the step; None: 1."""
    may_be_borrowed: bool

    def identity(self) -> Part:
        """Return the same, computed after the control dependencies at this point."""
        identical = tf.nest.map_structure(tf.identity, (self.batch, self.count))
        return self._replace(batch=identical[0], count=identical[1])

    @contextmanager
    def without_borrowed(self, variables: Sequence[tf.Variable]) -> Iterator[None]:
        """In the compiled step: set variables back after the block if the row is borrowed."""
        if not self.may_be_borrowed:
            yield
            return
        with restored_if(tf.equal(self.count, 0.0), variables):
            yield


def parts_of(batch: Batch, total: tf.Tensor, size: StepSize, passes: int, ranks: int) -> list[Part]:
    """Return what each pass computes on: the records in their order, in `passes` parts that differ by at most one.

    total: the records of all ranks, float32 scalar.
    """
    rows_in_batch = batch.ids.shape[0]
    if size.is_full:
        assert rows_in_batch is not None
        length = rows_in_batch // passes
        share = None if passes == 1 else tf.constant(1.0 / passes)
        return [
            Part(_rows(batch, slice(first, first + length)), tf.constant(float(length)), share, may_be_borrowed=False)
            for first in range(0, rows_in_batch, length)
        ]
    real = tf.where(batch.ids >= 0)[:, 0]
    if size.rows is not None:
        real = tf.ensure_shape(real, [size.rows])
    parts = []
    for number in range(passes if size.rows is None else max(1, min(passes, size.rows))):
        if size.rows is None:
            count = tf.size(real)
            first, last = number * count // passes, (number + 1) * count // passes
            indices = tf.concat([real[first:last], [0]], axis=0)[: tf.maximum(last - first, 1)]
            records = tf.cast(last - first, tf.float32)
        else:
            kept = max(1, min(passes, size.rows))
            first, last = number * size.rows // kept, (number + 1) * size.rows // kept
            indices = real[first:last] if last > first else tf.constant([0], tf.int64)
            records = tf.constant(float(last - first))
        is_whole = ranks == passes == 1 and bool(size.rows)
        share = None if is_whole else tf.math.divide_no_nan(ranks * records, total)
        may_be_borrowed = size.rows is None or size.rows == 0
        parts.append(Part(_gather(batch, indices), records, share, may_be_borrowed))
    return parts


def _rows(batch: Batch, rows: slice) -> Batch:
    """Return some rows; `count` stays that of all ranks."""
    if rows == slice(0, batch.ids.shape[0]):
        return batch
    part: Batch = tf.nest.map_structure(lambda values: values[rows], batch._replace(count=()))
    return part._replace(count=batch.count)


def _gather(batch: Batch, indices: tf.Tensor) -> Batch:
    part: Batch = tf.nest.map_structure(lambda values: tf.gather(values, indices), batch._replace(count=()))
    return part._replace(count=batch.count)
