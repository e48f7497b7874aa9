"""DistributedOptimizer: makes a given optimizer average gradients over all ranks inside `apply`.

`apply` is the one public method through which every Keras 3 training path updates weights: `model.fit`, a custom
`train_step`, `LossScaleOptimizer`. Does not broadcast initial values; see keras_callbacks and group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_train.distributed.allreduce import (
    add_up_rows,
    add_up_rows_in_order,
    combine_bf16,
    exchange_name,
    sum_in_order,
)
from horovod_train.errors import UserError

OPS = {"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}


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


def DistributedOptimizer(optimizer: keras.optimizers.Optimizer, **options: Any) -> CombiningOptimizer:
    """Make `optimizer` combine its gradients over all ranks before it does anything else with them.

    options: fields of GradientExchange, as op="sum", compression="bf16"; by default the mean over all ranks.

    Returns the same object: its class becomes a subclass with the same name. Its config, its state and a model saved
    with it are therefore those of the plain optimizer, and load without Horovod. Clipping, weight decay, loss-scale
    checks and gradient accumulation inside the optimizer see combined gradients; with Keras'
    `gradient_accumulation_steps` every micro-step is exchanged.

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
    # Not a copy by from_config: a copy would lose slots already built, and some optimizers cannot be rebuilt from
    # config.
    optimizer.__class__ = _distributed(type(optimizer), GradientExchange(**options))
    return cast(CombiningOptimizer, optimizer)


def _distributed(base: type, combine_one: GradientExchange) -> type:
    """Return a subclass of an optimizer's class, with the same name, that combines gradients before it applies them."""

    class Distributed(base, _Distributed):
        def combine(self, grads: Sequence[Any]) -> list[Any]:
            names = (f"{self.name}.gradient.{index}" for index in range(len(grads)))
            return [None if grad is None else combine_one(grad, name) for grad, name in zip(grads, names, strict=True)]

        def apply_combined(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            super().apply(grads, trainable_variables)

        def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            self.apply_combined(self.combine(grads), trainable_variables)

    Distributed.__name__, Distributed.__qualname__ = base.__name__, base.__qualname__
    Distributed.__module__, Distributed.__doc__ = base.__module__, base.__doc__
    return Distributed


@dataclass(frozen=True)
class GradientExchange:
    """(gradient, name) → the gradient combined over the ranks; same shape, same dtype. See DistributedOptimizer.

    gradient: a dense floating-point tensor or IndexedSlices; of the latter each row comes back once. name: equal on all
    ranks; exchange_name makes it unique among the exchanges under way. Raises UserError for an exchange that Horovod
    cannot do here.
    """

    op: str = "average"
    """"average", "sum" or "adasum" (Maleki et al. 2021; needs MPI and a number of ranks that is a power of two)."""
    compression: str = "none"
    """Format in which dense floating-point gradients are sent: "none", "fp16" or "bf16"."""
    process_set: hvd.ProcessSet | None = None
    """The ranks that combine their gradients; default all."""
    sparse_as_dense: bool = False
    """Exchange IndexedSlices as dense tensors instead of gathering their rows."""
    predivide: float = 1.0
    """With op "average", dense gradients are divided by this before the addition, and the sum by size / predivide.

    Half-precision sums over many ranks then neither overflow nor vanish.
    """
    deterministic: bool = False
    """Add dense gradients in a fixed order, which gives the same bits in each run, over gloo and over MPI.

    Needs one more exchange per gradient. op "adasum" has its own order, rows are in the order of the ranks.
    """

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise UserError(f"DistributedOptimizer: op must be one of {', '.join(OPS)}; received {self.op!r}.")
        if self.compression not in ("none", "fp16", "bf16"):
            raise UserError(
                f"DistributedOptimizer: compression must be none, fp16 or bf16; received {self.compression!r}."
            )
        if self.predivide != 1.0 and (self.op != "average" or self.compression == "bf16"):
            raise UserError("DistributedOptimizer: predivide goes with op average, and not with compression bf16.")
        if self.op == "adasum":
            _check_adasum(self.compression)

    @property
    def ranks(self) -> hvd.ProcessSet:
        return self.process_set or hvd.global_process_set

    def __call__(self, gradient: Any, name: str) -> Any:
        name, ranks = exchange_name(name), self.ranks
        if not isinstance(gradient, tf.IndexedSlices):
            return self._combine_dense(gradient, name)
        if self.sparse_as_dense or self.op == "adasum":
            return self._combine_dense(tf.convert_to_tensor(gradient), name)
        own = add_up_rows(gradient)  # so that no rank sends a row twice
        values = hvd.allgather(own.values, name=f"{name}.values", ignore_name_scope=True, process_set=ranks)
        indices = hvd.allgather(own.indices, name=f"{name}.indices", ignore_name_scope=True, process_set=ranks)
        if self.op == "average":
            values = values / tf.cast(ranks.size(), values.dtype)
        return add_up_rows_in_order(tf.IndexedSlices(values, indices, gradient.dense_shape))

    def _combine_dense(self, gradient: tf.Tensor, name: str) -> tf.Tensor:
        ranks, averages = self.ranks, self.op == "average"
        if self.compression == "bf16" and gradient.dtype in (tf.float32, tf.float64):
            return combine_bf16(gradient, name, ranks, divisor=ranks.size() if averages else 1)
        wire = tf.cast(gradient, tf.float16) if self.compression == "fp16" else gradient
        if self.deterministic and self.op != "adasum":
            after = self.predivide / ranks.size() if averages else 1.0
            combined = sum_in_order(wire / self.predivide, name, ranks) * after
        elif self.predivide == 1.0:
            combined = hvd.allreduce(wire, op=OPS[self.op], name=name, ignore_name_scope=True, process_set=ranks)
        else:
            combined = hvd.allreduce(
                wire,
                op=hvd.Sum,
                name=name,
                ignore_name_scope=True,
                process_set=ranks,
                prescale_factor=1 / self.predivide,
                postscale_factor=self.predivide / ranks.size(),
            )
        return tf.cast(combined, gradient.dtype)


def _check_adasum(compression: str) -> None:
    if not hvd.mpi_enabled():  # nor with NCCL alone: Horovod's Adasum on GPUs reaches the other hosts over MPI
        raise UserError("horovod.op: adasum needs MPI; the ranks of this run meet over gloo. Start it with mpirun.")
    if hvd.size() & (hvd.size() - 1):
        raise UserError(f"horovod.op: adasum needs a power of two of ranks; received {hvd.size()}.")
    if compression == "bf16":
        raise UserError("horovod.compression: bf16 does not go with op: adasum; use none or fp16.")
