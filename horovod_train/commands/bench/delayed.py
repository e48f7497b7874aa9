"""Records of which every block comes late, as from a store with that latency: to see what read-ahead hides.

The delay is in the thread that loads the block, where a file system or an object store would make it wait.
"""

from __future__ import annotations

import time

from horovod_train.data.features import Feature
from horovod_train.data.source import LoadBlock, LoadedBlock, Parser, RecordSource


class DelayedSource:
    """A RecordSource like another one, but for the delay."""

    def __init__(self, source: RecordSource, delay_s: float) -> None:
        self._source, self._delay_s = source, delay_s
        self.blocks, self.parts = source.blocks, source.parts

    def open(self) -> LoadBlock:
        load = self._source.open()

        def load_delayed(block: int) -> LoadedBlock:
            time.sleep(self._delay_s)
            return load(block)

        return load_delayed

    def parser(self, features: dict[str, Feature]) -> Parser:
        return self._source.parser(features)
