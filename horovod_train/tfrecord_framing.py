"""The layout of records in a TFRecord file: length, its checksum, data, its checksum. Knows no paths and no schemas.

The format: uint64 length, uint32 masked CRC-32C of the length, the data, uint32 masked CRC-32C of the data, all
little-endian (https://www.tensorflow.org/tutorials/load_data/tfrecord). Nothing here needs TensorFlow.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from google_crc32c import value as crc32c

HEADER_BYTES = 12
FOOTER_BYTES = 4
MAX_RECORD_BYTES = 1 << 40
"""A greater length counts as noise."""

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


class Frames(NamedTuple):
    """The records of one stretch of a file: where the data of each starts and ends in it, and its stored checksum."""

    starts: Sequence[int]
    ends: Sequence[int]
    checksums: Sequence[int] | np.ndarray
    problem: str = ""
    """What breaks the format after these records; "" if nothing does."""


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C of `data`, rotated and offset as the format requires."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(record: bytes) -> bytes:
    """Return one record as it is written to a file."""
    length = _LENGTH.pack(len(record))
    return b"".join((length, _FOOTER.pack(masked_crc(length)), record, _FOOTER.pack(masked_crc(record))))


class Header:
    """Reads and checks record lengths; caches the checksum of each length, because few lengths are common."""

    def __init__(self) -> None:
        self._checksums: dict[int, int] = {}

    def length(self, data: bytes, offset: int) -> int | None:
        """Return the length of the record whose header is at `offset`; None if its checksum is wrong."""
        length, checksum = _HEADER.unpack_from(data, offset)
        expected = self._checksums.get(length)
        if expected is None:
            expected = self._checksums[length] = masked_crc(_LENGTH.pack(length))
            if len(self._checksums) > 100_000:
                self._checksums.clear()
        return length if checksum == expected and length <= MAX_RECORD_BYTES else None


def split(data: bytes, header: Header) -> Frames:
    """Find the records in `data`, up to what breaks the format. Does not check their data."""
    starts: list[int] = []
    ends: list[int] = []
    checksums: list[int] = []
    offset, size, problem = 0, len(data), ""
    while offset < size and not problem:
        length = header.length(data, offset) if size - offset >= HEADER_BYTES else None
        end = offset + HEADER_BYTES + (length or 0)
        if size - offset < HEADER_BYTES:
            problem = "the file ends inside the record's length"
        elif length is None:
            problem = "the record's length does not match its checksum"
        elif end + FOOTER_BYTES > size:
            problem = "the file ends inside the record"
        else:
            starts.append(offset + HEADER_BYTES)
            ends.append(end)
            checksums.append(_FOOTER.unpack_from(data, end)[0])
            offset = end + FOOTER_BYTES
    return Frames(starts, ends, checksums, problem)


def even_table(data: bytes, header: Header) -> np.ndarray | None:
    """Return the records with their framing, uint8 [records, bytes], if all have one length; None otherwise.

    Records of plain arrays have one length. Python then does not look at single records.
    """
    length = header.length(data, 0) if len(data) >= HEADER_BYTES else None
    if length is None or len(data) % (width := HEADER_BYTES + length + FOOTER_BYTES):
        return None
    table = np.frombuffer(data, np.uint8).reshape(-1, width)
    return table if (table[:, :HEADER_BYTES] == table[0, :HEADER_BYTES]).all() else None


def table_frames(table: np.ndarray) -> Frames:
    """Return what `split` finds in the bytes of such a table."""
    count, width = table.shape
    starts, ends = (range(first, count * width, width) for first in (HEADER_BYTES, width - FOOTER_BYTES))
    return Frames(starts, ends, np.ascontiguousarray(table[:, -FOOTER_BYTES:]).view("<u4").ravel())


def bad_checksums(records: Collection[bytes], checksums: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the positions in `records` whose data does not match the stored masked checksum."""
    # In numpy for the whole list, because masking one by one costs more than the checksum.
    crc = np.fromiter(map(crc32c, records), np.uint32, len(records))
    masked = (crc >> np.uint32(15) | crc << np.uint32(17)) + np.uint32(0xA282EAD8)
    return np.flatnonzero(masked != np.asarray(checksums, np.uint32))
