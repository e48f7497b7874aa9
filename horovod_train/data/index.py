"""Where the records of TFRecord files start, block by block, and the cached form of that. Does not parse records.

A block is up to 256 neighbouring records of one file, fewer where they reach 1 MiB; it is read in one piece. Scanning
checks the framing and each length's checksum, not the data. What was found is kept in `index.npz` beside the records,
or in the user's cache folder where that is read-only, and scanned again when a file's size or time has changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import multiprocessing
import os
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from horovod_train.data import compression, framing
from horovod_train.data.progress import track
from horovod_train.errors import UserError

BLOCK_RECORDS = 256
BLOCK_BYTES = 1 << 20
INDEX_NAME = "index.npz"
_FORMAT = 1
_PATTERN = "*.tfrecord*"
_MANY_BYTES = 1 << 30  # beyond this, scanning is worth starting processes for


class Source(NamedTuple):
    """A file as it was when it was scanned. `packing` is "", "GZIP" or "ZLIB"."""

    path: str
    size: int
    mtime_ns: int
    packing: str


class Blocks(NamedTuple):
    """The blocks of one file, int64 arrays: first byte, bytes, records. In a packed file, bytes once unpacked."""

    offset: np.ndarray
    length: np.ndarray
    count: np.ndarray


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
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.blocks.count, dtype=np.int64)])

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


def list_files(patterns: Sequence[str], setting: str) -> list[str]:
    """The files that folders and globs stand for: in the order given, and by name within each.

    `setting` is the key that the patterns come from, for messages. Raises UserError where there are none.
    """
    files: list[str] = []
    for pattern in patterns:
        found = _list_folder(pattern, setting) if os.path.isdir(pattern) else _list_glob(pattern, setting)
        files.extend(found)
    twice = sorted({name for name in files if files.count(name) > 1}) if len(set(files)) < len(files) else []
    if twice:
        raise UserError(f"{setting}: {twice[0]} is named twice; each record would be read twice. Name it once.")
    return files


def open_index(files: Sequence[str], index_dir: str | None = None) -> Index:
    """The index of these files, from the cache where it is fresh. Raises UserError for a file that is not whole."""
    by_folder: dict[str, list[str]] = {}
    for name in files:
        by_folder.setdefault(os.path.dirname(name), []).append(name)
    known: dict[str, tuple[Source, Blocks]] = {}
    for folder, names in by_folder.items():
        known.update(_open_folder(folder, names, index_dir))
    entries = [known[name] for name in files]
    counts = [len(blocks.count) for _, blocks in entries]
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
    _save(os.path.join(folder, INDEX_NAME), entries)
    return int(sum(blocks.count.sum() for _, blocks in entries.values()))


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
    starts = np.array(edges, np.int64)
    return Blocks(starts, np.diff(starts, append=size), np.array(counts, np.int64))


def damage(path: str, record: int, offset: int, problem: str) -> str:
    """The one form in which a bad record is named. `record` counts from 0 within the file."""
    return f"{path}: record {record} at byte {offset}: {problem}."


# --- files ------------------------------------------------------------------------------------------------------


def _list_folder(folder: str, setting: str) -> list[str]:
    try:
        inside = sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(f"{setting}: {folder} cannot be read: {error.strerror}.") from error
    names = sorted(glob.glob(os.path.join(glob.escape(folder), _PATTERN)))
    if names:
        return names
    below = [name for name in inside if glob.glob(os.path.join(glob.escape(folder), name, _PATTERN))]
    if below:
        hint = f" Its folders have some: {setting}={os.path.join(folder, below[0])}?"
    elif inside:
        hint = f" It holds {', '.join(inside[:3])}{', …' if len(inside) > 3 else ''}; name other files with a glob."
    else:
        hint = " It is empty."
    raise UserError(f"{setting}: {folder} holds no {_PATTERN} files.{hint}")


def _list_glob(pattern: str, setting: str) -> list[str]:
    names = sorted(name for name in glob.glob(pattern, recursive=True) if not name.endswith(INDEX_NAME))
    if names:
        return names
    if glob.has_magic(pattern):
        raise UserError(f"{setting}: {pattern} matches no file.")
    parent = pattern
    while parent and not os.path.exists(parent):
        parent = os.path.dirname(parent.rstrip("/"))
    raise UserError(f"{setting}: {pattern} does not exist{f'; {parent} does' if parent else ''}.")


# --- the cached form --------------------------------------------------------------------------------------------


def _open_folder(folder: str, names: list[str], index_dir: str | None) -> dict[str, tuple[Source, Blocks]]:
    places = _places(folder, index_dir)
    with _one_at_a_time(folder):
        known: dict[str, tuple[Source, Blocks]] = {}
        for place in reversed(places):
            known.update(_load(place))
        fresh = {name: known[base] for name in names if (base := os.path.basename(name)) in known}
        fresh = {name: (s._replace(path=name), blocks) for name, (s, blocks) in fresh.items() if _unchanged(name, s)}
        stale = [name for name in names if name not in fresh]
        if stale:
            fresh.update(_scan_all(stale))
            kept = {base: entry for base, entry in known.items() if os.path.exists(os.path.join(folder, base))}
            kept.update({os.path.basename(name): entry for name, entry in fresh.items()})
            _save_somewhere(places, kept)
    return fresh


def _places(folder: str, index_dir: str | None) -> list[str]:
    """Where the index of a folder may lie, best first."""
    unique = hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:16]
    if index_dir:
        return [os.path.join(index_dir, f"{unique}.npz")]
    return [os.path.join(folder, INDEX_NAME), str(Path.home() / ".cache/horovod_train/index" / f"{unique}.npz")]


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


def _unchanged(name: str, source: Source) -> bool:
    try:
        stat = os.stat(name)
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (source.size, source.mtime_ns)


def _scan_all(names: list[str]) -> dict[str, tuple[Source, Blocks]]:
    with _executor(names) as executor:
        return dict(zip(names, track(executor.map(scan, names), len(names), "indexing"), strict=True))


def _executor(names: list[str]) -> Executor:
    workers = min(len(names), len(os.sched_getaffinity(0)))
    if workers > 1 and sum(os.path.getsize(name) for name in names if os.path.exists(name)) > _MANY_BYTES:
        return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    return ThreadPoolExecutor(workers)


def _load(place: str) -> dict[str, tuple[Source, Blocks]]:
    try:
        with np.load(place, allow_pickle=False) as saved:
            if int(saved["format"]) != _FORMAT:
                return {}
            arrays = {key: saved[key] for key in saved.files}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError):
        return {}  # none, or half of one: made again
    edges = np.cumsum(arrays["blocks"])[:-1]
    columns = zip(*(np.split(arrays[key], edges) for key in Blocks._fields), strict=True)
    entries: dict[str, tuple[Source, Blocks]] = {}
    for number, column in enumerate(columns):
        name = str(arrays["name"][number])
        size, mtime_ns = int(arrays["size"][number]), int(arrays["mtime_ns"][number])
        entries[name] = Source(name, size, mtime_ns, str(arrays["packing"][number])), Blocks(*column)
    return entries


def _save_somewhere(places: list[str], entries: dict[str, tuple[Source, Blocks]]) -> None:
    for place in places:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(place) or ".", exist_ok=True)
            _save(place, entries)
            return


def _save(place: str, entries: dict[str, tuple[Source, Blocks]]) -> None:
    names = sorted(entries)
    sources, blocks = [entries[name][0] for name in names], [entries[name][1] for name in names]
    arrays: dict[str, Any] = {key: np.concatenate([getattr(b, key) for b in blocks]) for key in Blocks._fields}
    arrays |= {"format": np.array(_FORMAT), "name": np.array(names), "blocks": np.array([len(b.count) for b in blocks])}
    arrays["size"] = np.array([s.size for s in sources], np.int64)
    arrays["mtime_ns"] = np.array([s.mtime_ns for s in sources], np.int64)
    arrays["packing"] = np.array([s.packing for s in sources])
    partial = f"{place}.{os.getpid()}.partial"
    try:
        with open(partial, "wb") as file:
            np.savez(file, **arrays)
        os.replace(partial, place)
    finally:
        with contextlib.suppress(OSError):
            os.remove(partial)
