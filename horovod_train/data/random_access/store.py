"""The interface of each kind of storage whose records are read by number, and what all kinds share. Contains no format.

Names a record that cannot be read, and uses the other records of its block. Checks the arrays of records against a
schema, pads lists and converts dtypes, without TensorFlow; casting, scaling and image decoding follow later, see
transforms.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from horovod_train.config.paths import is_remote
from horovod_train.config.registry import raised_at
from horovod_train.data.schema import Feature
from horovod_train.data.source import Arrays, Blocks, Data, LoadedBlock, split_records
from horovod_train.data.storage import DEFAULT, Stamp, Stamps, Storage, check_unchanged, describe
from horovod_train.errors import ReadFailed, RunError, UserError, one_line, reading, said_by_system, unreadable
from horovod_train.host import OpenFiles
from horovod_train.shown_text import listed

_BLOCK_RECORDS, _BLOCK_BYTES = 256, 1 << 20  # as of TFRecord files, so that the same records have the same order
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_MAX_BLOCKS = 4_000_000
_MAX_RECORDS = 1 << 36
"""Of one entry: a file can declare any number of rows that take no bytes, but a block of 256 takes some."""


@dataclass(frozen=True)
class Request:
    """What the config asks of each record."""

    names: tuple[str, ...] = ()
    """The features to read; () for all but those left out."""
    left_out: frozenset[str] = frozenset()
    """Labels that are not used, and may be missing."""
    images: frozenset[str] = frozenset()
    """Those that data.features calls `decode: image`."""
    texts: frozenset[str] = frozenset()
    """Those whose type it gives as `bytes`."""
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of classes in data.features, by feature: labels may be text."""
    setting: str = "data.train"
    """The config key that names the records, for messages."""
    storage: Storage = DEFAULT
    entries: tuple[str, ...] = ()
    """All of data.train and data.eval."""
    open_files: OpenFiles = field(default_factory=OpenFiles)
    """Those of all stores together, for a library that opens files itself."""

    def choose(self, stored: Sequence[str], path: str) -> list[str]:
        """Return the names to read. stored: those that the store has. Raises UserError for a missing one."""
        for name in self.names:
            if name not in stored:
                raise UserError(f"{self.setting}: {path} has no feature {name}; it has {', '.join(stored) or 'none'}.")
        names = list(self.names or (name for name in stored if name not in self.left_out))
        if stored and not names:
            raise UserError(f"{self.setting}: {path} has no inputs, only {', '.join(stored)}.")
        return names


class Store(ABC):
    """The records of one entry of data.train or data.eval, opened. A record's number counts from 0 in it."""

    path: str
    size: int
    """In bytes."""
    blocks: Blocks
    defaults: dict[str, dict[str, Any]]
    """Settings of features that the store knows, as in data.features, which takes precedence."""
    are_files = False
    """Whether each record is a file, whose path is its name."""
    note = ""
    """What users should know before a run."""
    unwritten = ""
    """What is not in the files though it can be read, which check-data counts as a fault."""

    @abstractmethod
    def read(self, first: int, last: int) -> Arrays | list[bytes]:
        """Return the records [first, last): arrays by name with these rows, or what is serialized.

        Several threads call it. A feature whose rows differ in length, or hold text, is an array of objects. Raises
        UserError if reading must end. Any other exception means that some of these records cannot be read;
        UnreadableFrom also says which.
        """

    def damage(self) -> str:
        """Return what checksums over whole files find, in a sentence; "": nothing. Reads them, for check-data."""
        return ""

    @abstractmethod
    def identity(self) -> Stamps | str:
        """Return the files whose content identifies the records; if they are in no files, a digest of them, in hex."""

    def name(self, record: int) -> str:
        """Return what users call a record: the path of its own file, or else the store's path and its number."""
        return f"{self.path}: record {record}"


class UnreadableFrom(Exception):
    """Of the records that were asked for, none from `record` on can be read; the cause says why."""

    def __init__(self, record: int) -> None:
        super().__init__(record)
        self.record = record


class FileStore(Store):
    """What stores of files have in common, besides `blocks` and `read`."""

    def __init__(self, path: str, files: Iterable[str], storage: Storage = DEFAULT) -> None:
        """files: those that hold the records. Raises UserError for one that does not exist."""
        self.path, self.defaults = path, dict[str, dict[str, Any]]()
        self.stamps: dict[str, Stamp] = {}
        """Of the files as they were when they were opened."""
        self._storage, self._checked = storage, set[str]()
        for file in files:
            with reading(file):
                self.stamps[file] = storage.stamp(file)
        self.size = sum(stamp.size for stamp in self.stamps.values())

    def identity(self) -> Stamps | str:
        return self.stamps

    def check(self, file: str) -> None:
        """Raise UserError if a file has disappeared or has changed. Checks a remote file once; see forget_checks."""
        if file in self._checked:
            return
        before = self.stamps[file]
        with reading(file, " any more"):
            now = self._storage.stamp(file)
        check_unchanged(file, before.size, before.mtime_ns, now)
        if is_remote(file):  # looking takes a request
            self._checked.add(file)

    def forget_checks(self) -> None:
        """Let `check` look at remote files again."""
        self._checked.clear()

    def read_file(self, file: str) -> bytes:
        """Return what one of the files holds. Raises UserError if it has changed since it was listed."""
        self.check(file)
        return self._storage.read_all(file)


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


