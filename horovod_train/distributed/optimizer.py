"""Makes a given optimizer combine gradients over the ranks inside `apply`, and says how they are combined.

`apply` is the one public method through which every Keras 3 training path updates weights: `model.fit`, a custom
`train_step`, `LossScaleOptimizer`. Does not broadcast initial values; see WorkerGroup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_train.distributed.allreduce import (
    add_up_rows,
    add_up_rows_in_order,
    combine_bf16,
    exchange_name,
    is_alone,
    number_of_ranks,
    over_ranks,
    sum_in_order,
)
from horovod_train.distributed.launch import launcher
from horovod_train.distributed.layer_contents import parts_in
from horovod_train.distributed.objects import HOST
from horovod_train.errors import UserError
from horovod_train.keras_seams import take_class, weights_of

OPS = {"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}
COMPRESSORS = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}

SMALL_BYTES = 1 << 20
"""Dense gradients that have no more bytes in all are exchanged as one tensor; see GradientExchange.combine_each."""

Apply = Callable[[Any, Sequence[Any], Sequence[Any]], None]
"""(optimizer, gradients, their variables): combines the gradients over the ranks and gives them to
`optimizer.apply_combined`."""


def require_tensorflow(owner: str) -> None:
    """Raise UserError if Keras computes with another backend, whose gradients Horovod's ops cannot exchange."""
    if (backend := keras.backend.backend()) != "tensorflow":
        raise UserError(
            f"{owner}: Keras' backend is {backend}, whose gradients would not be exchanged. Set "
            "KERAS_BACKEND=tensorflow before Keras is imported."
        )


class _Distributed:
    """Marks the subclasses that `distribute` makes."""

    name: str


