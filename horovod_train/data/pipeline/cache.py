"""Keeps parsed records in memory, so that later epochs read nothing. Needs memory for the whole data set at most."""

from __future__ import annotations

import math
import os

import numpy as np

from horovod_train.data.source import Arrays, Blocks, Parser
from horovod_train.errors import UserError


class ParsedCache:
    """Space for every record of a data set, filled as they arrive. Pages that were never filled use no memory."""

    def __init__(self, num_records: int, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> None:
        self._is_filled = np.zeros(num_records, bool)
        self._arrays: Arrays = {
            name: np.empty((num_records, *shapes[name]), object if dtype == "string" else dtype)
            for name, dtype in dtypes.items()
        }

    def holds(self, records: np.ndarray) -> bool:
        return bool(self._is_filled[records].all())

    def load(self, records: np.ndarray) -> Arrays:
        return {name: array[records] for name, array in self._arrays.items()}

    def save(self, records: np.ndarray, arrays: Arrays) -> None:
        for name, array in arrays.items():
            self._arrays[name][records] = array
        self._is_filled[records] = True


def bytes_to_cache(blocks: Blocks, parser: Parser) -> int:
    """Return the size of all parsed records; for strings, and so for images, the number of stored bytes."""
    sizes = {
        name: np.dtype(dtype).itemsize * math.prod(parser.shapes[name])
        for name, dtype in parser.dtypes.items()
        if dtype != "string"
    }
    stored = blocks.total_bytes if len(sizes) < len(parser.dtypes) else 0
    return blocks.num_records * sum(sizes.values()) + stored


def check_room_to_cache(bytes_each: int, ranks_on_host: int) -> None:
    """Raise UserError if this host lacks the memory for the full caches of all its ranks."""
    needed, memory = ranks_on_host * bytes_each, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise UserError(
            f"data.cache: memory needs {needed / 1e9:.1f} GB for {ranks_on_host} rank(s) of this host, which has "
            f"{memory / 1e9:.1f} GB. Use none: the operating system keeps what fits."
        )
