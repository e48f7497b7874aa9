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
_FORMAT = "horovod_train digests 1"


def _is_ours(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("format") == _FORMAT


_DIGESTS = Made("digests of records", r"digests\.json|[0-9a-f]{16}\.json", is_ours=_is_ours)


def content_digest(path: str, stats: Mapping[str, os.stat_result], index_dir: str | None) -> str:
    """Return a digest of what some files hold, in their order. Reads them whole unless that was done before.

    path: the file, or the folder that contains the files. Raises UserError if a file cannot be read.
    """
    folder, key = (path, ".") if os.path.isdir(path) else os.path.split(path)
    names = [os.path.relpath(file, folder) if folder else file for file in stats]
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in zip(names, stats.values(), strict=True)]
    stamp = hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()
    places = _places(folder, index_dir)
    for place in places:
        kept = _load(place).get(key)
        if isinstance(kept, dict) and kept.get("stamp") == stamp and isinstance(kept.get("digest"), str):
            return str(kept["digest"])
    digest = _digest(list(stats), names if key == "." else [])
    _save(places, key, {"stamp": stamp, "digest": digest})
    return digest


def _digest(files: Sequence[str], names: Sequence[str]) -> str:
    total = hashlib.sha256("\0".join(names).encode(errors="surrogateescape"))
    with ThreadPoolExecutor(min(len(files), len(os.sched_getaffinity(0)))) as threads:
        for digest in track(threads.map(_digest_file, files), len(files), "reading files once, to identify them"):
            total.update(digest)
    return total.hexdigest()


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


def _save(places: Sequence[Path], key: str, entry: Mapping[str, str]) -> None:
    """Write to the first place that can be written. If none can, the files are read again at the next start."""
    for place in places:
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            content = {"format": _FORMAT, "digests": {**_load(place), key: dict(entry)}}
            write_whole(place, json.dumps(content, indent=1) + "\n", _DIGESTS, sync=False)
            return
