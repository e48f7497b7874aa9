"""Finds the blocks of records in TFRecord files, and saves where they start. Does not parse records.

A block is up to 256 neighbouring records of one file, fewer if they reach 1 MiB; it is read in one piece. Scanning
checks the framing and each length's checksum, not the data. The result is stored in `index.npz` in the records' folder,
or in the user's cache folder if that is read-only. A file whose size or time has changed is scanned again. Files packed
by GZIP or ZLIB, known by their first bytes, are unpacked as a whole: records inside are not seekable.

The digest of a file covers the length and the stored checksum of every record, not of a sample. Scanning reads both
anyway: a record's checksum is the four bytes before the next record's length. A sample would save little and would miss
changes in the other records. Data that do not match their checksum are found when they are read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import re
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from horovod_train import tfrecord_framing
from horovod_train.config.paths import is_remote
from horovod_train.data.files import INDEX_NAME, check_different, hold_lock, paths_beside, save_to_first
from horovod_train.data.source import Blocks
from horovod_train.data.storage import DEFAULT, ReadAt, Stamp, Stamps, Storage, map_paths
from horovod_train.errors import UserError, reading
from horovod_train.host import usable_cores
from horovod_train.output.console import track
from horovod_train.output.files import Artifact, open_atomically, zip_members

BLOCK_RECORDS = 256
BLOCK_BYTES = 1 << 20
_DIGEST_BYTES = 16
_SHORT = 1 << 14  # bytes; between longer records, only headers are read
_CUT = tfrecord_framing.MAX_RECORD_BYTES + 1  # replaces a length that is cut off at the end of the file
_MANY_BYTES = 1 << 30  # beyond this, scanning is worth starting processes for
_SAVE_EVERY_S = 300.0  # a scan of millions of files that is ended is continued from there
_REMOTE_SCANS = 8  # remote files scanned at the same time; each keeps a few MiB in memory

DRAFT_NAME = rf"\.{re.escape(INDEX_NAME)}\.[0-9a-f]{{8}}\.partial"
"""Pattern of an index that is being written."""
_FORMAT = 3


class ScannedFile(NamedTuple):
    """A file as it was when it was scanned."""

    path: str
    size: int
    mtime_ns: int
    """As in storage.Stamp."""
    packing: str
    """ "", "GZIP" or "ZLIB"."""
    digest: str
    """128 bits in hex, of the length and the stored checksum of every record in its `Extents`."""
    problem: str
    """Why nothing after those blocks is read: which record, at which byte; "" for a complete file."""


_KINDS = [*get_type_hints(ScannedFile).values()]


class Extents(NamedTuple):
    """The blocks of one file, int64 arrays: first byte, bytes, records. In a packed file, bytes once it is unpacked."""

    offset: np.ndarray
    length: np.ndarray
    records: np.ndarray


Entries = dict[str, tuple[ScannedFile, Extents]]
"""By the file's name within its folder."""

_Blocks = tuple[Extents, str, str]
"""The blocks of a file, their digest, and why nothing after them is read."""


@dataclass(frozen=True, eq=False)
class Index:
    """Every block of some files, in their order."""

    files: tuple[ScannedFile, ...]
    file: np.ndarray
    """int32 [blocks]: the file of each block."""
    offset: np.ndarray
    """int64 [blocks]: the first byte of each block in its file; in a packed file, once unpacked."""
    blocks: Blocks

    def number_in_file(self, record: int) -> int:
        """Return a record's number within its own file, from 0."""
        first_block = np.searchsorted(self.file, self.file[self.blocks.containing(np.array([record]))[0]])
        return int(record - self.blocks.first_record[first_block])


def open_index(files: Sequence[str], index_dir: str | None = None, storage: Storage = DEFAULT) -> Index:
    """Return the index of these files, from the cache if it is current; of a damaged file, up to the damage.

    Raises UserError for a file that cannot be read, or that two of the paths lead to.
    """

    def stamp_of(name: str) -> Stamp | None:
        try:
            return storage.stamp(name)
        except OSError:
            return None  # scanning it says why

    stamps = {name: stamp for name, stamp in zip(files, map_paths(stamp_of, files), strict=True) if stamp is not None}
    check_different({name: stamp} for name, stamp in stamps.items())
    by_folder: dict[str, list[str]] = {}
    for name in files:
        by_folder.setdefault(os.path.dirname(name), []).append(name)
    entry_by_name: Entries = {}
    for folder, names in by_folder.items():
        entry_by_name.update(_open_folder(names, stamps, paths_beside(folder, INDEX_NAME, index_dir), storage))
    entries = [entry_by_name[name] for name in files]
    counts = [len(extents.records) for _, extents in entries]
    joined = Extents(*(np.concatenate(column) for column in zip(*(extents for _, extents in entries), strict=True)))
    file = np.repeat(np.arange(len(files), dtype=np.int32), counts)
    return Index(tuple(scanned for scanned, _ in entries), file, joined.offset, Blocks(joined.records, joined.length))


