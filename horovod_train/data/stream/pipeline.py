"""Cuts one rank's part of a stream into as many steps as all ranks take, and pads the steps after its end.

Knows `rank` and `size` as numbers. How many steps there are is decided by the ranks together; see training.streams.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from horovod_train.data.pipeline.batch import Batch
from horovod_train.data.pipeline.batch_source import BatchSource, StepRange, StepSize
from horovod_train.data.pipeline.feed import prefetch_to
from horovod_train.data.stream.users import WHERE, Stream
from horovod_train.errors import UserError

_CHUNK_RECORDS = 1024
"""Most records that go from Python into TensorFlow at the same time."""
_CHUNK_BYTES = 16 << 20
"""Most bytes of them, unless a single step has more."""


class StreamPipeline(BatchSource):
    """One rank's batches of a stream. Rows after its end repeat the epoch's first record, or are zeros without one."""

    def __init__(
        self,
        stream: Stream,
        rows: int,
        steps_per_epoch: int,
        lengths: Sequence[int] | None,
        prefetch_batches: int | None,
    ) -> None:
        """rows: of a rank's batch. lengths: the records of each rank in epoch 0, if the steps are made for them."""
        self._stream, self._lengths, self._prefetch = stream, lengths, prefetch_batches
        ranks, self.batch_size_per_rank = stream.ranks, rows
        self.has_weights = len(stream.elements) == 3
        self.global_batch_size = self.batch_size_per_rank * ranks.size
        self.steps_per_epoch = steps_per_epoch
        self.num_records = steps_per_epoch * self.global_batch_size
        self.content = self.files = ""
        self.order_settings = "as many ranks, the same data.dataset, seed {seed} and data.global_batch_size {batch}"
        facts = [
            stream.spec.name,
            stream.spec.options,
            stream.seed,
            ranks.size,
            self.global_batch_size,
            steps_per_epoch,
        ]
        self.fingerprint = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
        record_bytes = sum(leaf.shape.num_elements() * leaf.dtype.size for leaf in self._leaves)
        records = min(_CHUNK_RECORDS, _CHUNK_BYTES // record_bytes)
        self.steps_per_chunk = max(1, min(records // self.batch_size_per_rank, steps_per_epoch))
        self.scaled_spec = self.element_spec

    def count(self, step: int) -> int:
        rows = self.batch_size_per_rank
        if self._lengths is None:
            return self.global_batch_size
        return sum(min(max(length - step * rows, 0), rows) for length in self._lengths)

    def size_of(self, step: int) -> StepSize:
        return StepSize(None, False)

    def scaled(self, batch: Batch) -> Batch:
        return batch

    @property
    def skipped(self) -> int:
        return 0

    def _load(self, ranges: Iterator[StepRange]) -> Iterator[list[np.ndarray | tf.Tensor]]:
        for epoch, epoch_ranges in itertools.groupby(ranges, lambda steps: steps.epoch):
            yield from self._load_epoch(epoch, list(epoch_ranges))

    def _load_epoch(self, epoch: int, ranges: Sequence[StepRange]) -> Iterator[list[np.ndarray | tf.Tensor]]:
        """Yield the chunks of an epoch: leaves, weights, ids, counts, each [steps, …]."""
        rows, first_step = self.batch_size_per_rank, ranges[0].first
        with self._stream.explaining(epoch):
            records = self._stream.dataset(epoch)
            filler = self._filler(records) if first_step else None
            blocks = iter(records.skip(first_step * rows).batch(self.steps_per_chunk * rows).prefetch(1))
            for _, first, last in ranges:
                block = next(blocks, None)
                leaves = None if block is None else tf.nest.flatten(block)
                if filler is None:
                    filler = self._zeros() if leaves is None else [leaf[:1] for leaf in leaves]
                num_rows = 0 if leaves is None else int(leaves[-1].shape[0])
                if leaves is not None:
                    self._check_weights(leaves[-1], epoch)
                if self._lengths is not None and last == self.steps_per_epoch:
                    self._check_is_last(num_rows <= (last - first) * rows and next(blocks, None) is None, epoch)
                yield self._pad(leaves, filler, first, last - first)

    def _check_weights(self, weights: tf.Tensor, epoch: int) -> None:
        bad = tf.boolean_mask(weights, ~(tf.math.is_finite(weights) & (weights >= 0)))
        if int(tf.size(bad)):
            raise UserError(
                f"{WHERE}: {self._stream.name(epoch)}: expected weights of 0 or more; received {float(bad[0]):g}."
            )

    def _check_is_last(self, is_last: bool, epoch: int) -> None:
        if not is_last:
            raise UserError(
                f"{WHERE}: {self._stream.name(epoch)} gives more records than an epoch has room for: "
                f"{self.steps_per_epoch} steps, as the ranks gave in epoch 0. Give data.steps_per_epoch."
            )

    def _pad(
        self, leaves: list[tf.Tensor] | None, filler: list[tf.Tensor], first_step: int, steps: int
    ) -> list[np.ndarray | tf.Tensor]:
        ranks, rows = self._stream.ranks, self.batch_size_per_rank
        room = steps * rows
        leaves = [leaf[:0] for leaf in filler] if leaves is None else [leaf[:room] for leaf in leaves]
        num_rows = int(leaves[-1].shape[0])
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

    def _filler(self, records: tf.data.Dataset) -> list[tf.Tensor]:
        """Return the leaves of the epoch's first record, each with one row."""
        first = next(iter(records.take(1).batch(1)), None)
        return self._zeros() if first is None else tf.nest.flatten(first)

    def _zeros(self) -> list[tf.Tensor]:
        return [
            tf.zeros([1, *spec.shape], spec.dtype) if spec.dtype != tf.string else tf.fill([1, *spec.shape], "")
            for spec in self._leaves
        ]

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
