"""Opens HDF5 files that others may have made, and finds what is in them. Reads no values.

HDF5 lets a file refer to other files, which h5py would read as parts of it: a file from elsewhere could so bring a key
of the user into weights and predictions. Such files are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from horovod_train.errors import UserError, one_line

_MOST_LEVELS = 100


def open_hdf5(file: Any, name: str, kind: str = "HDF5", **options: Any) -> tuple[Any, dict[str, Any]]:
    """Open a file; return the h5py.File and its groups and datasets by path, each object once, without the root.

    file: a path or a file object. name: in front of errors. kind: what the file must be, in errors. options: of
    h5py.File. Soft links are not followed. Raises UserError for a file that is not HDF5, or that refers to others.
    """
    import h5py  # takes a while

    opened = None
    try:
        opened = h5py.File(file, "r", **options)
        return opened, dict(_walk(opened, name))
    except Exception as error:  # h5py raises whatever a damaged file leads to
        if opened is not None:
            opened.close()
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name}: cannot be read as {kind}: {one_line(error)}.") from error


def _walk(root: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield paths and objects, sorted within each group. A group may contain itself, so each object comes once."""
    import h5py

    visited, waiting = {root}, [(root, key, key) for key in sorted(root, reverse=True)]
    while waiting:
        group, key, path = waiting.pop()
        link = group.get(key, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise _refusal(name, path, f"a link to the file {link.filename}")
        if isinstance(link, h5py.SoftLink):
            continue  # to a path in this file, where it is found by itself; out of it only by an external link
        item = group[key]
        if not isinstance(item, h5py.Group | h5py.Dataset) or item in visited:
            continue
        visited.add(item)
        if isinstance(item, h5py.Group):
            if path.count("/") > _MOST_LEVELS:
                raise ValueError(f"it has groups within groups, more than {_MOST_LEVELS} deep")
            waiting += [(item, inner, f"{path}/{inner}") for inner in sorted(item, reverse=True)]
        elif item.external:
            raise _refusal(name, path, f"values kept in the file {item.external[0][0]}")
        elif item.is_virtual:
            raise _refusal(name, path, "a view of other datasets, which may be in other files")
        yield path, item


def _refusal(name: str, path: str, found: str) -> UserError:
    return UserError(
        f"{name}: {path} is {found}; expected a file that holds all its values, because another could be any file of "
        "yours. If you trust it, copy the values into one file."
    )
