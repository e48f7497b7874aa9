"""Reads records by number: loads whole blocks ahead of need, and takes the records out of them. Knows no format.

Keeps only the blocks that it is told to keep, so its memory is what the plan's windows span. Also finds out which
records of a batch cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from horovod_train.config.settings import DataConfig
from horovod_train.data.source import Arrays, Data, Fault, Parser, RecordSource, Wanted, one_by_one


class Reader:
    """Not for several threads at the same time."""

    def __init__(self, source: RecordSource, threads: int = DataConfig.read_threads) -> None:
        """threads: how many blocks are loaded at the same time."""
        self._blocks, self._opened = source.blocks, source.open()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="read-blocks")
        self._in_memory: dict[int, Future[Any]] = {}

    def read_ahead(self, blocks: Iterable[int]) -> None:
        """Start loading the blocks that are not in memory yet."""
        for block in blocks:
            if block not in self._in_memory:
                self._in_memory[block] = self._threads.submit(self._opened.load, block)

    def keep_only(self, blocks: Iterable[int]) -> None:
        """Free all other blocks."""
        for block in self._in_memory.keys() - set(blocks):
            del self._in_memory[block]

    def read(self, records: np.ndarray) -> tuple[Data, list[Fault]]:
        """Return the records in the order asked; empty for a record with a fault.

        Raises UserError if a part has disappeared, has changed or cannot be read.
        """
        blocks = self._blocks.containing(records)
        order = np.argsort(blocks, kind="stable")
        needed, first = np.unique(blocks[order], return_index=True)
        self.read_ahead(needed.tolist())
        places = records - self._blocks.first_record[blocks]
        wanted = [
            Wanted(self._in_memory[block].result(), places[rows], rows)
            for block, rows in zip(needed.tolist(), np.split(order, first[1:]), strict=True)
        ]
        return self._opened.take(records, wanted)

    def name_record(self, record: int, problem: str) -> str:
        """Return the sentence that tells where a record is, and what is wrong with it. Loads its block if necessary."""
        (block,) = self._blocks.containing(np.array([record])).tolist()
        self.read_ahead([block])
        return self._opened.name_record(record, self._in_memory[block].result(), problem)


def parse_usable(
    parser: Parser, records: np.ndarray, data: Data, faults: Sequence[Fault], name_record: Callable[[int, str], str]
) -> tuple[Arrays, dict[int, str]]:
    """Parse records; one by one if they do not parse together. name_record: as Reader's.

    Return the arrays of the usable ones, in order, and a sentence for each of the others, by number, in order.
    """
    arrays = None if faults else parser.parse(data)
    if arrays is not None:
        return arrays, {}
    known = {fault.record: fault.message for fault in faults}
    usable, unusable = [], dict[int, str]()
    for record, one in zip(records.tolist(), one_by_one(data), strict=True):
        problem = None if record in known else parser.problem(one)
        if problem:
            known[record] = name_record(record, problem)
        if record in known:
            unusable[record] = known[record]
        else:
            usable.append(one)
    arrays = parser.parse(usable) if usable else {}
    assert arrays is not None, "every record was checked, and together they still do not parse"
    return arrays, unusable
