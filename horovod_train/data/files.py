"""Finds the files that the config's folders and globs stand for. Does not open them."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Collection, Sequence
from typing import NamedTuple

from horovod_train.errors import UserError

INDEX_NAME = "index.npz"
"""An index of records, which may be in their folder; see tfrecord.index_file."""


class Listed(NamedTuple):
    """The files that folders and globs stand for: in the order given, and by name within each."""

    kind: str
    """The pattern that they fit."""
    files: list[str]
    counts: list[int]
    """How many of them each path stands for."""


def list_files(paths: Sequence[str], setting: str, patterns: Collection[str]) -> Listed:
    """Return the files that folders and globs stand for.

    All are of one kind: the first of `patterns` that fits any of the paths, or else the first. `setting` is the config
    key of the paths, for messages. Raises UserError if there are no files.
    """
    first = next(iter(patterns))
    kind = next((pattern for pattern in patterns if any(_fits(path, pattern) for path in paths)), first)
    found = [_list_folder(path, setting, kind) if os.path.isdir(path) else _list_glob(path, setting) for path in paths]
    files = [name for names in found for name in names]
    check_named_once(files, setting)
    return Listed(kind, files, [len(names) for names in found])


def check_named_once(files: Sequence[str], setting: str) -> None:
    """Raise UserError for a name that comes twice."""
    seen: set[str] = set()
    for name in map(os.path.normpath, files):
        if name in seen:
            raise UserError(f"{setting}: {name} is named twice; its records would be read twice. Name it once.")
        seen.add(name)


def record_folders(path: str, patterns: Collection[str]) -> list[str]:
    """Return the path itself, or if it is a folder without records, those of its folders that have some."""

    if not os.path.isdir(path) or has_records(path, patterns):
        return [path]
    below = sorted(os.path.join(path, name) for name in os.listdir(path))
    return [folder for folder in below if os.path.isdir(folder) and has_records(folder, patterns)] or [path]


def has_records(folder: str, patterns: Collection[str]) -> bool:
    """Return whether a folder has files of records in it."""
    return any(_records_in(folder, pattern) for pattern in patterns)


def _fits(path: str, pattern: str) -> bool:
    if os.path.isdir(path):
        return bool(_records_in(path, pattern))
    return fnmatch.fnmatchcase(os.path.basename(path), pattern)


def _records_in(folder: str, pattern: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(folder), pattern)))


def _list_folder(folder: str, setting: str, pattern: str) -> list[str]:
    try:
        inside = sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(f"{setting}: {folder} cannot be read: {error.strerror}.") from error
    names = _records_in(folder, pattern)
    if names:
        return names
    below = record_folders(folder, [pattern])
    if below != [folder]:
        hint = f" Its folders have some: {setting}={below[0]}?"
    elif inside:
        hint = f" It holds {', '.join(inside[:3])}{', …' if len(inside) > 3 else ''}; name other files with a glob."
    else:
        hint = " It is empty."
    raise UserError(f"{setting}: {folder} holds no {pattern} files.{hint}")


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
