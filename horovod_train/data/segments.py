"""The order in which one rank loads its records: several steps of an epoch at once, read, parsed and made whole.

A *segment* is a run of steps of one epoch: many records for one call into Python. Turns a plan into arrays; does not
know tf.data. A record that cannot be used ends the run, or is left out and counted, as `data.on_bad_record` says.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from horovod_train.data.index import Index
from horovod_train.data.parse import Arrays, Parser
from horovod_train.data.plan import Line, Plan, Rows
from horovod_train.data.reader import Fault, Reader
from horovod_train.errors import UserError

_SEGMENT_RECORDS = 4096
_SEGMENT_BYTES = 16 << 20


class Segment(NamedTuple):
    """Some steps of one rank. All arrays have steps × rows as first axis, but `count` has steps."""

    arrays: Arrays
    real: np.ndarray
    ids: np.ndarray
    count: np.ndarray


class Span(NamedTuple):
    """Steps [first, last) of an epoch."""

    epoch: int
    first: int
    last: int


class Loader:
    """One rank's segments from a position on. Loads them best one after the other: it reads ahead by one."""

    def __init__(self, plan: Plan, index: Index, parser: Parser, rank: int, size: int, skip_bad: bool) -> None:
        self._plan, self._index, self._parser = plan, index, parser
        self._rank, self._size, self._skip_bad = rank, size, skip_bad
        self._reader = Reader(index)
        self._lines: dict[int, Line] = {}
        self._rows: dict[Span, Rows] = {}
        self._lock = threading.Lock()
        self.skipped: set[int] = set()
        """Records left out so far on this rank."""
        record_bytes = int(index.blocks.length.sum()) / max(index.num_records, 1)
        records = min(_SEGMENT_RECORDS, _SEGMENT_BYTES / max(record_bytes, 1))
        self.steps = max(1, int(records / plan.rows_per_rank(size)))
        """Steps of a segment; fewer at the end of an epoch."""

    def segments(self, first_step: int, epochs: int) -> int:
        """How many segments there are from a step to the end of its epoch, and in the `epochs` - 1 after it."""
        steps = self._plan.steps_per_epoch
        return -(-(steps - first_step) // self.steps) + (epochs - 1) * -(-steps // self.steps)

    def span(self, number: int, epoch: int, first_step: int) -> Span:
        """The steps of a segment, counted from the one that begins at `first_step` of `epoch`."""
        steps = self._plan.steps_per_epoch
        in_first = self.segments(first_step, epochs=1)
        if number >= in_first:
            later, number = divmod(number - in_first, -(-steps // self.steps))
            epoch, first_step = epoch + 1 + later, 0
        first = first_step + number * self.steps
        return Span(epoch, first, min(first + self.steps, steps))

    def load(self, span: Span, following: Span | None) -> Segment:
        """Reads and parses a segment, and starts reading the following one. Raises UserError; names a bad record."""
        with self._lock:
            near = [self._read_ahead(s) for s in (span, following) if s]
            segment = self._load(span)
            self._reader.keep_only(np.concatenate(near).tolist())
            self._lines = {epoch: line for epoch, line in self._lines.items() if epoch >= span.epoch}
            return segment

    def _load(self, span: Span) -> Segment:
        records, real = (values.ravel() for values in self._rows.pop(span))
        data, faults = self._reader.read(records)
        arrays = None if faults else self._parser.parse(data)
        if arrays is None:
            bad = self._bad_rows(records, data, faults)
            real = real & ~bad
            good = np.flatnonzero(~bad)
            arrays = self._parser.blank(len(data))
            if good.size:
                stand_in = data[good[0]]
                arrays = self._parser.parse([stand_in if b else d for b, d in zip(bad, data, strict=True)])
        assert arrays is not None, "every record was checked, and together they still do not parse"
        count = np.array([self._plan.count(step) for step in range(span.first, span.last)], np.int64)
        return Segment(arrays, real, np.where(real, records, -1), count)

    def _bad_rows(self, records: np.ndarray, data: list[bytes], faults: list[Fault]) -> np.ndarray:
        """Which rows cannot be used, bool [rows]; raises UserError for the first unless bad ones are to be skipped."""
        known = {fault.record: fault for fault in faults}
        for record, one in zip(records.tolist(), data, strict=True):
            problem = None if record in known else self._parser.problem(one)
            if problem:
                known[record] = self._reader.fault(record, problem)
            if record in known and not self._skip_bad:
                raise UserError(known[record].message)
        self.skipped.update(known)
        return np.isin(records, list(known))

    def _read_ahead(self, span: Span) -> np.ndarray:
        """Starts reading what a segment needs; returns the blocks to keep for it."""
        line = self._line(span.epoch)
        places, real = self._plan.places(self._rank, self._size, span.first, span.last)
        if span not in self._rows:
            self._rows[span] = Rows(line.records(places), real)
        self._reader.read_ahead(np.unique(self._index.block_of(self._rows[span].records.ravel())).tolist())
        return line.blocks_near(places)

    def _line(self, epoch: int) -> Line:
        if epoch not in self._lines:
            self._lines[epoch] = self._plan.line(epoch)
        return self._lines[epoch]
