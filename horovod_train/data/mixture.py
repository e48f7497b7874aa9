"""Some data sets read as one: each record once an epoch, or as often as its data set repeats. Knows no format.

A repeated record has a number for each of its repeats, so everything that counts records is true of mixtures too. The
repeats of a block are blocks of their own: they come at different times in a shuffled epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_train.data.features import Feature
from horovod_train.data.source import BlockReader, Blocks, Data, Fault, Parser, Part, RecordSource, Wanted


class DataSet(NamedTuple):
    """One entry of data.train or data.eval."""

    name: str
    records: int
    """Without repeats."""
    repeats: int

    @property
    def records_per_epoch(self) -> int:
        return self.records * self.repeats


class Entry(NamedTuple):
    """What the config says of one data set."""

    name: str
    parts: int
    """How many of the source's parts it has."""
    repeats: int


def split_by_entry(source: RecordSource, entries: Sequence[Entry]) -> list[DataSet]:
    """Return the data sets of a source, in its order."""
    ends = np.cumsum([entry.parts for entry in entries])
    assert int(ends[-1]) == len(source.parts), "a source has as many parts as files"
    counts = [part.records for part in source.parts]
    return [
        DataSet(entry.name, sum(counts[end - entry.parts : end]), entry.repeats)
        for entry, end in zip(entries, ends.tolist(), strict=True)
    ]


class Mixture:
    """A source in which some data sets are repeated. A RecordSource."""

    def __init__(self, source: RecordSource, entries: Sequence[Entry]) -> None:
        self._source = source
        edges = np.cumsum([0, *(found.records for found in split_by_entry(source, entries))])
        first = np.searchsorted(source.blocks.first_record, edges)  # a block is of one part
        numbers = np.arange(len(source.blocks.records))
        self._block = np.concatenate(
            [np.tile(numbers[first[n] : first[n + 1]], entry.repeats) for n, entry in enumerate(entries)]
        )
        """int64 [blocks]: the block of the source that each block repeats."""
        self._blocks = Blocks(source.blocks.records[self._block], source.blocks.bytes[self._block])
        ends = np.cumsum([entry.parts for entry in entries]).tolist()
        self._parts = [
            part
            for entry, end in zip(entries, ends, strict=True)
            for part in list(source.parts[end - entry.parts : end]) * entry.repeats
        ]

    @property
    def blocks(self) -> Blocks:
        return self._blocks

    @property
    def parts(self) -> Sequence[Part]:
        return self._parts

    def open(self) -> MixedBlocks:
        return MixedBlocks(self._source.open(), self._block, self._blocks, self._source.blocks)

    def parser(self, features: dict[str, Feature]) -> Parser:
        return self._source.parser(features)


class MixedBlocks:
    """The blocks of a mixture. A BlockReader."""

    def __init__(self, opened: BlockReader[Any], block: np.ndarray, blocks: Blocks, of_source: Blocks) -> None:
        """`block`: as Mixture's. `blocks`: those of the mixture."""
        self._opened, self._block, self._blocks, self._of_source = opened, block, blocks, of_source

    def log_room_needed(self) -> None:
        self._opened.log_room_needed()

    def load(self, block: int) -> Any:
        return self._opened.load(int(self._block[block]))

    def take(self, records: np.ndarray, wanted: Sequence[Wanted[Any]]) -> tuple[Data, list[Fault]]:
        stored = self._stored(records)
        data, faults = self._opened.take(stored, wanted)
        messages = {fault.record: fault.message for fault in faults}
        numbers = zip(records.tolist(), stored.tolist(), strict=True)
        return data, [Fault(record, messages[number]) for record, number in numbers if number in messages]

    def name_record(self, record: int, block: Any, problem: str) -> str:
        (stored,) = self._stored(np.array([record])).tolist()
        return self._opened.name_record(stored, block, problem)

    def _stored(self, records: np.ndarray) -> np.ndarray:
        """Return the numbers of records in the source."""
        blocks = self._blocks.containing(records)
        return self._of_source.first_record[self._block[blocks]] + records - self._blocks.first_record[blocks]
