"""K-fold cross-validation: selects the training part or the held-out part of a source. Knows no format.

Of each K neighbouring records one is in each part, drawn from their number alone: so the parts have equal sizes to
within one record, are alike even where files are sorted, and are the same in every run, whatever its seed.
"""

from __future__ import annotations

import hashlib

import numpy as np

from horovod_train.data.order import counter_rng
from horovod_train.data.order.selection import Selection
from horovod_train.data.source import Blocks, RecordSource
from horovod_train.errors import UserError

_FOLDS = 4  # so that parts are independent of the orders of epochs; see sampler


def parts_of_records(records: int, folds: int) -> np.ndarray:
    """Return the part of each record, from 0: int64 [records]."""
    numbers = np.arange(-(-records // folds) * folds)
    draws = counter_rng.integers(counter_rng.key(folds, _FOLDS), numbers).reshape(-1, folds)
    last = records % folds
    if last:  # the last records, fewer than folds, are in different parts too
        draws[-1, last:] = np.iinfo(np.uint64).max
    return np.argsort(np.argsort(draws, axis=1, kind="stable"), axis=1).ravel()[:records]


def fold_records(source: RecordSource, fold: str, *, is_left_out: bool) -> Selection:
    """Return all records but those of a part. is_left_out: return that part instead, which training leaves out.

    fold: k/K, part k of K from 1, as config.rules has checked. Raises UserError for fewer than K records.
    """
    number, folds = map(int, fold.split("/"))
    if source.blocks.num_records < folds:
        raise UserError(f"data.fold: {fold} needs at least {folds} records; there are {source.blocks.num_records}.")
    in_part = parts_of_records(source.blocks.num_records, folds) == number - 1
    chosen = in_part if is_left_out else ~in_part
    counts = _count_chosen(chosen, source.blocks.first_record)
    block = np.flatnonzero(counts)
    edges = np.concatenate([[0], np.cumsum([part.records for part in source.parts])])
    digest_suffix = f"{number}/{folds} {'only' if is_left_out else 'left out'}"
    parts = [
        part._replace(records=count, digest=hashlib.sha256(f"{part.digest} {digest_suffix}".encode()).hexdigest())
        for part, count in zip(source.parts, _count_chosen(chosen, edges).tolist(), strict=True)
    ]
    blocks = Blocks(counts[block], source.blocks.bytes[block])
    return Selection(source, blocks, parts, block, np.flatnonzero(chosen))


def _count_chosen(chosen: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return how many are chosen between each edge and the next: int64 [edges - 1]."""
    return np.diff(np.concatenate([np.zeros(1, np.int64), np.cumsum(chosen)])[edges])