def write_index(folder: str, names: Iterable[str]) -> int:
    """Scan the files of a folder that was just written and store the index there; return the number of records."""
    entries = {name: scan(os.path.join(folder, name)) for name in names}
    assert not any(file.problem for file, _ in entries.values()), "a file that was just written is not complete"
    save_entries(Path(folder, INDEX_NAME), entries)
    return int(sum(extents.records.sum() for _, extents in entries.values()))


def _open_folder(names: list[str], stamps: Stamps, places: list[Path], storage: Storage) -> Entries:
    """Return the entries of the files of one folder. places: the paths at which its index may be."""
    folder = os.path.dirname(names[0])
    stored, current = _load(places, names, stamps)
    if len(current) == len(names):
        return current
    with hold_lock(places, limit_s=3 * _SAVE_EVERY_S):  # without it files are only scanned twice
        stored, current = _load(places, names, stamps)  # another process may have scanned meanwhile
        if stale := [name for name in names if name not in current]:
            there = _still_there(folder, stored, storage)
            kept = {base: entry for base, entry in stored.items() if base in there}

            def save() -> float:
                entries = kept | {os.path.basename(name): entry for name, entry in current.items()}
                save_to_first(places, partial(save_entries, entries=entries))
                return time.monotonic()

            saved_at = time.monotonic()
            for name, entry in _scan_all(stale, stamps, storage):
                current[name] = entry
                if time.monotonic() - saved_at > _SAVE_EVERY_S:
                    saved_at = save()
            save()
    return current


def _still_there(folder: str, names: Iterable[str], storage: Storage) -> set[str]:
    """Return the names of which a folder may still have a file: all, if a store does not list it."""
    if not is_remote(folder):
        return {name for name in names if os.path.exists(os.path.join(folder, name))}
    try:
        return {*names}.intersection(storage.names(folder))
    except OSError:  # a user may have the right to read a file alone; a store that fails says so when that is read
        return {*names}


def _load(places: Sequence[Path], names: Sequence[str], stamps: Stamps) -> tuple[Entries, Entries]:
    """Return all stored entries of a folder by base name, and the current ones of `names` by full name."""
    stored: Entries = {}
    current: Entries = {}
    for place in reversed(places):  # one that cannot be written may be stale
        entries = load_entries(place)
        stored.update(entries)
        for name in names:
            entry = entries.get(os.path.basename(name))
            if entry and name in stamps and stamps[name][:2] == (entry[0].size, entry[0].mtime_ns):
                current[name] = entry[0]._replace(path=name), entry[1]
    return stored, current


# --- scanning ---------------------------------------------------------------------------------------------------


def _scan_all(
    names: Sequence[str], stamps: Stamps, storage: Storage
) -> Iterator[tuple[str, tuple[ScannedFile, Extents]]]:
    size = sum(stamps[name].size for name in names if name in stamps)
    workers = min(len(names), usable_cores())
    executor: Executor
    if any(map(is_remote, names)):
        executor = ThreadPoolExecutor(_REMOTE_SCANS)
        scans = executor.map(partial(scan, storage=storage), names)
    else:
        is_worth_it = workers > 1 and size > _MANY_BYTES
        spawn = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(workers, mp_context=spawn) if is_worth_it else ThreadPoolExecutor(workers)
        scans = executor.map(scan, names)
    with executor:
        yield from zip(names, track(scans, len(names), "indexing"), strict=True)


def scan(path: str, storage: Storage = DEFAULT) -> tuple[ScannedFile, Extents]:
    """Find the blocks of one file, up to where it is damaged. Raises UserError if it cannot be read."""
    with reading(path), storage.opened(path) as (stamp, read):
        packing = detect(read(tfrecord_framing.HEADER_BYTES, 0))
        blocks = _scan_packed(path, packing, storage) if packing else _scan_blocks(read, stamp.size)
    extents, digest, problem = blocks
    return ScannedFile(path, stamp.size, stamp.mtime_ns, packing, digest, problem), extents


