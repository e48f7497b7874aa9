"""Reads the blocks of stores. Names a record that cannot be read, and uses the other records of its block."""

from __future__ import annotations

from horovod_train.data.random_access.store import Store, UnreadableFrom, describe_error
from horovod_train.data.source import Data, LoadedBlock, split_records
from horovod_train.errors import UserError


def read_block(store: Store, first: int, last: int) -> LoadedBlock:
    """Read the records [first, last), as source.LoadBlock says."""
    data, faults = _read(store, first, last)

    def name(position: int, problem: str) -> str:
        return f"{store.name(first + position)}: {problem}."

    return LoadedBlock(data, name, {position: name(position, why) for position, why in faults.items()})


def _read(store: Store, first: int, last: int) -> tuple[Data, dict[int, str]]:
    """Return the records [first, last), and by position why some cannot be read; those are empty.

    Reads one by one if the records cannot be read together.
    """
    try:
        return store.read(first, last), {}
    except (UserError, MemoryError):
        raise
    except UnreadableFrom as error:
        why, good = describe_error(error), error.record - first
        rows = split_records(store.read(first, error.record)) if good else []
        return rows + [{}] * (last - error.record), dict.fromkeys(range(good, last - first), why)
    except (Exception, SystemExit) as error:  # a library, or the user's class, may raise anything
        if last - first == 1:
            return [{}], {0: describe_error(error)}
    results = [_read(store, record, record + 1) for record in range(first, last)]
    faults = {position: fault[0] for position, (_, fault) in enumerate(results) if fault}
    return [row for data, _ in results for row in split_records(data)], faults
