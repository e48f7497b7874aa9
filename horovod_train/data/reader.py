"""Reads records by number: loads whole blocks ahead of need, and takes the records out of them. Knows no format.

Frees the blocks that keep_only does not name, so its memory is what the plan's windows span. Also finds the records of
a batch that cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from horovod_train.config.settings import DataConfig
from horovod_train.data.source import Arrays, Data, LoadedBlock, Parser, RecordSource, split_records
from horovod_train.output.console import track

_CHUNK = 4096


class _Part(NamedTuple):
    """The records to take from one block."""

    block: LoadedBlock
    positions: np.ndarray
    """int64: their positions in the block."""
    rows: np.ndarray
    """int64: their rows in the result."""


class Reader:
    """Not for several threads at the same time."""

    def __init__(self, source: RecordSource, threads: int = DataConfig.read_threads) -> None:
        """threads: how many blocks are loaded at the same time."""
        self._blocks, self._load = source.blocks, source.open()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="read-blocks")
        self._in_memory: dict[int, Future[LoadedBlock]] = {}

    def read_ahead(self, blocks: Iterable[int]) -> None:
        """Start loading the blocks that are not in memory yet."""
        for block in blocks:
            if block not in self._in_memory:
                self._in_memory[block] = self._threads.submit(self._load, block)

    def keep_only(self, blocks: Iterable[int]) -> None:
        """Free all other blocks."""
        for block in self._in_memory.keys() - set(blocks):
            del self._in_memory[block]

    def read(self, records: np.ndarray) -> tuple[Data, dict[int, str]]:
        """Return the records in the order of `records`, and a sentence for each that cannot be used, by its number.

        Raises UserError if a part has disappeared, has changed or cannot be read.
        """
        blocks = self._blocks.containing(records)
        order = np.argsort(blocks, kind="stable")
        needed, first = np.unique(blocks[order], return_index=True)
        self.read_ahead(needed.tolist())
        positions = records - self._blocks.first_record[blocks]
        parts = [
            _Part(self._in_memory[block].result(), positions[rows], rows)
            for block, rows in zip(needed.tolist(), np.split(order, first[1:]), strict=True)
        ]
        faults = {
            int(records[row]): part.block.faults[position]
            for part in parts
            if part.block.faults
            for row, position in zip(part.rows.tolist(), part.positions.tolist(), strict=True)
            if position in part.block.faults
        }
        return _join(parts, len(records)), faults

    def name_record(self, record: int, problem: str) -> str:
        """Return a sentence with the place of a record and its problem. Loads its block if necessary."""
        (block,) = self._blocks.containing(np.array([record])).tolist()
        self.read_ahead([block])
        return self._in_memory[block].result().name(record - int(self._blocks.first_record[block]), problem)


def _join(parts: Sequence[_Part], records: int) -> Data:
    """Join the records of all parts: in arrays, or one by one unless all parts have arrays of the same kinds."""
    arrays = [_arrays(part.block.data) for part in parts]
    kinds = [[(name, array.dtype, array.shape[1:]) for name, array in of_part.items()] for of_part in arrays]
    if not kinds[0] or any(of_part != kinds[0] for of_part in kinds):
        in_order: list[Any] = [None] * records
        for part in parts:
            stored = split_records(part.block.data)
            for row, position in zip(part.rows.tolist(), part.positions.tolist(), strict=True):
                in_order[row] = stored[position]
        return in_order
    joined = {name: np.empty((records, *shape), dtype) for name, dtype, shape in kinds[0]}
    for part, of_part in zip(parts, arrays, strict=True):
        for name, array in joined.items():
            array[part.rows] = of_part[name][part.positions]
    return joined if isinstance(parts[0].block.data, dict) else joined[""]


def _arrays(data: Data) -> Arrays:
    """Return the arrays of a block; none if its records are one by one."""
    return data if isinstance(data, dict) else {"": data} if isinstance(data, np.ndarray) else {}


def parse_usable(
    parser: Parser, records: np.ndarray, data: Data, faults: Mapping[int, str], name_record: Callable[[int, str], str]
) -> tuple[Arrays, dict[int, str]]:
    """Parse records; one by one if they do not parse together. faults, name_record: as of Reader.

    Return the arrays of the usable records, and a sentence for each other record, by its number; both in order.
    """
    arrays = None if faults else parser.parse(data)
    if arrays is not None:
        return arrays, {}
    problems = dict(faults)
    usable, unusable = [], dict[int, str]()
    for record, stored in zip(records.tolist(), split_records(data), strict=True):
        problem = None if record in problems else parser.problem(stored)
        if problem:
            problems[record] = name_record(record, problem)
        if record in problems:
            unusable[record] = problems[record]
        else:
            usable.append(stored)
    arrays = parser.parse(usable) if usable else {}
    if arrays is None:  # as of a user's function that takes each record, but not these together
        rows = [parser.parse([stored]) for stored in usable]
        assert None not in rows, "every record was checked, and one still does not parse"
        arrays = {name: np.concatenate([row[name] for row in rows if row]) for name in parser.dtypes}
    return arrays, unusable


def parse_all(
    source: RecordSource, reader: Reader, parser: Parser, description: str
) -> Iterator[tuple[np.ndarray, Data, Arrays, dict[int, str]]]:
    """Read all records in their order, some thousand at a time. description: of the work, on a progress bar.

    Yield for each chunk the numbers of its records, their stored data, and the results of parse_usable.
    """
    firsts = range(0, source.blocks.num_records, _CHUNK)
    for first in track(firsts, len(firsts), description):
        records = np.arange(first, min(first + _CHUNK, source.blocks.num_records))
        data, faults = reader.read(records)
        yield records, data, *parse_usable(parser, records, data, faults, reader.name_record)
        reader.keep_only(source.blocks.containing(records[-1:]).tolist())
