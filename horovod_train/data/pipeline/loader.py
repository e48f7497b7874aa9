"""Loads one rank's records in their order: reads and parses several steps of an epoch in one call.

Turns a plan into arrays; does not know tf.data, nor how records are stored. A record that cannot be used ends the run,
or is skipped and counted, as `data.on_bad_record` says. `data.cache` keeps parsed records in memory, so that later
epochs read nothing.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from horovod_train.config.settings import DataConfig
from horovod_train.data.parsing import zero_rows
from horovod_train.data.pipeline.batch_source import StepRange
from horovod_train.data.pipeline.feed import HOST
from horovod_train.data.reader import Reader, parse_usable
from horovod_train.data.sampler import EpochSequence, Plan, Rows
from horovod_train.data.source import Arrays, Blocks, Data, Parser, RecordSource, mark_skipped
from horovod_train.errors import UserError

_CHUNK_RECORDS = 4096
_CHUNK_SINGLE_RECORDS = 256  # single records may take long to read, and the first step waits for a whole chunk
_CHUNK_BYTES = 16 << 20


class Ranks(NamedTuple):
    """One rank of a run: its numbers, and where it computes."""

    rank: int
    size: int
    """How many ranks there are."""
    on_host: int = 1
    """How many of them share this host's memory."""
    device: str = HOST
    """TensorFlow's name of the device on which its steps start."""


@dataclass(frozen=True)
class Chunk:
    """Some steps of one rank. The first axis of all arrays is steps × rows, except of `count`, where it is steps."""

    arrays: Arrays
    records: np.ndarray
    """int64: the record in each row, also if that row has weight 0."""
    ids: np.ndarray
    """int64: the record in each row, -1 for padding; of a skipped record as source.mark_skipped returns it."""
    count: np.ndarray
    """int64: records of each step over all ranks."""
    widths: np.ndarray
    """int64 [steps, lists]: how long the lists of each step are over all ranks, with data.bucket_by_length."""


class Unparsed(NamedTuple):
    """A chunk that is read, but not parsed."""

    steps: StepRange
    rows: Rows
    widths: np.ndarray
    """As in Chunk."""
    data: Data | None
    """None if the cache has all of it."""
    faults: dict[int, str]
    """As Reader.read returns them."""


class _ChunkReads(NamedTuple):
    rows: Rows
    blocks: np.ndarray
    """Blocks to keep while the chunk is loaded."""
    widths: np.ndarray


