"""Selects records of a source: k-fold cross-validation, a held-out part, and mixtures of data sets. Knows no format.

Of each K neighbouring records one is in each fold, drawn from their number alone: so folds have equal sizes to within
one record, are alike even where files are sorted, and are the same in every run, whatever its seed. In a mixture each
record comes once an epoch, or as often as its data set repeats; each repeat of a block counts as another block, so the
repeats come at different times in a shuffled epoch. Counts of records include repeats.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from horovod_train.data import counter_rng
from horovod_train.data.schema import Feature
from horovod_train.data.source import Blocks, Data, LoadBlock, LoadedBlock, Parser, Part, RecordSource
from horovod_train.errors import UserError

_FOLDS, _FRACTION = 4, 5  # so that parts are independent of the orders of epochs; see sampler
_AT_ONCE = 1 << 20  # records whose parts are drawn together: it takes some 40 bytes for each


@dataclass(frozen=True, eq=False)
class Selection:
    """A RecordSource of selected records of another source."""

    source: RecordSource
    blocks: Blocks
    parts: Sequence[Part]
    block: np.ndarray
    """int64 [blocks]: the source's block that each block is made of."""
    chosen: np.ndarray | None = None
    """bool [records of the source]: which are selected; None if blocks are whole."""

    def numbers(self) -> np.ndarray:
        """Return the number of each record in the source: int64 [records]."""
        if self.chosen is not None:
            return np.flatnonzero(self.chosen)
        first = self.source.blocks.first_record
        return np.concatenate([np.arange(first[block], first[block + 1]) for block in self.block])

    def open(self) -> LoadBlock:
        return partial(self._load, self.source.open())

    def parser(self, features: dict[str, Feature]) -> Parser:
        return self.source.parser(features)

    def _load(self, load: LoadBlock, block: int) -> LoadedBlock:
        source_number = int(self.block[block])
        source_block = load(source_number)
        if self.chosen is None:
            return source_block
        first, last = self.source.blocks.first_record[source_number : source_number + 2].tolist()
        positions = np.flatnonzero(self.chosen[first:last]).tolist()
        faults = {row: source_block.faults[at] for row, at in enumerate(positions) if at in source_block.faults}
        data = _take(source_block.data, positions)
        return LoadedBlock(data, lambda row, problem: source_block.name(positions[row], problem), faults)


def _take(data: Data, positions: list[int]) -> Data:
    if isinstance(data, dict):
        return {name: array[positions] for name, array in data.items()}
    return data[positions] if isinstance(data, np.ndarray) else [data[position] for position in positions]


