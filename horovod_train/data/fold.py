"""Cross-validation: all records of a source but one part of K, or only that part. Knows no format.

Of each K neighbouring records one is in each part, drawn from their number alone: so the parts have equal sizes to
within one record, are alike even where files are sorted, and are the same in every run, whatever its seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_train.data import counter_rng
from horovod_train.data.features import Feature
from horovod_train.data.source import BlockReader, Blocks, Data, Fault, Parser, Part, RecordSource, Wanted

_FOLDS = 4  # so that parts are independent of the orders of epochs; see sampler


class Fold(NamedTuple):
    """Part `number` of `of`, from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Fold:
        """Parse `k/K`, which config.rules has checked."""
        number, _, of = text.partition("/")
        return cls(int(number), int(of))


def parts_of_records(records: int, folds: int) -> np.ndarray:
    """Return the part of each record, from 0: int64 [records]."""
    numbers = np.arange(-(-records // folds) * folds)
    draws = counter_rng.integers(counter_rng.key(folds, _FOLDS), numbers).reshape(-1, folds)
    last = records % folds
    if last:  # the last records, fewer than folds, are in different parts too
        draws[-1, last:] = np.iinfo(np.uint64).max
    return np.argsort(np.argsort(draws, axis=1, kind="stable"), axis=1).ravel()[:records]


class FoldedRecords:
    """Some records of a source. A RecordSource."""

    def __init__(self, source: RecordSource, fold: Fold, *, is_left_out: bool) -> None:
        """is_left_out: take the part itself, which training leaves out; otherwise all others."""
        self._source = source
        found = parts_of_records(source.blocks.num_records, fold.of) == fold.number - 1
        chosen = found if is_left_out else ~found
        self._record = np.flatnonzero(chosen)
        """int64 [records]: the number in the source of each record."""
        counts = _count(chosen, source.blocks.first_record)
        self._block = np.flatnonzero(counts)
        """int64 [blocks]: those of the source's blocks that hold some."""
        self._blocks = Blocks(counts[self._block], source.blocks.bytes[self._block])
        edges = np.concatenate([[0], np.cumsum([part.records for part in source.parts])])
        which = f"{fold.number}/{fold.of} {'only' if is_left_out else 'left out'}"
        self._parts = [
            part._replace(records=count, digest=hashlib.sha256(f"{part.digest} {which}".encode()).hexdigest())
            for part, count in zip(source.parts, _count(chosen, edges).tolist(), strict=True)
        ]

    @property
    def blocks(self) -> Blocks:
        return self._blocks

    @property
    def parts(self) -> Sequence[Part]:
        return self._parts

    def open(self) -> FoldedBlocks:
        return FoldedBlocks(self._source.open(), self._block, self._record, self._source.blocks)

    def parser(self, features: dict[str, Feature]) -> Parser:
        return self._source.parser(features)


class FoldedBlocks:
    """The blocks of folded records. A BlockReader."""

    def __init__(self, opened: BlockReader[Any], block: np.ndarray, record: np.ndarray, of_source: Blocks) -> None:
        """`block`, `record`: as FoldedRecords'."""
        self._opened, self._block, self._record, self._of_source = opened, block, record, of_source

    def log_room_needed(self) -> None:
        self._opened.log_room_needed()

    def load(self, block: int) -> Any:
        return self._opened.load(int(self._block[block]))

    def take(self, records: np.ndarray, wanted: Sequence[Wanted[Any]]) -> tuple[Data, list[Fault]]:
        stored = self._record[records]
        places = stored - self._of_source.first_record[self._of_source.containing(stored)]
        data, faults = self._opened.take(stored, [Wanted(part.block, places[part.rows], part.rows) for part in wanted])
        messages = {fault.record: fault.message for fault in faults}
        numbers = zip(records.tolist(), stored.tolist(), strict=True)
        return data, [Fault(record, messages[number]) for record, number in numbers if number in messages]

    def name_record(self, record: int, block: Any, problem: str) -> str:
        return self._opened.name_record(int(self._record[record]), block, problem)


def _count(chosen: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return how many are chosen between each edge and the next: int64 [edges - 1]."""
    return np.diff(np.concatenate([np.zeros(1, np.int64), np.cumsum(chosen)])[edges])
