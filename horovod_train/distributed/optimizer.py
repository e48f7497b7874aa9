"""DistributedOptimizer: makes a given optimizer average gradients over all ranks inside `apply`.

`apply` is the one public method through which every Keras 3 training path updates weights: `model.fit`, a custom
`train_step`, `LossScaleOptimizer`. Does not broadcast initial values; see keras_callbacks and group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_train.config.settings import HorovodConfig
from horovod_train.distributed.allreduce import (
    add_up_rows,
    add_up_rows_in_order,
    combine_bf16,
    exchange_name,
    sum_in_order,
)
from horovod_train.errors import UserError

OPS = {"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}
Exchange = Callable[[tf.Tensor, str], tf.Tensor]


class CombiningOptimizer(Protocol):
    """A Keras optimizer that exchanges gradients; it can also combine them without applying them.

    TrainStep uses that to look at combined gradients before the update. Only the methods that training calls.
    """

    built: bool
    variables: Sequence[Any]
    learning_rate: Any

    def build(self, variables: Sequence[Any]) -> None:
        """Create the slots of all trainable variables."""

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Return the loss to differentiate; another one only if the precision needs it."""

    def combine(self, grads: Sequence[Any]) -> list[Any]:
        """Collective: return the gradients combined over the ranks, for `apply_combined`."""

    def apply_combined(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Update the variables with gradients that have been combined already."""


class _Distributed:
    """Marks the subclasses that DistributedOptimizer makes."""

    name: str


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    exchange: HorovodConfig = HorovodConfig(),  # noqa: B008  frozen
    *,
    process_set: hvd.ProcessSet | None = None,
    deterministic: bool = False,
) -> CombiningOptimizer:
    """Make `optimizer` combine its gradients over all ranks before it does anything else with them.

    Returns the same object: its class becomes a subclass with the same name. Its config, its state and a model saved
    with it are therefore those of the plain optimizer, and load without Horovod. Clipping, weight decay, loss-scale
    checks and gradient accumulation inside the optimizer see combined gradients; with Keras'
    `gradient_accumulation_steps` every micro-step is exchanged.

    exchange: how gradients are combined. Of its settings,
      op "adasum" (Maleki et al. 2021) needs MPI and a number of ranks that is a power of two;
      predivide divides dense gradients before the addition, and the sum by size / predivide, so that half-precision
      sums over many ranks neither overflow nor vanish;
      cycle_time_ms and fusion_threshold_mb have no effect here, but in `start`.
    process_set: the ranks that combine their gradients; default all.
    deterministic: add dense gradients in a fixed order, which gives the same bits in each run, over gloo and over MPI;
      needs one more exchange per gradient. op "adasum" has its own order, rows are in the order of the ranks.

    Each gradient is exchanged separately, as soon as it is computed, so that exchanges overlap with the rest of the
    backward pass. A gradient that is None must be None on every rank. XLA cannot compile the exchange: in `model.fit`
    the callback BroadcastVariables switches XLA off, elsewhere UserError is raised when the step is traced.

    Raises UserError for an unknown op or compression, for an optimizer that is already distributed, and under the
    mixed_float16 policy for an optimizer that is not a LossScaleOptimizer. Keras would wrap that one in a
    LossScaleOptimizer that checks on each rank whether *its* gradients are finite; ranks with different answers would
    wait for each other forever.
    """
    if isinstance(optimizer, _Distributed):
        raise UserError(f"DistributedOptimizer: {optimizer.name} is distributed already; wrap it once.")
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if keras.mixed_precision.dtype_policy().name == "mixed_float16" and not is_scaled:
        raise UserError(
            "DistributedOptimizer: mixed_float16 needs DistributedOptimizer(LossScaleOptimizer(optimizer)); "
            f"received {type(optimizer).__name__}."
        )
    combine_one = build_exchange(
        exchange.op, exchange.compression, process_set, exchange.sparse_as_dense, exchange.predivide, deterministic
    )
    base = type(optimizer)

    class Distributed(base, _Distributed):  # type: ignore[misc, valid-type]
        def combine(self, grads: Sequence[Any]) -> list[Any]:
            """Return the gradients combined over the ranks, for callers that use them before `apply_combined`."""
            return [
                None if grad is None else combine_one(grad, f"{self.name}.gradient.{i}") for i, grad in enumerate(grads)
            ]

        def apply_combined(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            super().apply(grads, trainable_variables)

        def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            self.apply_combined(self.combine(grads), trainable_variables)

    Distributed.__name__, Distributed.__qualname__ = base.__name__, base.__qualname__
    Distributed.__module__, Distributed.__doc__ = base.__module__, base.__doc__
    # Not a copy by from_config: a copy would lose slots already built, and some optimizers cannot be rebuilt from
    # config.
    optimizer.__class__ = Distributed
    return cast(CombiningOptimizer, optimizer)


def build_exchange(
    op: str,
    compression: str,
    process_set: hvd.ProcessSet | None = None,
    sparse_as_dense: bool = False,
    predivide: float = 1.0,
    deterministic: bool = False,
) -> Exchange:
    """Return a function (gradient, name) → the gradient combined over the ranks; same shape, same dtype.

    gradient: a dense floating-point tensor or IndexedSlices; of the latter each row comes back once. name: equal on all
    ranks; exchange_name makes it unique among the exchanges under way. Raises UserError for an exchange that Horovod
    cannot do here.
    """
    _check_exchange(op, compression, predivide)
    ranks = process_set or hvd.global_process_set

    def exchange_dense(gradient: tf.Tensor, name: str) -> tf.Tensor:
        if compression == "bf16" and gradient.dtype in (tf.float32, tf.float64):
            return combine_bf16(gradient, name, ranks, divisor=ranks.size() if op == "average" else 1)
        wire = tf.cast(gradient, tf.float16) if compression == "fp16" else gradient
        if deterministic and op != "adasum":
            after = predivide / ranks.size() if op == "average" else 1.0
            combined = sum_in_order(wire / predivide, name, ranks) * after
        elif predivide == 1.0:
            combined = hvd.allreduce(wire, op=OPS[op], name=name, ignore_name_scope=True, process_set=ranks)
        else:
            combined = hvd.allreduce(
                wire,
                op=hvd.Sum,
                name=name,
                ignore_name_scope=True,
                process_set=ranks,
                prescale_factor=1 / predivide,
                postscale_factor=predivide / ranks.size(),
            )
        return tf.cast(combined, gradient.dtype)

    def exchange(gradient: tf.Tensor, name: str) -> tf.Tensor:
        name = exchange_name(name)
        if not isinstance(gradient, tf.IndexedSlices):
            return exchange_dense(gradient, name)
        if sparse_as_dense or op == "adasum":
            return exchange_dense(tf.convert_to_tensor(gradient), name)
        own = add_up_rows(gradient)  # so that no rank sends a row twice
        values = hvd.allgather(own.values, name=f"{name}.values", ignore_name_scope=True, process_set=ranks)
        indices = hvd.allgather(own.indices, name=f"{name}.indices", ignore_name_scope=True, process_set=ranks)
        if op == "average":
            values = values / tf.cast(ranks.size(), values.dtype)
        return add_up_rows_in_order(tf.IndexedSlices(values, indices, gradient.dense_shape))

    return exchange


def _check_exchange(op: str, compression: str, predivide: float) -> None:
    if op not in OPS:
        raise UserError(f"DistributedOptimizer: op must be one of {', '.join(OPS)}; received {op!r}.")
    if compression not in ("none", "fp16", "bf16"):
        raise UserError(f"DistributedOptimizer: compression must be none, fp16 or bf16; received {compression!r}.")
    if predivide != 1.0 and (op != "average" or compression == "bf16"):
        raise UserError("DistributedOptimizer: predivide goes with op average, and not with compression bf16.")
    if op == "adasum":
        _check_adasum(compression)


def _check_adasum(compression: str) -> None:
    if not hvd.mpi_enabled():  # nor with NCCL alone: Horovod's Adasum on GPUs reaches the other hosts over MPI
        raise UserError("horovod.op: adasum needs MPI; the ranks of this run meet over gloo. Start it with mpirun.")
    if hvd.size() & (hvd.size() - 1):
        raise UserError(f"horovod.op: adasum needs a power of two of ranks; received {hvd.size()}.")
    if compression == "bf16":
        raise UserError("horovod.compression: bf16 does not go with op: adasum; use none or fp16.")
