"""Detects GZIP and ZLIB files by their first bytes and unpacks them as a whole: records inside are not seekable."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from horovod_train import tfrecord_framing
from horovod_train.data.storage.storage import DEFAULT, Storage
from horovod_train.errors import UserError


def detect(head: bytes) -> str:
    """Return "GZIP", "ZLIB" or "" from the first 12 bytes of a file."""
    if len(head) == tfrecord_framing.HEADER_BYTES and tfrecord_framing.Header().length(head, 0) is not None:
        return ""
    if head[:2] == b"\x1f\x8b":
        return "GZIP"
    # RFC 1950: method 8 (deflate), and the first two bytes a multiple of 31.
    if len(head) > 1 and head[0] & 0x0F == 8 and (head[0] << 8 | head[1]) % 31 == 0:
        return "ZLIB"
    return ""


def unpack(path: str, packing: str, storage: Storage = DEFAULT) -> Iterator[bytes]:
    """Yield the file's unpacked content in pieces. Raises UserError for a broken file, OSError if it is not read."""
    written = 0
    decoder = zlib.decompressobj(zlib.MAX_WBITS | (16 if packing == "GZIP" else 0))
    try:
        for piece in storage.read_pieces(path):
            packed = piece
            while packed:
                unpacked = decoder.decompress(packed)
                written += len(unpacked)
                yield unpacked
                packed = decoder.unused_data  # a file may contain several gzip files, one after another
                if decoder.eof and packed:
                    decoder = zlib.decompressobj(zlib.MAX_WBITS | 16)
    except zlib.error as error:
        raise UserError(f"{path}: cannot be unpacked as {packing} after {written} bytes: {error}.") from error
    if not decoder.eof:
        raise UserError(f"{path}: the {packing} file ends early, after {written} unpacked bytes. Write it again.")
