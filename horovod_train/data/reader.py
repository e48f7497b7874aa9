"""Records by number: reads whole blocks ahead of need, splits them and verifies every checksum. Does not parse.

Holds the blocks that it is told to keep and no others, so its memory is what the plan's windows span.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from horovod_train.data import framing
from horovod_train.data.index import Index, damage
from horovod_train.data.index_file import Source
from horovod_train.data.stage import Stage
from horovod_train.errors import UserError

_READ_THREADS = 8


class Fault(NamedTuple):
    """A record that cannot be used: its number, and the sentence that names it."""

    record: int
    message: str


class _Block(NamedTuple):
    data: bytes
    frames: framing.Frames
    error: framing.FramingError | None


class Reader:
    """Not for several threads at once."""

    def __init__(self, index: Index, stage: Stage) -> None:
        self._index, self._stage = index, stage
        self._threads = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="read-blocks")
        self._blocks: dict[int, Future[_Block]] = {}
        self._header = framing.Header()

    def read_ahead(self, blocks: Iterable[int]) -> None:
        """Starts reading the blocks that are not held yet."""
        for block in blocks:
            if block not in self._blocks:
                self._blocks[block] = self._threads.submit(self._load, block)

    def keep_only(self, blocks: Iterable[int]) -> None:
        """Lets go of all other blocks."""
        kept = set(blocks)
        for block in self._blocks.keys() - kept:
            del self._blocks[block]

    def read(self, records: np.ndarray) -> tuple[list[bytes], list[Fault]]:
        """The bytes of each record, in the order asked; empty where a fault is returned for it.

        Raises UserError where a file has gone, changed or cannot be read.
        """
        blocks = self._index.block_of(records)
        order = np.argsort(blocks, kind="stable")
        needed, first = np.unique(blocks[order], return_index=True)
        self.read_ahead(needed.tolist())
        found, checksums, broken = [b""] * len(records), [0] * len(records), set()
        inside = (records - self._index.first_record[blocks]).tolist()
        for block, rows in zip(needed.tolist(), np.split(order, first[1:]), strict=True):
            data, (starts, ends, stored), _ = self._blocks[block].result()
            for row in rows.tolist():
                place = inside[row]
                if place < len(starts):
                    found[row], checksums[row] = data[starts[place] : ends[place]], stored[place]
                else:
                    broken.add(row)
        faults = [self._framing_fault(int(records[row])) for row in sorted(broken)]
        for row in framing.bad_checksums(found, checksums).tolist():
            if row not in broken:
                found[row] = b""
                faults.append(self.fault(int(records[row]), "its data does not match its checksum"))
        return found, faults

    def fault(self, record: int, problem: str) -> Fault:
        """Names a record: file, place in it, byte. Reads its block if need be."""
        block = int(self._index.block_of(np.array([record]))[0])
        self.read_ahead([block])
        starts = self._blocks[block].result().frames.starts
        start = starts[record - int(self._index.first_record[block])] - framing.HEADER_BYTES
        path = self._index.files[self._index.file[block]].path
        offset = int(self._index.blocks.offset[block]) + start
        return Fault(record, damage(path, self._index.number_in_file(record), offset, problem))

    def _framing_fault(self, record: int) -> Fault:
        """Names the record that broke the framing; those after it in its block are lost with it."""
        block = int(self._index.block_of(np.array([record]))[0])
        error = self._blocks[block].result().error
        assert error is not None, "a block has fewer records than its index says, and whole framing"
        first = int(self._index.first_record[block])
        path = self._index.files[self._index.file[block]].path
        number = self._index.number_in_file(first) + error.record
        return Fault(record, damage(path, number, int(self._index.blocks.offset[block]) + error.offset, error.problem))

    def _load(self, block: int) -> _Block:
        data = self._read_bytes(block)
        try:
            return _Block(data, framing.split(data, self._header), None)
        except framing.FramingError as error:
            intact = framing.split(data[: error.offset], self._header)
            return _Block(data, intact, error)

    def _read_bytes(self, block: int) -> bytes:
        file = int(self._index.file[block])
        source = self._index.files[file]
        offset, length = int(self._index.blocks.offset[block]), int(self._index.blocks.length[block])
        first, last = np.searchsorted(self._index.file, [file, file + 1]).tolist()
        staged = self._stage.load(source, block - first, last - first, offset, length)
        if staged is not None:
            return staged
        data = _read_source(source, offset, length, self._stage)
        self._stage.save(source, block - first, last - first, offset, data)
        return data


def _read_source(source: Source, offset: int, length: int, stage: Stage) -> bytes:
    try:
        # Opened anew for each block: only so is a file noticed that was removed or replaced.
        fd = os.open(source.path, os.O_RDONLY)
        try:
            stat = os.fstat(fd)
            if (stat.st_size, stat.st_mtime_ns) != (source.size, source.mtime_ns):
                raise UserError(
                    f"{source.path}: was changed while in use: {source.size} bytes before, {stat.st_size} now, "
                    "or a newer date. Put it back as it was, or start again on the new file."
                )
            data = os.pread(stage.unpacked(source) if source.packing else fd, length, offset)
        finally:
            os.close(fd)
    except OSError as error:
        raise UserError(f"{source.path}: cannot be read any more: {error.strerror or error}.") from error
    if len(data) < length:
        raise UserError(f"{source.path}: byte {offset}: {length} bytes expected, {len(data)} came.")
    return data
