"""Computes the minimised loss and its gradient on one rank: forward, loss, penalties, backward, in parts if set.

Does not exchange, apply or count anything; see step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from horovod_train.config.registry import raised_at
from horovod_train.data.pipeline.batch import Batch
from horovod_train.distributed.group import as_tf_variable
from horovod_train.distributed.optimizer import CombiningOptimizer
from horovod_train.distributed.sync_batch_norm import rows_that_count
from horovod_train.errors import UserError, one_line
from horovod_train.training.parts.losses import Loss, Weighed
from horovod_train.training.parts.metrics import Accumulator
from horovod_train.training.steps.traced import assigned_by, check_draws, check_variables


class TraceResult(NamedTuple):
    """What tracing shows of a model and its loss."""

    has_own_losses: bool
    """Whether layers add losses that depend on the records, as activity_regularizer and add_loss do."""
    has_masks: bool
    """Whether masks leave records, or positions of them, out of the loss."""


def check_fits(
    model: keras.Model, loss: Loss, metrics: Accumulator, batch: Batch, where: str, *, training: bool = False
) -> TraceResult:
    """Trace model, loss and metrics on the shapes of `batch` (of tf.TensorSpec), without computing.

    Raises UserError where the model does not accept the records, and in training for draws and changes of variables
    that a checkpoint would not have.
    """
    results: list[TraceResult] = []

    def forward(records: Batch) -> None:
        with rows_that_count(records.real):
            outputs = model(records.inputs, training=training)
        of_weights = [weight for weight in model.trainable_weights if weight.regularizer is not None]
        losses = loss.weigh(records.targets, outputs, records.weights)
        has_masks = any(of_term.mask is not None for of_term in loss(records.targets, outputs).values())
        results[:] = [TraceResult(len(model.losses) > len(of_weights), has_masks)]
        metrics.add(losses, records.targets, outputs, records.real)

    try:
        function = tf.function(forward, autograph=False).get_concrete_function(batch)
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        shapes = tf.nest.map_structure(lambda spec: f"{spec.dtype.name}{spec.shape}", (batch.inputs, batch.targets))
        reason = one_line(error)[-400:] + raised_at(error)
        raise UserError(f"{where}: model, loss and metrics do not fit records of {shapes}: {reason}") from error
    if training:
        check_draws(function, "the model", "model.name")
        known = [*model.variables, *metrics.variables]
        check_variables(assigned_by(function), known, "the model changes", "model.name")
    return results[0]


class PassResult(NamedTuple):
    """Result of a forward and a backward pass over some rows."""

    gradients: list[Any]
    """One for each trainable variable: a tensor, IndexedSlices, or None if it has no part in the loss."""
    outputs: Any
    losses: Weighed
    """Of this rank's records, penalties left out."""
    penalty: tf.Tensor
    """float32: what regularisation adds to the mean loss."""