def raise_if_of_the_system(error: BaseException, record: str) -> None:
    """Raise UserError or ReadFailed for an error of the system, by which good records would count as bad ones."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        raise UserError(f"{record}: cannot be read: {said_by_system(error)}.") from error
    if unreadable(error) is ReadFailed:
        raise ReadFailed(f"{record}: cannot be read: {describe(error)}.") from error


@contextmanager
def opening(where: str, kind: str) -> Iterator[None]:
    """Raise UserError, or ReadFailed, in a block that reads a file by a library, which may raise anything.

    where: the path, after the setting that names it if the caller knows it.
    """
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        raise_if_of_the_system(error, where)
        reason = one_line(getattr(error, "strerror", None) or error).rstrip(".") or type(error).__name__
        raise UserError(f"{where}: cannot be read as {kind}: {reason}.") from error


def try_read(store: Store, first: int, last: int) -> Arrays | list[bytes] | BaseException:
    """Return the records [first, last), or what was raised because some of them cannot be read.

    Raises what must end the reading.
    """
    try:
        return store.read(first, last)
    except (RunError, MemoryError):
        raise
    except (Exception, SystemExit) as error:  # a library, or the user's class, may raise anything
        raise_if_of_the_system(error, store.name(first))
        return error


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
    return np.fromiter(values, object, len(values))  # np.array would take arrays of equal length for rows


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
    found = try_read(store, first, last)
    if not isinstance(found, BaseException):
        return found, {}
    if isinstance(found, UnreadableFrom):
        good = found.record - first
        rows = split_records(store.read(first, found.record)) if good else []
        faults = dict.fromkeys(range(good, last - first), describe_error(found))
        return rows + [{}] * (last - found.record), faults
    if last - first == 1:
        return [{}], {0: describe_error(found)}
    results = [_read(store, record, record + 1) for record in range(first, last)]
    faults = {position: fault[0] for position, (_, fault) in enumerate(results) if fault}
    return [row for data, _ in results for row in split_records(data)], faults


# --- parsing ----------------------------------------------------------------------------------------------------


class ArraysParser:
    """Parses records that are arrays by name. A Parser."""

    def __init__(self, features: dict[str, Feature]) -> None:
        self._features = features
        self.dtypes = {name: "string" if f.decode == "image" else f.stored_dtype for name, f in features.items()}
        self.shapes = {name: () if f.decode == "image" else f.tensor_shape for name, f in features.items()}

    def parse(self, records: Data) -> Arrays | None:
        parsed = {}
        for name, feature in self._features.items():
            values = self._values(records, name)
            array = None if values is None else _convert(feature, values)
            if values is None or array is None or _value_problem(feature, values, array):
                return None
            parsed[name] = array
        return parsed

    def problem(self, record: Any) -> str | None:
        for name, feature in self._features.items():
            if name not in record:
                return f"feature {name}: the record does not have it; it has {', '.join(record) or 'nothing'}"
            values = stack([record[name]])
            array = _convert(feature, values)
            if array is None:
                actual = _actual_form(values)
                if feature.class_names and (texts := _as_bytes(values)) is not None:
                    actual = ", ".join(repr(text.decode(errors="replace")) for text in texts.ravel()[:3].tolist())
                return f"feature {name}: expected {_expected_form(feature)}; the record holds {actual}"
            if problem := _value_problem(feature, values, array):
                return f"feature {name}: {problem}"
        return None

    def _values(self, records: Data, name: str) -> np.ndarray | None:
        if isinstance(records, dict):
            return records.get(name)
        if any(name not in row for row in records):
            return None
        return stack([row[name] for row in records])


def _convert(feature: Feature, values: np.ndarray) -> np.ndarray | None:
    """Return the values as the schema has them; None if those of some record, taken alone, do not fit."""
    if feature.max_length:
        return _pad(feature, values)
    array = _convert_alike(feature, values)
    if array is None and values.dtype == object:  # they differ in kind, and may fit one by one
        return _join([_convert_alike(feature, stack([value])) for value in values])
    return array


def _convert_alike(feature: Feature, values: np.ndarray) -> np.ndarray | None:
    if feature.stored_dtype == "string" or feature.decode == "image":
        shape = () if feature.decode == "image" else feature.shape
        texts = _as_bytes(values)
        return texts if texts is not None and texts.shape[1:] == shape else None
    if feature.class_names and (texts := _as_bytes(values)) is not None:
        numbers = {name.encode(errors="surrogateescape"): number for number, name in enumerate(feature.class_names)}
        numbers = {name.strip(): number for name, number in numbers.items()} | numbers
        found = [numbers.get(text, numbers.get(text.strip())) for text in texts.ravel()]
        fits = texts.shape[1:] == feature.shape and None not in found
        return np.array(found, np.int64).reshape(texts.shape) if fits else None
    return _as_dtype(values, feature.stored_dtype) if values.shape[1:] == feature.shape else None


def _pad(feature: Feature, values: np.ndarray) -> np.ndarray | None:
    """Return lists of any length as rows of `max_length`."""
    assert feature.max_length is not None
    lists = [np.asarray(value) for value in values]
    if any(value.ndim == 0 or len(value) > feature.max_length for value in lists):
        return None
    # Each list is converted alone: joined first, numbers among texts would be texts, and integers among floats floats.
    empty = np.zeros((0, *feature.shape), object if feature.stored_dtype == "string" else feature.stored_dtype)
    items = _join([_convert_alike(feature, value) if len(value) else empty for value in lists])
    if items is None:
        return None
    padding = b"" if feature.stored_dtype == "string" else feature.padding
    rows = np.full((len(lists), *feature.tensor_shape), padding, items.dtype)
    rows[_is_item(feature.max_length, lists)] = items
    return rows


def _join(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Return arrays as one; None if one is missing."""
    found = [part for part in parts if part is not None]
    return np.concatenate(found) if len(found) == len(parts) else None