class Loader:
    """Loads one rank's chunks. One thread reads them in order; any number of threads parse."""

    def __init__(self, plan: Plan, source: RecordSource, parser: Parser, ranks: Ranks, config: DataConfig) -> None:
        self._plan, self._blocks, self._parser, self._ranks = plan, source.blocks, parser, ranks
        self._skip_bad = config.on_bad_record == "skip"
        self._reader = Reader(source, config.read_threads)
        uses_cache = config.cache == "memory"
        self._cache = ParsedCache(plan.num_records, parser.shapes, parser.dtypes) if uses_cache else None
        self._sequences: dict[tuple[int, str], EpochSequence] = {}
        self._chunk_reads: dict[StepRange, _ChunkReads] = {}
        self._lock = threading.Lock()
        self.skipped: set[int] = set()
        """Records skipped so far on this rank."""
        record_bytes = source.blocks.total_bytes / max(source.blocks.num_records, 1)
        max_records = _CHUNK_SINGLE_RECORDS if source.blocks.are_single else _CHUNK_RECORDS
        records = min(max_records, _CHUNK_BYTES / max(record_bytes, 1))
        self.steps_per_chunk = max(1, int(records / plan.rows_per_rank(ranks.size)))
        """How many steps are loaded together."""

    def read(self, steps: StepRange, following: Sequence[StepRange]) -> Unparsed:
        """Read a chunk, and start reading the following ones. Call it in the order of steps. Raises UserError."""
        with self._lock:
            reads = self._start_reading(steps)
            blocks = [reads.blocks, *(self._start_reading(later).blocks for later in following)]
            records = reads.rows.records.ravel()
            data, faults = (None, {}) if self._is_cached(records) else self._reader.read(records)
            self._reader.keep_only(np.concatenate(blocks).tolist())
            self._chunk_reads = {s: r for s, r in self._chunk_reads.items() if s in following}
            self._sequences = {key: order for key, order in self._sequences.items() if key[0] >= steps.epoch}
        return Unparsed(steps, reads.rows, reads.widths, data, faults)

    def parse(self, unparsed: Unparsed) -> Chunk:
        """Parse what was read; several threads may do so, in any order. Raises UserError that names a bad record."""
        records, real = (values.ravel() for values in unparsed.rows)
        arrays, bad = self._parse(records, unparsed.data, unparsed.faults)
        _, first, last = unparsed.steps
        count = np.array([self._plan.count(step) for step in range(first, last)], np.int64)
        ids = np.where(real, np.where(bad, mark_skipped(records), records), -1)
        return Chunk(arrays, records, ids, count, unparsed.widths)

    def bad_record(self, record: int, problem: str) -> UserError:
        """Return the error that names a bad record, what is wrong with it, and the rank that read it."""
        return self._error(self.name_record(record, problem))

    def stored(self, record: int) -> Arrays:
        """Return the stored values of one record, each with one row."""
        records = np.array([record])
        with self._lock:
            data, faults = self._reader.read(records)
        return self._parse(records, data, faults)[0]

    def name_record(self, record: int, problem: str) -> str:
        """Return a sentence with the place of a record and its problem. Reads its block if necessary."""
        with self._lock:
            return self._reader.name_record(record, problem)

    def _error(self, sentence: str) -> UserError:
        rank = f"rank {self._ranks.rank} of {self._ranks.size}"
        return UserError(f"{sentence} Read by {rank}; data.on_bad_record=skip leaves out such records.")

    def _parse(self, records: np.ndarray, data: Data | None, faults: dict[int, str]) -> tuple[Arrays, np.ndarray]:
        """Return the stored values of records, and which rows are unusable: those hold another record, or zeros."""
        if data is None:
            assert self._cache is not None, "nothing was read, and there is no cache"
            return self._cache.load(records), np.zeros(len(records), bool)
        arrays, unusable = parse_usable(self._parser, records, data, faults, self.name_record)
        if unusable and not self._skip_bad:
            raise self._error(next(iter(unusable.values())))
        self.skipped.update(unusable)
        bad = np.isin(records, list(unusable)) if unusable else np.zeros(len(records), bool)
        if self._cache:
            self._cache.save(records[~bad], arrays)
        return self._fill_rows(arrays, bad) if unusable else arrays, bad

    def _fill_rows(self, usable: Arrays, bad: np.ndarray) -> Arrays:
        """Return arrays with a row for each record, from those of the usable ones."""
        if bad.all():
            return zero_rows(self._parser, len(bad))
        rows = np.where(bad, 0, np.cumsum(~bad) - 1)
        return {name: np.asarray(array)[rows] for name, array in usable.items()}

    def _start_reading(self, steps: StepRange) -> _ChunkReads:
        """Start reading the blocks of a chunk, unless that was done before. Return what the chunk needs."""
        if steps not in self._chunk_reads:
            sequence, (epoch, first, last) = self._sequence(steps.epoch, "rank"), steps
            arguments = (sequence, self._ranks.rank, self._ranks.size, first, last)
            rows = self._plan.rows(*arguments)
            cached = self._is_cached(rows.records.ravel())
            blocks = np.zeros(0, np.int64) if cached else self._plan.blocks_near(*arguments)
            # A separate sequence for all ranks' records, because a sequence caches only the windows last used.
            widths = self._plan.widths(self._sequence(epoch, "all"), first, last)
            self._chunk_reads[steps] = _ChunkReads(rows, blocks, widths)
            if not cached:
                self._reader.read_ahead(np.unique(self._blocks.containing(rows.records.ravel())).tolist())
        return self._chunk_reads[steps]

    def _is_cached(self, records: np.ndarray) -> bool:
        return self._cache is not None and self._cache.holds(records)

    def _sequence(self, epoch: int, ranks: str) -> EpochSequence:
        if (epoch, ranks) not in self._sequences:
            self._sequences[epoch, ranks] = self._plan.sequence(epoch)
        return self._sequences[epoch, ranks]


class ParsedCache:
    """Space for every record of a data set, filled as they arrive. Pages that were never filled use no memory."""

    def __init__(self, num_records: int, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> None:
        self._is_filled = np.zeros(num_records, bool)
        self._arrays: Arrays = {
            name: np.empty((num_records, *shapes[name]), object if dtype == "string" else dtype)
            for name, dtype in dtypes.items()
        }

    def holds(self, records: np.ndarray) -> bool:
        return bool(self._is_filled[records].all())

    def load(self, records: np.ndarray) -> Arrays:
        return {name: array[records] for name, array in self._arrays.items()}

    def save(self, records: np.ndarray, arrays: Arrays) -> None:
        for name, array in arrays.items():
            self._arrays[name][records] = array
        self._is_filled[records] = True


def bytes_to_cache(blocks: Blocks, parser: Parser) -> int:
    """Return the size of all parsed records; for strings, and so for images, the number of stored bytes."""
    sizes = {
        name: np.dtype(dtype).itemsize * math.prod(parser.shapes[name])
        for name, dtype in parser.dtypes.items()
        if dtype != "string"
    }
    stored = blocks.total_bytes if len(sizes) < len(parser.dtypes) else 0
    return blocks.num_records * sum(sizes.values()) + stored


def check_room_to_cache(bytes_each: int, ranks_on_host: int) -> None:
    """Raise UserError if this host lacks the memory for the full caches of all its ranks."""
    needed, memory = ranks_on_host * bytes_each, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise UserError(
            f"data.cache: memory needs {needed / 1e9:.1f} GB for {ranks_on_host} rank(s) of this host, which has "
            f"{memory / 1e9:.1f} GB. Use none: the operating system keeps what fits."
        )
