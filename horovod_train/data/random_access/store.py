"""The interface of each kind of storage whose records are read by number, and what all kinds share.

Names a record that cannot be read, and uses the other records of its block. Contains no format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from horovod_train.config.paths import is_remote
from horovod_train.config.registry import raised_at
from horovod_train.data.source import Arrays, Blocks, Data, LoadedBlock, split_records
from horovod_train.data.storage import DEFAULT, Stamp, Storage, check_unchanged
from horovod_train.errors import UserError, one_line

_BLOCK_RECORDS, _BLOCK_BYTES = 256, 1 << 20  # as of TFRecord files, so that the same records have the same order
_MAX_BLOCKS = 4_000_000
_MAX_RECORDS = 1 << 36
"""Of one entry: a file can declare any number of rows that take no bytes, but a block of 256 takes some."""


@dataclass(frozen=True)
class Request:
    """What the config asks of each record."""

    names: tuple[str, ...] = ()
    """The features to read; () for all."""
    images: frozenset[str] = frozenset()
    """Those that data.features calls `decode: image`."""
    setting: str = "data.train"
    """The config key that names the records, for messages."""
    storage: Storage = DEFAULT
    entries: tuple[str, ...] = ()
    """All of data.train and data.eval."""

    def choose(self, stored: Sequence[str], path: str) -> list[str]:
        """Return the names to read. stored: those that the store has. Raises UserError for a missing one."""
        for name in self.names:
            if name not in stored:
                raise UserError(f"{self.setting}: {path} has no feature {name}; it has {', '.join(stored) or 'none'}.")
        return list(self.names or stored)


class Store(Protocol):
    """The records of one entry of data.train or data.eval, opened. A record's number counts from 0 in it."""

    path: str
    size: int
    """In bytes."""
    blocks: Blocks
    defaults: dict[str, dict[str, Any]]
    """Settings of features that the store knows, as in data.features, which takes precedence."""
    are_files: bool
    """Whether each record is a file, whose path is its name."""

    @property
    def note(self) -> str:
        """Return what users should know before a run; "" if nothing."""

    def read(self, first: int, last: int) -> Arrays | list[bytes]:
        """Return the records [first, last): arrays by name with these rows, or what is serialized.

        Several threads call it. A feature whose rows differ in length, or hold text, is an array of objects. Raises
        UserError if reading must end. Any other exception means that some of these records cannot be read;
        UnreadableFrom also says which.
        """

    def identity(self) -> FileStamps | str:
        """Return the files whose content identifies the records; if they are in no files, a digest of them, in hex."""

    def name(self, record: int) -> str:
        """Return what users call a record: the path of its own file, or else the store's path and its number."""


class UnreadableFrom(Exception):
    """Of the records that were asked for, none from `record` on can be read; the cause says why."""

    def __init__(self, record: int) -> None:
        super().__init__(record)
        self.record = record


