"""shard: gives each record to one rank, and equally many to each, so that all ranks take the same steps.

It exchanges nothing, so a script may call it before ranks can meet. What it was given is compared over the ranks when
they meet next, at a broadcast: ranks that hold the records in other orders would lose some and train on others twice.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from horovod_train.distributed.launch import launcher
from horovod_train.errors import UserError
from horovod_train.keras_seams import is_in_memory, is_of_batches, unsure_order
from horovod_train.shown_text import listed
from horovod_train.tensorflow.agreement import guards

log = logging.getLogger(__name__)

_SAMPLED_ROWS, _SAMPLED_BYTES = 1024, 4 << 20
"""At most so many rows of an array, evenly spaced, and about so many bytes of it, are compared over the ranks."""
_SAMPLED_RECORDS = 16
"""Of a dataset of arrays, its first ones."""

_NOTED_CALLS = 64
"""The most calls that are compared at a broadcast."""

_SEVERAL = "Give several inputs one by one, x1, x2, y, weights = hvd.shard(x1, x2, y), or as a dict."


def shard(*data: Any) -> Any:
    """Return this rank's part of arrays, or of a tf.data.Dataset, with a sample weight for each record.

    Every record is on one rank, and all ranks get equally many: a rank that would have one less gets its first record
    once more, with weight 0. A loss of Keras' counts it as a record without error; its weighted metrics leave it out.

    data: arrays with the same number of rows, or dicts of such, as `fit` takes them for several inputs or outputs:
        `x, y, weights = shard(x, y)`. Or one dataset of (x, y), not batched yet, of known cardinality: a dataset of
        (x, y, weight). Its order must be the same on all ranks, in every epoch. So shuffle and sample what this
        returns, and leave `deterministic` on, there too; a generator must give all ranks the same.

    All ranks must give the same rows in the same order. At the next broadcast (of the broadcast callback,
    broadcast_variables or broadcast_model) UserError is raised on all ranks if they gave different numbers of rows, or
    if every array of a call differs between ranks, in up to 1,024 rows of each, evenly spaced; of a dataset made of
    arrays in its first 16 records. An array that is equal on all ranks, but for rounding, shows that the order is.
    Nothing is compared if ranks made different numbers of calls, of other datasets, in elastic scripts, and after
    init(check_weights=False); nor more than the first 64 calls before a broadcast.

    Raises UserError for what has no rows that can be taken by number, for arrays of different lengths, for fewer
    records than ranks, and for a dataset of another form, or whose order may be another one on each rank.
    """
    if len(data) == 1 and isinstance(data[0], tf.data.Dataset):
        return _shard_dataset(data[0])
    arrays: dict[str, np.ndarray] = {}
    arguments = [_as_arrays(value, f"argument {number}", arrays) for number, value in enumerate(data, start=1)]
    counts = set(map(len, arrays.values()))
    if len(counts) != 1:
        text = ", ".join(f"{name}: {len(array)}" for name, array in arrays.items()) or "nothing"
        advice = f" {_SEVERAL}" if any(map(_is_several, data)) else ""
        raise UserError(f"hvd.shard: expected arrays with the same number of rows; received {text}.{advice}")
    rank, size, count = hvd.rank(), hvd.size(), counts.pop()
    _check_count(count)
    _note(arrays, count)
    rows = np.arange(rank, count, size)
    weights = np.ones(len(rows), np.float32)
    if len(rows) < -(-count // size):
        rows, weights = np.append(rows, rank), np.append(weights, np.float32(0))
    return (*keras.tree.map_structure(lambda array: array[rows], arguments), weights)


def _as_arrays(value: Any, name: str, arrays: dict[str, np.ndarray]) -> np.ndarray | dict[Any, Any]:
    """Return a value as an array with rows, or a dict of such. Raises UserError for what has no rows.

    name: what messages call it. arrays: those so far, by name; gets those of the value too.
    """
    if isinstance(value, Mapping):
        return {key: _as_arrays(part, f"{name}[{key!r}]", arrays) for key, part in value.items()}
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
    arrays[name] = array
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
    _note_records(dataset, count)
    rank, size = hvd.rank(), hvd.size()
    rank_records = dataset.shard(size, rank)
    weighted = rank_records.map(lambda x, y: (x, y, tf.constant(1.0)))
    if rank < count % size or count % size == 0:
        return weighted
    return weighted.concatenate(rank_records.take(1).map(lambda x, y: (x, y, tf.constant(0.0))))


def _check_count(count: int) -> None:
    if count < hvd.size():
        raise UserError(f"hvd.shard: expected at least one record for each of {hvd.size()} ranks; received {count}.")


class _Seen(NamedTuple):
    """What some rows of an array look like. digest: of their bits; means: of each, [] if they are no numbers."""

    digest: str = ""
    shows_order: bool = False
    """Whether the rows differ from each other."""
    means: Sequence[float] = ()

    def is_like(self, other: _Seen) -> bool:
        """Return whether the rows are in the same order: numbers that hosts have computed may differ in last bits."""
        if self.digest == other.digest:
            return True
        if not self.means or len(self.means) != len(other.means):
            return False
        return np.allclose(self.means, other.means, rtol=1e-3, atol=1e-3 * float(np.std(self.means)))


_given: list[tuple[int, dict[str, _Seen]]] = []
"""Of the calls since the last broadcast how many rows each was given, and what its arrays look like, by name."""


def _is_noted() -> bool:
    """Return whether the next call is to be noted: of a script that shards each batch, and never broadcasts, some."""
    return guards.check_weights and len(_given) < _NOTED_CALLS and not launcher.detect().is_elastic


def _note(arrays: Mapping[str, np.ndarray], count: int) -> None:
    if _is_noted():
        _given.append((count, {name: _seen_of(array) for name, array in arrays.items()}))


def _note_records(dataset: tf.data.Dataset, count: int) -> None:
    """Note a dataset by its first records, if it is made of arrays: reading another one may take long, or change it."""
    if not _is_noted():
        return
    first = [tf.nest.flatten(record) for record in dataset.take(_SAMPLED_RECORDS)] if is_in_memory(dataset) else []
    columns = [column for column in zip(*first, strict=True) if isinstance(column[0], tf.Tensor)]
    fitting = [column for column in columns if len({tuple(value.shape) for value in column}) == 1]
    _note({f"part {number} of a record": np.stack(column) for number, column in enumerate(fitting, start=1)}, count)


def _seen_of(array: np.ndarray) -> _Seen:
    fitting = _SAMPLED_BYTES // max(array.nbytes // len(array), 1)
    sampled = min(len(array), max(8, min(fitting, _SAMPLED_ROWS)))
    sample = array[np.linspace(0, len(array) - 1, sampled).astype(np.int64)]
    if not sample.dtype.hasobject:
        rows = [row.tobytes() for row in sample]
    elif all(isinstance(item, str | bytes | float | int | None) for item in sample.ravel().tolist()):
        rows = [repr(row).encode() for row in sample.tolist()]
    else:
        rows = []  # other objects may look different in each process
    with np.errstate(invalid="ignore", over="ignore"):
        flat = sample.reshape(sampled, -1).astype(np.float64) if sample.dtype.kind in "biuf" else np.empty((0, 0))
        means = flat.mean(axis=1).tolist() if flat.size else []
    return _Seen(hashlib.sha256(b"".join(rows)).hexdigest(), len(set(rows)) > 1, means)


def take_given() -> list[Any]:
    """Return what the calls of `shard` since the last time were given on this rank, in values that ranks can send."""
    given = [(count, {name: tuple(seen) for name, seen in arrays.items()}) for count, arrays in _given]
    _given.clear()
    return given


def check_given(by_rank: Sequence[Sequence[Any]]) -> None:
    """Raise UserError if ranks gave `shard` different rows. by_rank: what `take_given` returned on each.

    Nothing is compared if ranks made different numbers of calls: a rank may evaluate alone.
    """
    if len({len(calls) for calls in by_rank}) > 1:
        return
    for calls in zip(*by_rank, strict=True):
        counts, arrays = zip(*calls, strict=True)
        if len(set(counts)) > 1:
            rank = next(rank for rank, count in enumerate(counts) if count != counts[0])
            raise UserError(
                f"hvd.shard: all ranks must give the same rows; received {counts[0]} of them on rank 0, {counts[rank]} "
                f"on rank {rank}. It takes a rank's part of what all ranks hold: give all the same, and part nothing "
                "before."
            )
        by_name = {name: [_Seen(*seen.get(name, ())) for seen in arrays] for name in arrays[0]}
        names = [name for name, seen in by_name.items() if any(each.shows_order for each in seen)]
        unlike = [[not each.is_like(by_name[name][0]) for each in by_name[name]] for name in names]
        others = [np.flatnonzero(of_ranks).tolist() for of_ranks in unlike]
        if not all(others) or not names:
            continue
        ranks = others[0]
        verb = "differs" if len(names) == 1 else "differ"
        raise UserError(
            f"hvd.shard: {listed(names, 4)}, of {counts[0]} rows, {verb} on rank {listed(ranks, 4)} from rank 0 in "
            "order or in values, so records would be lost, and others trained on twice. Give all ranks the same "
            "order, as by train_test_split(…, random_state=0), and shuffle what hvd.shard returns. If the order is the "
            "same and the values differ on purpose, share row numbers: rows, weights = hvd.shard(np.arange(len(x)))."
        )
