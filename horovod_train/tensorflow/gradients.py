"""DistributedOptimizer and DistributedGradientTape with Horovod's arguments: gradients combined over the ranks.

Does not exchange a gradient itself; see distributed.optimizer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from horovod_train.distributed.allreduce import in_turn, is_alone, make_outside_graphs, number_of_ranks, with_values
from horovod_train.distributed.group import check_have_gradients, check_sendable, key_of
from horovod_train.distributed.optimizer import (
    OPS,
    Apply,
    GradientExchange,
    distribute,
    variables_of,
    with_loss_scale,
)
from horovod_train.errors import UserError
from horovod_train.keras_seams import method_replaced, take_class
from horovod_train.tensorflow.agreement import count_exchange, number_of

Groups = int | list[list[Any]] | None

log = logging.getLogger(__name__)

_accumulating_optimizers: WeakSet[Any] = WeakSet()
"""Optimizers with backward_passes_per_step above 1."""
_combined_by_tape: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Existing gradients that tapes have combined, by id, so that an optimizer does not combine them again."""


class _Bf16(Compressor):
    """Stands for bfloat16, which Horovod cannot add up: GradientExchange sends and adds it."""

    @staticmethod
    def compress(tensor: Any) -> Any:
        raise UserError(
            "hvd.Compression.bf16 is for gradients: of DistributedOptimizer and DistributedGradientTape. Use fp16 here."
        )


class Compression(hvd.Compression):
    """none, fp16, and bf16: as wide in range as float32, added as float32, and sent as 16 bits."""

    bf16 = _Bf16


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
    process_set: the ranks that combine their gradients; the others apply their own. All ranks call `fit` alike where it
        has the broadcast callback.
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
    exchange = _exchange_by(
        "DistributedOptimizer", op, compression, sparse_as_dense, gradient_predivide_factor, process_set
    )
    combiner = GradientCombiner(exchange, name, device_dense, device_sparse, num_groups, groups, scale_local_gradients)
    optimizer = with_loss_scale(optimizer)
    distribute(optimizer, _applying(combiner))
    take_class(optimizer, _with_local_variables(type(optimizer), combiner))
    if backward_passes_per_step > 1:
        take_class(optimizer, _accumulating(type(optimizer), backward_passes_per_step, average_aggregated_gradients))
        _accumulating_optimizers.add(optimizer)
    return optimizer


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer, name: str | None = None, *, local_layers: Any = None, **options: Any
) -> keras.optimizers.Optimizer:
    """As DistributedOptimizer, but leave the variables of some layers out: each rank trains its own values of them.

    local_layers: a built Keras layer, or several.
    """
    local_variables = _variables_of(local_layers, "PartialDistributedOptimizer")
    wrapped: Any = DistributedOptimizer(optimizer, name, **options)
    for variable in local_variables:
        wrapped.register_local_var(variable)
    return wrapped


