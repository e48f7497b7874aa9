"""Records of which every block comes late, as from a store with that latency: to see what read-ahead hides.

The delay is in the thread that loads the block, where a file system or an object store would make it wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_train.data.features import Feature
from horovod_train.data.source import BlockReader, Data, Fault, Parser, RecordSource, Wanted


class DelayedSource:
    """A RecordSource like another one, but for the delay."""

    def __init__(self, source: RecordSource, delay_s: float) -> None:
        self._source, self._delay_s = source, delay_s
        self.blocks, self.parts = source.blocks, source.parts

    def open(self) -> BlockReader[Any]:
        return _DelayedBlocks(self._source.open(), self._delay_s)

    def parser(self, features: dict[str, Feature]) -> Parser:
        return self._source.parser(features)


class _DelayedBlocks:
    def __init__(self, reader: BlockReader[Any], delay_s: float) -> None:
        self._reader, self._delay_s = reader, delay_s

    def load(self, block: int) -> Any:
        time.sleep(self._delay_s)
        return self._reader.load(block)

    def take(self, records: np.ndarray, wanted: Sequence[Wanted[Any]]) -> tuple[Data, list[Fault]]:
        return self._reader.take(records, wanted)

    def name_record(self, record: int, block: Any, problem: str) -> str:
        return self._reader.name_record(record, block, problem)