def _is_item(max_length: int, lists: Sequence[Any]) -> np.ndarray:
    """Return which places of padded lists are none of the padding: bool [records, max_length]."""
    return np.arange(max_length) < np.array([len(value) for value in lists])[:, None]


def _value_problem(feature: Feature, values: np.ndarray, array: np.ndarray) -> str | None:
    """Return what is wrong with values as classes; padding is none. array: the values as the schema has them."""
    if feature.classes and feature.max_length:
        array = array[_is_item(feature.max_length, list(values))]
    return feature.value_problem(array)


def _as_bytes(values: np.ndarray) -> np.ndarray | None:
    """Return texts as bytes objects; None if some are no texts, or cannot be encoded."""
    if values.dtype.kind == "S":
        return values.astype(object)
    try:
        if values.dtype.kind == "U":
            return np.char.encode(values, "utf-8").astype(object)
        if values.dtype != object:
            return None
        flat = [value.encode() if isinstance(value, str) else value for value in values.ravel()]
    except UnicodeEncodeError:
        return None
    return objects(flat).reshape(values.shape) if all(isinstance(value, bytes) for value in flat) else None


def _as_dtype(values: np.ndarray, stored: str) -> np.ndarray | None:
    """Return numbers in another dtype, rounded if it is one of floats; None if it does not hold them.

    Whole numbers stand for floats: of a column of floats one file may hold no others.
    """
    if np.can_cast(values.dtype, stored, "safe"):
        return values.astype(stored, copy=False) if values.dtype.kind != "O" else None
    kinds = values.dtype.kind, np.dtype(stored).kind
    if kinds not in (("f", "f"), ("i", "f"), ("u", "f")):
        return None
    with np.errstate(over="raise"):
        try:
            return values.astype(stored)
        except FloatingPointError:
            return None


def _expected_form(feature: Feature) -> str:
    if feature.decode == "image":
        return "the bytes of an image's file"
    if feature.class_names:
        return f"one of {listed(feature.class_names)}, or its number"
    if feature.max_length:
        items = f"values of {feature.stored_dtype}" if not feature.shape else f"items of {_stored_form(feature)}"
        return f"at most {feature.max_length} {items}"
    return _stored_form(feature)


def _stored_form(feature: Feature) -> str:
    dtype = "text" if feature.stored_dtype == "string" else feature.stored_dtype
    return f"{dtype}{list(feature.shape)}"


def _actual_form(values: np.ndarray) -> str:
    (value,) = values
    if value is None:
        return "nothing"
    array = np.asarray(value)
    if array.dtype.kind == "U" and _as_bytes(array) is None:
        return "text with a surrogate, which UTF-8 does not have"
    if isinstance(value, bytes | str) or values.dtype.kind in "SU":
        return f"text{list(values.shape[1:])}"
    if array.dtype == object and any(part is None for part in array.ravel()):
        return "a list that lacks a value"
    dtype = "text" if array.dtype.kind in "SUO" else array.dtype.name
    return f"{dtype}{list(array.shape)}"