def drop_accumulated_gradients() -> None:
    """Drop the gradients that optimizers have accumulated and not applied: ranks that join have none."""
    for optimizer in list(_accumulating_optimizers):
        optimizer.drop_accumulated_gradients()


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Make `gradient` of a tape return gradients combined over all ranks. Returns the same tape.

    Only `gradient` is combined: `jacobian` and `batch_jacobian` stay this rank's. Gradients with respect to inputs are
    combined too, with a warning: take a plain tape for this rank's. The arguments are those of
    DistributedOptimizer. A gradient that is None must be None on every rank.

    Raises UserError for arguments that do not go together, and for a tape that is distributed already.
    """
    if isinstance(gradtape, _DistributedTape):
        raise UserError("DistributedGradientTape: this tape is distributed already; wrap it once.")
    exchange = _exchange_by(
        "DistributedGradientTape", op, compression, sparse_as_dense, gradient_predivide_factor, process_set
    )
    combiner = GradientCombiner(exchange, None, device_dense, device_sparse, num_groups, groups, scale_local_gradients)
    take_class(gradtape, _distributed_tape(type(gradtape), combiner))
    return gradtape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, *, local_layers: Any = None, **options: Any
) -> tf.GradientTape:
    """As DistributedGradientTape, but leave the variables of some layers out: each rank keeps its own gradients.

    local_layers: a built Keras layer, or several.
    """
    local_variables = _variables_of(local_layers, "PartialDistributedGradientTape")
    tape: Any = DistributedGradientTape(gradtape, **options)
    for variable in local_variables:
        tape.register_local_source(variable)
    return gradtape


def _exchange_by(
    owner: str, op: Any, compression: Any, sparse_as_dense: bool, predivide_factor: float, process_set: hvd.ProcessSet
) -> GradientExchange:
    """Return the exchange that Horovod's arguments ask for. owner: what messages call it.

    Raises UserError for arguments that do not go together or cannot be served here.
    """
    if process_set.process_set_id is None:
        raise UserError(f"{owner}: Horovod does not know this process set. Give hvd.init(process_sets=[...]) it.")
    if not predivide_factor > 0:
        raise UserError(f"{owner}: gradient_predivide_factor must be above 0; received {predivide_factor}.")
    names = {value: name for name, value in OPS.items()}
    if op not in names:
        raise UserError(f"{owner}: op must be hvd.Average, hvd.Sum or hvd.Adasum; received {op!r}.")
    return GradientExchange(
        names[op],
        "bf16" if compression is Compression.bf16 else compression,
        process_set,
        sparse_as_dense,
        predivide_factor,
        owner=owner,
    )


@dataclass(eq=False)
class GradientCombiner:
    """(gradients, variables) → the gradients combined over the ranks, those of local variables left as they are.

    exchange: how a gradient is combined, and among which ranks. The other fields are Horovod's arguments, by Horovod's
    names. Raises UserError for arguments that do not go together or cannot be served here.
    """

    exchange: GradientExchange
    name: str | None
    device_dense: str
    device_sparse: str
    num_groups: int
    groups: Groups
    scale_local_gradients: bool

    def __post_init__(self) -> None:
        self.owner, self.process_set = self.exchange.owner, self.exchange.ranks
        self._groups = self.groups if self.groups is not None else self.num_groups or None
        is_number = isinstance(self._groups, int) and self._groups >= 1
        if self._groups is not None and not is_number and not isinstance(self._groups, list):
            raise UserError(
                f"{self.owner}: groups must be at least 1, or lists of variables; received {self._groups!r}."
            )
        self.local_keys: set[Any] = set()
        """By `key_of`: the variables of which each rank has its own value."""
        for argument, device in (("device_dense", self.device_dense), ("device_sparse", self.device_sparse)):
            if "gpu" in device.lower() and not tf.config.get_visible_devices("GPU"):
                raise UserError(f"{self.owner}: {argument}={device!r}, but this process sees no GPU. Leave it out.")

    def register_local(self, variable: Any) -> None:
        """Leave the gradients of this variable out of the exchange from now on: each rank has its own value of it."""
        self.local_keys.add(key_of(variable))

    def is_local(self, variable: Any) -> bool:
        return key_of(variable) in self.local_keys

    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Collective among the ranks of the process set. variables: in the order of `grads`."""
        combined = list(grads)
        if not self.process_set.included():
            return combined
        local_indices = {i for i, variable in enumerate(variables) if self.is_local(variable)}
        shared_indices = [i for i in range(len(combined)) if i not in local_indices]
        places = {i: place for place, i in enumerate(shared_indices)}  # ranks may have different local variables
        indices = [i for i in shared_indices if combined[i] is not None]
        # A tape may also differentiate by tensors, such as inputs, which differ by rank.
        by_inputs = [i for i in indices if isinstance(variables[i], tf.Tensor)]
        of_weights = [i for i in indices if i not in by_inputs]
        weights = [variables[i] for i in of_weights]
        if by_inputs and not is_alone(self.process_set):
            _warn_of_inputs()
        check_have_gradients(weights)
        # Compressed to fp16, also those of other floats are sent.
        if self.exchange.compression in ("bf16", hvd.Compression.none) and not is_alone(self.process_set):
            check_sendable(weights)
        prefix = self.name or self.owner
        if weights:  # two optimizers of a script may have one name
            prefix = f"{prefix}.{number_of(weights[0], self.process_set)}"
            count_exchange(weights, [combined[i] for i in of_weights], prefix, self.process_set)
        if self.scale_local_gradients:
            ranks = number_of_ranks(self.process_set)
            for i in local_indices:
                combined[i] = with_values(combined[i], lambda values: values / tf.cast(ranks, values.dtype))

        def exchange(gradients: dict[int, Any]) -> dict[int, Any]:
            exchanged: dict[int, Any] = {}
            for number, bucket in enumerate(self._split_by_dtype(gradients, variables)):
                if len(bucket) == 1:
                    (i,) = bucket
                    is_sparse = isinstance(gradients[i], tf.IndexedSlices) and not self.exchange.sparse_as_dense
                    with tf.device(self.device_sparse if is_sparse else self.device_dense):
                        exchanged[i] = self.exchange(gradients[i], f"{prefix}.gradient.{places[i]}")
                    continue
                with tf.device(self.device_dense):
                    results = self.exchange.combine_together([gradients[i] for i in bucket], f"{prefix}.group.{number}")
                exchanged.update(zip(bucket, results, strict=True))
            return exchanged

        for i, gradient in in_turn(prefix, {i: combined[i] for i in indices}, exchange, self.process_set).items():
            combined[i] = gradient
        return combined

    def _split_by_dtype(self, grads: Mapping[int, Any], variables: Sequence[Any]) -> Iterator[list[int]]:
        """Yield the indices of gradients that are exchanged together: those of one dtype in each group."""
        for group in self._group_indices(grads, variables):
            by_dtype: dict[str, list[int]] = {}
            for i in group:
                by_dtype.setdefault(grads[i].dtype.name, []).append(i)
            yield from by_dtype.values()

    def _group_indices(self, grads: Mapping[int, Any], variables: Sequence[Any]) -> Iterator[list[int]]:
        """Yield the indices of the dense gradients of each group, and each sparse one alone."""
        dense = [i for i, grad in grads.items() if not isinstance(grad, tf.IndexedSlices)]
        yield from ([i] for i in grads if i not in set(dense))
        if self._groups is None:
            yield from ([i] for i in dense)
        elif isinstance(self._groups, int):
            yield from (part.tolist() for part in np.array_split(dense, self._groups) if part.size)
        else:
            group_of = {key_of(variable): number for number, group in enumerate(self._groups) for variable in group}
            members: dict[int, list[int]] = {}
            for i in dense:
                members.setdefault(group_of.get(key_of(variables[i]), len(self._groups) + i), []).append(i)
            yield from members.values()


