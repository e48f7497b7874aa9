"""TFRecord files as a source of records: each holds a serialized tf.train.Example, or what `data.parse` reads.

Reads blocks of the files, splits them into records and verifies every checksum. Does not keep or parse them.

With `data.stage_dir`, blocks are copied to a node-local disk: the rank that first reads a block copies it, and all
ranks of the node then read the copy. When a file changes, the name of its copy changes too. Copies from before the last
boot are not used, because their last writes may be lost. Without a folder that the ranks of a node share, only what
packed files hold is stored, in an unnamed temporary file of this process, which disappears with it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from rich.filesize import decimal

from horovod_train import tfrecord_framing
from horovod_train.config.paths import is_remote, link_to_nothing
from horovod_train.config.settings import DataConfig
from horovod_train.data.files import hold_lock
from horovod_train.data.schema import Feature
from horovod_train.data.source import LoadBlock, LoadedBlock, Parser, Part, parser_of_examples, problems_of
from horovod_train.data.storage import DEFAULT, Stamp, Storage, check_unchanged, read_at, reopen_if_stale, resolved
from horovod_train.data.tfrecord_index import Index, ScannedFile, at_record, open_index, unpack, write_unpacked
from horovod_train.errors import UserError, reading, unusable
from horovod_train.host import OpenFiles, boot_id
from horovod_train.output.files import Artifact, remove, rename
from horovod_train.output.logs import ANY_RANK

_UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_NAME = r"[0-9a-f]{24}"
_OTHER_BOOT = Artifact(
    "a folder of copies", _UUID, "folder", (rf"{_NAME}\.(there|blocks|unpacked|(unpacked\.)?lock|partial)",)
)
_PARTIAL = Artifact("an unfinished copy", rf"{_NAME}\.partial")
log = logging.getLogger(__name__)


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
        return parser_of_examples(features)


def open_tfrecords(files: Sequence[str], config: DataConfig) -> TFRecords:
    """Open TFRecord files by their index. Scans files without a current one: seconds per million records, once."""
    storage = Storage(config.retry_s)
    source = TFRecords(open_index(files, config.index_dir, storage), config.stage_dir, storage)
    problems = problems_of(source.parts)
    if problems and config.on_bad_record != "skip":
        raise UserError(problems[0])
    return source


class TFRecordBlocks:
    """The blocks of an index."""

    def __init__(self, index: Index, stage_dir: str | None, storage: Storage) -> None:
        self._index, self._storage = index, storage
        ends = np.zeros(len(index.files), np.int64)
        np.maximum.at(ends, index.file, index.offset + index.blocks.bytes)
        unpacked_bytes = {file: end for file, end in zip(index.files, ends.tolist(), strict=True) if file.packing}
        self._staged = StagedFiles(stage_dir, index.files, unpacked_bytes, storage)
        self._header, self._files = tfrecord_framing.Header(), OpenFiles()
        self._unchanged: set[str] = set()
        """Remote files that had not changed when this process first read them."""

    def load(self, block: int) -> LoadedBlock:
        """Read a block, as source.LoadBlock says."""
        file, count = self._index.files[self._index.file[block]], int(self._index.blocks.records[block])
        offset, length = int(self._index.offset[block]), int(self._index.blocks.bytes[block])
        copy = self._staged.load(file, block, offset, length)
        if copy is not None:
            loaded = self._split(block, count, copy)
            if not loaded.faults:
                return loaded
        # A copy whose file was removed by a clean-up, and then written to by a rank, has holes.
        data = self._read_file(file, offset, length)
        self._staged.save(file, block, offset, data)
        return self._split(block, count, data)

    def _split(self, block: int, count: int, data: bytes) -> LoadedBlock:
        """Return the records of a block, and which of them are faulty."""
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

    def _read_file(self, file: ScannedFile, offset: int, length: int) -> bytes:
        path, is_file_remote = file.path, is_remote(file.path)
        with reading(path, " any more"):
            if is_file_remote and path not in self._unchanged:  # once, because it takes a request
                check_unchanged(path, file.size, file.mtime_ns, self._storage.stamp(path))
                self._unchanged.add(path)
            if file.packing:  # its copy is read, so the file need not stay open
                if not is_file_remote:
                    check_unchanged(path, file.size, file.mtime_ns, Stamp.of(os.stat(path)))
                data = self._staged.read_unpacked(file, offset, length)
            elif is_file_remote:
                data = self._storage.read(path, offset, length)
            else:
                data = reopen_if_stale(
                    partial(self._read_open, file, offset, length), forget=partial(self._files.forget, path)
                )
        if len(data) < length:
            raise UserError(f"{path}: byte {offset}: {length} bytes expected, {len(data)} came.")
        return data

    def _read_open(self, file: ScannedFile, offset: int, length: int) -> bytes:
        with self._files.opened(file.path) as fd:
            # If the file was replaced, this descriptor still reads the old one.
            check_unchanged(file.path, file.size, file.mtime_ns, Stamp.of(os.fstat(fd)))
            return read_at(fd, length, offset)


class StagedFiles:
    """The copies of one node, or of one process if `folder` is None. Threads and processes may share it."""

    def __init__(
        self,
        folder: str | None,
        files: Sequence[ScannedFile],
        unpacked_bytes: Mapping[ScannedFile, int],
        storage: Storage = DEFAULT,
    ) -> None:
        """Open or create the copies. Raises UserError for an unusable folder.

        unpacked_bytes: the size of the content of each packed file.
        """
        self._stage_dir, self._folder, self._flags, self._is_full = folder, None, -1, False
        self._source_folder = os.path.dirname(files[0].path) if files else ""
        self._unpacked, self._storage = UnpackedFiles(unpacked_bytes, storage), storage
        if folder:
            try:
                self._folder = _open_folder(folder)
                # One byte for each block says whether it is there. Not mapped into memory, because writing to a mapped
                # page on a full disk ends the process.
                self._flags = os.open(self._folder / f"{_copy_name(*files)}.there", os.O_RDWR | os.O_CREAT, 0o600)
            except OSError as error:
                raise unusable(f"data.stage_dir: {folder} cannot be used", error, link_to_nothing(folder)) from error
        if unpacked_bytes:
            self._log_room_needed(len(unpacked_bytes), sum(unpacked_bytes.values()))

    def _log_room_needed(self, files: int, total: int) -> None:
        place = self._stage_dir or tempfile.gettempdir()
        free, each = shutil.disk_usage(place).free, "once for all ranks of a node" if self._folder else "on each rank"
        text = f"{files} packed files take up to {decimal(total)} in {place} once unpacked, {each}"
        text += f"; {decimal(free)} are free"
        if free < total:
            log.warning(f"{text}. Make room, or choose a larger disk: data.stage_dir.")
        else:
            log.info(text)

    def load(self, file: ScannedFile, block: int, offset: int, length: int) -> bytes | None:
        """Return a block's bytes; None if this node has no copy."""
        if self._folder is None:
            return None
        try:
            if not file.packing and os.pread(self._flags, 1, block) != b"\1":
                return None
            copy = self._folder / f"{_copy_name(file)}.{'unpacked' if file.packing else 'blocks'}"
            data = self._storage.read(str(copy), offset, length)
        except OSError:  # removed by a clean-up, or not unpacked yet: the source is read instead
            return None
        return data if len(data) == length else None

    def save(self, file: ScannedFile, block: int, offset: int, data: bytes) -> None:
        """Store a block for the next rank that reads it. A full disk ends the copying, not the run."""
        if self._folder is None or self._is_full or file.packing:
            return
        try:
            fd = os.open(self._folder / f"{_copy_name(file)}.blocks", os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                if os.pwrite(fd, data, offset) == len(data):
                    os.pwrite(self._flags, b"\1", block)  # last, because another rank may look at any moment
            finally:
                os.close(fd)
        except OSError as error:
            self._stop_copying(error)

    def read_unpacked(self, file: ScannedFile, offset: int, length: int) -> bytes:
        """Return bytes of a packed file's content. The first call unpacks it; with a folder, once per node.

        Raises UserError if the file is broken, or if no disk has space for it.
        """
        if self._folder is not None and not self._is_full:
            path = self._folder / f"{_copy_name(file)}.unpacked"
            if not path.exists():
                # Only ranks that need the same file wait for the one that unpacks it, and until it has ended: without
                # the lock they would remove its part. Other users cannot hold the lock, which is in a private folder.
                with hold_lock([path]):
                    try:
                        if not path.exists():
                            self._write(file, path)
                    except OSError as error:
                        self._stop_copying(error)
            with contextlib.suppress(FileNotFoundError):  # not written, or removed by a clean-up
                return self._storage.read(str(path), offset, length)
        return self._unpacked.read(file, offset, length)

    def _write(self, file: ScannedFile, path: Path) -> None:
        partial = path.with_suffix(".partial")
        remove(partial, _PARTIAL)  # left by a rank that was killed
        try:
            with partial.open("xb") as out:
                for piece in unpack(file.path, file.packing, self._storage):
                    out.write(piece)
            rename(partial, path)
        finally:
            remove(partial, _PARTIAL)

    def _stop_copying(self, error: OSError) -> None:
        """Stop copying if the disk is full; after other errors the next block is tried again."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and not self._is_full:
            self._is_full = True
            what = f"What is not there yet of {self._source_folder} is not copied."
            log.warning(f"data.stage_dir: {self._stage_dir}: {error.strerror}. {what}", extra=ANY_RANK)


def _open_folder(folder: str) -> Path:
    """Return the subfolder of this user and this boot; remove those of this user's earlier boots."""
    user_folder = Path(folder) / f".horovod_train-stage-{os.geteuid()}"
    boot_folder = user_folder / boot_id()
    user_folder.parent.mkdir(parents=True, exist_ok=True)
    user_folder.mkdir(mode=0o700, exist_ok=True)
    status = user_folder.lstat()
    # Its name is predictable, so another user may have made it and could put false records there.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UserError(
            f"data.stage_dir: expected {user_folder} to be a folder that belongs to user {os.geteuid()} alone (mode "
            f"700); it belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):o}. Remove it, or "
            "choose another stage_dir."
        )
    boot_folder.mkdir(mode=0o700, exist_ok=True)
    for entry in user_folder.iterdir():
        if entry != boot_folder:
            with contextlib.suppress(OSError):
                remove(entry, _OTHER_BOOT)
    return boot_folder


