"""HDF5 files: each dataset is a feature, with a row for each record; in groups its name is GROUP/NAME. Uses h5py."""

from __future__ import annotations

import math
from typing import Any

from horovod_train.data.random_access.store import FileStamps, Request, check_lengths, even_blocks
from horovod_train.data.source import Arrays
from horovod_train.errors import UserError


class HDF5File:
    """The records of an HDF5 file. A Store. h5py lets one thread read at a time."""

    note = ""

    def __init__(self, path: str, request: Request) -> None:
        """Raises UserError for a file that is not HDF5, or whose datasets are not rows of numbers or text."""
        import h5py  # takes a while

        self.path, self.known, self._stamps = path, dict[str, dict[str, Any]](), FileStamps([path])
        try:
            self._file = h5py.File(path, "r", locking="best-effort")  # some network file systems cannot lock
        except OSError as error:
            raise UserError(f"{path}: cannot be read as HDF5: {' '.join(str(error).split())}.") from error
        found: dict[str, Any] = {}
        self._file.visititems(lambda name, item: found.update({name: item}) if isinstance(item, h5py.Dataset) else None)
        self._datasets = {name: found[name] for name in request.choose(list(found), path)}
        for name, dataset in self._datasets.items():
            kind = h5py.check_vlen_dtype(dataset.dtype) or dataset.dtype
            if not dataset.shape or not (h5py.check_string_dtype(dataset.dtype) or kind.kind in "biuf"):
                shape = list(dataset.shape or ())
                raise UserError(f"{path}: {name} is {dataset.dtype}{shape}; expected rows of numbers, text, or lists.")
        lengths = {name: dataset.shape[0] for name, dataset in self._datasets.items()}
        records = check_lengths(lengths, path, request.setting)
        self.size = self._stamps.size
        # A chunk is unpacked whole, so a block has whole ones.
        chunks = [dataset.chunks[0] for dataset in self._datasets.values() if dataset.chunks]
        self.blocks = even_blocks(records, self._bytes(records), max(chunks, default=1))

    def read(self, first: int, last: int) -> Arrays:
        self._stamps.check(self.path)
        return {name: dataset[first:last] for name, dataset in self._datasets.items()}

    def identity(self) -> FileStamps:
        return self._stamps

    def _bytes(self, records: int) -> int:
        """Return the bytes of all records in memory; lists and text take a share of the file."""
        fixed = [
            dataset.dtype.itemsize * math.prod(dataset.shape)
            for dataset in self._datasets.values()
            if dataset.dtype.kind != "O"
        ]
        return sum(fixed) if len(fixed) == len(self._datasets) else max(sum(fixed), self.size)
