"""The batch that each step gets: one rank's part of it. Does not know where it comes from; see batch_source."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import tensorflow as tf

Tensors: TypeAlias = "tf.Tensor | dict[str, tf.Tensor]"


class Batch(NamedTuple):
    """One rank's part of a step. Shapes are static; rows without a record have weight 0 and repeat another record.

    A pipeline gives inputs and targets as they are stored, such as uint8; Pipeline.scaled converts them for the model.
    """

    inputs: Tensors
    """One tensor [rows, …], or a dict of them if the schema names several inputs."""
    targets: Tensors
    weights: tf.Tensor
    """float32 [rows]: the record's weight by data.weight, or 1; 0 for padding."""
    ids: tf.Tensor
    """int64 [rows]: the record's number, -1 for padding, and less for a skipped record; see source.mark_skipped."""
    count: tf.Tensor
    """int64 scalar: the records of this step over all ranks."""

    @property
    def real(self) -> tf.Tensor:
        """float32 [rows]: 1 for a record, whatever its weight, 0 for padding and skipped records."""
        return tf.cast(self.ids >= 0, tf.float32)


def spec_of_batch(chunks: tf.data.Dataset) -> Batch:
    """Return the specs of the batches in such a dataset; see BatchSource.chunks."""
    return tf.nest.map_structure(lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), chunks.element_spec)


def pick(tensors: dict[str, tf.Tensor], names: tuple[str, ...]) -> Tensors:
    """Return the named tensors as a model gets them: the only one, or a dict of them."""
    return tensors[names[0]] if len(names) == 1 else {name: tensors[name] for name in names}


def tensors_by_name(tensors: Tensors, names: tuple[str, ...]) -> dict[str, tf.Tensor]:
    """Return a result of pick as a dict."""
    return {names[0]: tensors} if len(names) == 1 else tensors