def _copy_name(*files: ScannedFile) -> str:
    """Return the copy's name: a hash of path, size and mtime of the files."""
    facts = [(resolved(file.path), file.size, file.mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


class UnpackedFiles:
    """Several threads may use it. Each file has its part of the one temporary file, so one descriptor is enough."""

    def __init__(self, sizes: Mapping[ScannedFile, int], storage: Storage) -> None:
        """sizes: the bytes of each packed file's content."""
        self._storage, self._sizes = storage, sizes
        self._starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        self._locks = {file: threading.Lock() for file in sizes}
        self._is_unpacked: set[ScannedFile] = set()
        self._opening = threading.Lock()
        self._file: BinaryIO | None = None

    def read(self, file: ScannedFile, offset: int, length: int) -> bytes:
        """Return bytes of a file's content. The first call unpacks it. Raises UserError if that cannot be done."""
        with self._locks[file]:  # per file, so that threads that need another file do not wait
            if file not in self._is_unpacked:
                self._unpack(file)
                self._is_unpacked.add(file)
        length = min(length, self._sizes[file] - offset)
        return read_at(self._descriptor(), length, self._starts[file] + offset)

    def _unpack(self, file: ScannedFile) -> None:
        position, end = self._starts[file], self._starts[file] + self._sizes[file]
        for piece in unpack(file.path, file.packing, self._storage):
            if file.problem and position + len(piece) >= end:  # nothing is read after the damage
                self._write(file, piece[: end - position], position)
                return
            if position + len(piece) > end:
                raise UserError(f"{file.path}: holds more than when it was indexed. Put it back as it was.")
            self._write(file, piece, position)
            position += len(piece)

    def _write(self, file: ScannedFile, piece: bytes, position: int) -> None:
        total = decimal(sum(self._sizes.values()))
        needed = f" All packed files together need {total} on each rank; data.stage_dir needs it once for all."
        write_unpacked(file.path, self._descriptor, piece, position, needed)

    def _descriptor(self) -> int:
        with self._opening:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - for as long as this lives
            return self._file.fileno()
