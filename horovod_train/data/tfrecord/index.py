"""Finds the blocks of records in TFRecord files, and caches where they start. Does not parse records.

A block is up to 256 neighbouring records of one file, fewer if they reach 1 MiB; it is read in one piece. Scanning
checks the framing and each length's checksum, not the data. The result is stored in `index.npz` in the records' folder,
or in the user's cache folder if that is read-only. A file whose size or time has changed is scanned again.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from horovod_train.config.remote_paths import is_remote
from horovod_train.data.cache_paths import paths_beside, save_to_first
from horovod_train.data.files import INDEX_NAME, check_different
from horovod_train.data.progress import track
from horovod_train.data.source import Blocks
from horovod_train.data.storage.storage import DEFAULT, Stamp, Stamps, Storage, map_paths
from horovod_train.data.tfrecord.index_file import (
    Entries,
    Extents,
    ScannedFile,
    hold_lock,
    is_current,
    load_entries,
    save_entries,
)
from horovod_train.data.tfrecord.scan import scan

_MANY_BYTES = 1 << 30  # beyond this, scanning is worth starting processes for
_REMOTE_SCANS = 8  # remote files scanned at the same time; each keeps a few MiB in memory


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
    stamps = _stamps(files, storage)
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


def _stamps(names: Sequence[str], storage: Storage) -> Stamps:
    """Return the stamps of the files that have one."""
    stamps = map_paths(lambda name: _stamp(name, storage), names)
    return {name: stamp for name, stamp in zip(names, stamps, strict=True) if stamp is not None}


def _stamp(name: str, storage: Storage) -> Stamp | None:
    try:
        return storage.stamp(name)
    except OSError:
        return None  # scanning it says why


# --- caching ----------------------------------------------------------------------------------------------------


def _open_folder(names: list[str], stamps: Stamps, places: list[Path], storage: Storage) -> Entries:
    """Return the entries of the files of one folder. places: the paths at which its index may be."""
    folder = os.path.dirname(names[0])
    stored, current = _load(places, names, stamps)
    if len(current) == len(names):
        return current
    with hold_lock(places):
        stored, current = _load(places, names, stamps)  # another process may have scanned meanwhile
        stale = [name for name in names if name not in current]
        if stale:
            current.update(_scan_all(stale, stamps, storage))
            listed = set(storage.names(folder)) if is_remote(folder) else None
            entries = {base: entry for base, entry in stored.items() if _exists(folder, base, listed)}
            entries.update({os.path.basename(name): entry for name, entry in current.items()})
            save_to_first(places, partial(save_entries, entries=entries))
    return current


def _exists(folder: str, base: str, listed: set[str] | None) -> bool:
    """Return whether a folder has a file. listed: the names in a remote folder."""
    return os.path.exists(os.path.join(folder, base)) if listed is None else base in listed


def _load(places: Sequence[Path], names: Sequence[str], stamps: Stamps) -> tuple[Entries, Entries]:
    """Return all stored entries of a folder by base name, and the current ones of `names` by full name."""
    stored: Entries = {}
    current: Entries = {}
    for place in reversed(places):  # one that cannot be written may be stale
        entries = load_entries(place)
        stored.update(entries)
        for name in names:
            entry = entries.get(os.path.basename(name))
            if entry and name in stamps and is_current(entry[0], stamps[name]):
                current[name] = entry[0]._replace(path=name), entry[1]
    return stored, current


def _scan_all(names: Sequence[str], stamps: Stamps, storage: Storage) -> Entries:
    size = sum(stamps[name].size for name in names if name in stamps)
    if any(map(is_remote, names)):
        executor: Executor = ThreadPoolExecutor(_REMOTE_SCANS)
        scans = executor.map(lambda name: scan(name, storage), names)
    else:
        executor = _executor(len(names), size)
        scans = executor.map(scan, names)
    with executor:
        return dict(zip(names, track(scans, len(names), "indexing"), strict=True))


def _executor(files: int, size: int) -> Executor:
    workers = min(files, len(os.sched_getaffinity(0)))
    if workers > 1 and size > _MANY_BYTES:
        return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    return ThreadPoolExecutor(workers)
