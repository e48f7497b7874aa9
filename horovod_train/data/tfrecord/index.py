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

import numpy as np

from horovod_train.data.files import INDEX_NAME
from horovod_train.data.progress import track
from horovod_train.data.source import Blocks
from horovod_train.data.tfrecord.index_file import (
    Entries,
    Extents,
    ScannedFile,
    is_of,
    load_entries,
    one_at_a_time,
    places,
    save_entries,
    save_somewhere,
)
from horovod_train.data.tfrecord.scan import scan
from horovod_train.errors import UserError

_MANY_BYTES = 1 << 30  # beyond this, scanning is worth starting processes for

Stats = Mapping[str, os.stat_result]


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


def open_index(files: Sequence[str], index_dir: str | None = None) -> Index:
    """Return the index of these files, from the cache if it is current; of a damaged file, up to the damage.

    Raises UserError for a file that cannot be read, or that two of the paths lead to.
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
    counts = [len(extents.records) for _, extents in entries]
    joined = Extents(*(np.concatenate(column) for column in zip(*(extents for _, extents in entries), strict=True)))
    file = np.repeat(np.arange(len(files), dtype=np.int32), counts)
    return Index(tuple(one for one, _ in entries), file, joined.offset, Blocks(joined.records, joined.length))


def write_index(folder: str, names: Iterable[str]) -> int:
    """Scan the files of a folder that was just written and store the index there; return the number of records."""
    entries = {name: scan(os.path.join(folder, name)) for name in names}
    assert not any(file.problem for file, _ in entries.values()), "a file that was just written is not whole"
    save_entries(os.path.join(folder, INDEX_NAME), entries)
    return int(sum(extents.records.sum() for _, extents in entries.values()))


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
        entry = known.get(os.path.basename(name))
        if entry and name in stats and is_of(entry[0], stats[name]):
            fresh[name] = entry[0]._replace(path=name), entry[1]
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
