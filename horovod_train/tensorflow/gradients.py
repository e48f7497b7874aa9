"""Combine gradients over the ranks as the arguments of Horovod's optimizer and tape say. Both use this.

DistributedGradientTape and PartialDistributedGradientTape: a tf.GradientTape whose gradients are combined.

Compression: the formats in which gradients can be sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from horovod_train.distributed.allreduce import number_of_ranks
from horovod_train.distributed.group import check_have_gradients
from horovod_train.distributed.optimizer import OPS, GradientExchange
from horovod_train.errors import UserError
from horovod_train.subclass import take_class
from horovod_train.tensorflow.agreement import count_exchange
from horovod_train.tensorflow.names import key_of, number_of

Groups = int | list[list[Any]] | None


@dataclass(frozen=True)
class Arguments:
    """What Horovod's DistributedOptimizer and DistributedGradientTape have in common, by Horovod's names."""

    name: str | None = None
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = hvd.Compression.none
    sparse_as_dense: bool = False
    op: Any = hvd.Average
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: Groups = None
    process_set: hvd.ProcessSet = hvd.global_process_set
    scale_local_gradients: bool = True


class GradientCombiner:
    """(gradients, variables) → the gradients combined over the ranks, those of local variables left as they are.

    owner: what messages call it. Raises UserError for arguments that do not go together or cannot be served here.
    """

    def __init__(self, owner: str, arguments: Arguments) -> None:
        self._owner, self._arguments = owner, arguments
        self.ranks = arguments.process_set
        """The ranks that combine their gradients."""
        if self.ranks.process_set_id is None:
            raise UserError(f"{owner}: Horovod does not know this process set. Give hvd.init(process_sets=[...]) it.")
        if not arguments.gradient_predivide_factor > 0:
            raise UserError(
                f"{owner}: gradient_predivide_factor must be above 0; received {arguments.gradient_predivide_factor}."
            )
        self._exchange = GradientExchange(
            op=self._name_of_op(arguments.op),
            compression="bf16" if arguments.compression is Compression.bf16 else arguments.compression,
            ranks=self.ranks,
            sparse_as_dense=arguments.sparse_as_dense,
            predivide=arguments.gradient_predivide_factor,
        )
        self._groups = arguments.groups if arguments.groups is not None else arguments.num_groups or None
        is_number = isinstance(self._groups, int) and self._groups >= 1
        if self._groups is not None and not is_number and not isinstance(self._groups, list):
            raise UserError(f"{owner}: groups must be at least 1, or lists of variables; received {self._groups!r}.")
        self._local_variables: dict[Any, Any] = {}
        for argument, device in (("device_dense", arguments.device_dense), ("device_sparse", arguments.device_sparse)):
            self._check_device(argument, device)

    def register_local(self, variable: Any) -> None:
        """Leave the gradients of this variable out of the exchange from now on: each rank has its own value of it."""
        self._local_variables[key_of(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        return key_of(variable) in self._local_variables

    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads: Sequence[Any], variables: Sequence[Any] | None) -> list[Any]:
        """Collective among the ranks of the process set. variables: in the order of `grads`; None if not known.

        Raises UserError if local variables or groups of variables cannot be told without `variables`.
        """
        combined, prefix = list(grads), self._exchange_prefix(variables)
        if not self.ranks.included():
            return combined
        if variables is None and (self._local_variables or isinstance(self._groups, list)):
            raise UserError(f"{self._owner}: local variables and groups need apply(grads, trainable_variables).")
        variables = variables or [None] * len(combined)
        local_indices = {i for i, variable in enumerate(variables) if variable is not None and self.is_local(variable)}
        indices = [i for i, grad in enumerate(combined) if grad is not None and i not in local_indices]
        # A tape may also differentiate by tensors, such as inputs, which differ by rank.
        weights = [
            variables[i] for i in indices if variables[i] is not None and not isinstance(variables[i], tf.Tensor)
        ]
        check_have_gradients(weights)
        if weights:
            count_exchange(weights, prefix, self.ranks)
        if self._arguments.scale_local_gradients:
            for i in local_indices:
                combined[i] = _divide(combined[i], number_of_ranks(self.ranks))
        for number, bucket in enumerate(self._split_by_dtype(combined, indices, variables)):
            if len(bucket) == 1:
                combined[bucket[0]] = self._combine(combined[bucket[0]], f"{prefix}.gradient.{bucket[0]}")
                continue
            with tf.device(self._arguments.device_dense):
                exchanged = self._exchange.combine_together([combined[i] for i in bucket], f"{prefix}.group.{number}")
            for i, gradient in zip(bucket, exchanged, strict=True):
                combined[i] = gradient
        return combined

    def _exchange_prefix(self, variables: Sequence[Any] | None) -> str:
        """Return the first part of the names of exchanges: the same on all ranks, and different for each use."""
        prefix, first = self._arguments.name or self._owner, variables[0] if variables else None
        if first is None or isinstance(first, tf.Tensor):
            return prefix
        return f"{prefix}.{number_of(first, self.ranks)}"  # two optimizers of a script may have one name

    def _combine(self, grad: Any, name: str) -> Any:
        is_sparse = isinstance(grad, tf.IndexedSlices) and not self._arguments.sparse_as_dense
        with tf.device(self._arguments.device_sparse if is_sparse else self._arguments.device_dense):
            return self._exchange(grad, name)

    def _split_by_dtype(
        self, grads: Sequence[Any], indices: Sequence[int], variables: Sequence[Any]
    ) -> Iterator[list[int]]:
        """Yield the indices of gradients that are exchanged together: those of one dtype in each group."""
        for group in self._group_indices(grads, indices, variables):
            by_dtype: dict[str, list[int]] = {}
            for i in group:
                by_dtype.setdefault(grads[i].dtype.name, []).append(i)
            yield from by_dtype.values()

    def _group_indices(
        self, grads: Sequence[Any], indices: Sequence[int], variables: Sequence[Any]
    ) -> Iterator[list[int]]:
        """Yield the indices of the dense gradients of each group, and each sparse one alone."""
        dense = [i for i in indices if not isinstance(grads[i], tf.IndexedSlices)]
        yield from ([i] for i in indices if i not in set(dense))
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

    def _name_of_op(self, op: Any) -> str:
        names = {value: name for name, value in OPS.items()}
        if op not in names:
            raise UserError(f"{self._owner}: op must be hvd.Average, hvd.Sum or hvd.Adasum; received {op!r}.")
        return names[op]

    def _check_device(self, argument: str, device: str) -> None:
        if "gpu" in device.lower() and not tf.config.get_visible_devices("GPU"):
            raise UserError(f"{self._owner}: {argument}={device!r}, but this process sees no GPU. Leave it out.")


class CombinedGradients:
    """Existing gradients that tapes have combined, so that an optimizer does not combine them again."""

    def __init__(self) -> None:
        self._combined: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def add(self, grads: Sequence[Any]) -> None:
        self._combined.update({id(grad): grad for grad in grads if grad is not None})

    def contains_all(self, grads: Sequence[Any]) -> bool:
        """Return whether tapes have combined all gradients. One that has been clipped since is a new tensor."""
        gradients = [grad for grad in grads if grad is not None]
        return bool(gradients) and all(self._combined.get(id(grad)) is grad for grad in gradients)


combined_by_tape = CombinedGradients()


def variables_of(layers: Any, owner: str) -> list[Any]:
    """Return the trainable variables of a layer, or of several. Raises UserError for what is not a Keras layer."""
    layers = [layers] if isinstance(layers, keras.Layer) else list(layers or ())
    if wrong := [layer for layer in layers if not isinstance(layer, keras.Layer)]:
        raise UserError(f"{owner}: local_layers must be Keras layers; received {type(wrong[0]).__name__}.")
    if unbuilt := [layer.name for layer in layers if not layer.built]:
        raise UserError(f"{owner}: local layer {unbuilt[0]} has no variables yet. Build it, or call the model once.")
    return [variable for layer in layers for variable in layer.trainable_weights]


def _divide(grad: Any, divisor: Any) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_divide(grad.values, divisor), grad.indices, grad.dense_shape)
    return None if grad is None else grad / tf.cast(divisor, grad.dtype)


class _Distributed:
    """Marks the subclasses that DistributedGradientTape makes."""


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

    Only `gradient` is combined: `jacobian` and `batch_jacobian` stay this rank's. The arguments are those of
    DistributedOptimizer. A gradient that is None must be None on every rank.

    Raises UserError for arguments that do not go together, and for a tape that is distributed already.
    """
    if isinstance(gradtape, _Distributed):
        raise UserError("DistributedGradientTape: this tape is distributed already; wrap it once.")
    arguments = Arguments(
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
    take_class(gradtape, _distributed(type(gradtape), GradientCombiner("DistributedGradientTape", arguments)))
    return gradtape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, *, local_layers: Any = None, **options: Any
) -> tf.GradientTape:
    """As DistributedGradientTape, but leave the variables of some layers out: each rank keeps its own gradients.

    local_layers: a built Keras layer, or several.
    """
    local_variables = variables_of(local_layers, "PartialDistributedGradientTape")
    tape: Any = DistributedGradientTape(gradtape, **options)
    for variable in local_variables:
        tape.register_local_source(variable)
    return gradtape


def _distributed(base: type, combiner: GradientCombiner) -> type:
    class Distributed(base, _Distributed):
        def register_local_source(self, source: Any) -> None:
            """Leave the gradients of this variable out of the exchange."""
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
            combined_by_tape.add(grads)
            return tf.nest.pack_sequence_as(sources, grads)

        def get_local_and_global_gradients(
            self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
        ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
            """Collective: return (source, gradient) of the local sources, and of the others."""
            grads = self.gradient(target, sources, output_gradients, use_generic_names=use_generic_names)
            pairs = list(zip(sources, grads, strict=True))
            local = [pair for pair in pairs if combiner.is_local(pair[0])]
            return local, [pair for pair in pairs if not combiner.is_local(pair[0])]

    return Distributed


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
