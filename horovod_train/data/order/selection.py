"""Selects records of another source, some left out or repeated: what folds and mixtures share. Knows no format.

A repeated record has a number for each of its repeats, so counts of records include repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from horovod_train.data.features import Feature
from horovod_train.data.source import Blocks, Data, LoadBlock, LoadedBlock, Parser, Part, RecordSource


@dataclass(frozen=True, eq=False)
class Selection:
    """A RecordSource of selected records of another source."""

    source: RecordSource
    blocks: Blocks
    parts: Sequence[Part]
    block: np.ndarray
    """int64 [blocks]: the source's block that each block is made of."""
    records: np.ndarray | None = None
    """int64 [records]: the number of each record in the source; None if blocks are whole."""

    def open(self) -> LoadBlock:
        return partial(self._load, self.source.open())

    def parser(self, features: dict[str, Feature]) -> Parser:
        return self.source.parser(features)

    def _load(self, load: LoadBlock, block: int) -> LoadedBlock:
        source_number = int(self.block[block])
        source_block = load(source_number)
        if self.records is None:
            return source_block
        first, last = self.blocks.first_record[block : block + 2].tolist()
        positions = (self.records[first:last] - self.source.blocks.first_record[source_number]).tolist()
        faults = {row: source_block.faults[at] for row, at in enumerate(positions) if at in source_block.faults}
        data = _take(source_block.data, positions)
        return LoadedBlock(data, lambda row, problem: source_block.name(positions[row], problem), faults)


def _take(data: Data, positions: list[int]) -> Data:
    if isinstance(data, dict):
        return {name: array[positions] for name, array in data.items()}
    return data[positions] if isinstance(data, np.ndarray) else [data[position] for position in positions]
