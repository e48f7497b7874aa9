"""DistributedGradientTape and PartialDistributedGradientTape: a tf.GradientTape whose gradients are combined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_train.errors import UserError
from horovod_train.subclass import take_class
from horovod_train.tensorflow.gradients import Arguments, GradientCombiner, Groups, combined_by_tape, variables_of


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