def at_record(record: int, offset: int, problem: str) -> str:
    """Return the part of a message that follows the file. `record` counts from 0 within the file."""
    return f"record {record} at byte {offset}: {problem}."


def _scan_packed(path: str, packing: str, storage: Storage) -> _Blocks:
    with ExitStack() as opened:
        descriptor, size = cache(lambda: opened.enter_context(tempfile.TemporaryFile(buffering=0)).fileno()), 0
        try:
            for piece in unpack(path, packing, storage):
                write_unpacked(path, descriptor, piece, size)
                size += len(piece)
        except BrokenFile as error:  # then nothing can be read: blocks are read from the complete, unpacked file
            return Extents(*np.zeros((3, 0), np.int64)), "", str(error).removeprefix(f"{path}: ")
        extents, digest, problem = _scan_blocks(lambda length, at: os.pread(descriptor(), length, at), size)
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


class BrokenFile(UserError):
    """A packed file that cannot be unpacked to its end."""


def write_unpacked(path: str, descriptor: Callable[[], int], piece: bytes, position: int, needed: str = "") -> None:
    """Write a piece of what a packed file holds into a temporary file, which `descriptor` opens.

    Raises UserError that names the folder without room, not the file. needed: a sentence, how much room there must be.
    """
    try:
        while piece:
            written = os.pwrite(descriptor(), piece, position)
            piece, position = piece[written:], position + written
    except OSError as error:
        place = f" into {tempfile.tempdir}" if tempfile.tempdir else ""  # None: no folder can be written
        raise UserError(
            f"{path}: cannot be unpacked{place}: {error.strerror}.{needed} Set TMPDIR to a disk with more room."
        ) from error


def unpack(path: str, packing: str, storage: Storage = DEFAULT) -> Iterator[bytes]:
    """Yield the file's unpacked content in pieces. Raises BrokenFile, and OSError if it cannot be read."""
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
        raise BrokenFile(f"{path}: cannot be unpacked as {packing} after {written} bytes: {error}.") from error
    if not decoder.eof:
        raise BrokenFile(f"{path}: the {packing} file ends early, after {written} unpacked bytes. Write it again.")


# --- the file ---------------------------------------------------------------------------------------------------


def _is_index(path: Path) -> bool:
    """Check the content, because other programs also write files named index.npz. A broken file is not removed."""
    if path.name != INDEX_NAME or not path.stat().st_size:
        return True
    members = {name.removesuffix(".npy") for name in zip_members(path)}
    return {*Extents._fields, "facts"} <= members or {*Extents._fields, "format", "packing"} <= members  # format 2


_INDEX = Artifact("an index of TFRecords", rf"{re.escape(INDEX_NAME)}|[0-9a-f]{{16}}\.npz", content_matches=_is_index)


def load_entries(place: Path) -> Entries:
    try:
        if not place.is_file():  # a pipe could keep a reader for ever
            return {}
        with np.load(place, allow_pickle=False) as saved:
            members = saved.zip.infolist()
            # No version has compressed it, so content larger than the file is not ours, and may fill the memory.
            is_ours = all(member.compress_type == zipfile.ZIP_STORED for member in members)
            if not is_ours or sum(member.file_size for member in members) > place.stat().st_size:
                return {}
            facts = json.loads(saved["facts"].tobytes())
            if facts["format"] != _FORMAT:
                return {}
            edges = np.cumsum(facts["blocks"])[:-1]
            columns = zip(*(np.split(saved[key], edges) for key in Extents._fields), strict=True)
            if any(list(map(type, row)) != _KINDS for row in facts["files"]):
                return {}
            rows = zip(itertools.starmap(ScannedFile, facts["files"]), columns, strict=True)
            return {file.path: (file, Extents(*column)) for file, column in rows}
    except Exception:  # a damaged zip file raises nearly any error; the files are then scanned again
        return {}


def save_entries(place: Path, entries: Entries) -> None:
    files = [file._replace(path=name) for name, (file, _) in sorted(entries.items())]
    extents = [entries[file.path][1] for file in files]
    facts = {"format": _FORMAT, "files": files, "blocks": [len(e.records) for e in extents]}
    arrays: dict[str, Any] = {key: np.concatenate([getattr(e, key) for e in extents]) for key in Extents._fields}
    with open_atomically(place, _INDEX, sync=False) as file:
        np.savez(file, facts=np.frombuffer(json.dumps(facts).encode(), np.uint8), **arrays)
