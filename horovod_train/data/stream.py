"""Batches of a stream: calls the user's function, and cuts one rank's part into as many steps as all ranks take.

The function, (rank, size, epoch, seed, training) → tf.data.Dataset of single records, alone decides which rank gets
which record; its call is named in errors. Steps after the end of a rank's part are padded. How many steps there are is
decided by the ranks together; see training.open_run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_train.config.registry import call, load_function
from horovod_train.config.settings import DataConfig, Spec
from horovod_train.data.batch_source import Batch, BatchSource, StepRange, iterate, prefetch_to
from horovod_train.data.model_inputs import describe_inputs
from horovod_train.data.parsing import reason_of
from horovod_train.data.pipeline import Ranks
from horovod_train.data.random_access.store import describe_error
from horovod_train.errors import ReadFailed, RunError, UserError, unreadable, unreadable_as_told
from horovod_train.keras_seams import is_of_batches

_CHUNK_RECORDS = 1024
"""Most records that go from Python into TensorFlow at the same time."""
_CHUNK_BYTES = 16 << 20
"""Most bytes of them, unless a single step has more."""
WHERE = "data.dataset"
_COUNT_BATCH = 1024
_COMPARED_RECORDS = 64
"""By so many records at most ranks see whether they get the same ones."""


class StreamPipeline(BatchSource):
    """One rank's batches of a stream. Rows after its end repeat the epoch's first record, or are zeros without one."""

    def __init__(
        self,
        stream: Stream,
        batch: int,
        steps_per_epoch: int,
        lengths: Sequence[int] | None,
        prefetch_batches: int | None,
    ) -> None:
        """batch: over all ranks, one or more each. lengths: of each rank in epoch 0, if the steps are made for them."""
        self._stream, self._lengths, self._prefetch = stream, lengths, prefetch_batches
        ranks, self._rows = stream.ranks, rows_by_rank(batch, stream.ranks.size)
        self.batch_size_per_rank = self._rows[ranks.rank]
        self.has_weights = len(stream.elements) == 3
        self.global_batch_size = batch
        self.steps_per_epoch = steps_per_epoch
        self.num_records = steps_per_epoch * self.global_batch_size
        self.content = self.files = ""
        self.class_names, self.features = {}, {}
        self.order_settings = "as many ranks, the same data.dataset, seed {seed} and data.global_batch_size {batch}"
        self.first_rows = ""
        """A digest of the first records that this pipeline has read; "" before that, and if they are all alike."""
        spec = stream.spec
        facts = [spec.name, spec.options, stream.seed, ranks.size, self.global_batch_size, steps_per_epoch]
        self.fingerprint = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
        record_bytes = sum(leaf.shape.num_elements() * leaf.dtype.size for leaf in self._leaves)
        records = min(_CHUNK_RECORDS, _CHUNK_BYTES // record_bytes)
        self.steps_per_chunk = max(1, min(records // max(self._rows), steps_per_epoch))
        self.scaled_spec = self.element_spec
        self.model_inputs = describe_inputs(self.scaled_spec.inputs)

    def count(self, step: int) -> int:
        if self._lengths is None:
            return self.global_batch_size
        by_rank = zip(self._lengths, self._rows, strict=True)
        return sum(min(max(length - step * rows, 0), rows) for length, rows in by_rank)

    def _load(self, ranges: Iterator[StepRange]) -> Iterator[list[np.ndarray | tf.Tensor]]:
        for epoch, epoch_ranges in itertools.groupby(ranges, lambda steps: steps.epoch):
            yield from self._load_epoch(epoch, list(epoch_ranges))

    def _load_epoch(self, epoch: int, ranges: Sequence[StepRange]) -> Iterator[list[np.ndarray | tf.Tensor]]:
        """Yield the chunks of an epoch: leaves, weights, ids, counts, each [steps, …]."""
        rows, first_step = self.batch_size_per_rank, ranges[0].first
        zeros = [tf.zeros([1, *spec.shape], spec.dtype) for spec in self._leaves]

        def leaves_of(block: Any) -> list[tf.Tensor]:
            return [leaf[:0] for leaf in zeros] if block is None else tf.nest.flatten(block)

        with self._stream.explaining(epoch):
            first_record: list[tf.Tensor] = []
            if first_step:  # a dataset of its own: one that shuffles has another order each time that it is iterated
                first_record = leaves_of(next(iterate(self._stream.dataset(epoch).take(1).batch(1)), None))
            records = self._stream.dataset(epoch)
            blocks = iterate(records.skip(first_step * rows).batch(self.steps_per_chunk * rows).prefetch(1))
            for _, first, last in ranges:
                leaves, room = leaves_of(next(blocks, None)), (last - first) * rows
                first_record = first_record or [leaf[:1] for leaf in leaves]
                self.first_rows = self.first_rows or _digest_of_rows(leaves[:-1])
                bad = tf.boolean_mask(leaves[-1], ~(tf.math.is_finite(leaves[-1]) & (leaves[-1] >= 0)))
                if int(tf.size(bad)):
                    name = self._stream.name(epoch)
                    raise UserError(f"{WHERE}: {name}: expected weights of 0 or more; received {float(bad[0]):g}.")
                is_end = self._lengths is not None and last == self.steps_per_epoch
                if is_end and (int(leaves[-1].shape[0]) > room or next(blocks, None) is not None):
                    raise UserError(
                        f"{WHERE}: {self._stream.name(epoch)} gives more records than an epoch has room for: "
                        f"{self.steps_per_epoch} steps, as the ranks gave in epoch 0. Give data.steps_per_epoch."
                    )
                filler = first_record if first_record[-1].shape[0] else zeros
                yield self._pad([leaf[:room] for leaf in leaves], filler, first, last - first)

    def _pad(
        self, leaves: list[tf.Tensor], filler: list[tf.Tensor], first_step: int, steps: int
    ) -> list[np.ndarray | tf.Tensor]:
        """Return a chunk. filler: the leaves of one row, which rows without a record repeat."""
        ranks, rows = self._stream.ranks, self.batch_size_per_rank
        room, num_rows = steps * rows, int(leaves[-1].shape[0])
        full = [
            tf.concat([leaf, tf.repeat(fill, room - num_rows, axis=0)], 0) if num_rows < room else leaf
            for leaf, fill in zip(leaves, filler, strict=True)
        ]
        real = tf.range(room) < num_rows
        positions = tf.range(room, dtype=tf.int64) + first_step * rows
        ids = tf.where(real, positions * ranks.size + ranks.rank, -1)
        full[-1] = tf.where(real, full[-1], 0.0)
        counts = tf.constant([self.count(step) for step in range(first_step, first_step + steps)], tf.int64)
        return [*(tf.reshape(values, [steps, rows, *values.shape[1:]]) for values in (*full, ids)), counts]

    @property
    def _leaves(self) -> list[tf.TensorSpec]:
        return [*tf.nest.flatten(self._stream.elements[:2]), tf.TensorSpec([], tf.float32)]

    @property
    def _specs(self) -> list[tf.TensorSpec]:
        by_row = [*self._leaves, tf.TensorSpec([], tf.int64)]
        rows = [tf.TensorSpec([None, self.batch_size_per_rank, *spec.shape], spec.dtype) for spec in by_row]
        return [*rows, tf.TensorSpec([None], tf.int64)]

    def _dataset(self, data: tf.data.Dataset) -> tf.data.Dataset:
        data = data.map(tf.autograph.experimental.do_not_convert(self._as_batch))
        ahead = -(-(self._prefetch or 1) // self.steps_per_chunk)
        return prefetch_to(data.prefetch(ahead), self._stream.ranks.device)

    def _as_batch(self, *values: tf.Tensor) -> Batch:
        *leaves, weights, ids, count = values
        inputs, targets = tf.nest.pack_sequence_as(self._stream.elements[:2], leaves)
        return Batch(inputs, targets, weights, ids, count)


def rows_by_rank(batch: int, ranks: int) -> list[int]:
    """Return how many records of a full step each rank has; their sum is `batch`."""
    return [(batch + ranks - 1 - rank) // ranks for rank in range(ranks)]


def open_stream(config: DataConfig, ranks: Ranks, *, seed: int, training: bool) -> Stream | None:
    """Call the function for epoch 0; return None if it gives None, as it may with training=False. Raises UserError."""
    assert config.dataset is not None
    stream = Stream(config.dataset, ranks, seed, training)
    return stream if stream.elements else None


class Stream:
    """One rank's part of the user's stream, epoch by epoch."""

    def __init__(self, spec: Spec, ranks: Ranks, seed: int, training: bool) -> None:
        """Call the function for epoch 0. Raises UserError if its records have another form than is required."""
        self.spec, self.ranks, self.seed, self._training = spec, ranks, seed, training
        self._function = load_function(spec.name, WHERE)
        self._first = self._call(0)
        if self._first is None and training:
            raise UserError(f"{WHERE}: {self.name(0)} must return a tf.data.Dataset; received None.")
        self.has_batches = self._first is not None and is_of_batches(self._first)
        """Whether an element seems to be a batch, and so not a record."""
        self.elements = () if self._first is None else _check_elements(self._first, spec.name)
        """The specs of a record: (inputs, targets), and its weight if it has one; () if there are no records."""

    def dataset(self, epoch: int) -> tf.data.Dataset:
        """Return the records of an epoch: (inputs, targets, weight). Raises UserError."""
        data, self._first = (self._first if epoch == 0 else None), None
        data = self._call(epoch) if data is None else data
        if data is None or _check_elements(data, self.spec.name) != self.elements:
            elements = None if data is None else data.element_spec
            raise UserError(f"{WHERE}: {self.name(epoch)} gives {elements}; epoch 0 gave {self.elements}.")
        return data.map(_with_weight, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def count(self) -> int:
        """Return the number of records of epoch 0; reads all of them if the dataset does not know it.

        Raises UserError for a stream that never ends.
        """
        data = self.dataset(0)
        cardinality = int(data.cardinality())
        if cardinality == tf.data.INFINITE_CARDINALITY:
            raise UserError(
                f"{WHERE}: {self.name(0)} never ends. Give data.steps_per_epoch: how many steps an epoch has."
            )
        if cardinality >= 0:
            return cardinality
        with self.explaining(0):
            return int(data.batch(_COUNT_BATCH).reduce(tf.constant(0, tf.int64), _add_rows))

    def name(self, epoch: int) -> str:
        """Return the call as users would write it."""
        arguments = f"rank={self.ranks.rank}, size={self.ranks.size}, epoch={epoch}, training={self._training}"
        return f"{self.spec.name.partition(':')[2]}({arguments})"

    @contextmanager
    def explaining(self, epoch: int) -> Iterator[None]:
        """Raise UserError, or ReadFailed, that names the call, in place of what the user's code raises in the block."""
        try:
            yield
        except (RunError, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, tf.errors.OpError):  # TensorFlow keeps of what Python has raised the text alone
                said = reason_of(error).rstrip(".")
                kind = ReadFailed if isinstance(error, tf.errors.UnavailableError) else unreadable_as_told(said)
            else:
                said, kind = describe_error(error), unreadable(error)
            raise kind(f"{WHERE}: {self.name(epoch)}: {said}.") from error

    def _call(self, epoch: int) -> tf.data.Dataset | None:
        arguments = {"rank": self.ranks.rank, "size": self.ranks.size, "seed": self.seed, "training": self._training}
        with self.explaining(epoch), tf.device("cpu:0"):
            result = call(self._function, self.spec, WHERE, epoch=epoch, **arguments)
        if not isinstance(result, tf.data.Dataset | None):
            raise UserError(
                f"{WHERE}: {self.name(epoch)} must return a tf.data.Dataset; received {type(result).__name__}."
            )
        return result


