"""Batches for one rank as a tf.data pipeline: what the plan says, cast, scaled and cut into steps.

Knows `rank` and `size` as numbers and never talks to other ranks. Python is called once for thousands of records; the
steps are cut in C++. Does not decide where an epoch starts; see loop.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from horovod_train.config import DataConfig
from horovod_train.data.feed import Feed
from horovod_train.data.parse import Parser
from horovod_train.data.plan import Order, Plan
from horovod_train.data.records import Records
from horovod_train.data.schema import Feature
from horovod_train.data.segments import Loader, Span
from horovod_train.errors import UserError

Tensors = tf.Tensor | dict[str, tf.Tensor]


class Batch(NamedTuple):
    """One rank's share of a step. Shapes are static; rows that hold no record weigh 0 and repeat another record."""

    inputs: Tensors
    """One tensor [rows, …], or a dict of them where the schema names several inputs."""
    targets: Tensors
    weights: tf.Tensor
    """float32 [rows]: 1 for a record, 0 for padding."""
    ids: tf.Tensor
    """int64 [rows]: the record's number, -1 for padding."""
    count: tf.Tensor
    """int64 scalar: the records of this step over all ranks."""


class Pipeline:
    """What one rank reads of one split. Made by build_pipeline."""

    def __init__(self, records: Records, plan: Plan, config: DataConfig, rank: int, size: int) -> None:
        self._plan, self._schema, self._config = plan, records.schema, config
        self._parser = Parser(records.schema)
        self._loader = Loader(plan, records.index, self._parser, rank, size, config.on_bad_record == "skip")
        self._failure: Exception | None = None
        self.num_records = plan.num_records
        self.global_batch_size = plan.global_batch_size
        self.global_batch_size = plan.global_batch_size
        self.steps_per_epoch = plan.steps_per_epoch
        self.batch_size_per_rank = plan.rows_per_rank(size)
        self.element_spec: Batch = self._dataset(Feed(iter(()), self._dtypes).queue, 0).element_spec

    def count(self, step: int) -> int:
        """Records over all ranks in a step of an epoch, counted from 0."""
        return self._plan.count(step)

    @property
    def skipped(self) -> int:
        """Records that this rank has left out so far because they could not be used."""
        return len(self._loader.skipped)

    def batches(self, epoch: int, first_step: int = 0, epochs: int | None = None) -> tf.data.Dataset:
        """Batches from a step of an epoch on, through `epochs` epochs (that one included) or without end.

        Reading starts at once. The dataset is good for one pass: ask again for another.
        """
        loader = self._loader
        segments = None if epochs is None else loader.segments(first_step, epochs)
        numbers = itertools.count() if segments is None else range(segments)
        feed = Feed(self._values(loader.span(number, epoch, first_step) for number in numbers), self._dtypes)
        data = self._dataset(feed.queue, segments)
        # The thread must not outlive the dataset, nor wait on a full queue when the interpreter ends.
        weakref.finalize(data, feed.stop)
        feed.start()
        return data

    def explain(self, error: BaseException) -> Exception | None:
        """The failure behind an error that iterating raised, naming the record; None if it is not about the data."""
        return self._failure if isinstance(error, tf.errors.OpError) else None

    # What a segment is while it passes from Python into tf.data: stored values by feature, weights, ids, count; each
    # [steps, rows, …], count [steps].

    @property
    def _dtypes(self) -> list[str]:
        return [*self._parser.dtypes.values(), "float32", "int64", "int64"]

    def _values(self, spans: Iterator[Span]) -> Iterator[list[np.ndarray]]:
        span = next(spans, None)
        while span:
            following = next(spans, None)
            try:
                segment = self._loader.load(span, following)
            except Exception as error:
                self._failure = error
                raise
            rows = (span.last - span.first, self.batch_size_per_rank)
            values = [segment.arrays[name] for name in self._parser.dtypes]
            values += [segment.real.astype(np.float32), segment.ids]
            yield [*(value.reshape(*rows, *value.shape[1:]) for value in values), segment.count]
            span = following

    def _dataset(self, queue: tf.queue.QueueBase, segments: int | None) -> tf.data.Dataset:
        rows = self.batch_size_per_rank
        shapes = [(None, rows, *shape) for shape in self._parser.shapes.values()] + [(None, rows)] * 2 + [(None,)]
        data = tf.data.Dataset.range(np.iinfo(np.int64).max if segments is None else segments)
        data = data.map(lambda _: _with_shapes(queue.dequeue(), shapes)).prefetch(1)
        data = data.map(self._finish, num_parallel_calls=tf.data.AUTOTUNE).unbatch()
        return data.prefetch(self._config.prefetch_batches or tf.data.AUTOTUNE)

    def _finish(self, *values: tf.Tensor) -> Batch:
        *stored, weights, ids, count = values
        features = self._parser.features
        tensors = {name: _finish(features[name], value) for name, value in zip(features, stored, strict=True)}
        inputs, targets = _pick(tensors, self._schema.inputs), _pick(tensors, self._schema.targets)
        return Batch(inputs, targets, weights, ids, count)


def build_pipeline(
    records: Records, config: DataConfig, *, rank: int, size: int, seed: int, training: bool, global_batch_size: int
) -> Pipeline:
    """The pipeline of one rank among `size`. `training` shuffles as the config says; otherwise the files' order holds.

    Raises UserError where nothing is left to read.
    """
    order: Order = "lanes" if not training else "shuffled" if config.shuffle else "file"
    drop = training and config.drop_remainder
    plan = Plan(records.index.blocks.count, global_batch_size, seed, order, config.shuffle_window, drop)
    if not plan.steps_per_epoch:
        raise UserError(
            f"data.drop_remainder: the {plan.num_records} records of {records.setting} do not fill one batch of "
            f"{global_batch_size}, so nothing would be read. Make the batch smaller or leave it out."
        )
    return Pipeline(records, plan, config, rank, size)


def _finish(feature: Feature, rows: tf.Tensor) -> tf.Tensor:
    """The tensor that the model gets, from the stored values."""
    if feature.scale is not None or feature.offset is not None:
        dtype = tf.as_dtype(feature.tensor_dtype)
        rows = tf.cast(rows, dtype if dtype.is_floating else tf.float32)
        rows = rows * tf.cast(1 if feature.scale is None else feature.scale, rows.dtype)
        rows = rows + tf.cast(feature.offset or 0, rows.dtype)
    return tf.cast(rows, feature.tensor_dtype) if rows.dtype != feature.tensor_dtype else rows


def _with_shapes(values: list[tf.Tensor], shapes: list[tuple[int | None, ...]]) -> tuple[tf.Tensor, ...]:
    for value, shape in zip(values, shapes, strict=True):
        value.set_shape(shape)
    return tuple(values)


def _pick(tensors: dict[str, tf.Tensor], names: tuple[str, ...]) -> Tensors:
    return tensors[names[0]] if len(names) == 1 else {name: tensors[name] for name in names}
