"""shard: gives each record to one rank, and equally many to each, so that all ranks take the same steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from horovod_train.errors import UserError
from horovod_train.keras_seams import is_of_batches, unsure_order

log = logging.getLogger(__name__)

_SEVERAL = "Give several inputs one by one, x1, x2, y, weights = hvd.shard(x1, x2, y), or as a dict."


def shard(*data: Any) -> Any:
    """Return this rank's part of arrays, or of a tf.data.Dataset, with a sample weight for each record.

    Every record is on one rank, and all ranks get equally many: a rank that would have one less gets its first record
    once more, with weight 0. A loss of Keras' counts it as a record without error; its weighted metrics leave it out.

    data: arrays with the same number of rows, or dicts of such, as `fit` takes them for several inputs or outputs:
        `x, y, weights = shard(x, y)`. Or one dataset of (x, y), not batched yet, of known cardinality: a dataset of
        (x, y, weight). Its order must be the same on all ranks, in every epoch. So shuffle and sample what this
        returns, and leave `deterministic` on, there too; a generator must give all ranks the same.

    Raises UserError for what has no rows that can be taken by number, for arrays of different lengths, for fewer
    records than ranks, and for a dataset of another form, or whose order may be another one on each rank.
    """
    if len(data) == 1 and isinstance(data[0], tf.data.Dataset):
        return _shard_dataset(data[0])
    lengths: dict[str, int] = {}
    arguments = [_as_arrays(value, f"argument {number}", lengths) for number, value in enumerate(data, start=1)]
    counts = set(lengths.values())
    if len(counts) != 1:
        text = ", ".join(f"{name}: {length}" for name, length in lengths.items()) or "nothing"
        advice = f" {_SEVERAL}" if any(map(_is_several, data)) else ""
        raise UserError(f"hvd.shard: expected arrays with the same number of rows; received {text}.{advice}")
    rank, size, count = hvd.rank(), hvd.size(), counts.pop()
    _check_count(count)
    rows = np.arange(rank, count, size)
    weights = np.ones(len(rows), np.float32)
    if len(rows) < -(-count // size):
        rows, weights = np.append(rows, rank), np.append(weights, np.float32(0))
    return (*keras.tree.map_structure(lambda array: array[rows], arguments), weights)


def _as_arrays(value: Any, name: str, lengths: dict[str, int]) -> np.ndarray | dict[Any, Any]:
    """Return a value as an array with rows, or a dict of such. Raises UserError for what has no rows.

    name: what messages call it. lengths: of the arrays so far, by name; gets those of the value too.
    """
    if isinstance(value, Mapping):
        return {key: _as_arrays(part, f"{name}[{key!r}]", lengths) for key, part in value.items()}
    kind = type(value).__name__
    if isinstance(value, tf.data.Dataset):
        raise _no_rows(name, "a dataset", "Give hvd.shard one dataset of (x, y), alone.")
    if isinstance(value, tf.RaggedTensor):
        raise _no_rows(name, "a RaggedTensor", "Pad it: to_tensor(); or make a dataset of it.")
    if isinstance(value, tf.SparseTensor) or hasattr(value, "tocsr"):
        raise _no_rows(name, f"a sparse {kind}", "Make it dense: toarray(), or tf.sparse.to_dense.")
    if value is None or isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        what = "None" if value is None else kind
        raise _no_rows(name, what, "Leave it out, or make an array of it.")
    if isinstance(value, keras.utils.PyDataset):
        raise _no_rows(name, f"the PyDataset {kind}", "Let it give this rank's batches: hvd.rank() of hvd.size().")
    try:
        array = np.asarray(value)
    except ValueError:
        advice = _SEVERAL if _is_several(value) else "Pad them to one shape."
        raise _no_rows(name, f"{kind} whose items have different shapes", advice) from None
    if array.ndim == 0:
        raise _no_rows(name, f"{kind} without rows", "Make an array of it.")
    lengths[name] = len(array)
    return array


def _is_several(value: Any) -> bool:
    """Return whether a value is a list of arrays of one length, as `fit` takes them for several inputs."""
    if not isinstance(value, list | tuple) or not all(getattr(item, "ndim", 0) for item in value):
        return False
    return len({len(item) for item in value}) == 1


def _no_rows(name: str, what: str, advice: str) -> UserError:
    return UserError(f"hvd.shard: {name} must be an array with one row for each record; received {what}. {advice}")


def _shard_dataset(dataset: tf.data.Dataset) -> tf.data.Dataset:
    count = int(dataset.cardinality())
    if count < 0:
        raise UserError(
            "hvd.shard: the dataset does not say how many records it has. Say so with "
            "dataset.apply(tf.data.experimental.assert_cardinality(n))."
        )
    if not isinstance(dataset.element_spec, tuple) or len(dataset.element_spec) != 2:
        raise UserError(f"hvd.shard: expected a dataset of (x, y), not batched; received {dataset.element_spec}.")
    if is_of_batches(dataset) and hvd.rank() == 0:
        log.warning(
            "hvd.shard: the dataset is of batches, and each counts as one record, with one weight. Batch what it "
            "returns, unless a record is a sequence."
        )
    if (cause := unsure_order(dataset)) is not None:
        advice = f"Apply {cause} to what hvd.shard returns."
        if cause == "deterministic=False":  # an option of the whole pipeline, wherever it is set
            advice = "Leave it out, also after hvd.shard."
        raise UserError(
            f"hvd.shard: by {cause} the dataset is, or may become, in another order on each rank, so records would be "
            f"lost. {advice}"
        )
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
