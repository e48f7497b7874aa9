"""Where the records of TFRecord files start, block by block, and the cached form of that. Does not parse records.

A block is up to 256 neighbouring records of one file, fewer where they reach 1 MiB; it is read in one piece. Scanning
checks the framing and each length's checksum, not the data. What was found is kept in `index.npz` beside the records,
or in the user's cache folder where that is read-only, and scanned again when a file's size or time has changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from horovod_train.data import compression, framing
from horovod_train.data.index_file import (
    INDEX_NAME,
    Blocks,
    Entries,
    Source,
    load_entries,
    places,
    save_entries,
    save_somewhere,
    unchanged,
)
from horovod_train.data.progress import track
from horovod_train.errors import UserError

BLOCK_RECORDS = 256
BLOCK_BYTES = 1 << 20
_MANY_BYTES = 1 << 30  # beyond this, scanning is worth starting processes for


@dataclass(frozen=True, eq=False)
class Index:
    """Every block of a dataset in file order; a record's number is its place in that order."""

    files: tuple[Source, ...]
    file: np.ndarray
    """int32 [blocks]: the file of each block."""
    blocks: Blocks

    @cached_property
    def first_record(self) -> np.ndarray:
        """int64 [blocks + 1]: the number of each block's first record; at the end, the number of records."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.blocks.records, dtype=np.int64)])

    @property
    def num_records(self) -> int:
        return int(self.first_record[-1])

    def block_of(self, records: np.ndarray) -> np.ndarray:
        """The block that each record is in."""
        return np.searchsorted(self.first_record, records, side="right") - 1

    def number_in_file(self, record: int) -> int:
        """A record's place in its own file, from 0."""
        first_block = np.searchsorted(self.file, self.file[self.block_of(np.array([record]))[0]])
        return int(record - self.first_record[first_block])


def open_index(files: Sequence[str], index_dir: str | None = None) -> Index:
    """The index of these files, from the cache where it is fresh. Raises UserError for a file that is not whole."""
    by_folder: dict[str, list[str]] = {}
    for name in files:
        by_folder.setdefault(os.path.dirname(name), []).append(name)
    known: Entries = {}
    for folder, names in by_folder.items():
        known.update(_open_folder(folder, names, index_dir))
    entries = [known[name] for name in files]
    counts = [len(blocks.records) for _, blocks in entries]
    joined = Blocks(*(np.concatenate(column) for column in zip(*(blocks for _, blocks in entries), strict=True)))
    file = np.repeat(np.arange(len(files), dtype=np.int32), counts)
    return Index(tuple(source for source, _ in entries), file, joined)


def scan(path: str) -> tuple[Source, Blocks]:
    """Finds the blocks of one file. Raises UserError with record and byte where the file is not what it should be."""
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            packing = compression.detect(os.pread(file.fileno(), framing.HEADER_BYTES, 0))
            source = Source(path, stat.st_size, stat.st_mtime_ns, packing)
            if stat.st_size == 0:
                raise UserError(f"{path}: the file is empty; expected TFRecords. Remove it or write it again.")
            if not packing:
                return source, _scan_blocks(file.fileno(), stat.st_size, path)
            with tempfile.TemporaryFile() as unpacked:
                size = compression.unpack(path, packing, unpacked)
                return source, _scan_blocks(unpacked.fileno(), size, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from error


def write_index(folder: str, names: Iterable[str]) -> int:
    """Scans the files of a folder that was just written and leaves the index there; returns the number of records."""
    entries = {name: scan(os.path.join(folder, name)) for name in names}
    save_entries(os.path.join(folder, INDEX_NAME), entries)
    return int(sum(blocks.records.sum() for _, blocks in entries.values()))


# --- scanning ---------------------------------------------------------------------------------------------------


def _scan_blocks(fd: int, size: int, path: str) -> Blocks:
    header, chunk, base = framing.Header(), b"", 0
    offset, record, length = 0, 0, 0
    edges, counts = [0], [0]
    while offset < size:
        if offset + framing.HEADER_BYTES > base + len(chunk):
            # Long records: look at their headers only, do not read what lies between.
            base, chunk = offset, os.pread(fd, 1 << 20 if length < 1 << 14 else 4096, offset)
            if len(chunk) < framing.HEADER_BYTES:
                raise UserError(damage(path, record, offset, "the file ends inside the record's length"))
        found = header.length(chunk, offset - base)
        if found is None and record == 0:
            raise UserError(f"{path}: is not a TFRecord file: its first 12 bytes are not a length and its checksum.")
        if found is None:
            raise UserError(damage(path, record, offset, "the record's length does not match its checksum"))
        end = offset + framing.HEADER_BYTES + found + framing.FOOTER_BYTES
        if end > size:
            raise UserError(damage(path, record, offset, f"the file ends {end - size} bytes before the record does"))
        if counts[-1] == BLOCK_RECORDS or (counts[-1] and end - edges[-1] > BLOCK_BYTES):
            edges.append(offset)
            counts.append(0)
        counts[-1] += 1
        offset, record, length = end, record + 1, found
    if record == 0:
        raise UserError(f"{path}: holds no records once unpacked. Remove it or write it again.")
    starts = np.array(edges, np.int64)
    return Blocks(starts, np.diff(starts, append=size), np.array(counts, np.int64))


def damage(path: str, record: int, offset: int, problem: str) -> str:
    """The one form in which a bad record is named. `record` counts from 0 within the file."""
    return f"{path}: record {record} at byte {offset}: {problem}."


# --- keeping ----------------------------------------------------------------------------------------------------


def _open_folder(folder: str, names: list[str], index_dir: str | None) -> Entries:
    where = places(folder, index_dir)
    with _one_at_a_time(folder):
        known: Entries = {}
        for place in reversed(where):
            known.update(load_entries(place))
        fresh = {name: known[base] for name in names if (base := os.path.basename(name)) in known}
        fresh = {name: (s._replace(path=name), blocks) for name, (s, blocks) in fresh.items() if unchanged(name, s)}
        stale = [name for name in names if name not in fresh]
        if stale:
            fresh.update(_scan_all(stale))
            kept = {base: entry for base, entry in known.items() if os.path.exists(os.path.join(folder, base))}
            kept.update({os.path.basename(name): entry for name, entry in fresh.items()})
            save_somewhere(where, kept)
    return fresh


@contextlib.contextmanager
def _one_at_a_time(folder: str) -> Iterator[None]:
    """Ranks of one host scan a folder once: the others wait, then find the index. Best effort: some disks cannot."""
    try:
        fd = os.open(folder or ".", os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _scan_all(names: list[str]) -> Entries:
    with _executor(names) as executor:
        return dict(zip(names, track(executor.map(scan, names), len(names), "indexing"), strict=True))


def _executor(names: list[str]) -> Executor:
    workers = min(len(names), len(os.sched_getaffinity(0)))
    if workers > 1 and sum(os.path.getsize(name) for name in names if os.path.exists(name)) > _MANY_BYTES:
        return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    return ThreadPoolExecutor(workers)