@functools.cache
def _warn_of_inputs() -> None:
    """Say on rank 0, the first time, that gradients of inputs are combined."""
    if hvd.rank() == 0:
        log.warning(
            "DistributedGradientTape also combines gradients with respect to inputs over the ranks, which have other "
            "inputs. For this rank's own, as for adversarial examples and gradient penalties, use a plain GradientTape."
        )


def _variables_of(layers: Any, owner: str) -> list[Any]:
    """Return the trainable variables of a layer, or of several. Raises UserError for what is not a Keras layer."""
    layers = [layers] if isinstance(layers, keras.Layer) else list(layers or ())
    if wrong := [layer for layer in layers if not isinstance(layer, keras.Layer)]:
        raise UserError(f"{owner}: local_layers must be Keras layers; received {type(wrong[0]).__name__}.")
    if unbuilt := [layer.name for layer in layers if not layer.built]:
        raise UserError(f"{owner}: local layer {unbuilt[0]} has no variables yet. Build it, or call the model once.")
    return [variable for layer in layers for variable in layer.trainable_weights]


def _applying(combiner: GradientCombiner) -> Apply:
    """Return an Apply that leaves gradients as they are if a tape has combined them, and warns once."""
    has_warned = False

    def apply(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        nonlocal has_warned
        gradients = [grad for grad in grads if grad is not None]
        # One that has been clipped since is a new tensor.
        is_combined = bool(gradients) and all(_combined_by_tape.get(id(grad)) is grad for grad in gradients)
        if is_combined and hvd.rank() == 0 and not has_warned:
            has_warned = True
            log.warning(
                "DistributedOptimizer applies the gradients that DistributedGradientTape has combined as they are. "
                "One of the two is enough."
            )
        optimizer.apply_combined(grads if is_combined else combiner(grads, variables), variables)

    return apply


def _with_local_variables(base: type, combiner: GradientCombiner) -> type:
    def check_norm(optimizer: Any) -> None:
        each = [optimizer, *getattr(optimizer, "optimizers", ())]
        if any(getattr(part, "global_clipnorm", None) is not None for part in each):
            raise UserError(
                "DistributedOptimizer: local variables do not go with global_clipnorm: each rank would clip by another "
                "norm. Use clipnorm."
            )

    class WithLocalVariables(base):
        gradient_combiner = combiner
        """Knows which gradients are combined, and over which ranks."""

        def register_local_var(self, var: Any) -> None:
            """Leave this variable's gradients out of the exchange: each rank has its own value of it."""
            if isinstance(self, keras.optimizers.LossScaleOptimizer):
                raise UserError(
                    "DistributedOptimizer: local variables do not go with LossScaleOptimizer: a rank on which one of "
                    "their gradients overflows would skip the step alone. Use mixed_bfloat16, which needs no scale."
                )
            check_norm(self)
            combiner.register_local(var)

        def build(self, variables: Any) -> None:
            super().build(variables)
            if combiner.local_keys:  # a MultiOptimizer may get its optimizers only here
                check_norm(self)

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
            self.count_apply()  # here, because `apply` of the base is not called in each pass
            grads = list(grads)
            variables = variables_of(self, grads) if trainable_variables is None else list(trainable_variables)
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


class _DistributedTape:
    """Marks the subclasses that DistributedGradientTape makes."""


def _distributed_tape(base: type, combiner: GradientCombiner) -> type:
    class Distributed(base, _DistributedTape):
        def register_local_source(self, source: Any) -> None:
            """Leave the gradients of this variable out of the exchange.

            Clip those of the others apart from it: a common norm would be another one on each rank.
            """
            combiner.register_local(source)

        def gradient(
            self,
            target: Any,
            sources: Any,
            output_gradients: Any = None,
            unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
            use_generic_names: bool = False,
        ) -> Any:
            """Collective: return gradients combined over the ranks, in the structure of `sources`.

            use_generic_names: the names of exchanges never depend on the graph here, so both values are served.
            """
            local_gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)
            flat_sources = tf.nest.flatten(sources)
            grads = combiner(tf.nest.flatten(local_gradients), flat_sources)
            _combined_by_tape.update({id(grad): grad for grad in grads if grad is not None})
            return tf.nest.pack_sequence_as(sources, grads)

        def jacobian(self, *arguments: Any, **options: Any) -> Any:
            """Return this rank's own. TensorFlow's method calls `gradient` for each value of the target."""
            with self._plain_gradient():
                return super().jacobian(*arguments, **options)

        def batch_jacobian(self, *arguments: Any, **options: Any) -> Any:
            """Return this rank's own, as `jacobian` does."""
            with self._plain_gradient():
                return super().batch_jacobian(*arguments, **options)

        def _plain_gradient(self) -> AbstractContextManager[None]:
            """Inside the block, `gradient` is this rank's."""
            plain = super().gradient
            return method_replaced([self], "gradient", lambda *_: plain)

        def get_local_and_global_gradients(
            self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
        ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
            """Collective: return (source, gradient) of the local sources, and of the others."""
            grads = self.gradient(target, sources, output_gradients, use_generic_names=use_generic_names)
            pairs = list(zip(sources, grads, strict=True))
            local = [pair for pair in pairs if combiner.is_local(pair[0])]
            return local, [pair for pair in pairs if not combiner.is_local(pair[0])]

    return Distributed
