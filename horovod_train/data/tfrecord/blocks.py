"""Reads blocks of TFRecord files, splits them into records and verifies every checksum. Does not keep or parse them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from horovod_train import tfrecord_framing
from horovod_train.config.remote_paths import is_remote
from horovod_train.data.source import Data, Fault, Wanted
from horovod_train.data.storage.storage import DEFAULT, Stamp, Storage
from horovod_train.data.tfrecord.index import Index
from horovod_train.data.tfrecord.index_file import ScannedFile, is_of
from horovod_train.data.tfrecord.scan import at_record
from horovod_train.data.tfrecord.staging import StagedFiles
from horovod_train.errors import UserError
from horovod_train.open_files import OpenFiles


class _Block(NamedTuple):
    number: int
    data: bytes
    table: np.ndarray | None
    """From tfrecord_framing.even_table."""
    frames: tfrecord_framing.Frames
    error: tfrecord_framing.FramingError | None


class TFRecordBlocks:
    """The blocks of an index. A BlockReader."""

    def __init__(self, index: Index, stage_dir: str | None, storage: Storage = DEFAULT) -> None:
        self._index, self._storage = index, storage
        self._staged = StagedFiles(stage_dir, index.files, _unpacked_bytes(index), storage)
        self._header, self._files = tfrecord_framing.Header(), OpenFiles()
        self._checked: set[str] = set()
        """Remote files that were unchanged when this process first read them."""

    def load(self, block: int) -> _Block:
        data = self._read_bytes(block)
        table = tfrecord_framing.even_table(data, self._header)
        if table is not None:
            return _Block(block, data, table, tfrecord_framing.table_frames(table), None)
        try:
            return _Block(block, data, None, tfrecord_framing.split(data, self._header), None)
        except tfrecord_framing.FramingError as error:
            return _Block(block, data, None, tfrecord_framing.split(data[: error.offset], self._header), error)

    def take(self, records: np.ndarray, wanted: Sequence[Wanted[_Block]]) -> tuple[Data, list[Fault]]:
        table = _join_tables(wanted, len(records))
        return (table, []) if table is not None else self._take_singly(records, wanted)

    def name_record(self, record: int, block: _Block, problem: str) -> str:
        start = block.frames.starts[record - int(self._index.blocks.first_record[block.number])]
        return self._name(block, record, start - tfrecord_framing.HEADER_BYTES, problem)

    def _take_singly(self, records: np.ndarray, wanted: Sequence[Wanted[_Block]]) -> tuple[list[bytes], list[Fault]]:
        found, checksums, faults = [b""] * len(records), [0] * len(records), dict[int, Fault]()
        for part in wanted:
            data, (starts, ends, stored) = part.block.data, part.block.frames
            for row, place in zip(part.rows.tolist(), part.places.tolist(), strict=True):
                if place < len(starts):
                    found[row], checksums[row] = data[starts[place] : ends[place]], stored[place]
                else:
                    faults[row] = self._framing_fault(int(records[row]), part.block)
        for row in tfrecord_framing.bad_checksums(found, checksums).tolist():
            if row not in faults:
                record, found[row] = int(records[row]), b""
                block = next(part.block for part in wanted if row in part.rows)
                faults[row] = Fault(record, self.name_record(record, block, "its data does not match its checksum"))
        return found, list(faults.values())

    def _framing_fault(self, record: int, block: _Block) -> Fault:
        """Name the record that broke the framing; those after it in its block are lost too."""
        error = block.error
        assert error is not None, "a block has fewer records than its index says, and whole framing"
        first = int(self._index.blocks.first_record[block.number])
        return Fault(record, self._name(block, first + error.record, error.offset, error.problem))

    def _name(self, block: _Block, record: int, offset: int, problem: str) -> str:
        """Name a record of a block. offset: in the block."""
        path = self._index.files[self._index.file[block.number]].path
        offset += int(self._index.offset[block.number])
        return f"{path}: {at_record(self._index.number_in_file(record), offset, problem)}"

    def _read_bytes(self, block: int) -> bytes:
        file = self._index.files[self._index.file[block]]
        offset, length = int(self._index.offset[block]), int(self._index.blocks.bytes[block])
        copy = self._staged.load(file, block, offset, length)
        if copy is not None:
            return copy
        data = self._read_file(file, offset, length)
        self._staged.save(file, block, offset, data)
        return data

    def _read_file(self, file: ScannedFile, offset: int, length: int) -> bytes:
        try:
            data = (self._read_remote if is_remote(file.path) else self._read_local)(file, offset, length)
        except OSError as error:
            raise UserError(f"{file.path}: cannot be read any more: {error.strerror or error}.") from error
        if len(data) < length:
            raise UserError(f"{file.path}: byte {offset}: {length} bytes expected, {len(data)} came.")
        return data

    def _read_local(self, file: ScannedFile, offset: int, length: int) -> bytes:
        if file.packing:  # its copy is read, so that it need not stay open
            _check_unchanged(file, Stamp.of(os.stat(file.path)))
            return self._staged.read_unpacked(file, offset, length)
        with self._files.opened(file.path) as fd:
            _check_unchanged(file, Stamp.of(os.fstat(fd)))  # one that was replaced is read as it was
            return os.pread(fd, length, offset)

    def _read_remote(self, file: ScannedFile, offset: int, length: int) -> bytes:
        if file.path not in self._checked:  # once, because it takes a request
            _check_unchanged(file, self._storage.stamp(file.path))
            self._checked.add(file.path)
        if file.packing:
            return self._staged.read_unpacked(file, offset, length)
        return self._storage.read(file.path, offset, length)


def _unpacked_bytes(index: Index) -> dict[ScannedFile, int]:
    """Return the size of each packed file's content."""
    ends = np.zeros(len(index.files), np.int64)
    np.maximum.at(ends, index.file, index.offset + index.blocks.bytes)
    return {file: int(end) for file, end in zip(index.files, ends.tolist(), strict=True) if file.packing}


def _join_tables(wanted: Sequence[Wanted[_Block]], records: int) -> np.ndarray | None:
    """Return all records as one table; None if their lengths differ, or if a wrong checksum needs a closer look."""
    widths = {None if part.block.table is None else part.block.table.shape[1] for part in wanted}
    width = widths.pop()
    if width is None or widths:
        return None
    table = np.empty((records, width), np.uint8)
    for part in wanted:
        assert part.block.table is not None
        table[part.rows] = part.block.table[part.places]
    data = table.tobytes()
    ends = range(width - tfrecord_framing.FOOTER_BYTES, len(data), width)
    each = (
        data[start:end] for start, end in zip(range(tfrecord_framing.HEADER_BYTES, len(data), width), ends, strict=True)
    )
    if tfrecord_framing.bad_checksums(list(each), tfrecord_framing.table_checksums(table)).size:
        return None
    return table[:, tfrecord_framing.HEADER_BYTES : -tfrecord_framing.FOOTER_BYTES]


def _check_unchanged(file: ScannedFile, now: Stamp) -> None:
    if not is_of(file, now):
        raise UserError(
            f"{file.path}: was changed while in use: {file.size} bytes before, {now.size} now, "
            "or a newer date. Put it back as it was, or start again on the new file."
        )
