"""shard: gives each record to one rank, and equally many to each, so that all ranks take the same steps."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_train.errors import UserError


def shard(*data: Any) -> Any:
    """Return this rank's part of arrays, or of a tf.data.Dataset, with a sample weight for each record.

    Every record is on one rank, and all ranks get equally many: a rank that would have one less gets its first record
    once more, with weight 0. A loss of Keras' counts it as a record without error; its weighted metrics leave it out.

    data: arrays with the same number of rows: `x, y, weights = shard(x, y)`. Or one dataset of (x, y), not batched yet,
        of known cardinality: a dataset of (x, y, weight).

    Raises UserError for arrays of different lengths, for fewer records than ranks, and for a dataset of another form.
    """
    if len(data) == 1 and isinstance(data[0], tf.data.Dataset):
        return _shard_dataset(data[0])
    lengths = [len(array) for array in data]
    if len(set(lengths)) != 1:
        raise UserError(f"hvd.shard: expected arrays with the same number of rows; received {lengths}.")
    rank, size = hvd.rank(), hvd.size()
    _check_count(lengths[0])
    rows = np.arange(rank, lengths[0], size)
    weights = np.ones(len(rows), np.float32)
    if len(rows) < -(-lengths[0] // size):
        rows, weights = np.append(rows, rank), np.append(weights, np.float32(0))
    return (*(np.asarray(array)[rows] for array in data), weights)


def _shard_dataset(dataset: tf.data.Dataset) -> tf.data.Dataset:
    count = int(dataset.cardinality())
    if count < 0:
        raise UserError(
            "hvd.shard: the dataset does not say how many records it has. Say so with "
            "dataset.apply(tf.data.experimental.assert_cardinality(n))."
        )
    if not isinstance(dataset.element_spec, tuple) or len(dataset.element_spec) != 2:
        raise UserError(f"hvd.shard: expected a dataset of (x, y), not batched; received {dataset.element_spec}.")
    _check_count(count)
    rank, size = hvd.rank(), hvd.size()
    rank_records = dataset.shard(size, rank)
    weighted = rank_records.map(lambda x, y: (x, y, tf.constant(1.0)))
    if rank < count % size or count % size == 0:
        return weighted
    return weighted.concatenate(rank_records.take(1).map(lambda x, y: (x, y, tf.constant(0.0))))


def _check_count(count: int) -> None:
    if count < hvd.size():
        raise UserError(f"hvd.shard: expected at least one record for each of {hvd.size()} ranks; received {count}.")
