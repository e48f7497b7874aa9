"""Tells whether files hold the same bytes: a digest of each, computed once and kept as long as size and time are equal.

The digest is over the CRC32C of each piece of 4 MiB, as that of TFRecords is over their checksums: it finds what has
changed by accident, not what somebody has forged.

Kept as indexes of TFRecords are: in `digests.json` next to the records, in `data.index_dir`, or in the user's cache
folder if the records' folder is read-only. Modification times only say whether a digest is still valid, so copies are
equal whatever their dates.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c

from horovod_train.data.progress import track
from horovod_train.errors import UserError
from horovod_train.output.files import write_whole
from horovod_train.output.removal import Made

NAME = "digests.json"
_PIECE = 1 << 22

Stats = Mapping[str, os.stat_result]
"""By a file's path, in the order of the files."""

_FORMAT = "horovod_train digests 1"


def _is_ours(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("format") == _FORMAT


_DIGESTS = Made("digests of records", r"digests\.json|[0-9a-f]{16}\.json", is_ours=_is_ours)


def content_digests(entries: Mapping[str, Stats], index_dir: str | None) -> dict[str, str]:
    """Return a digest of what the files of each entry hold, in their order. Reads them unless that was done before.

    entries: for each file, or folder with files, the files. Raises UserError if a file cannot be read.
    """
    by_folder: dict[str, list[str]] = {}
    for path in entries:
        by_folder.setdefault(_split(path)[0], []).append(path)
    digests: dict[str, str] = {}
    for folder, paths in by_folder.items():
        places = _places(folder, index_dir)
        kept = {key: entry for place in reversed(places) for key, entry in _load(place).items()}
        stamps = {path: _stamp(path, entries[path]) for path in paths}
        for path, stamp in stamps.items():
            entry = kept.get(_split(path)[1])
            if isinstance(entry, dict) and entry.get("stamp") == stamp and isinstance(entry.get("digest"), str):
                digests[path] = entry["digest"]
        missing = [path for path in paths if path not in digests]
        if missing:
            digests |= _read_all({path: entries[path] for path in missing})
            _save(places, {_split(path)[1]: {"stamp": stamps[path], "digest": digests[path]} for path in missing})
    return digests


def _split(path: str) -> tuple[str, str]:
    """Return the folder where the digest of an entry is kept, and the entry's name in it."""
    return (path, ".") if os.path.isdir(path) else (os.path.dirname(path), os.path.basename(path))


def _stamp(path: str, stats: Stats) -> str:
    facts = [(_name(path, file), stat.st_size, stat.st_mtime_ns) for file, stat in stats.items()]
    return hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()


def _name(path: str, file: str) -> str:
    """Return the name of a file of a folder; "" of a file that is an entry itself, since its part has the name."""
    return "" if file == path else os.path.relpath(file, path if os.path.isdir(path) else os.path.dirname(path) or ".")


def _read_all(entries: Mapping[str, Stats]) -> dict[str, str]:
    files = [file for stats in entries.values() for file in stats]
    with ThreadPoolExecutor(min(len(files), len(os.sched_getaffinity(0)))) as threads:
        read = track(threads.map(_digest_file, files), len(files), "reading files once, to identify them")
        of_file = dict(zip(files, read, strict=True))
    digests = {}
    for path, stats in entries.items():
        total = hashlib.sha256()
        for file in stats:
            total.update(_name(path, file).encode(errors="surrogateescape") + b"\0" + of_file[file])
        digests[path] = total.hexdigest()
    return digests


def _digest_file(path: str) -> bytes:
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                digest.update(google_crc32c.value(piece).to_bytes(4, "little"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    return digest.digest()


def _places(folder: str, index_dir: str | None) -> list[Path]:
    unique = hashlib.sha256(os.path.realpath(folder).encode(errors="surrogateescape")).hexdigest()[:16]
    if index_dir:
        return [Path(index_dir, f"{unique}.json")]
    try:
        return [Path(folder, NAME), Path.home() / ".cache/horovod_train/index" / f"{unique}.json"]
    except RuntimeError:  # in a container a user may have neither HOME nor an entry in passwd
        return [Path(folder, NAME)]


def _load(place: Path) -> dict[str, Any]:
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = content.get("digests") if isinstance(content, dict) and content.get("format") == _FORMAT else None
    return found if isinstance(found, dict) else {}


def _save(places: Sequence[Path], entries: Mapping[str, Any]) -> None:
    """Write to the first place that can be written. If none can, the files are read again at the next start."""
    for place in places:
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            content = {"format": _FORMAT, "digests": {**_load(place), **entries}}
            write_whole(place, json.dumps(content, indent=1) + "\n", _DIGESTS, sync=False)
            return