def parts_of_records(records: int, folds: int) -> np.ndarray:
    """Return the part of each record, from 0: [records] of the smallest type of whole numbers."""
    step = folds * -(-_AT_ONCE // folds)
    parts = [_parts(first, min(first + step, records), folds) for first in range(0, records, step)]
    return np.concatenate([np.zeros(0, np.min_scalar_type(folds)), *parts])


def _parts(first: int, end: int, folds: int) -> np.ndarray:
    """Return the parts of neighbouring records, of which the first is the first of a group of folds."""
    groups = -(-(end - first) // folds)
    numbers = np.arange(first, first + groups * folds)
    draws = counter_rng.integers(counter_rng.key(folds, _FOLDS), numbers).reshape(groups, folds)
    last = (end - first) % folds
    if last:  # the last records, fewer than folds, are in different parts too
        draws[-1, last:] = np.iinfo(np.uint64).max
    parts = np.argsort(np.argsort(draws, axis=1, kind="stable"), axis=1).ravel()
    return parts[: end - first].astype(np.min_scalar_type(folds))


def fold_records(source: RecordSource, fold: str, *, is_left_out: bool) -> Selection:
    """Return all records but those of a part. is_left_out: return that part instead, which training leaves out.

    fold: k/K, part k of K from 1, as config.rules has checked. Raises UserError for fewer than K records.
    """
    number, folds = map(int, fold.split("/"))
    if source.blocks.num_records < folds:
        raise UserError(f"data.fold: {fold} needs at least {folds} records; there are {source.blocks.num_records}.")
    in_part = parts_of_records(source.blocks.num_records, folds) == number - 1
    return _select(source, in_part if is_left_out else ~in_part, f"{number}/{folds}", is_left_out)


def hold_out(source: RecordSource, fraction: float, *, is_held_out: bool) -> Selection:
    """Return all records but a fraction, above 0 and below 1. is_held_out: return that fraction instead.

    Raises UserError if none would be left to train.
    """
    is_in = held_out_records(source.blocks.num_records, fraction)
    if is_in.all():
        raise UserError(f"data.eval_fraction: {fraction:g} of 1 record leaves none to train.")
    return _select(source, is_in if is_held_out else ~is_in, f"fraction {fraction!r}", is_held_out)


def held_out_records(records: int, fraction: float) -> np.ndarray:
    """Return which records are held out: bool [records]. Of each 1 / fraction neighbours one is, drawn by number."""
    is_in = np.zeros(records, bool)
    first, step = 0, max(_AT_ONCE, int(3 / fraction))
    while first < records:
        numbers = np.arange(first, min(first + step, records))
        group = np.floor(numbers * fraction)
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        whole = len(numbers) if numbers[-1] == records - 1 else starts[-1]  # the last group may go on
        draws = counter_rng.integers(counter_rng.key(_FRACTION), numbers)
        least = np.minimum.reduceat(draws, starts)
        found = np.flatnonzero(draws == np.repeat(least, np.diff(np.append(starts, len(numbers)))))
        found = found[np.diff(group[found], prepend=-1) > 0]  # the first of each group, if draws are equal
        is_in[first + found[found < whole]] = True
        first += whole
    return is_in


def _select(source: RecordSource, chosen: np.ndarray, part: str, is_left_out: bool) -> Selection:
    """Return the chosen records, bool [records]. part: what identifies those that training leaves out."""
    counts = _count_chosen(chosen, source.blocks.first_record)
    block = np.flatnonzero(counts)
    edges = np.concatenate([[0], np.cumsum([part.records for part in source.parts])])
    digest_suffix = f"{part} {'only' if is_left_out else 'left out'}"
    parts = [
        part._replace(records=count, digest=hashlib.sha256(f"{part.digest} {digest_suffix}".encode()).hexdigest())
        for part, count in zip(source.parts, _count_chosen(chosen, edges).tolist(), strict=True)
    ]
    blocks = Blocks(counts[block], source.blocks.bytes[block])
    return Selection(source, blocks, parts, block, chosen)


def _count_chosen(chosen: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return how many are chosen between each edge and the next: int64 [edges - 1]."""
    return np.diff(np.concatenate([np.zeros(1, np.int64), np.cumsum(chosen)])[edges])


class DataSet(NamedTuple):
    """One entry of data.train or data.eval."""

    name: str
    records: int
    """Without repeats."""
    repeats: int


class Entry(NamedTuple):
    """One data set as the config names it."""

    name: str
    parts: int
    """How many of the source's parts it has."""
    repeats: int


def split_by_entry(source: RecordSource, entries: Sequence[Entry]) -> list[DataSet]:
    """Return the data sets of a source, in its order."""
    return [
        DataSet(entry.name, sum(part.records for part in parts), entry.repeats)
        for entry, parts in zip(entries, _parts_by_entry(source, entries), strict=True)
    ]


def mix(source: RecordSource, entries: Sequence[Entry]) -> Selection:
    """Return the records of a source, those of each data set as often as it repeats."""
    edges = np.cumsum([0, *(data_set.records for data_set in split_by_entry(source, entries))])
    first_block = np.searchsorted(source.blocks.first_record, edges)  # a block is of one part
    blocks_by_entry = np.split(np.arange(first_block[-1]), first_block[1:-1])
    repeats = [entry.repeats for entry in entries]
    block = np.concatenate([np.tile(blocks, times) for blocks, times in zip(blocks_by_entry, repeats, strict=True)])
    blocks = Blocks(source.blocks.records[block], source.blocks.bytes[block])
    parts = [list(parts) * times for parts, times in zip(_parts_by_entry(source, entries), repeats, strict=True)]
    return Selection(source, blocks, [*itertools.chain(*parts)], block)


def _parts_by_entry(source: RecordSource, entries: Sequence[Entry]) -> list[Sequence[Part]]:
    """Return the parts of each data set."""
    ends = np.cumsum([entry.parts for entry in entries]).tolist()
    assert ends[-1] == len(source.parts), "a source has as many parts as files"
    return [source.parts[end - entry.parts : end] for entry, end in zip(entries, ends, strict=True)]
