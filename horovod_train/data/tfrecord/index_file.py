"""Stores the blocks of a folder's files on disk, in `index.npz`: where, in which form, and how long they are valid.

Does not find blocks; see index.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from horovod_train.data.files import INDEX_NAME
from horovod_train.data.storage import Stamp
from horovod_train.output.files import open_atomically
from horovod_train.output.removal import Artifact, remove

DRAFT_NAME = rf"\.{re.escape(INDEX_NAME)}\.[0-9a-f]{{8}}\.partial"
"""Pattern of an index that is being written."""
_FORMAT = 2
_TEXTS = ("name", "packing", "digest", "problem")
_NUMBERS = ("size", "mtime_ns")


def _is_index(path: Path) -> bool:
    """Check the content, because other programs also write files named index.npz. A broken file is not removed."""
    if path.name != INDEX_NAME or not path.stat().st_size:
        return True
    try:
        with zipfile.ZipFile(path) as archive:
            arrays = {name.removesuffix(".npy") for name in archive.namelist()}
    except (zipfile.BadZipFile, NotImplementedError):
        return False
    return {"format", "blocks", "packing", *Extents._fields} <= arrays


_LOCK = Artifact("a lock", r".+\.(npz|unpacked|dataset)\.lock")
_INDEX = Artifact("an index of TFRecords", rf"{re.escape(INDEX_NAME)}|[0-9a-f]{{16}}\.npz", content_matches=_is_index)


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


class Extents(NamedTuple):
    """The blocks of one file, int64 arrays: first byte, bytes, records. In a packed file, bytes once it is unpacked."""

    offset: np.ndarray
    length: np.ndarray
    records: np.ndarray


Entries = dict[str, tuple[ScannedFile, Extents]]
"""By the file's name within its folder."""


def is_current(file: ScannedFile, stamp: Stamp) -> bool:
    """Return whether the file is as it was when it was scanned."""
    return (stamp.size, stamp.mtime_ns) == (file.size, file.mtime_ns)


def load_entries(place: Path) -> Entries:
    try:
        with np.load(place, allow_pickle=False) as saved:
            return _unpack({key: saved[key] for key in saved.files})
    except Exception:  # a damaged zip file raises nearly any error; the files are then scanned again
        return {}


def _unpack(arrays: Mapping[str, np.ndarray]) -> Entries:
    if int(arrays["format"]) != _FORMAT:
        return {}
    edges = np.cumsum(arrays["blocks"])[:-1]
    columns = zip(*(np.split(arrays[key], edges) for key in Extents._fields), strict=True)
    facts = {key: arrays[key].tolist() for key in _NUMBERS} | {key: _split_texts(arrays[key]) for key in _TEXTS}
    names = facts.pop("name")
    rows = zip(*facts.values(), strict=True)
    return {
        name: (ScannedFile(path=name, **dict(zip(facts, row, strict=True))), Extents(*column))
        for name, row, column in zip(names, rows, columns, strict=True)
    }


def save_entries(place: Path, entries: Entries) -> None:
    names = sorted(entries)
    files, extents = [entries[name][0] for name in names], [entries[name][1] for name in names]
    arrays: dict[str, Any] = {key: np.concatenate([getattr(e, key) for e in extents]) for key in Extents._fields}
    arrays |= {"format": np.array(_FORMAT), "name": _join_texts(names), "blocks": [len(e.records) for e in extents]}
    arrays |= {key: _join_texts(getattr(file, key) for file in files) for key in _TEXTS if key != "name"}
    arrays |= {key: np.array([getattr(file, key) for file in files], np.int64) for key in _NUMBERS}
    with open_atomically(place, _INDEX, sync=False) as file:
        np.savez(file, **arrays)


# An array of strings would give each string the size of the longest.


def _join_texts(texts: Iterable[str]) -> np.ndarray:
    return np.frombuffer("\0".join(texts).encode(errors="surrogateescape"), np.uint8)


def _split_texts(array: np.ndarray) -> list[str]:
    return array.tobytes().decode(errors="surrogateescape").split("\0")


@contextlib.contextmanager
def hold_lock(places: Sequence[Path], limit_s: float | None = None) -> Iterator[None]:
    """Lock a file by a second file next to it, so that only one of the processes that need the file writes it.

    places: where the file may be. Best effort: without a lock several processes may write it, and the last write stays.
    limit_s: how long to wait for another process before doing without a lock; None: until it has ended.
    """
    locks = (_open_lock(place.with_name(f"{place.name}.lock"), limit_s) for place in places)
    path, fd = next(filter(None, locks), (Path(), -1))
    try:
        yield
    finally:
        if fd >= 0:
            with contextlib.suppress(OSError):
                remove(path, _LOCK)
            os.close(fd)


def _open_lock(path: Path, limit_s: float | None) -> tuple[Path, int] | None:
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # NFS locks only what is open for writing
        except OSError:
            return None
        try:
            _wait_for_lock(fd, deadline)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return path, fd
        except FileNotFoundError:
            pass  # its last holder has removed it
        except OSError:
            os.close(fd)
            return None
        os.close(fd)


def _wait_for_lock(fd: int, deadline: float | None) -> None:
    """Lock an open file. Raises BlockingIOError if another process still holds the lock at the deadline."""
    if deadline is None:
        fcntl.flock(fd, fcntl.LOCK_EX)
        return
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.05)
