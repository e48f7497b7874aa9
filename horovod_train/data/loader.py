"""Loads one rank's records in their order: reads and parses several steps of an epoch in one call.

A *segment* is several consecutive steps of one epoch: many records for one call into Python. Turns a plan into arrays;
does not know tf.data. A record that cannot be used ends the run, or is skipped and counted, as `data.on_bad_record`
says.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from horovod_train.data.cache import ParsedCache
from horovod_train.data.diagnostics import name_faults
from horovod_train.data.parsing import Arrays, Parser, blank
from horovod_train.data.sampler import Line, Plan, Rows
from horovod_train.data.tfrecord.index import Index
from horovod_train.data.tfrecord.reader import Data, Fault, Reader, as_list
from horovod_train.errors import UserError
from horovod_train.output.console import to_stderr

_SEGMENT_RECORDS = 4096
_SEGMENT_BYTES = 16 << 20


@dataclass(frozen=True)
class Chunk:
    """Some steps of one rank. The first axis of all arrays is steps × rows, except of `count`, where it is steps."""

    arrays: Arrays
    records: np.ndarray
    """int64: the record in each row, also if that row has weight 0."""
    real: np.ndarray
    """bool: False for padding and for skipped records."""
    count: np.ndarray
    """int64: records of each step over all ranks."""

    @property
    def ids(self) -> np.ndarray:
        """The records, with -1 for rows with weight 0."""
        return np.where(self.real, self.records, -1)


class StepRange(NamedTuple):
    """Steps [first, last) of an epoch."""

    epoch: int
    first: int
    last: int


class Unparsed(NamedTuple):
    """A segment as it was read."""

    span: StepRange
    records: np.ndarray
    real: np.ndarray
    """bool: False for padding."""
    data: Data | None
    """None if the cache holds all of it."""
    faults: list[Fault]


class _Need(NamedTuple):
    rows: Rows
    blocks: np.ndarray
    """Blocks to keep while the segment is loaded: those of every window that a lane is in."""


class Loader:
    """Loads one rank's segments. One thread reads them in order, one ahead; any number of threads parse."""

    def __init__(
        self,
        plan: Plan,
        index: Index,
        parser: Parser,
        rank: int,
        size: int,
        *,
        stage_dir: str | None,
        skip_bad: bool,
        cache: bool,
    ) -> None:
        """`cache` keeps every parsed record in memory; `skip_bad` skips records that cannot be used."""
        self._plan, self._index, self._parser = plan, index, parser
        self._rank, self._size, self._skip_bad = rank, size, skip_bad
        self._reader = Reader(index, stage_dir)
        if rank == 0 and (room := self._reader.room_needed()):
            to_stderr(room)
        self._cache = ParsedCache(index.num_records, parser.shapes, parser.dtypes) if cache else None
        self._lines: dict[int, Line] = {}
        self._needs: dict[StepRange, _Need] = {}
        self._lock = threading.Lock()
        self.skipped: set[int] = set()
        """Records skipped so far on this rank."""
        record_bytes = int(index.blocks.length.sum()) / max(index.num_records, 1)
        records = min(_SEGMENT_RECORDS, _SEGMENT_BYTES / max(record_bytes, 1))
        self.steps = max(1, int(records / plan.rows_per_rank(size)))
        """Steps of a segment; fewer at the end of an epoch."""

    def segments(self, first_step: int, epochs: int) -> int:
        """Return the number of segments from a step to the end of its epoch, and in the `epochs` - 1 after it."""
        steps = self._plan.steps_per_epoch
        return -(-(steps - first_step) // self.steps) + (epochs - 1) * -(-steps // self.steps)

    def span(self, number: int, epoch: int, first_step: int) -> StepRange:
        """Return the steps of segment `number`; segment 0 begins at `first_step` of `epoch`."""
        steps = self._plan.steps_per_epoch
        in_first = self.segments(first_step, epochs=1)
        if number >= in_first:
            later, number = divmod(number - in_first, -(-steps // self.steps))
            epoch, first_step = epoch + 1 + later, 0
        first = first_step + number * self.steps
        return StepRange(epoch, first, min(first + self.steps, steps))

    def read(self, span: StepRange, following: StepRange | None) -> Unparsed:
        """Read a segment, and start reading the following one. Call it in the order of the spans. Raises UserError."""
        with self._lock:
            need = self._need(span)
            near = [need.blocks, *([self._need(following).blocks] if following else [])]
            records = need.rows.records.ravel()
            data, faults = (None, []) if self._is_cached(records) else self._reader.read(records)
            self._reader.keep_only(np.concatenate(near).tolist())
            self._needs = {s: n for s, n in self._needs.items() if s == following}
            self._lines = {epoch: line for epoch, line in self._lines.items() if epoch >= span.epoch}
        return Unparsed(span, records, need.rows.real.ravel(), data, faults)

    def parse(self, read: Unparsed) -> Chunk:
        """Parse what was read; several threads may do so, in any order. Raises UserError that names a bad record."""
        arrays, bad = self._parse(read.records, read.data, read.faults)
        count = np.array([self._plan.count(step) for step in range(read.span.first, read.span.last)], np.int64)
        return Chunk(arrays, read.records, read.real & ~bad, count)

    def bad_record(self, record: int, problem: str) -> UserError:
        """Return the error that names a bad record, what is wrong with it, and the rank that read it."""
        with self._lock:
            return self._error(self._reader.fault(record, problem).message)

    def _error(self, message: str) -> UserError:
        return UserError(
            f"{message} Read by rank {self._rank} of {self._size}; data.on_bad_record=skip leaves out such records."
        )

    def stored(self, record: int) -> Arrays:
        """Return the stored values of one record, each with one row."""
        records = np.array([record])
        with self._lock:
            data, faults = self._reader.read(records)
        return self._parse(records, data, faults)[0]

    def _parse(self, records: np.ndarray, data: Data | None, faults: list[Fault]) -> tuple[Arrays, np.ndarray]:
        """Return the stored values of records, and which rows are unusable: those hold another record, or zeros."""
        bad = np.zeros(len(records), bool)
        if data is None:
            assert self._cache is not None, "nothing was read, and there is no cache"
            return self._cache.load(records), bad
        arrays = None if faults else self._parser.parse(data)
        if arrays is None:
            singly = as_list(data)
            with self._lock:
                named = name_faults(self._reader, self._parser, records, singly, faults)
            if named and not self._skip_bad:
                raise self._error(next(iter(named.values())))
            self.skipped.update(named)
            bad = np.isin(records, list(named))
            arrays = blank(self._parser, len(data))
            if not bad.all():
                stand_in = singly[int(np.flatnonzero(~bad)[0])]
                arrays = self._parser.parse([stand_in if b else one for b, one in zip(bad, singly, strict=True)])
            assert arrays is not None, "every record was checked, and together they still do not parse"
        if self._cache:
            self._cache.keep(records[~bad], {name: array[~bad] for name, array in arrays.items()})
        return arrays, bad

    def _need(self, span: StepRange) -> _Need:
        """Return the records and blocks of a segment, after starting to read them."""
        if span not in self._needs:
            line = self._line(span.epoch)
            places, real = self._plan.places(self._rank, self._size, span.first, span.last)
            rows = Rows(line.records(places), real)
            cached = self._is_cached(rows.records.ravel())
            self._needs[span] = _Need(rows, np.zeros(0, np.int64) if cached else line.blocks_near(places))
            if not cached:
                self._reader.read_ahead(np.unique(self._index.block_of(rows.records.ravel())).tolist())
        return self._needs[span]

    def _is_cached(self, records: np.ndarray) -> bool:
        return self._cache is not None and self._cache.holds(records)

    def _line(self, epoch: int) -> Line:
        if epoch not in self._lines:
            self._lines[epoch] = self._plan.line(epoch)
        return self._lines[epoch]
