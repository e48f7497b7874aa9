"""Some data sets read as one: each record once an epoch, or as often as its data set repeats. Knows no format.

The repeats of a block are blocks of their own: they come at different times in a shuffled epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from horovod_train.data.order.selection import Selection
from horovod_train.data.source import Blocks, RecordSource


class DataSet(NamedTuple):
    """One entry of data.train or data.eval."""

    name: str
    records: int
    """Without repeats."""
    repeats: int


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


def mix(source: RecordSource, entries: Sequence[Entry]) -> Selection:
    """Return the records of a source, those of each data set as often as it repeats."""
    of_source = source.blocks
    edges = np.cumsum([0, *(found.records for found in split_by_entry(source, entries))])
    first = np.searchsorted(of_source.first_record, edges)  # a block is of one part
    numbers = np.arange(len(of_source.records))
    block = np.concatenate(
        [np.tile(numbers[first[n] : first[n + 1]], entry.repeats) for n, entry in enumerate(entries)]
    )
    blocks = Blocks(of_source.records[block], of_source.bytes[block])
    ends = np.cumsum([entry.parts for entry in entries]).tolist()
    parts = [
        part
        for entry, end in zip(entries, ends, strict=True)
        for part in list(source.parts[end - entry.parts : end]) * entry.repeats
    ]
    return Selection(source, blocks, parts, block)
