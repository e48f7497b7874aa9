"""Cuts the records of this rank out of a batch of fixed size: no row is computed that is not a record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import tensorflow as tf

from horovod_train.data.pipeline.batch import Batch
from horovod_train.data.pipeline.batch_source import StepSize
from horovod_train.training.nonfinite import restored_if


class Part(NamedTuple):
    """What one pass of a step computes on."""

    batch: Batch
    """The records; one borrowed row if there are none."""
    count: tf.Tensor
    """float32 scalar: the number of records; 0 if the row is borrowed."""
    share: tf.Tensor | None
    """float32 scalar: N · count / records of all ranks in the step; None: 1."""
    may_be_borrowed: bool

    def identity(self) -> Part:
        """Return the same, computed after the control dependencies at this point."""
        identical = tf.nest.map_structure(tf.identity, (self.batch, self.count))
        return self._replace(batch=identical[0], count=identical[1])

    @contextmanager
    def without_borrowed(self, variables: Sequence[tf.Variable]) -> Iterator[None]:
        """In the compiled step: set variables back after the block if the row is borrowed."""
        if not self.may_be_borrowed:
            yield
            return
        with restored_if(tf.equal(self.count, 0.0), variables):
            yield


def parts_of(batch: Batch, total: tf.Tensor, size: StepSize, passes: int, ranks: int) -> list[Part]:
    """Return what each pass computes on: the records in their order, in `passes` parts that differ by at most one.

    total: the records of all ranks, float32 scalar.
    """
    rows_in_batch = batch.ids.shape[0]
    if size.is_full:
        assert rows_in_batch is not None
        length = rows_in_batch // passes
        share = None if passes == 1 else tf.constant(1.0 / passes)
        return [
            Part(_rows(batch, slice(first, first + length)), tf.constant(float(length)), share, may_be_borrowed=False)
            for first in range(0, rows_in_batch, length)
        ]
    real = tf.where(batch.ids >= 0)[:, 0]
    if size.rows is not None:
        real = tf.ensure_shape(real, [size.rows])
    parts = []
    for number in range(passes if size.rows is None else max(1, min(passes, size.rows))):
        if size.rows is None:
            count = tf.size(real)
            first, last = number * count // passes, (number + 1) * count // passes
            indices = tf.concat([real[first:last], [0]], axis=0)[: tf.maximum(last - first, 1)]
            records = tf.cast(last - first, tf.float32)
        else:
            kept = max(1, min(passes, size.rows))
            first, last = number * size.rows // kept, (number + 1) * size.rows // kept
            indices = real[first:last] if last > first else tf.constant([0], tf.int64)
            records = tf.constant(float(last - first))
        is_whole = ranks == passes == 1 and bool(size.rows)
        share = None if is_whole else tf.math.divide_no_nan(ranks * records, total)
        may_be_borrowed = size.rows is None or size.rows == 0
        parts.append(Part(_gather(batch, indices), records, share, may_be_borrowed))
    return parts


def _rows(batch: Batch, rows: slice) -> Batch:
    """Return some rows; `count` stays that of all ranks."""
    if rows == slice(0, batch.ids.shape[0]):
        return batch
    part: Batch = tf.nest.map_structure(lambda values: values[rows], batch._replace(count=()))
    return part._replace(count=batch.count)


def _gather(batch: Batch, indices: tf.Tensor) -> Batch:
    part: Batch = tf.nest.map_structure(lambda values: tf.gather(values, indices), batch._replace(count=()))
    return part._replace(count=batch.count)
