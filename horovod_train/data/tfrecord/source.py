"""TFRecord files as a source of records: each holds a serialized tf.train.Example, or what `data.parse` reads.

Reads blocks of the files, splits them into records and verifies every checksum. Does not keep or parse them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np

from horovod_train import tfrecord_framing
from horovod_train.config.paths import is_remote
from horovod_train.config.settings import DataConfig
from horovod_train.data.schema import Feature
from horovod_train.data.source import LoadBlock, LoadedBlock, Parser, Part, problems_of
from horovod_train.data.storage import DEFAULT, Stamp, Storage, check_unchanged
from horovod_train.data.tfrecord.index import Index, ScannedFile, at_record, open_index
from horovod_train.data.tfrecord.staging import StagedFiles
from horovod_train.errors import UserError
from horovod_train.open_files import OpenFiles


class TFRecords:
    """The records of some files. A RecordSource."""

    def __init__(self, index: Index, stage_dir: str | None = None, storage: Storage = DEFAULT) -> None:
        """`stage_dir`: a node-local folder for copies of what is read."""
        self.index, self._stage_dir, self._storage = index, stage_dir, storage
        self.blocks = index.blocks

    @cached_property
    def parts(self) -> list[Part]:
        files = self.index.files
        records = np.bincount(self.index.file, self.blocks.records, len(files)).astype(np.int64).tolist()
        return [
            Part(file.path, file.size, count, file.digest, file.problem)
            for file, count in zip(files, records, strict=True)
        ]

    def open(self) -> LoadBlock:
        return TFRecordBlocks(self.index, self._stage_dir, self._storage).load

    def parser(self, features: dict[str, Feature]) -> Parser:
        from horovod_train.data.parsing import SchemaParser  # loads TensorFlow

        return SchemaParser(features)


def open_tfrecords(files: Sequence[str], config: DataConfig, *, allow_damage: bool) -> TFRecords:
    """Open TFRecord files by their index. Scans files without a current one: seconds per million records, once."""
    storage = Storage(config.retry_s)
    source = TFRecords(open_index(files, config.index_dir, storage), config.stage_dir, storage)
    problems = problems_of(source.parts)
    if problems and not allow_damage:
        raise UserError(problems[0])
    return source


class TFRecordBlocks:
    """The blocks of an index."""

    def __init__(self, index: Index, stage_dir: str | None, storage: Storage = DEFAULT) -> None:
        self._index, self._storage = index, storage
        self._staged = StagedFiles(stage_dir, index.files, _unpacked_bytes(index), storage)
        self._header, self._files = tfrecord_framing.Header(), OpenFiles()
        self._unchanged: set[str] = set()
        """Remote files that had not changed when this process first read them."""

    def load(self, block: int) -> LoadedBlock:
        """Read a block, as source.LoadBlock says."""
        data, count = self._read_bytes(block), int(self._index.blocks.records[block])
        table = tfrecord_framing.even_table(data, self._header)
        frames = tfrecord_framing.split(data, self._header) if table is None else tfrecord_framing.table_frames(table)
        records = [data[start:end] for start, end in zip(frames.starts, frames.ends, strict=True)]
        name = partial(self._name_record, block, frames)
        bad = tfrecord_framing.bad_checksums(records, frames.checksums).tolist()
        faults = {position: name(position, "its data does not match its checksum") for position in bad}
        if frames.problem:  # the records after it in the block are lost too
            faults |= dict.fromkeys(range(len(records), count), name(len(records), frames.problem))
            records += [b""] * (count - len(records))
        header, footer = tfrecord_framing.HEADER_BYTES, tfrecord_framing.FOOTER_BYTES
        return LoadedBlock(records if table is None else table[:, header:-footer], name, faults)

    def _name_record(self, block: int, frames: tfrecord_framing.Frames, position: int, problem: str) -> str:
        """Return where a record is, and its problem. position: in the block; after its last, of broken framing."""
        path = self._index.files[self._index.file[block]].path
        if position < len(frames.starts):
            offset = frames.starts[position] - tfrecord_framing.HEADER_BYTES
        else:
            offset = frames.ends[-1] + tfrecord_framing.FOOTER_BYTES if frames.ends else 0
        record = self._index.number_in_file(int(self._index.blocks.first_record[block]) + position)
        return f"{path}: {at_record(record, int(self._index.offset[block]) + offset, problem)}"

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
        if file.packing:  # its copy is read, so the file need not stay open
            check_unchanged(file.path, file.size, file.mtime_ns, Stamp.of(os.stat(file.path)))
            return self._staged.read_unpacked(file, offset, length)
        with self._files.opened(file.path) as fd:
            # If the file was replaced, this descriptor still reads the old one.
            check_unchanged(file.path, file.size, file.mtime_ns, Stamp.of(os.fstat(fd)))
            return os.pread(fd, length, offset)

    def _read_remote(self, file: ScannedFile, offset: int, length: int) -> bytes:
        if file.path not in self._unchanged:  # once, because it takes a request
            check_unchanged(file.path, file.size, file.mtime_ns, self._storage.stamp(file.path))
            self._unchanged.add(file.path)
        if file.packing:
            return self._staged.read_unpacked(file, offset, length)
        return self._storage.read(file.path, offset, length)


def _unpacked_bytes(index: Index) -> dict[ScannedFile, int]:
    """Return the size of each packed file's content."""
    ends = np.zeros(len(index.files), np.int64)
    np.maximum.at(ends, index.file, index.offset + index.blocks.bytes)
    return {file: int(end) for file, end in zip(index.files, ends.tolist(), strict=True) if file.packing}
