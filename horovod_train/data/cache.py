"""Parsed records kept in memory, so that from the second pass on nothing is read. Bounded by the whole data set."""

from __future__ import annotations

import os

import numpy as np

from horovod_train.data.parse import Arrays
from horovod_train.errors import UserError


class ParsedCache:
    """Room for every record of a data set, filled as they come. Pages that were never filled cost nothing."""

    def __init__(self, num_records: int, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> None:
        self._held = np.zeros(num_records, bool)
        _check_room(num_records, shapes, dtypes)
        self._arrays: Arrays = {
            name: np.empty((num_records, *shapes[name]), object if dtype == "string" else dtype)
            for name, dtype in dtypes.items()
        }

    def holds(self, records: np.ndarray) -> bool:
        return bool(self._held[records].all())

    def load(self, records: np.ndarray) -> Arrays:
        return {name: array[records] for name, array in self._arrays.items()}

    def keep(self, records: np.ndarray, arrays: Arrays) -> None:
        for name, array in arrays.items():
            self._arrays[name][records] = array
        self._held[records] = True


def _check_room(num_records: int, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> None:
    """Strings, and with them images, are not counted: how long they are is known when they have come."""
    sizes = (
        np.dtype(dtype).itemsize * int(np.prod(shapes[name], dtype=np.int64))
        for name, dtype in dtypes.items()
        if dtype != "string"
    )
    needed, there = num_records * sum(sizes), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise UserError(
            f"data.cache: memory needs {needed / 1e9:.1f} GB on each rank; this host has {there / 1e9:.1f} GB. "
            "Use none: the operating system keeps what fits."
        )
