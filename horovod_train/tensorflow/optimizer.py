"""DistributedOptimizer and PartialDistributedOptimizer with Horovod's arguments, for Keras 3 optimizers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_train.distributed.optimizer import Combine, distribute, with_loss_scale
from horovod_train.errors import UserError
from horovod_train.subclass import take_class
from horovod_train.tensorflow.gradients import Arguments, GradientCombiner, Groups, combined_by_tape, variables_of
from horovod_train.tensorflow.names import key_of, make_outside_graphs

log = logging.getLogger(__name__)

_accumulating_optimizers: WeakSet[Any] = WeakSet()
"""Optimizers with backward_passes_per_step above 1."""


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    *,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Make a Keras optimizer combine its gradients over all ranks before it uses them. Returns the same optimizer.

    Under the policy mixed_float16 it returns the LossScaleOptimizer that `compile` would make of it. A custom loop then
    differentiates optimizer.scale_loss(loss).

    Its class becomes a subclass with the same name: its config, its state and a model saved with it stay those of the
    plain optimizer. Clipping, weight decay and loss scale see combined gradients.

    name: prefix of the names of exchanges, the same on all ranks; default one made here.
    device_dense, device_sparse: TensorFlow device of the exchange, of dense gradients and of IndexedSlices.
    compression: hvd.Compression.none, .fp16 or .bf16, or a class with compress(tensor) and decompress(tensor, context).
    sparse_as_dense: exchange IndexedSlices as dense tensors.
    backward_passes_per_step: add up the gradients of so many calls of `apply` before they are combined and applied; the
        calls between change nothing. `iterations` counts the updates.
    op: hvd.Average, hvd.Sum or hvd.Adasum (needs MPI and a number of ranks that is a power of two).
    gradient_predivide_factor: with hvd.Average, divide by this before the sum and by size / factor after it.
    average_aggregated_gradients: divide the sum of backward_passes_per_step gradients by their number.
    num_groups, groups: exchange gradients in so many groups, or in groups of these variables, each in one exchange.
    process_set: the ranks that combine their gradients; the others apply their own.
    scale_local_gradients: divide the gradients of local variables (`register_local_var`) by the number of ranks.

    Raises UserError for arguments that do not go together, for use_locking=True (TensorFlow 1), for an optimizer that
    is not Keras 3's or is distributed already.
    """
    if use_locking:
        raise UserError("DistributedOptimizer: use_locking is for optimizers of TensorFlow 1. Leave it out.")
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise UserError(
            "DistributedOptimizer: backward_passes_per_step must be a whole number of at least 1; "
            f"received {backward_passes_per_step!r}."
        )
    arguments = Arguments(
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    combiner = GradientCombiner("DistributedOptimizer", arguments)
    optimizer = with_loss_scale(optimizer)
    distribute(optimizer, _combine_once(combiner))
    take_class(optimizer, _with_local_variables(type(optimizer), combiner))
    if backward_passes_per_step > 1:
        take_class(optimizer, _accumulating(type(optimizer), backward_passes_per_step, average_aggregated_gradients))
        _accumulating_optimizers.add(optimizer)
    return optimizer


def drop_accumulated_gradients() -> None:
    """Drop the gradients that optimizers have accumulated and not applied: ranks that join have none."""
    for optimizer in list(_accumulating_optimizers):
        optimizer.drop_accumulated_gradients()


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer, name: str | None = None, *, local_layers: Any = None, **options: Any
) -> keras.optimizers.Optimizer:
    """As DistributedOptimizer, but leave the variables of some layers out: each rank trains its own values of them.

    local_layers: a built Keras layer, or several.
    """
    local_variables = variables_of(local_layers, "PartialDistributedOptimizer")
    wrapped: Any = DistributedOptimizer(optimizer, name, **options)
    for variable in local_variables:
        wrapped.register_local_var(variable)
    return wrapped


