"""Finds where the records of TFRecord files start, block by block, and caches this. Does not parse records.

A block is up to 256 neighbouring records of one file, fewer if they reach 1 MiB; it is read in one piece. Scanning
checks the framing and each length's checksum, not the data. The result is stored in `index.npz` in the records' folder,
or in the user's cache folder if that is read-only. A file whose size or time has changed is scanned again.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from horovod_train.data.identity import FileFacts, digest_of
from horovod_train.data.progress import track
from horovod_train.data.tfrecord.index_file import (
    INDEX_NAME,
    Blocks,
    Entries,
    Source,
    is_of,
    load_entries,
    one_at_a_time,
    places,
    save_entries,
    save_somewhere,
)
from horovod_train.data.tfrecord.scan import at_record, scan
from horovod_train.errors import UserError

_MANY_BYTES = 1 << 30  # beyond this, scanning is worth starting processes for

Stats = Mapping[str, os.stat_result]


@dataclass(frozen=True, eq=False)
class Index:
    """Every block of a dataset in file order; a record's number is its position in that order."""

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

    @cached_property
    def facts(self) -> tuple[FileFacts, ...]:
        """What identifies each file, in any folder."""
        records = np.bincount(self.file, self.blocks.records, len(self.files)).astype(np.int64).tolist()
        return tuple(
            FileFacts(os.path.basename(source.path), source.size, count, source.digest)
            for source, count in zip(self.files, records, strict=True)
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the facts: equal if a record's number means the same record."""
        return digest_of(self.facts)

    @property
    def problems(self) -> list[str]:
        """A sentence for each file that is not complete."""
        return [f"{source.path}: {source.problem}" for source in self.files if source.problem]

    def block_of(self, records: np.ndarray) -> np.ndarray:
        """Return the block that contains each record."""
        return np.searchsorted(self.first_record, records, side="right") - 1

    def number_in_file(self, record: int) -> int:
        """Return a record's number within its own file, from 0."""
        first_block = np.searchsorted(self.file, self.file[self.block_of(np.array([record]))[0]])
        return int(record - self.first_record[first_block])


def open_index(files: Sequence[str], index_dir: str | None = None, *, allow_damage: bool = False) -> Index:
    """Return the index of these files, from the cache if it is current.

    allow_damage: of an incomplete file use the records before the damage, and name the file in `problems`. Without it
    such a file raises UserError. A file that cannot be read, or that two of the paths lead to, always raises UserError.
    """
    stats = {name: stat for name in files if (stat := _stat(name)) is not None}
    _check_different(stats)
    by_folder: dict[str, list[str]] = {}
    for name in files:
        by_folder.setdefault(os.path.dirname(name), []).append(name)
    known: Entries = {}
    for folder, names in by_folder.items():
        known.update(_open_folder(folder, names, stats, index_dir))
    entries = [known[name] for name in files]
    counts = [len(blocks.records) for _, blocks in entries]
    joined = Blocks(*(np.concatenate(column) for column in zip(*(blocks for _, blocks in entries), strict=True)))
    file = np.repeat(np.arange(len(files), dtype=np.int32), counts)
    index = Index(tuple(source for source, _ in entries), file, joined)
    if index.problems and not allow_damage:
        raise UserError(index.problems[0])
    return index


def write_index(folder: str, names: Iterable[str]) -> int:
    """Scan the files of a folder that was just written and store the index there; return the number of records."""
    entries = {name: scan(os.path.join(folder, name)) for name in names}
    assert not any(source.problem for source, _ in entries.values()), "a file that was just written is not whole"
    save_entries(os.path.join(folder, INDEX_NAME), entries)
    return int(sum(blocks.records.sum() for _, blocks in entries.values()))


def damage(path: str, record: int, offset: int, problem: str) -> str:
    """Name a bad record. `record` counts from 0 within the file."""
    return f"{path}: {at_record(record, offset, problem)}"


def _stat(name: str) -> os.stat_result | None:
    try:
        return os.stat(name)
    except OSError:
        return None  # scanning it says why


def _check_different(stats: Stats) -> None:
    """Raise UserError for two names of one file, whose records would be read twice."""
    seen: dict[tuple[int, ...], str] = {}
    for name, stat in stats.items():
        # Size and time too: some network file systems use an inode number twice.
        other = seen.setdefault((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns), name)
        if other != name and stat.st_ino:
            raise UserError(f"{name}: is the same file as {other}; its records would be read twice. Name it once.")


# --- keeping ----------------------------------------------------------------------------------------------------


def _open_folder(folder: str, names: list[str], stats: Stats, index_dir: str | None) -> Entries:
    where = places(folder, index_dir)
    known, fresh = _load(where, names, stats)
    if len(fresh) == len(names):
        return fresh
    with one_at_a_time(where):
        known, fresh = _load(where, names, stats)  # another process may have scanned meanwhile
        stale = [name for name in names if name not in fresh]
        if stale:
            fresh.update(_scan_all(stale, stats))
            kept = {base: entry for base, entry in known.items() if os.path.exists(os.path.join(folder, base))}
            kept.update({os.path.basename(name): entry for name, entry in fresh.items()})
            save_somewhere(where, kept)
    return fresh


def _load(where: Sequence[str], names: Sequence[str], stats: Stats) -> tuple[Entries, Entries]:
    """Return all that is stored for a folder and, of `names`, what is still valid, by the full name."""
    known: Entries = {}
    for place in reversed(where):
        known.update(load_entries(place))
    fresh: Entries = {}
    for name in names:
        source, blocks = known.get(os.path.basename(name), (None, None))
        if source is not None and blocks is not None and name in stats and is_of(source, stats[name]):
            fresh[name] = source._replace(path=name), blocks
    return known, fresh


def _scan_all(names: Sequence[str], stats: Stats) -> Entries:
    size = sum(stats[name].st_size for name in names if name in stats)
    with _executor(len(names), size) as executor:
        return dict(zip(names, track(executor.map(scan, names), len(names), "indexing"), strict=True))


def _executor(files: int, size: int) -> Executor:
    workers = min(files, len(os.sched_getaffinity(0)))
    if workers > 1 and size > _MANY_BYTES:
        return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    return ThreadPoolExecutor(workers)
