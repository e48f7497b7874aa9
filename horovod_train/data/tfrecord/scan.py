"""Finds the blocks of one TFRecord file, and a digest of what its records hold. Does not store them; see index.

The digest covers the length and the stored checksum of every record, not of a sample. Scanning reads both anyway: a
record's checksum is the four bytes before the next record's length. A sample would save little and would miss changes
in the other records. Data that do not match their checksum are found when they are read.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile

import numpy as np

from horovod_train import tfrecord_framing
from horovod_train.data.storage.storage import DEFAULT, ReadAt, Storage
from horovod_train.data.tfrecord import compression
from horovod_train.data.tfrecord.index_file import Extents, ScannedFile
from horovod_train.errors import UserError

BLOCK_RECORDS = 256
BLOCK_BYTES = 1 << 20
_DIGEST_BYTES = 16
_SHORT = 1 << 14  # bytes; between longer records, only headers are read
_CUT = tfrecord_framing.MAX_RECORD_BYTES + 1  # replaces a length that is cut off at the end of the file


_Blocks = tuple[Extents, str, str]
"""The blocks of a file, their digest, and why nothing after them is read."""


def scan(path: str, storage: Storage = DEFAULT) -> tuple[ScannedFile, Extents]:
    """Find the blocks of one file, up to where it is damaged. Raises UserError if it cannot be read."""
    try:
        with storage.opened(path) as (stamp, read):
            packing = compression.detect(read(tfrecord_framing.HEADER_BYTES, 0))
            blocks = _scan_packed(path, packing, storage) if packing else _scan_blocks(read, stamp.size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from error
    extents, digest, problem = blocks
    return ScannedFile(path, stamp.size, stamp.mtime_ns, packing, digest, problem), extents


def at_record(record: int, offset: int, problem: str) -> str:
    """Return the part of a message that follows the file. `record` counts from 0 within the file."""
    return f"record {record} at byte {offset}: {problem}."


def _scan_packed(path: str, packing: str, storage: Storage) -> _Blocks:
    with tempfile.TemporaryFile() as unpacked:
        try:
            size = sum(unpacked.write(piece) for piece in compression.unpack(path, packing, storage))
        except UserError as error:  # then nothing can be read: blocks are read from the complete, unpacked file
            return Extents(*np.zeros((3, 0), np.int64)), "", str(error).removeprefix(f"{path}: ")
        unpacked.flush()
        extents, digest, problem = _scan_blocks(functools.partial(os.pread, unpacked.fileno()), size)
    return extents, digest, problem if size else "holds no records once unpacked. Remove it or write it again."


def _scan_blocks(read: ReadAt, size: int) -> _Blocks:
    header, content = tfrecord_framing.Header(), hashlib.blake2b(digest_size=_DIGEST_BYTES)
    chunk, chunk_start, headers = b"", 0, list[bytes]()
    offset, record, length = 0, 0, 0
    edges, counts = [0], [0]
    problem = "" if size else "the file is empty; expected TFRecords. Remove it or write it again."
    while offset < size:
        at = offset - chunk_start
        if at + tfrecord_framing.HEADER_BYTES > len(chunk):
            content.update(b"".join(headers))
            headers.clear()
            # Starts at the checksum that ends the previous record.
            chunk_start = max(offset - tfrecord_framing.FOOTER_BYTES, 0)
            chunk, at = read(1 << 20 if length < _SHORT else 4096, chunk_start), offset - chunk_start
        next_length = header.length(chunk, at) if len(chunk) >= at + tfrecord_framing.HEADER_BYTES else _CUT
        end = offset + tfrecord_framing.HEADER_BYTES + (next_length or 0) + tfrecord_framing.FOOTER_BYTES
        if next_length is None or end > size:
            problem = _describe_damage(record, offset, next_length, end - size)
            break
        headers.append(chunk[at - tfrecord_framing.FOOTER_BYTES if at else 0 : at + tfrecord_framing.HEADER_BYTES])
        if counts[-1] == BLOCK_RECORDS or (counts[-1] and end - edges[-1] > BLOCK_BYTES):
            edges.append(offset)
            counts.append(0)
        counts[-1] += 1
        offset, record, length = end, record + 1, next_length
    last = read(tfrecord_framing.FOOTER_BYTES, offset - tfrecord_framing.FOOTER_BYTES) if record else b""
    content.update(b"".join([*headers, last]))
    if not record:
        edges, counts = [], []
    starts = np.array(edges, np.int64)
    extents = Extents(starts, np.diff(starts, append=offset), np.array(counts, np.int64))
    return extents, content.hexdigest(), problem


def _describe_damage(record: int, offset: int, length: int | None, over: int) -> str:
    """Return the problem of a record that ends `over` bytes beyond the file. length None: its header is damaged."""
    if length is None and record == 0:
        return "is not a TFRecord file: its first 12 bytes are not a length and its checksum."
    if length is None:
        return at_record(record, offset, "the record's length does not match its checksum")
    if length == _CUT:
        return at_record(record, offset, "the file ends inside the record's length")
    return at_record(record, offset, f"the file ends {over} bytes before the record does")
