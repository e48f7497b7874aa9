"""What each step gets, one rank's part of it, and what training asks of whatever gives it: see pipeline and stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from horovod_train.data.mixture import DataSet

Tensors: TypeAlias = "tf.Tensor | dict[str, tf.Tensor]"


class Batch(NamedTuple):
    """One rank's part of a step. Shapes are static; rows without a record have weight 0 and repeat another record.

    A pipeline gives inputs and targets as they are stored, such as uint8; Pipeline.scaled makes of them what the model
    gets.
    """

    inputs: Tensors
    """One tensor [rows, …], or a dict of them if the schema names several inputs."""
    targets: Tensors
    weights: tf.Tensor
    """float32 [rows]: the record's weight by data.weight, or 1; 0 for padding."""
    ids: tf.Tensor
    """int64 [rows]: the record's number, -1 for padding."""
    count: tf.Tensor
    """int64 scalar: the records of this step over all ranks."""

    @property
    def real(self) -> tf.Tensor:
        """float32 [rows]: 1 for a record, whatever its weight, 0 for padding."""
        return tf.cast(self.ids >= 0, tf.float32)


class BatchSource(ABC):
    """Gives one rank its batches, epoch by epoch, in steps that all ranks take together."""

    num_records: int
    """Over all ranks in an epoch; of a stream, as many as its steps have room for."""
    global_batch_size: int
    steps_per_epoch: int
    batch_size_per_rank: int
    element_spec: Batch
    scaled_spec: Batch
    """Specs of what `scaled` returns."""
    fingerprint: str
    """Equal for two of them if a position in an epoch means the same records, whatever their rank and size."""
    content: str
    """A digest of what the records hold; "" if it is not known."""
    data_sets: Sequence[DataSet] = ()
    """The data sets that the records are from."""
    files: str
    """The parts as identity.pack packs them; "" if there are none."""
    what_orders: str
    """The settings on which the order of the records depends, in words."""

    @abstractmethod
    def batches(self, epoch: int, first_step: int = 0, epochs: int | None = None) -> tf.data.Dataset:
        """Return batches from a step of an epoch on, through `epochs` epochs (including that one) or without end.

        Reading starts immediately. The dataset can be iterated once; call this again for another pass.
        """

    @abstractmethod
    def count(self, step: int) -> int:
        """Return the number of records over all ranks in a step of an epoch, counted from 0."""

    @abstractmethod
    def scaled(self, batch: Batch) -> Batch:
        """Return the batch as the model gets it: cast, scaled and offset.

        Call it in the compiled step, so that fewer bytes are batched and copied to the device, which then scales.
        """

    @property
    @abstractmethod
    def skipped(self) -> int:
        """Different records that this rank has skipped so far; runs a few batches ahead of what was consumed."""

    @abstractmethod
    def explain(self, error: BaseException) -> Exception | None:
        """Return the failure behind an error from iterating, naming the record; None if data did not cause it."""

    def one_pass(self, most: int) -> Iterator[tuple[Iterator[Batch], int]]:
        """Yield (batches, steps) until an epoch is over: each time the caller takes `steps` batches, at most `most`."""
        batches = iter(self.batches(epoch=0, epochs=1))
        for first in range(0, self.steps_per_epoch, most):
            yield batches, min(most, self.steps_per_epoch - first)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise data failures instead of TensorFlow's errors, inside a block that takes the batches."""
        try:
            yield
        except tf.errors.OpError as error:
            raise self.explain(error) or error from error


def pick(tensors: dict[str, tf.Tensor], names: tuple[str, ...]) -> Tensors:
    """Return the named tensors as a model gets them: the only one, or a dict of them."""
    return tensors[names[0]] if len(names) == 1 else {name: tensors[name] for name in names}


def by_name(tensors: Tensors, names: tuple[str, ...]) -> dict[str, tf.Tensor]:
    """Return what pick has made as a dict again."""
    return {names[0]: tensors} if len(names) == 1 else tensors
