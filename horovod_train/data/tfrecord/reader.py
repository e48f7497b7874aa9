"""Reads records by number: reads whole blocks ahead of need, splits them and verifies every checksum. Does not parse.

Keeps only the blocks that it is told to keep, so its memory is what the plan's windows span.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from horovod_train import tfrecord_framing
from horovod_train.data.tfrecord.index import Index, damage
from horovod_train.data.tfrecord.index_file import Source
from horovod_train.data.tfrecord.staging import Stage
from horovod_train.errors import UserError

_READ_THREADS = 8


class Fault(NamedTuple):
    """A record that cannot be used: its number, and the sentence that names it."""

    record: int
    message: str


Data = list[bytes] | np.ndarray
"""Records: one by one, or uint8 [records, bytes] if all have one length."""


def as_list(data: Data) -> list[bytes]:
    return [row.tobytes() for row in data] if isinstance(data, np.ndarray) else data


class _Block(NamedTuple):
    data: bytes
    table: np.ndarray | None
    """From tfrecord_framing.even_table."""
    frames: tfrecord_framing.Frames
    error: tfrecord_framing.FramingError | None


class Reader:
    """Not for several threads at the same time."""

    def __init__(self, index: Index, stage_dir: str | None) -> None:
        """`stage_dir`: a node-local folder for copies of what is read."""
        self._index, self._stage = index, Stage(stage_dir, index.files, _unpacked_bytes(index))
        self._threads = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="read-blocks")
        self._blocks: dict[int, Future[_Block]] = {}
        self._header = tfrecord_framing.Header()

    def room_needed(self) -> str | None:
        """Return a sentence on the disk space that unpacking will need; None if no file is packed."""
        return self._stage.room_needed()

    def read_ahead(self, blocks: Iterable[int]) -> None:
        """Start reading the blocks that are not in memory yet."""
        for block in blocks:
            if block not in self._blocks:
                self._blocks[block] = self._threads.submit(self._load, block)

    def keep_only(self, blocks: Iterable[int]) -> None:
        """Free all other blocks."""
        kept = set(blocks)
        for block in self._blocks.keys() - kept:
            del self._blocks[block]

    def read(self, records: np.ndarray) -> tuple[Data, list[Fault]]:
        """Return the bytes of each record, in the order asked; empty for a record with a fault.

        Raises UserError if a file has disappeared, has changed or cannot be read.
        """
        numbers = self._index.block_of(records)
        order = np.argsort(numbers, kind="stable")
        needed, first = np.unique(numbers[order], return_index=True)
        self.read_ahead(needed.tolist())
        inside = records - self._index.first_record[numbers]
        groups = [
            (self._blocks[block].result(), rows)
            for block, rows in zip(needed.tolist(), np.split(order, first[1:]), strict=True)
        ]
        table = _join_tables(groups, inside)
        return (table, []) if table is not None else self._read_singly(records, groups, inside)

    def _read_singly(
        self, records: np.ndarray, groups: list[tuple[_Block, np.ndarray]], inside: np.ndarray
    ) -> tuple[list[bytes], list[Fault]]:
        found, checksums, broken = [b""] * len(records), [0] * len(records), set()
        for (data, _, (starts, ends, stored), _), rows in groups:
            for row, place in zip(rows.tolist(), inside[rows].tolist(), strict=True):
                if place < len(starts):
                    found[row], checksums[row] = data[starts[place] : ends[place]], stored[place]
                else:
                    broken.add(row)
        faults = [self._framing_fault(int(records[row])) for row in sorted(broken)]
        for row in tfrecord_framing.bad_checksums(found, checksums).tolist():
            if row not in broken:
                found[row] = b""
                faults.append(self.fault(int(records[row]), "its data does not match its checksum"))
        return found, faults

    def fault(self, record: int, problem: str) -> Fault:
        """Name a record: file, number in it, byte. Reads its block if necessary."""
        block = int(self._index.block_of(np.array([record]))[0])
        self.read_ahead([block])
        starts = self._blocks[block].result().frames.starts
        start = starts[record - int(self._index.first_record[block])] - tfrecord_framing.HEADER_BYTES
        path = self._index.files[self._index.file[block]].path
        offset = int(self._index.blocks.offset[block]) + start
        return Fault(record, damage(path, self._index.number_in_file(record), offset, problem))

    def _framing_fault(self, record: int) -> Fault:
        """Name the record that broke the framing; those after it in its block are lost too."""
        block = int(self._index.block_of(np.array([record]))[0])
        error = self._blocks[block].result().error
        assert error is not None, "a block has fewer records than its index says, and whole framing"
        first = int(self._index.first_record[block])
        path = self._index.files[self._index.file[block]].path
        number = self._index.number_in_file(first) + error.record
        return Fault(record, damage(path, number, int(self._index.blocks.offset[block]) + error.offset, error.problem))

    def _load(self, block: int) -> _Block:
        data = self._read_bytes(block)
        table = tfrecord_framing.even_table(data, self._header)
        if table is not None:
            return _Block(data, table, tfrecord_framing.table_frames(table), None)
        try:
            return _Block(data, None, tfrecord_framing.split(data, self._header), None)
        except tfrecord_framing.FramingError as error:
            return _Block(data, None, tfrecord_framing.split(data[: error.offset], self._header), error)

    def _read_bytes(self, block: int) -> bytes:
        source = self._index.files[self._index.file[block]]
        offset, length = int(self._index.blocks.offset[block]), int(self._index.blocks.length[block])
        staged = self._stage.load(source, block, offset, length)
        if staged is not None:
            return staged
        data = _read_source(source, offset, length, self._stage)
        self._stage.save(source, block, offset, data)
        return data


def _unpacked_bytes(index: Index) -> dict[Source, int]:
    """Return the size of each packed file's content."""
    ends = np.zeros(len(index.files), np.int64)
    np.maximum.at(ends, index.file, index.blocks.offset + index.blocks.length)
    return {source: int(end) for source, end in zip(index.files, ends.tolist(), strict=True) if source.packing}