def _combine_once(combiner: GradientCombiner) -> Combine:
    """Return a Combine that leaves gradients as they are if a tape has combined them, and warns once."""
    has_warned = False

    def combine(grads: Sequence[Any], variables: Sequence[Any] | None, name: str) -> list[Any]:
        nonlocal has_warned
        if not combined_by_tape.contains_all(grads):
            return combiner(grads, variables)
        if hvd.rank() == 0 and not has_warned:
            has_warned = True
            log.warning(
                "DistributedOptimizer applies the gradients that DistributedGradientTape has combined as they are. "
                "One of the two is enough."
            )
        return list(grads)

    return combine


def _with_local_variables(base: type, combiner: GradientCombiner) -> type:
    class WithLocalVariables(base):
        @property
        def gradient_combiner(self) -> GradientCombiner:
            """Knows which gradients are combined, and over which ranks."""
            return combiner

        def register_local_var(self, var: Any) -> None:
            """Leave this variable's gradients out of the exchange: each rank has its own value of it."""
            if isinstance(self, keras.optimizers.LossScaleOptimizer):
                raise UserError(
                    "DistributedOptimizer: local variables do not go with LossScaleOptimizer: a rank on which one of "
                    "their gradients overflows would skip the step alone. Use mixed_bfloat16, which needs no scale."
                )
            combiner.register_local(var)

    return WithLocalVariables


def _accumulating(base: type, passes: int, average: bool) -> type:
    """Return a subclass of a distributed optimizer's class that applies the sum of the gradients of several calls."""

    accumulators: dict[Any, tuple[list[tf.Variable], tf.Variable, list[bool]]] = {}

    def accumulators_of(variables: Sequence[Any]) -> tuple[list[tf.Variable], tf.Variable, list[bool]]:
        """Return, for these variables: the sums, the number of calls, and whether each has ever had a gradient.

        Each set of variables has separate ones, because an optimizer may be called for one set and then for another.
        """
        key = tuple(key_of(variable) for variable in variables)
        if key not in accumulators:
            accumulators[key] = make_outside_graphs(lambda: new_accumulators(variables))
        return accumulators[key]

    def new_accumulators(variables: Sequence[Any]) -> tuple[list[tf.Variable], tf.Variable, list[bool]]:
        sums = [tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False) for variable in variables]
        with tf.device("CPU:0"):  # on a GPU the host would wait for the count in every step
            pass_count = tf.Variable(0, dtype=tf.int64, trainable=False)
        return sums, pass_count, [False] * len(sums)

    class Accumulating(base):
        def drop_accumulated_gradients(self) -> None:
            for sums, pass_count, _ in accumulators.values():
                for variable in (*sums, pass_count):
                    variable.assign(tf.zeros_like(variable))

        def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            if trainable_variables is None:
                raise UserError("DistributedOptimizer: backward_passes_per_step needs apply(grads, variables).")
            variables = list(trainable_variables)
            with tf.init_scope():
                if not self.built:
                    self.build(variables)
            sums, pass_count, have_grads = accumulators_of(variables)
            for i, (total, grad) in enumerate(zip(sums, grads, strict=True)):
                have_grads[i] |= grad is not None
                if isinstance(grad, tf.IndexedSlices):
                    total.scatter_add(grad)
                elif grad is not None:
                    total.assign_add(grad)

            def update() -> tf.Tensor:
                divisor = passes if average else 1
                accumulated = [
                    total / divisor if has_grad else None for total, has_grad in zip(sums, have_grads, strict=True)
                ]
                super(Accumulating, self).apply(accumulated, variables)
                for total in sums:
                    total.assign(tf.zeros_like(total))
                return tf.constant(True)

            with tf.device("CPU:0"):
                is_due = tf.equal(pass_count.assign_add(1) % passes, 0)
            tf.cond(is_due, update, lambda: tf.constant(False))

    return Accumulating