class FileStamps:
    """Some files as they were when they were opened."""

    def __init__(self, paths: Iterable[str], storage: Storage = DEFAULT) -> None:
        """Raises UserError for a file that does not exist."""
        self.stamps: dict[str, Stamp] = {}
        self._storage, self._checked = storage, set[str]()
        for path in paths:
            try:
                self.stamps[path] = storage.stamp(path)
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {error.strerror}.") from error

    @property
    def size(self) -> int:
        return sum(stamp.size for stamp in self.stamps.values())

    def check(self, path: str) -> None:
        """Raise UserError if the file has disappeared or has changed. Checks a remote file once; see forget_checks."""
        if path in self._checked:
            return
        before = self.stamps[path]
        try:
            now = self._storage.stamp(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read any more: {error.strerror}.") from error
        check_unchanged(path, before.size, before.mtime_ns, now)
        if is_remote(path):  # looking takes a request
            self._checked.add(path)

    def forget_checks(self) -> None:
        """Let `check` look at remote files again."""
        self._checked.clear()


class FileStore:
    """What stores of files have in common. A Store, once it has `blocks` and `read`."""

    note = ""
    are_files = False

    def __init__(self, path: str, files: Iterable[str], storage: Storage = DEFAULT) -> None:
        """files: those that hold the records. Raises UserError for one that does not exist."""
        self.path, self.defaults = path, dict[str, dict[str, Any]]()
        self._stamps = FileStamps(files, storage)
        self.size = self._stamps.size

    def identity(self) -> FileStamps | str:
        return self._stamps

    def name(self, record: int) -> str:
        return f"{self.path}: record {record}"


def check_local(path: str, setting: str, what: str) -> None:
    """Raise UserError for a remote path, for a library that reads only from a local disk."""
    if is_remote(path):
        raise UserError(
            f"{setting}: {path}: {what} are only read from a local disk. Copy them there, mount them, or convert them: "
            "prepare --help."
        )


def even_blocks(records: int, total_bytes: int, multiple: int = 1) -> Blocks:
    """Return blocks of up to 256 records or 1 MiB, which begin at multiples of `multiple` records."""
    record_bytes = total_bytes / max(records, 1)
    rows = int(min(_BLOCK_RECORDS, max(_BLOCK_BYTES // max(record_bytes, 1), 1)))
    rows = max(rows // multiple, 1) * multiple
    return blocks_of(np.diff(np.append(np.arange(0, records, rows), records)), total_bytes)


def single_blocks(records: int, sizes: np.ndarray | float) -> Blocks:
    """Return a block for each record, so that only records that are needed are read; of millions, for several.

    sizes: bytes of each record, or of all alike.
    """
    block_records = -(-records // _MAX_BLOCKS)
    starts = np.arange(0, records, max(block_records, 1))
    counts = np.diff(np.append(starts, records))
    if isinstance(sizes, float):
        return Blocks(counts, (counts * sizes).astype(np.int64))
    return Blocks(counts, np.add.reduceat(sizes, starts) if records else counts)


def blocks_of(counts: Sequence[int] | np.ndarray, total_bytes: int) -> Blocks:
    """Return blocks with these numbers of records; the bytes are shared out evenly."""
    records = np.array(counts, np.int64)
    return Blocks(records, (records * (total_bytes / max(int(records.sum()), 1))).astype(np.int64))


def check_lengths(lengths: Mapping[str, int], path: str, setting: str) -> int:
    """Return the number of records. Raises UserError if the features have different numbers of rows, or none."""
    if not lengths:
        raise UserError(f"{setting}: {path} holds no features.")
    first, *further = lengths
    for other in further:
        if lengths[other] != lengths[first]:
            raise UserError(
                f"{setting}: {path}: {first} has {lengths[first]} rows, {other} has {lengths[other]}. If only some "
                "are records, name those in data.inputs and data.targets."
            )
    if lengths[first] > _MAX_RECORDS:
        raise UserError(
            f"{setting}: {path}: {first} declares {lengths[first]} rows; expected values that are there, of at most "
            f"{_MAX_RECORDS} records. The file is damaged, or its rows are empty."
        )
    return lengths[first]


def describe_error(error: BaseException) -> str:
    """Return what was raised in a library or in a user's class, and where in the user's code."""
    error = (error.__cause__ if isinstance(error, UnreadableFrom) else None) or error
    text = one_line(error).rstrip(".")
    return ": ".join(filter(None, (type(error).__name__, text))) + raised_at(error)


def stack(values: Sequence[Any]) -> np.ndarray:
    """Return one array of the values of some records: of objects if they are texts, or differ in shape or dtype."""
    if len(values) == 1 and not isinstance(values[0], bytes | str):
        return np.asarray(values[0])[None]
    arrays = [value if isinstance(value, bytes | str) else np.asarray(value) for value in values]
    kinds = {None if isinstance(value, bytes | str) else (value.dtype, value.shape) for value in arrays}
    if len(kinds) == 1 and None not in kinds:
        return np.stack(arrays)
    return objects(arrays)


def objects(values: Sequence[Any]) -> np.ndarray:
    """Return an array with one object for each value."""
    array = np.empty(len(values), object)
    for row, value in enumerate(values):  # numpy would take arrays of equal length for rows
        array[row] = value
    return array


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
