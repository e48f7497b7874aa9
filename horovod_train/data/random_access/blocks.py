"""Reads the blocks of stores. A record that cannot be read is found and named; the others of its block are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_train.data.random_access.store import Store, UnreadableFrom, describe_error
from horovod_train.data.source import Arrays, Blocks, Data, Fault, Wanted, one_by_one
from horovod_train.errors import UserError


@dataclass(frozen=True, eq=False)
class _Block:
    store: Store
    first: int
    """The number in its store of the block's first record."""
    data: Data
    faults: dict[int, str]
    """Position in the block → why the record there cannot be read. It is empty in `data`."""


class StoreBlocks:
    """The blocks of some stores, one store after the other. A BlockReader."""

    def __init__(self, stores: Sequence[Store], blocks: Blocks) -> None:
        self._stores = stores
        counts = [len(store.blocks.records) for store in stores]
        self._store = np.repeat(np.arange(len(stores)), counts)
        self._first_block = np.concatenate([[0], np.cumsum(counts)])
        self._blocks = blocks

    def load(self, block: int) -> _Block:
        number = int(self._store[block])
        store, inside = self._stores[number], block - int(self._first_block[number])
        first, last = store.blocks.first_record[inside : inside + 2].tolist()
        return _Block(store, first, *_read(store, first, last))

    def take(self, records: np.ndarray, wanted: Sequence[Wanted[_Block]]) -> tuple[Data, list[Fault]]:
        arrays = _join(wanted, len(records))
        if arrays is not None:
            return arrays, []
        found: list[Any] = [None] * len(records)
        faults = []
        for part in wanted:
            block, rows = part.block, one_by_one(part.block.data)
            for row, place in zip(part.rows.tolist(), part.places.tolist(), strict=True):
                found[row] = rows[place]
                if place in block.faults:
                    record = int(records[row])
                    faults.append(Fault(record, self.name_record(record, block, block.faults[place])))
        return found, faults

    def name_record(self, record: int, block: _Block, problem: str) -> str:
        (number,) = self._blocks.containing(np.array([record]))
        place = record - int(self._blocks.first_record[number])
        return f"{block.store.path}: record {block.first + place}: {problem}."


def _read(store: Store, first: int, last: int) -> tuple[Data, dict[int, str]]:
    """Return the records [first, last), one by one if they cannot be read together; and the faults, as of a _Block."""
    try:
        return store.read(first, last), {}
    except (UserError, MemoryError):
        raise
    except UnreadableFrom as error:
        why, good = describe_error(error), error.record - first
        rows = one_by_one(store.read(first, error.record)) if good else []
        return rows + [{}] * (last - error.record), dict.fromkeys(range(good, last - first), why)
    except (Exception, SystemExit) as error:  # a library, or the user's class, may raise anything
        if last - first == 1:
            return [{}], {0: describe_error(error)}
    each = [_read(store, record, record + 1) for record in range(first, last)]
    faults = {place: found[0] for place, (_, found) in enumerate(each) if found}
    return [row for data, _ in each for row in one_by_one(data)], faults


def _join(wanted: Sequence[Wanted[_Block]], records: int) -> Arrays | None:
    """Return all records as arrays; None if some are not in arrays, or in arrays of other kinds than the others."""
    first = wanted[0].block.data
    if not isinstance(first, dict):
        return None
    kinds = _kinds(first)
    joined = {name: np.empty((records, *shape), dtype) for name, dtype, shape in kinds}
    for part in wanted:
        data = part.block.data
        if not isinstance(data, dict) or _kinds(data) != kinds:
            return None
        for name, array in joined.items():
            array[part.rows] = data[name][part.places]
    return joined


def _kinds(arrays: Arrays) -> list[tuple[str, np.dtype, tuple[int, ...]]]:
    return [(name, array.dtype, array.shape[1:]) for name, array in arrays.items()]
