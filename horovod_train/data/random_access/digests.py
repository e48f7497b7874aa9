"""Computes digests of files, which tell whether files hold the same bytes. Saves them for files that do not change.

A digest is over the CRC32C of each piece of 4 MiB, as that of TFRecords is over their checksums: it detects accidental
changes, not forgery.

Digests are saved in `digests.json`; see files. A saved digest is valid while the file's size and modification
time are the same. The time is not part of the digest, so copies are equal whatever their dates.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c

from horovod_train.config.paths import is_remote
from horovod_train.data.files import paths_beside, save_to_first
from horovod_train.data.storage import DEFAULT, Stamps, Storage
from horovod_train.errors import UserError
from horovod_train.output.console import track
from horovod_train.output.files import write_atomically
from horovod_train.output.removal import Artifact

NAME = "digests.json"
_PIECE = 1 << 22
_REMOTE_FILES = 8  # read at the same time

_FORMAT = "horovod_train digests 1"


def _is_ours(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("format") == _FORMAT


_DIGESTS = Artifact("digests of records", r"digests\.json|[0-9a-f]{16}\.json", content_matches=_is_ours)


def content_digests(entries: Mapping[str, Stamps], index_dir: str | None, storage: Storage = DEFAULT) -> dict[str, str]:
    """Return a digest of what the files of each entry hold, in their order. Reads only files whose digest is not saved.

    entries: for each file, or folder with files, the files. Raises UserError if a file cannot be read.
    """
    by_folder: dict[str, list[str]] = {}
    for path in entries:
        by_folder.setdefault(_locate(path, entries[path])[0], []).append(path)
    digests: dict[str, str] = {}
    for folder, paths in by_folder.items():
        places = paths_beside(folder, NAME, index_dir)
        stamps = {path: _stamp(path, entries[path]) for path in paths}
        for place in places:
            saved = _load(place)
            for path, stamp in stamps.items():
                entry = saved.get(_locate(path, entries[path])[1])
                if isinstance(entry, dict) and entry.get("stamp") == stamp and isinstance(entry.get("digest"), str):
                    digests[path] = entry["digest"]
        missing = [path for path in paths if path not in digests]
        if missing:
            digests |= _read_all({path: entries[path] for path in missing}, storage)
            entries_to_save = {path: {"stamp": stamps[path], "digest": digests[path]} for path in missing}
            entry_by_name = {_locate(path, entries[path])[1]: entry for path, entry in entries_to_save.items()}
            save_to_first(places, partial(_save, entry_by_name))
    return digests


def _locate(path: str, files: Stamps) -> tuple[str, str]:
    """Return the folder in whose file the digest of an entry is saved, and the entry's name there."""
    return (os.path.dirname(path), os.path.basename(path)) if path in files else (path, ".")


def _stamp(path: str, files: Stamps) -> str:
    facts = [(_name_in_entry(path, file, files), stamp.size, stamp.mtime_ns) for file, stamp in files.items()]
    return hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()


def _name_in_entry(path: str, file: str, files: Stamps) -> str:
    """Return the name of a file of an entry; "" of a file that is an entry itself, since its part has the name."""
    return "" if file == path else os.path.relpath(file, _locate(path, files)[0] or ".")


def _read_all(entries: Mapping[str, Stamps], storage: Storage) -> dict[str, str]:
    files = [file for stamps in entries.values() for file in stamps]
    max_threads = _REMOTE_FILES if any(map(is_remote, files)) else len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(min(len(files), max_threads)) as threads:
        results = threads.map(lambda file: _digest_file(file, storage), files)
        results = track(results, len(files), "reading files once, to identify them")
        digest_of_file = dict(zip(files, results, strict=True))
    digests = {}
    for path, stamps in entries.items():
        total = hashlib.sha256()
        for file in stamps:
            name = _name_in_entry(path, file, stamps).encode(errors="surrogateescape")
            total.update(name + b"\0" + digest_of_file[file])
        digests[path] = total.hexdigest()
    return digests


def _digest_file(path: str, storage: Storage) -> bytes:
    digest = hashlib.sha256()
    try:
        with storage.opened(path) as (stamp, read):
            for offset in range(0, stamp.size, _PIECE):
                piece = read(_PIECE, offset)
                digest.update(google_crc32c.value(piece).to_bytes(4, "little"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    return digest.digest()


def _load(place: Path) -> dict[str, Any]:
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    saved = content.get("digests") if isinstance(content, dict) and content.get("format") == _FORMAT else None
    return saved if isinstance(saved, dict) else {}


def _save(entries: Mapping[str, Any], place: Path) -> None:
    content = {"format": _FORMAT, "digests": {**_load(place), **entries}}
    write_atomically(place, json.dumps(content, indent=1) + "\n", _DIGESTS, sync=False)
