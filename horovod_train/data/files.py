"""Finds the files that the config's folders and globs stand for. Does not open them."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

from horovod_train.data.tfrecord.index_file import INDEX_NAME
from horovod_train.errors import UserError

_PATTERN = "*.tfrecord*"


def list_files(patterns: Sequence[str], setting: str) -> list[str]:
    """Return the files that folders and globs stand for: in the order given, and by name within each.

    `setting` is the config key of the patterns, for messages. Raises UserError if there are no files.
    """
    files: list[str] = []
    for pattern in patterns:
        found = _list_folder(pattern, setting) if os.path.isdir(pattern) else _list_glob(pattern, setting)
        files.extend(found)
    seen: set[str] = set()
    for name in map(os.path.normpath, files):
        if name in seen:
            raise UserError(f"{setting}: {name} is named twice; its records would be read twice. Name it once.")
        seen.add(name)
    return files


def record_folders(path: str) -> list[str]:
    """Return the path itself, or if it holds no records, those of its folders that do."""
    if not os.path.isdir(path) or _records_in(path):
        return [path]
    below = sorted(os.path.join(path, name) for name in os.listdir(path))
    return [folder for folder in below if os.path.isdir(folder) and _records_in(folder)] or [path]


def _records_in(folder: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(folder), _PATTERN)))


def _list_folder(folder: str, setting: str) -> list[str]:
    try:
        inside = sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(f"{setting}: {folder} cannot be read: {error.strerror}.") from error
    names = _records_in(folder)
    if names:
        return names
    below = record_folders(folder)
    if below != [folder]:
        hint = f" Its folders have some: {setting}={below[0]}?"
    elif inside:
        hint = f" It holds {', '.join(inside[:3])}{', …' if len(inside) > 3 else ''}; name other files with a glob."
    else:
        hint = " It is empty."
    raise UserError(f"{setting}: {folder} holds no {_PATTERN} files.{hint}")


def _list_glob(pattern: str, setting: str) -> list[str]:
    if os.path.exists(pattern):  # the name of a file may look like a glob
        return [pattern]
    names = sorted(name for name in glob.glob(pattern, recursive=True) if not name.endswith(INDEX_NAME))
    if names:
        return names
    if glob.has_magic(pattern):
        raise UserError(f"{setting}: {pattern} matches no file.")
    parent = pattern
    while parent and not os.path.exists(parent):
        parent = os.path.dirname(parent.rstrip("/"))
    raise UserError(f"{setting}: {pattern} does not exist{f'; {parent} does' if parent else ''}.")