def _digest_of_rows(leaves: Sequence[tf.Tensor]) -> str:
    """Return a digest of the first rows of some tensors; "" if these are all alike, or none."""
    arrays = [np.asarray(leaf[:_COMPARED_RECORDS]) for leaf in leaves]
    if all((array == array[:1]).all() for array in arrays):
        return ""
    rows = [repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes() for array in arrays]
    return hashlib.sha256(b"".join(rows)).hexdigest()


@tf.autograph.experimental.do_not_convert
def _with_weight(*element: Any) -> tuple[Any, Any, tf.Tensor]:
    inputs, targets, *weight = element
    return inputs, targets, tf.cast(weight[0], tf.float32) if weight else tf.constant(1.0)


@tf.autograph.experimental.do_not_convert
def _add_rows(count: tf.Tensor, element: tuple[Any, ...]) -> tf.Tensor:
    return count + tf.shape(element[-1], tf.int64)[0]


def _check_elements(data: tf.data.Dataset, name: str) -> tuple[Any, ...]:
    """Return the specs of a record. Raises UserError unless it is (inputs, targets) or (inputs, targets, weight)."""
    spec = data.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise UserError(
            f"{WHERE}: {name} must give records (inputs, targets) or (inputs, targets, weight); received {spec}."
        )
    for part, what in zip(spec[:2], ("inputs", "targets"), strict=True):
        leaves = list(part.values()) if isinstance(part, dict) else [part]
        if not leaves or not all(isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined() for leaf in leaves):
            raise UserError(
                f"{WHERE}: {name}: {what} must be a tensor, or tensors by name, of known shapes; received {part}. "
                "Pad what differs in length, and batch nothing: each element is one record."
            )
    if len(spec) == 3 and not (isinstance(spec[2], tf.TensorSpec) and spec[2].shape.rank == 0):
        raise UserError(f"{WHERE}: {name}: the weight of a record must be one number; received {spec[2]}.")
    return spec
