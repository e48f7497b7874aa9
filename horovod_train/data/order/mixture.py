"""Some data sets read as one: each record once an epoch, or as often as its data set repeats. Knows no format.

Each repeat of a block counts as another block, so the repeats come at different times in a shuffled epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from horovod_train.data.order.selection import Selection
from horovod_train.data.source import Blocks, Part, RecordSource


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