@dataclass(eq=False, repr=False)
class Objective:
    """The mean loss over the records of all ranks, by their weights if they have any, plus penalties.

    Those are what layers add, and l2 · ½ Σ‖W‖² over matrices W: trainable variables with two or more dimensions, so
    biases and scales are excluded; ½‖W‖² is tf.nn.l2_loss. A rank's gradient is that of `size` times its part of the
    mean, so that the average over ranks is the gradient.
    """

    model: keras.Model
    optimizer: CombiningOptimizer
    """Scales the loss if the precision needs it."""
    loss: Loss
    size: int
    accumulate_steps: int = 1
    l2: float = 0.0
    has_masks: bool = False
    jit_compile: bool = False
    """Whether to compile the passes, and nothing else, with XLA."""

    def __post_init__(self) -> None:
        self.retrace()

    def retrace(self) -> None:
        """Compile the passes when they run next; see TrainStep.retrace."""
        self._pass = self._forward_backward
        if self.jit_compile:
            self._pass = tf.function(self._forward_backward, autograph=False, jit_compile=True)

    def gradients(self, batch: Batch, metrics: Accumulator) -> tuple[list[Any], dict[str, tf.Tensor]]:
        """In the compiled step: return this rank's gradients, and its parts of the global means times `size` (float32).

        The parts are of each loss and of "penalty", by name. Adds outputs and losses to `metrics`. The records are
        processed in `accumulate_steps` parts, to bound memory.
        """
        if self.accumulate_steps == 1:
            result = self._pass(batch)
            _note(metrics, batch, result)
            return result.gradients, self._scaled_losses(result.losses.sums, result.penalty, batch)

        def part(index: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
            length = value.shape[0] // self.accumulate_steps
            return value[index * length : (index + 1) * length]

        def part_of_batch(index: tf.Tensor) -> Batch:
            rows_of_part = tf.nest.map_structure(lambda value: part(index, value), batch._replace(count=()))
            return rows_of_part._replace(count=batch.count)

        def one_part(
            index: tf.Tensor, sums: list[Any], losses: dict[str, tf.Tensor], penalty: tf.Tensor
        ) -> tuple[Any, ...]:
            part_batch = part_of_batch(index)
            result = self._pass(part_batch)
            _note(metrics, part_batch, result)
            added = [_add_gradient(*pair, index) for pair in zip(sums, result.gradients, strict=True)]
            losses = {name: losses[name] + value for name, value in result.losses.sums.items()}
            return index + 1, added, losses, penalty + result.penalty

        kinds = self._kinds_of_gradients(part_of_batch(0))
        zeros = [_zero_total(kind, self.accumulate_steps) for kind in kinds]
        _, sums, losses, penalty = tf.while_loop(
            lambda index, *_: index < self.accumulate_steps,
            one_part,
            (0, zeros, dict.fromkeys(self.loss.terms, tf.constant(0.0)), tf.constant(0.0)),
            parallel_iterations=1,  # a forward pass may communicate too
        )
        totals = [_finish_total(*pair) for pair in zip(kinds, sums, strict=True)]
        return totals, self._scaled_losses(losses, penalty / self.accumulate_steps, batch)

    def total_weights(self, batch: Batch) -> tf.Tensor:
        """In a tf.function: return Σ weight over this rank's batch for each term of the loss, float32 [terms]."""
        if not self.has_masks:
            return self.loss.total_weights(batch.targets, batch.weights)
        # Only the masks of these outputs are used: TensorFlow leaves out the rest of the pass, and with variables as
        # tensors also the loops of recurrent layers, which would be stateful if they read variables.
        values = [(variable, as_tf_variable(variable).read_value()) for variable in self.model.variables]
        with keras.StatelessScope(values):
            outputs = self.model(batch.inputs, training=False)
        return tf.stack(list(self.loss.weigh(batch.targets, outputs, batch.weights).totals.values()))

    def _scaled_losses(self, sums: Mapping[str, tf.Tensor], penalty: tf.Tensor, batch: Batch) -> dict[str, tf.Tensor]:
        """Scale so that the average over ranks is the sum over all ranks, divided by the weights of all ranks."""
        scaled = {name: value * self.size for name, value in sums.items()}
        return self.loss.means(scaled, batch.count) | {"penalty": penalty}

    def _kinds_of_gradients(self, batch: Batch) -> list[_Kind | None]:
        """Return the kind of each gradient of such a batch, in order; None if a variable has no part in the loss."""
        gradients: list[Any] = []

        def trace(records: Batch) -> None:
            gradients[:] = self._forward_backward(records).gradients

        shapes = tf.nest.map_structure(lambda value: tf.TensorSpec(value.shape, value.dtype), batch)
        tf.function(trace, autograph=False).get_concrete_function(shapes)
        return [
            None if gradient is None else _Kind(tuple(variable.shape), gradient.dtype, _indices_dtype(gradient))
            for variable, gradient in zip(self.model.trainable_variables, gradients, strict=True)
        ]

    def _forward_backward(self, batch: Batch) -> PassResult:
        with tf.GradientTape() as tape:
            outputs, losses, penalty, total = self.forward(batch, passes=self.accumulate_steps)
            scaled = self.optimizer.scale_loss(total)
        return PassResult(tape.gradient(scaled, self.model.trainable_variables), outputs, losses, penalty)

    def forward(self, batch: Batch, *, passes: int = 1) -> tuple[Any, Weighed, tf.Tensor, tf.Tensor]:
        """Run a forward pass in training; return outputs, losses, penalty, and what to differentiate.

        The last is a float32 scalar. passes: the number of such passes whose gradients are added up.
        """
        with rows_that_count(batch.real):
            outputs = self.model(batch.inputs, training=True)
        with tf.name_scope("loss_function"):
            losses = self.loss.weigh(batch.targets, outputs, batch.weights)
            penalty = self._penalty()
            loss = self._scaled_losses(losses.sums, penalty, batch)["loss"]
            return outputs, losses, penalty, loss + penalty / passes

    def _penalty(self) -> tf.Tensor:
        penalties = [tf.cast(value, tf.float32) for value in self.model.losses]
        if self.l2:
            matrices = [variable for variable in self.model.trainable_variables if len(variable.shape) > 1]
            penalties += [self.l2 * tf.nn.l2_loss(tf.cast(matrix, tf.float32)) for matrix in matrices]
        return tf.add_n(penalties) if penalties else tf.constant(0.0)


def _note(metrics: Accumulator, batch: Batch, result: PassResult) -> None:
    # The penalty is the same for every record, so that its mean over records is itself.
    records = tf.reduce_sum(batch.real)
    sums = result.losses.sums | {"penalty": result.penalty * records}
    totals = result.losses.totals | {"penalty": records}
    metrics.add(result.losses._replace(sums=sums, totals=totals), batch.targets, result.outputs, batch.real)


class _Kind(NamedTuple):
    """Shape and dtypes of a gradient."""

    shape: tuple[int, ...]
    dtype: tf.DType
    indices_dtype: tf.DType | None
    """None: dense."""


def _indices_dtype(gradient: Any) -> tf.DType | None:
    return gradient.indices.dtype if isinstance(gradient, tf.IndexedSlices) else None


def _zero_total(kind: _Kind | None, passes: int) -> Any:
    """Return a zero total for adding up gradients of one kind over the parts; sparse ones keep all rows."""
    if kind is None:
        return ()
    if kind.indices_dtype is None:
        return tf.zeros(kind.shape, kind.dtype)
    rows, indices = ([None, *kind.shape[1:]], kind.dtype), ([None], kind.indices_dtype)
    return tuple(
        tf.TensorArray(dtype, passes, infer_shape=False, element_shape=shape) for shape, dtype in (rows, indices)
    )


def _add_gradient(total: Any, gradient: Any, index: tf.Tensor) -> Any:
    if gradient is None:
        return ()
    if not isinstance(gradient, tf.IndexedSlices):
        return total + gradient
    rows, indices = total
    return rows.write(index, gradient.values), indices.write(index, gradient.indices)


def _finish_total(kind: _Kind | None, total: Any) -> Any:
    if kind is None or kind.indices_dtype is None:
        return None if kind is None else total
    rows, indices = total
    return tf.IndexedSlices(rows.concat(), indices.concat(), tf.constant(kind.shape, tf.int64))
