"""Reads the blocks of stores. A record that cannot be read is found and named; the others of its block are used."""

from __future__ import annotations

from horovod_train.data.random_access.store import Store, UnreadableFrom, describe_error
from horovod_train.data.source import Data, LoadedBlock, split_records
from horovod_train.errors import UserError


def read_block(store: Store, first: int, last: int) -> LoadedBlock:
    """Read the records [first, last), as source.LoadBlock says."""
    data, faults = _read(store, first, last)

    def name(place: int, problem: str) -> str:
        return f"{store.path}: record {first + place}: {problem}."

    return LoadedBlock(data, name, {place: name(place, why) for place, why in faults.items()})


def _read(store: Store, first: int, last: int) -> tuple[Data, dict[int, str]]:
    """Return the records [first, last), one by one if they cannot be read together; and why some cannot, by position.

    Those are empty.
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
    each = [_read(store, record, record + 1) for record in range(first, last)]
    faults = {place: faulty[0] for place, (_, faulty) in enumerate(each) if faulty}
    return [row for data, _ in each for row in split_records(data)], faults
