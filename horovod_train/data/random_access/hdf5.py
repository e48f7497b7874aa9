"""HDF5 files: each dataset is a feature, with a row for each record; in groups its name is GROUP/NAME. Uses h5py.

HDF5 lets a file refer to other files, which h5py would read as parts of it: a file from elsewhere could so bring a key
of the user into weights and predictions. Such files are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from horovod_train.config.paths import is_remote
from horovod_train.data.random_access.store import FileStore, Request, check_lengths, even_blocks, opening
from horovod_train.data.source import Arrays
from horovod_train.data.storage import Pages, Range, RemoteFile
from horovod_train.errors import UserError, one_line
from horovod_train.host import Opened

_PAGES = 64
"""To cache of a remote file: for the structure of HDF5, and for text and lists of any length."""

_LOCKING = "best-effort"
"""Some network file systems cannot lock."""

_MOST_LEVELS = 100
"""Of groups within groups."""

_ALWAYS_TAKEN, _MOST_EXPANSION = 1 << 32, 1000
"""Bytes of a dataset, and per byte of its file if it has more: the limits of Keras. Deflate packs to a 1030th."""


class _Rows:
    """Where the rows of a dataset are in its file; of text and lists of any length, where their addresses are."""

    def __init__(self, dataset: Any) -> None:
        self._start = dataset.id.get_offset() if dataset.chunks is None else None
        self._row_bytes = dataset.id.get_type().get_size() * math.prod(dataset.shape[1:])
        self._rows = dataset.chunks[0] if dataset.chunks else 1
        self._chunks: dict[int, list[Range]] = {}
        if dataset.chunks:
            dataset.id.chunk_iter(self._add_chunk)

    def ranges(self, first: int, last: int) -> list[Range]:
        """Return the bytes that hold the rows [first, last)."""
        if self._start is not None:
            return [(self._start + first * self._row_bytes, (last - first) * self._row_bytes)]
        chunks = range(first // self._rows, -(-last // self._rows))
        return [byte_range for chunk in chunks for byte_range in self._chunks.get(chunk, ())]

    def _add_chunk(self, chunk: Any) -> None:
        self._chunks.setdefault(chunk.chunk_offset[0] // self._rows, []).append((chunk.byte_offset, chunk.size))


class HDF5File(FileStore):
    """The records of an HDF5 file. h5py lets one thread read at a time."""

    def __init__(self, path: str, request: Request) -> None:
        """Raises UserError for a file that is not HDF5, or whose datasets are not rows of numbers or text."""
        import h5py  # takes a while

        super().__init__(path, [path], request.storage)
        self._remote = RemoteFile(Pages(request.storage, path, _PAGES)) if is_remote(path) else None
        self._open_files = request.open_files
        file, found = open_hdf5(self._remote or path, path, locking=_LOCKING)
        with file:
            items = {name: item for name, item in found.items() if isinstance(item, h5py.Dataset)}
            self._describe({name: items[name] for name in request.choose(list(items), path)}, request.setting)

    def _describe(self, datasets: dict[str, Any], setting: str) -> None:
        """Take what is needed of the open datasets. Raises UserError."""
        import h5py  # takes a while

        path, self._names = self.path, list(datasets)
        for name, dataset in datasets.items():
            try:
                dtype = dataset.dtype
            except (TypeError, ValueError) as error:
                raise UserError(f"{path}: {name} cannot be read: {one_line(error)}.") from error
            kind = h5py.check_vlen_dtype(dtype) or dtype
            if not dataset.shape or not (h5py.check_string_dtype(dtype) or kind.kind in "biuf"):
                shape = list(dataset.shape or ())
                raise UserError(f"{path}: {name} is {dtype}{shape}; expected rows of numbers, text, or lists.")
            declared = max(dtype.itemsize * math.prod(dataset.shape), dataset.shape[0])
            if declared > max(_ALWAYS_TAKEN, _MOST_EXPANSION * self.size):
                raise UserError(
                    f"{path}: {name} is {dtype}{list(dataset.shape)}, and the file has {self.size} bytes; expected "
                    "values that are there. The file is damaged, or was never filled."
                )
        sentences = (_unwritten_in(dataset, name, path) for name, dataset in datasets.items())
        self.unwritten = " ".join(filter(None, sentences))
        lengths = {name: dataset.shape[0] for name, dataset in datasets.items()}
        records = check_lengths(lengths, path, setting)
        # HDF5 unpacks complete chunks, so a block has complete chunks of the dataset with the largest rows. To unpack
        # some of the others twice costs little, and h5py chunks those of a few bytes by the thousand.
        chunked = [dataset for dataset in datasets.values() if dataset.chunks]
        largest = max(chunked, key=lambda each: each.dtype.itemsize * math.prod(each.shape[1:]), default=None)
        sizes = [d.dtype.itemsize * math.prod(d.shape) for d in datasets.values() if d.dtype.kind != "O"]
        # Lists and text take a share of the file.
        total_bytes = sum(sizes) if len(sizes) == len(datasets) else max(sum(sizes), self.size)
        self.blocks = even_blocks(records, total_bytes, largest.chunks[0] if largest is not None else 1)
        self._rows = [] if self._remote is None else [_Rows(dataset) for dataset in datasets.values()]

    def read(self, first: int, last: int) -> Arrays:
        self.check(self.path)
        ranges = [byte_range for rows in self._rows for byte_range in rows.ranges(first, last)]
        in_memory = self._remote.loaded(ranges) if self._remote else nullcontext()
        with self._open_files.opened(self.path, self._open) as datasets, in_memory:
            return {name: dataset[first:last] for name, dataset in datasets.items()}

    def _open(self, _: str) -> Opened:
        import h5py  # takes a while

        file = h5py.File(self._remote or self.path, "r", locking=_LOCKING)
        return {name: file[name] for name in self._names}, file.close


def _unwritten_in(dataset: Any, name: str, path: str) -> str:
    """Return a sentence for values that were never written, as where a writer has died; "" if there are none."""
    of_chunks = zip(dataset.shape, dataset.chunks or dataset.shape, strict=True)
    chunks = math.prod(-(-length // of_chunk) if of_chunk else 0 for length, of_chunk in of_chunks)
    try:
        written = dataset.id.get_num_chunks() if dataset.chunks else int(dataset.id.get_storage_size() > 0)
    except (RuntimeError, OSError, ValueError):  # it is damaged, which the records show when they are read
        return ""
    if written >= chunks:
        return ""
    what = f"{written} of {chunks} chunks were ever written; the others read"
    if not written:
        what = "was never written, and reads"
    return f"{path}: {name}: {what} as the fill value. Write the file again, if its writer has died."


def open_hdf5(file: Any, name: str, kind: str = "HDF5", **options: Any) -> tuple[Any, dict[str, Any]]:
    """Open a file; return the h5py.File and its groups and datasets by path, each object once, without the root.

    file: a path or a file object. name: in front of errors. kind: what the file must be, in errors. options: of
    h5py.File. Soft links are not followed. Raises UserError for a file that is not HDF5, or that refers to others.
    """
    import h5py  # takes a while

    with opening(name, kind):
        opened = h5py.File(file, "r", **options)
        try:
            return opened, dict(_walk(opened, name))
        except BaseException:
            opened.close()
            raise


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
