"""Records of another source, of which some are left out or repeated: what folds and mixtures share. Knows no format.

A record that is repeated has a number for each of its repeats, so whatever counts records is true of selections too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_train.data.features import Feature
from horovod_train.data.source import BlockReader, Blocks, Data, Fault, Parser, Part, RecordSource, Wanted


@dataclass(frozen=True, eq=False)
class Selection:
    """A RecordSource made of another's records."""

    source: RecordSource
    blocks: Blocks
    parts: Sequence[Part]
    block: np.ndarray
    """int64 [blocks]: the source's block that each block is made of."""
    stored: Callable[[np.ndarray], np.ndarray]
    """Returns the numbers in the source of records with these numbers here: int64 of the same shape."""

    def open(self) -> SelectedBlocks:
        return SelectedBlocks(self.source.open(), self)

    def parser(self, features: dict[str, Feature]) -> Parser:
        return self.source.parser(features)


class SelectedBlocks:
    """The blocks of a selection. A BlockReader, whose blocks in memory are those of the source."""

    def __init__(self, opened: BlockReader[Any], selection: Selection) -> None:
        self._opened, self._selection = opened, selection

    def load(self, block: int) -> Any:
        return self._opened.load(int(self._selection.block[block]))

    def take(self, records: np.ndarray, wanted: Sequence[Wanted[Any]]) -> tuple[Data, list[Fault]]:
        stored, of_source = self._selection.stored(records), self._selection.source.blocks
        places = stored - of_source.first_record[of_source.containing(stored)]
        data, faults = self._opened.take(stored, [Wanted(part.block, places[part.rows], part.rows) for part in wanted])
        messages = {fault.record: fault.message for fault in faults}
        numbers = zip(records.tolist(), stored.tolist(), strict=True)
        return data, [Fault(record, messages[number]) for record, number in numbers if number in messages]

    def name_record(self, record: int, block: Any, problem: str) -> str:
        (stored,) = self._selection.stored(np.array([record])).tolist()
        return self._opened.name_record(stored, block, problem)
