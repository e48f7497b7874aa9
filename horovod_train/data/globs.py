"""Finds the paths that fit a pattern: what glob.glob finds with `recursive`, on a disk and in a store.

Raises OSError for a folder that cannot be read; glob.glob, and drivers of stores, leave out what is in it.
"""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from horovod_train.config.paths import is_remote
from horovod_train.data.storage import DEFAULT, Storage, map_paths, parent

_LOST_AND_FOUND = "lost+found"
"""No wildcard stands for a local folder of this name: the root of every ext4 has one, and only root may read it."""
_LISTED_WHOLE = ("s3", "gs")
"""Stores without folders: one request lists a thousand objects, however deep they are."""

_Entry = tuple[str, Callable[[], bool]]
"""A path, or a name in a folder, and what tells whether it is a folder."""


def matching(pattern: str, storage: Storage = DEFAULT) -> list[str]:
    """Return the paths that fit a pattern, sorted."""
    return sorted(path for path, _ in _Glob(storage).matches(pattern, only_folders=False) if path)


def files_and_folders(pattern: str, storage: Storage = DEFAULT) -> tuple[list[str], list[str]]:
    """Return the paths of files that fit a pattern, and of folders that do, both sorted."""
    found = {path: is_folder() for path, is_folder in _Glob(storage).matches(pattern, only_folders=False) if path}
    folders = sorted(path for path, is_folder in found.items() if is_folder)
    return sorted(found.keys() - folders), folders


class _Glob:
    """Looks at each remote folder once."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._listed: dict[str, dict[str, bool]] = {}
        """By remote folder and by name in it, whether that is a folder."""

    def matches(self, pattern: str, *, only_folders: bool) -> Iterator[_Entry]:
        folder, name = os.path.split(pattern)
        if not glob.has_magic(pattern) or (is_remote(pattern) and parent(pattern) is None):  # a store lists no buckets
            yield from self._existing(pattern)
            return
        folders = [folder]
        if glob.has_magic(folder):
            folders = [path for path, _ in self.matches(folder, only_folders=True)]
        if name == "**":
            yield from ((os.path.join(place, ""), lambda: True) for place in folders)
            yield from self._below(folders, only_folders=only_folders)
        elif glob.has_magic(name):
            for place, found in zip(folders, map_paths(self._entries, folders), strict=True):
                entries = {base: is_folder for base, is_folder in found if name[0] == "." or base[0] != "."}
                names = [base for base, is_folder in entries.items() if not only_folders or is_folder()]
                yield from ((os.path.join(place, base), entries[base]) for base in fnmatch.filter(names, name))
        else:
            for existing in map_paths(self._existing, [os.path.join(place, name) for place in folders]):
                yield from existing

    def _below(self, folders: Sequence[str], *, only_folders: bool) -> Iterator[_Entry]:
        in_stores = [folder for folder in folders if folder.partition("://")[0] in _LISTED_WHOLE]
        map_paths(self._list_whole, [folder for folder in in_stores if folder.rstrip("/") not in self._listed])
        while folders:
            inner = []
            for place, entries in zip(folders, map_paths(self._entries, folders), strict=True):
                for name, is_folder in entries:
                    if name[0] == ".":
                        continue
                    path = os.path.join(place, name)
                    if is_folder():
                        inner.append(path)
                    elif only_folders:
                        continue
                    yield path, is_folder
            folders = inner

    def _existing(self, path: str) -> list[_Entry]:
        """Return the path in a list, or an empty list."""
        if is_remote(path):
            folder, _, name = path.rpartition("/")
            if name and folder in self._listed:
                return [(path, partial(bool, self._listed[folder][name]))] if name in self._listed[folder] else []
            kind = self._storage.kind(path)
            return [(path, lambda: kind == "directory")] if kind else []
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [(path, partial(os.path.isdir, path))]

    def _entries(self, folder: str) -> list[_Entry]:
        """Return the entries of a folder; none if this is none."""
        try:
            if is_remote(folder):
                if (place := folder.rstrip("/")) not in self._listed:
                    self._listed[place] = self._storage.list_remote(folder)
                return [(name, partial(bool, is_folder)) for name, is_folder in self._listed[place].items()]
            with os.scandir(folder or ".") as entries:
                return [(e.name, e.is_dir) for e in entries if e.name != _LOST_AND_FOUND or not e.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _list_whole(self, folder: str) -> None:
        """Look at a folder of a store and all below it in one listing."""
        try:
            files = self._storage.files_below(folder)
        except FileNotFoundError:
            return
        top = folder.rstrip("/")
        self._listed[top] = {}
        for file in files:
            inner, names = top, file.split("/")
            for count, name in enumerate(names, 1):
                if not name:  # an object for the folder
                    break
                entries = self._listed.setdefault(inner, {})
                entries[name] = count < len(names) or entries.get(name, False)
                inner = f"{inner}/{name}"
