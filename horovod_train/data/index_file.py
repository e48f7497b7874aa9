"""The blocks of a folder's files as kept on disk, in `index.npz`: where, in which form, how long they hold.

Does not find blocks; see index.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from horovod_train.removal import DRAFT, Made, draft_of, remove, replace

INDEX_NAME = "index.npz"
DRAFT_NAME = rf"\.{re.escape(INDEX_NAME)}\.[0-9a-f]{{8}}\.partial"
"""Pattern of an index that is being written."""
_FORMAT = 1


def _is_index(path: Path) -> bool:
    """Other programs too call a file index.npz. One that is broken is not known for ours, and stays."""
    if path.name != INDEX_NAME or not path.stat().st_size:
        return True
    try:
        with zipfile.ZipFile(path) as archive:
            arrays = {name.removesuffix(".npy") for name in archive.namelist()}
    except (zipfile.BadZipFile, NotImplementedError):
        return False
    return {"format", "blocks", "packing", *Blocks._fields} <= arrays


_INDEX = Made("an index of TFRecords", rf"{re.escape(INDEX_NAME)}|[0-9a-f]{{16}}\.npz", is_ours=_is_index)


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
    records: np.ndarray


Entries = dict[str, tuple[Source, Blocks]]
"""By the file's name within its folder."""


def places(folder: str, index_dir: str | None) -> list[str]:
    """Where the index of a folder may lie, best first."""
    unique = hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:16]
    if index_dir:
        return [os.path.join(index_dir, f"{unique}.npz")]
    return [os.path.join(folder, INDEX_NAME), str(Path.home() / ".cache/horovod_train/index" / f"{unique}.npz")]


def unchanged(name: str, source: Source) -> bool:
    try:
        stat = os.stat(name)
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (source.size, source.mtime_ns)


def load_entries(place: str) -> Entries:
    try:
        with np.load(place, allow_pickle=False) as saved:
            return _unpack({key: saved[key] for key in saved.files})
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError):
        return {}  # none, half of one, or of another version: made again


def _unpack(arrays: Mapping[str, np.ndarray]) -> Entries:
    if int(arrays["format"]) != _FORMAT:
        return {}
    edges = np.cumsum(arrays["blocks"])[:-1]
    columns = zip(*(np.split(arrays[key], edges) for key in Blocks._fields), strict=True)
    facts = zip(*(arrays[key].tolist() for key in ("name", "size", "mtime_ns", "packing")), strict=True)
    return {fact[0]: (Source(*fact), Blocks(*column)) for fact, column in zip(facts, columns, strict=True)}


def save_somewhere(places: list[str], entries: Entries) -> None:
    for place in places:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(place) or ".", exist_ok=True)
            save_entries(place, entries)
            return


def save_entries(place: str, entries: Entries) -> None:
    names = sorted(entries)
    sources, blocks = [entries[name][0] for name in names], [entries[name][1] for name in names]
    arrays: dict[str, Any] = {key: np.concatenate([getattr(b, key) for b in blocks]) for key in Blocks._fields}
    arrays |= {
        "format": np.array(_FORMAT),
        "name": np.array(names),
        "blocks": np.array([len(b.records) for b in blocks]),
    }
    arrays["size"] = np.array([s.size for s in sources], np.int64)
    arrays["mtime_ns"] = np.array([s.mtime_ns for s in sources], np.int64)
    arrays["packing"] = np.array([s.packing for s in sources])
    draft = draft_of(Path(place))
    try:
        with draft.open("xb") as file:
            np.savez(file, **arrays)
        replace(draft, Path(place), _INDEX)
    finally:
        with contextlib.suppress(OSError):
            remove(draft, DRAFT)