def with_loss_scale(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the LossScaleOptimizer that `compile` would make under mixed_float16; else the optimizer itself.

    `compile` would wrap a distributed optimizer in one that checks on each rank whether *its* gradients are finite;
    ranks with different answers would wait for each other forever. A loop that does not call the `scale_loss` of what
    this returns gets a UserError, because the gradients would be divided by a scale that they do not have.
    """
    is_half = keras.mixed_precision.dtype_policy().name == "mixed_float16"
    is_plain = isinstance(optimizer, keras.optimizers.Optimizer) and not isinstance(
        optimizer, keras.optimizers.LossScaleOptimizer | _Distributed
    )
    if not (is_half and is_plain):
        return optimizer
    scaled = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")  # the name that compile gives
    take_class(optimizer, _scaled_already(type(optimizer)))
    take_class(scaled, _asking_for_scaled_losses(type(scaled)))
    return scaled


def _asking_for_scaled_losses(base: type) -> type:
    """Return a subclass of LossScaleOptimizer that refuses gradients if nothing has asked it to scale a loss."""

    class Asking(base):
        def scale_loss(self, loss: Any) -> Any:
            object.__setattr__(self, "_has_scaled", True)  # not Keras' own, which would track it
            return super().scale_loss(loss)

        def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            if "_has_scaled" not in vars(self):
                raise UserError(
                    "DistributedOptimizer: under mixed_float16 it returns a LossScaleOptimizer, as compile makes one, "
                    "whose gradients must be those of a scaled loss. Differentiate optimizer.scale_loss(loss)."
                )
            super().apply(grads, trainable_variables)

    return Asking


def _scaled_already(base: type) -> type:
    """Return a subclass of an optimizer's class that no second LossScaleOptimizer takes, as `compile` would make."""

    class Scaled(base):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "loss_scale_factor":
                raise UserError(
                    "model.compile: under mixed_float16 DistributedOptimizer returns another optimizer; give compile "
                    "that one: optimizer = hvd.DistributedOptimizer(optimizer)."
                )
            super().__setattr__(name, value)

    return Scaled


def distribute(optimizer: Any, apply: Apply) -> None:
    """Make `optimizer` do `apply` in place of its own `apply`, which becomes its `apply_combined`.

    Its class becomes a subclass with the same name. Its config, its state and a model saved with it are therefore those
    of the plain optimizer, and load without Horovod. Clipping, weight decay, loss-scale checks and gradient
    accumulation inside the optimizer see combined gradients; with Keras' `gradient_accumulation_steps` every micro-step
    is exchanged. A gradient that is None must be None on every rank.

    XLA cannot compile the exchange: in `model.fit` the callback BroadcastGlobalVariablesCallback switches XLA off,
    elsewhere UserError is raised when the step is traced.

    Raises UserError for an optimizer that is already distributed, under another backend of Keras, and under the
    mixed_float16 policy for one that is not a LossScaleOptimizer. Keras would wrap that one in a LossScaleOptimizer
    that checks on each rank whether *its* gradients are finite; ranks with different answers would wait for each other
    forever. Later, to copy or pickle the optimizer raises UserError: the copy would be a plain one.
    """
    require_tensorflow("DistributedOptimizer")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        advice = f" Give keras.optimizers.get({optimizer!r})." if isinstance(optimizer, str) else ""
        kind = type(optimizer).__name__
        raise UserError(f"DistributedOptimizer: expected a Keras 3 optimizer; received {kind}.{advice}")
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
    take_class(optimizer, _distributed(type(optimizer), apply))


def _distributed(base: type, apply_distributed: Apply) -> type:
    """Return a subclass of an optimizer's class that combines gradients before it applies them."""

    apply_count = 0

    class Distributed(base, _Distributed):
        def __setattr__(self, name: str, value: Any) -> None:
            # LossScaleOptimizer and MultiOptimizer do this to an optimizer that they take. The former would skip the
            # steps in which *this* rank's gradients overflow, so ranks would exchange gradients of different steps. The
            # first assignment is that of the optimizer's own constructor, which sets `built` later.
            if name == "loss_scale_factor" and value is None and "built" in vars(self):
                raise UserError(
                    f"{self.name} is distributed, and LossScaleOptimizer and MultiOptimizer take only an optimizer "
                    "that is not. Distribute the outer one: DistributedOptimizer(LossScaleOptimizer(optimizer))."
                )
            super().__setattr__(name, value)

        def apply_combined(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            super().apply(grads, trainable_variables)

        def count_apply(self) -> None:
            """Note that `apply` has been called, for apply_gradients."""
            nonlocal apply_count
            apply_count += 1

        def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            count_before = apply_count
            result = super().apply_gradients(grads_and_vars, *args, **kwargs)
            # One that adds up gradients of its own may call `apply` only at times, outside of a graph.
            gives_to_inner = not tf.executing_eagerly() or any(parts_in(vars(self), keras.optimizers.Optimizer))
            if apply_count == count_before and gives_to_inner:
                raise UserError(
                    f"DistributedOptimizer: apply_gradients of {base.__name__} does not call its apply, in which "
                    "gradients are averaged. Distribute the optimizer inside it, if there is one."
                )
            return result

        def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            self.count_apply()
            # As Keras takes them: any iterables, which are read more than once here.
            gradients = list(grads)
            variables = variables_of(self, gradients) if trainable_variables is None else list(trainable_variables)
            apply_distributed(self, gradients, variables)

        def __reduce__(self) -> Any:
            raise UserError(
                f"{self.name} is distributed, which no copy of it would be. Copy or pickle an optimizer "
                "before it is distributed."
            )

    return Distributed


def variables_of(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Return the variables that `apply` means if it names none. Raises UserError if it cannot mean them."""
    variables = weights_of(optimizer) if optimizer.built else []
    if len(variables) != len(gradients):
        built = f"is built for {len(variables)}" if optimizer.built else "is not built"
        raise UserError(
            f"DistributedOptimizer: apply got {len(gradients)} gradients without variables, and {optimizer.name} "
            f"{built}. Give it the variables: optimizer.apply(grads, model.trainable_variables)."
        )
    return variables


@dataclass(frozen=True)
class GradientExchange:
    """(gradient, name) → the gradient combined over the ranks; same shape, same dtype.

    gradient: a dense floating-point tensor or IndexedSlices; of the latter each row comes back once. name: equal on all
    ranks; exchange_name makes it unique among the exchanges under way. Raises UserError for an exchange that Horovod
    cannot do here.
    """

    op: str = "average"
    """"average", "sum" or "adasum" (Maleki et al. 2021; needs MPI and a number of ranks that is a power of two)."""
    compression: str | type = "none"
    """Format in which dense floating-point gradients are sent: "none", "fp16", "bf16", or a Compressor of Horovod's."""
    ranks: hvd.ProcessSet = hvd.global_process_set
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

    owner: str = "DistributedOptimizer"
    """What messages call it."""

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise UserError(f"{self.owner}: op must be one of {', '.join(OPS)}; received {self.op!r}.")
        if self.compression not in (*COMPRESSORS, "bf16") and not hasattr(self.compression, "decompress"):
            raise UserError(f"{self.owner}: compression must be none, fp16 or bf16; received {self.compression!r}.")
        if self.predivide != 1.0 and (self.op != "average" or self.compression == "bf16"):
            raise UserError(
                f"{self.owner}: gradient_predivide_factor goes with op average, and not with compression bf16; "
                f"received op {self.op} and compression {self.compression}."
            )
        if self.op == "adasum":
            if self.ranks.process_set_id != hvd.global_process_set.process_set_id:
                raise UserError(f"{self.owner}: op adasum is over all ranks; leave process_set out.")
            if not hvd.mpi_enabled():  # nor with NCCL alone: Horovod's Adasum on GPUs reaches the other hosts over MPI
                raise UserError(
                    f"{self.owner}: op adasum needs MPI; the ranks of this run meet over gloo. Start it with mpirun."
                )
            if hvd.size() & (hvd.size() - 1):
                raise UserError(f"{self.owner}: op adasum needs a power of two of ranks; received {hvd.size()}.")
            if self.compression == "bf16":
                raise UserError(f"{self.owner}: compression bf16 does not go with op adasum; use none or fp16.")

    def __call__(self, gradient: Any, name: str) -> Any:
        name, ranks = exchange_name(name), self.ranks
        if not isinstance(gradient, tf.IndexedSlices):
            return self._combine_dense(gradient, name)
        if self.sparse_as_dense or self.op == "adasum":
            return self._combine_dense(tf.convert_to_tensor(gradient), name)
        local_rows = add_up_rows(gradient)  # so that no rank sends a row twice
        if is_alone(ranks):
            return local_rows
        values = hvd.allgather(local_rows.values, name=f"{name}.values", ignore_name_scope=True, process_set=ranks)
        indices = hvd.allgather(local_rows.indices, name=f"{name}.indices", ignore_name_scope=True, process_set=ranks)
        if self.op == "average":
            values = over_ranks(values, ranks)
        return add_up_rows_in_order(tf.IndexedSlices(values, indices, gradient.dense_shape))

    def combine_each(self, gradients: Sequence[Any], name: str) -> list[Any]:
        """Combine each gradient, None where it is None; small dense ones of a dtype as one tensor.

        Any exchange takes one of Horovod's cycles, and tensors that are ready at different moments may take several.
        Small ones gain nothing from an earlier start.
        """
        combined = [None] * len(gradients)
        for dtype, indices in self._small_indices(gradients).items():
            flat = tf.concat([tf.reshape(gradients[index], [-1]) for index in indices], axis=0)
            total = self(flat, f"{name}s.{dtype}")
            parts = tf.split(total, [gradients[index].shape.num_elements() for index in indices])
            for index, part in zip(indices, parts, strict=True):
                combined[index] = tf.reshape(part, gradients[index].shape)
        for index, gradient in enumerate(gradients):
            if gradient is not None and combined[index] is None:
                combined[index] = self(gradient, f"{name}.{index}")
        return combined

    def _small_indices(self, gradients: Sequence[Any]) -> dict[str, list[int]]:
        """Return the indices of the gradients to exchange as one tensor, by dtype."""
        indices: dict[str, list[int]] = {}
        size = 0
        if is_alone(self.ranks):
            return indices
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, tf.Tensor) and gradient.shape.is_fully_defined():
                indices.setdefault(gradient.dtype.name, []).append(index)
                size += gradient.shape.num_elements() * gradient.dtype.size
        # Adasum scales each tensor by its own norm.
        return {} if size > SMALL_BYTES or self.op == "adasum" else indices

    def combine_together(self, gradients: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Combine dense gradients in one exchange, which begins when all of them are ready on all ranks.

        Raises UserError for what does not go with it: op adasum, compression bf16, deterministic.
        """
        if self.op == "adasum" or self.compression == "bf16" or self.deterministic:
            raise UserError(f"{self.owner}: groups do not go with op adasum, compression bf16 or deterministic.")
        packed = [self._compressor.compress(gradient) for gradient in gradients]
        sums = hvd.grouped_allreduce(
            [wire for wire, _ in packed],
            name=exchange_name(name),
            ignore_name_scope=True,
            process_set=self.ranks,
            **self._arithmetic(),
        )
        return [self._compressor.decompress(total, context) for total, (_, context) in zip(sums, packed, strict=True)]

    @property
    def _compressor(self) -> Any:
        return COMPRESSORS[self.compression] if isinstance(self.compression, str) else self.compression

    def _arithmetic(self) -> dict[str, Any]:
        """Return how Horovod's allreduce adds and divides."""
        if self.predivide == 1.0:
            return {"op": OPS[self.op]}
        if launcher.detect().is_elastic:  # only Horovod itself knows the number of ranks of each exchange
            return {"op": hvd.Average, "prescale_factor": 1 / self.predivide, "postscale_factor": self.predivide}
        factors = {"prescale_factor": 1 / self.predivide, "postscale_factor": self.predivide / self.ranks.size()}
        return {"op": hvd.Sum, **factors}

    def _combine_dense(self, gradient: tf.Tensor, name: str) -> tf.Tensor:
        ranks, is_average = self.ranks, self.op == "average"
        if self.compression == "bf16" and gradient.dtype in (tf.float32, tf.float64):
            return combine_bf16(gradient, name, ranks, divisor=number_of_ranks(ranks) if is_average else 1)
        compressor = hvd.Compression.none if self.compression == "bf16" else self._compressor
        wire, context = compressor.compress(gradient)
        if is_alone(ranks):
            return compressor.decompress(wire, context)
        if self.deterministic and self.op != "adasum":
            postscale = self.predivide / ranks.size() if is_average else 1.0
            combined = sum_in_order(wire / self.predivide, name, ranks) * postscale
        else:
            # Of gradients on GPUs with NCCL, Horovod's Adasum takes the mean within a host.
            with tf.device(HOST) if self.op == "adasum" else nullcontext():
                combined = hvd.allreduce(
                    wire, name=name, ignore_name_scope=True, process_set=ranks, **self._arithmetic()
                )
        return compressor.decompress(combined, context)
