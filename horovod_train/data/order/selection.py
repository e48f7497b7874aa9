"""Records of another source, of which some are left out or repeated: what folds and mixtures share. Knows no format.

A record that is repeated has a number for each of its repeats, so whatever counts records is true of selections too.
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
    """A RecordSource made of another's records."""

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
        of_source = int(self.block[block])
        whole = load(of_source)
        if self.records is None:
            return whole
        first, last = self.blocks.first_record[block : block + 2].tolist()
        places = (self.records[first:last] - self.source.blocks.first_record[of_source]).tolist()
        faults = {here: whole.faults[place] for here, place in enumerate(places) if place in whole.faults}
        return LoadedBlock(_take(whole.data, places), lambda here, problem: whole.name(places[here], problem), faults)


def _take(data: Data, places: list[int]) -> Data:
    if isinstance(data, dict):
        return {name: array[places] for name, array in data.items()}
    return data[places] if isinstance(data, np.ndarray) else [data[place] for place in places]