def _join_tables(groups: list[tuple[_Block, np.ndarray]], inside: np.ndarray) -> np.ndarray | None:
    """Return all records as one table; None if their lengths differ, or if a wrong checksum needs a closer look."""
    widths = {None if block.table is None else block.table.shape[1] for block, _ in groups}
    width = widths.pop()
    if width is None or widths:
        return None
    table = np.empty((len(inside), width), np.uint8)
    for block, rows in groups:
        assert block.table is not None
        table[rows] = block.table[inside[rows]]
    data = table.tobytes()
    ends = range(width - tfrecord_framing.FOOTER_BYTES, len(data), width)
    each = (
        data[start:end] for start, end in zip(range(tfrecord_framing.HEADER_BYTES, len(data), width), ends, strict=True)
    )
    if tfrecord_framing.bad_checksums(list(each), tfrecord_framing.table_checksums(table)).size:
        return None
    return table[:, tfrecord_framing.HEADER_BYTES : -tfrecord_framing.FOOTER_BYTES]


def _read_source(source: Source, offset: int, length: int, stage: Stage) -> bytes:
    try:
        # Opened again for each block, because only then is a removed or replaced file noticed.
        fd = os.open(source.path, os.O_RDONLY)
        try:
            stat = os.fstat(fd)
            if (stat.st_size, stat.st_mtime_ns) != (source.size, source.mtime_ns):
                raise UserError(
                    f"{source.path}: was changed while in use: {source.size} bytes before, {stat.st_size} now, "
                    "or a newer date. Put it back as it was, or start again on the new file."
                )
            data = stage.read_unpacked(source, offset, length) if source.packing else os.pread(fd, length, offset)
        finally:
            os.close(fd)
    except OSError as error:
        raise UserError(f"{source.path}: cannot be read any more: {error.strerror or error}.") from error
    if len(data) < length:
        raise UserError(f"{source.path}: byte {offset}: {length} bytes expected, {len(data)} came.")
    return data
