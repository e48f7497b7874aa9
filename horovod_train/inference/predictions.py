"""The file of a model's outputs for each record, in the order of the records, as npz or csv. Only root has one.

Rows may come in any order, with padding between them. Computes nothing, and needs no TensorFlow.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import glob
import logging
import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from horovod_train.errors import RunError, UserError
from horovod_train.host import boot_id
from horovod_train.output.files import Artifact, draft_of, remove, replace, zip_members

log = logging.getLogger(__name__)

Specs = dict[str, tuple[tuple[int, ...], np.dtype]]
"""Name of an output → shape and dtype of one row."""

_ROWS, _BYTES = 4096, 16 << 20
"""Most rows of text, and bytes of outputs, that are written at a time."""
_HEADER_BYTES = 512
"""Of an array in an npz file, and more than it takes."""

_FILE, _CLASS, _PROBABILITY = "file", "class", "probability"
"""Columns beside the outputs: of the record, and of the class with the largest output."""


class RecordNames(NamedTuple):
    """What a file says of records and classes besides outputs."""

    files: Sequence[str] = ()
    """Of each record; () if records are not files of their own."""
    class_names: Sequence[str] = ()
    """Of the target that the model has learned."""
    are_logits: bool | None = None
    """Whether outputs are logits of the classes; False: probabilities; None: neither."""
    numbers: np.ndarray | None = None
    """The position of each record in its files: int64 [records]; None for 0, 1, …"""


def _is_csv_of_outputs(path: Path) -> bool:
    """Return whether a table has a column record, and in its first row nothing but numbers, a file, and a class."""
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = csv.reader(file)
            head, row = next(rows, []), next(rows, [])
        numbers = [value for column, value in zip(head, row, strict=False) if column not in (_FILE, _CLASS)]
        all_are_numbers = len([complex(value) for value in numbers]) == len(numbers)
        return all_are_numbers and head[:1] == ["record"] and len(row) in (0, len(head))
    except (ValueError, csv.Error):
        return False


PREDICTIONS = Artifact(
    "a file that predict wrote",
    r".+\.(npz|csv)",
    content_matches=lambda path: _is_csv_of_outputs(path) or "record.npy" in zip_members(path),
)
NO_NAMES = RecordNames()
_HOST = "host"
"""The file in a draft that names the host, by its boot id."""
_DRAFT = Artifact("unfinished predictions", r"\..+\.[0-9a-f]{8}\.partial", "folder", (r"\d+\.npy", "whole", _HOST))


class Predictions:
    """Takes rows in any order, and writes a file of them at the end. Ranks other than root have this: no file."""

    def put(self, ids: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        """Take rows [n, ...] of every output, and the numbers of their records, int64 [n], -1 for padding."""

    def write(self) -> Iterator[None]:
        """Write the complete file in pieces, and yield after each. Raises RunError."""
        yield from ()

    @property
    def written(self) -> int:
        """Return how many records the file has."""
        return 0

    def close(self) -> None:
        """Remove unfinished files."""


class PredictionsFile(Predictions):
    """Collects rows in files next to the final one, so that memory does not grow with the number of records.

    Names the class with the largest output, and how probable that is, if the model has one output, with a score for
    each class, or one score for two classes.
    """

    def __init__(self, path: Path, specs: Specs, num_records: int, names: RecordNames = NO_NAMES) -> None:
        """Raises UserError if the file cannot be written."""
        self._names, self._has_scores = names, _has_scores(specs, names)
        self._path, self._records = path, num_records
        self._folder, self._arrays = draft_of(path), dict[str, np.ndarray]()
        self._locked: int | None = None
        self._unnamed = 0
        """Records without a class, because not all their scores are numbers."""
        try:
            _remove_left(path)
            self._folder.mkdir()
            with (self._folder / _HOST).open("x") as file:
                file.write(boot_id())
            self._locked = _lock(self._folder)
            for number, (name, spec) in enumerate(specs.items()):
                self._arrays[name] = self._open(f"{number}.npy", *spec)
            if path.suffix == ".npz":
                (self._folder / "whole").touch()
                _reserve(self._folder / "whole", self._whole_bytes())
        except OSError as error:
            self.close()
            raise UserError(
                f"--out {path}: cannot be written: {error.strerror or error}. Choose another place."
            ) from error
        self._is_there = np.zeros(num_records, bool)

    def put(self, ids: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        real = ids >= 0
        assert not self._is_there[ids[real]].any(), "a record was predicted twice"
        self._is_there[ids[real]] = True
        for name, values in rows.items():
            self._arrays[name][ids[real]] = values[real]

    def write(self) -> Iterator[None]:
        draft = self._folder / "whole"
        try:
            yield from (self._write_csv if self._path.suffix == ".csv" else self._write_npz)(draft)
            replace(draft, self._path, PREDICTIONS)
            if self._unnamed:
                log.warning(f"{self._path}: {self._unnamed} record(s) have NaN among their scores, and no class")
        except OSError as error:
            raise RunError(f"{self._path}: cannot be written: {error.strerror or error}.") from error

    @property
    def written(self) -> int:
        return int(self._is_there.sum())

    def close(self) -> None:
        self._arrays.clear()
        if self._locked is not None:
            os.close(self._locked)
            self._locked = None
        with contextlib.suppress(OSError):
            remove(self._folder, _DRAFT)

    def _open(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        path = self._folder / name
        array = np.lib.format.open_memmap(path, "w+", dtype, (self._records, *shape))
        _reserve(path, path.stat().st_size)
        return array

    def _whole_bytes(self) -> int:
        """Return the bytes of an npz file of all records, or a little more."""
        texts = [self._names.files, self._names.class_names if self._has_scores else ()]
        text_bytes = (4 * max(map(len, text), default=0) for text in texts)
        row_bytes = [8, 4, *text_bytes, *map(_row_bytes, self._arrays.values())]
        return sum(self._records * bytes_ + _HEADER_BYTES for bytes_ in row_bytes)

    def _write_npz(self, draft: Path) -> Iterator[None]:
        record, names = np.flatnonzero(self._is_there), []
        for some in _in_pieces(record, _ROWS):
            names.append(self._described(some))
            yield
        described = {name: np.concatenate([piece[name] for piece in names]) for name in (names[0] if names else ())}
        numbers = self._numbers(record)
        with draft.open("r+b") as file:
            with zipfile.ZipFile(file, "x", allowZip64=True) as archive:
                for name, array in [("record", numbers), *self._arrays.items(), *described.items()]:
                    # Without records that were left out; in pieces, because memory may not hold all outputs.
                    rows = np.arange(len(record)) if len(array) == len(record) else record
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        shape, descr = (len(record), *array.shape[1:]), np.lib.format.dtype_to_descr(array.dtype)
                        about = {"descr": descr, "fortran_order": False, "shape": shape}
                        np.lib.format.write_array_header_1_0(member, about)
                        for some in _in_pieces(rows, max(_BYTES // max(_row_bytes(array), 1), 1)):
                            member.write(array[some].tobytes())
                            yield
            file.truncate()  # to what the archive takes of the room that was reserved

    def _write_csv(self, draft: Path) -> Iterator[None]:
        record = np.flatnonzero(self._is_there)
        with draft.open("x", newline="", encoding="utf-8", errors="surrogateescape") as file:
            writer = csv.writer(file)
            columns = [column for name, array in self._arrays.items() for column in _columns(name, array)]
            writer.writerow(["record", *columns, *self._described(record[:0])])
            row_bytes = sum(map(_row_bytes, self._arrays.values()))
            for some in _in_pieces(record, max(min(_ROWS, _BYTES // max(row_bytes, 1)), 1)):
                flat = [_as_numbers(array[some]).reshape(len(some), -1) for array in self._arrays.values()]
                described = self._described(some).values()
                for row, number in enumerate(self._numbers(some).tolist()):
                    outputs = (str(value) for array in flat for value in array[row])
                    writer.writerow([number, *outputs, *(values[row] for values in described)])
                yield

    def _numbers(self, record: np.ndarray) -> np.ndarray:
        return record if self._names.numbers is None else self._names.numbers[record]

    def _described(self, record: np.ndarray) -> dict[str, np.ndarray]:
        """Return what the columns beside the outputs say of some records."""
        described = {}
        if self._names.files:
            described[_FILE] = np.array([self._names.files[number] for number in record.tolist()], str)
        if self._has_scores:
            (scores,) = self._arrays.values()
            chosen, probability = _best(scores[record].astype(np.float64), self._names.are_logits)
            self._unnamed += int((chosen < 0).sum())
            names = ["" if number < 0 else self._names.class_names[number] for number in chosen.tolist()]
            described[_CLASS] = np.array(names, str)
            if probability is not None:
                described[_PROBABILITY] = probability.astype(np.float32)
        return {name: values for name, values in described.items() if name not in self._arrays}


def _remove_left(path: Path) -> None:
    """Remove unfinished predictions of this file, and the room they reserve, whose process has ended on this host.

    Not of other hosts: some network file systems keep locks for one host only.
    """
    for folder in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        with contextlib.suppress(OSError):  # of what is not ours, too
            if (folder / _HOST).read_text() == boot_id() and (locked := _lock(folder)) is not None:
                try:
                    remove(folder, _DRAFT)
                finally:
                    os.close(locked)


def _lock(folder: Path) -> int | None:
    """Lock a folder; return its descriptor, None if another process has it or its file system knows no such locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _in_pieces(rows: np.ndarray, most: int) -> list[np.ndarray]:
    return np.split(rows, range(most, len(rows), most)) if len(rows) else []


def _row_bytes(array: np.ndarray) -> int:
    return array.dtype.itemsize * math.prod(array.shape[1:])


def _reserve(path: Path, size: int) -> None:
    """Take the room of a file now: a disk that fills up later would lose the run, or kill it where it maps the file."""
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _has_scores(specs: Specs, names: RecordNames) -> bool:
    """Return whether the only output has a score for each class, or for the second of two."""
    if any(np.issubdtype(dtype, np.complexfloating) for _, dtype in specs.values()):
        return False  # they have no order
    shapes, classes = [shape for shape, _ in specs.values()], len(names.class_names)
    of_second = classes == 2 and names.are_logits is not None and shapes in ([()], [(1,)])
    return of_second or (classes > 0 and shapes == [(classes,)])


def _best(scores: np.ndarray, are_logits: bool | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the class with the largest score of each record, and its probability; None if scores tell none.

    A record with NaN among its scores has class -1 and probability NaN.
    """
    if scores.ndim == 1 or scores.shape[1] == 1:  # of the second of two classes
        score = scores.reshape(len(scores))
        scores = np.stack([-score if are_logits else 1 - score, score], axis=1) / (2 if are_logits else 1)
    has_nan = np.isnan(scores).any(axis=1)
    chosen = scores.argmax(axis=1)
    if are_logits:
        with np.errstate(invalid="ignore"):  # infinity less infinity
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    probability = np.where(has_nan, np.nan, scores[np.arange(len(scores)), chosen])
    return np.where(has_nan, -1, chosen), None if are_logits is None else probability


def _as_numbers(values: np.ndarray) -> np.ndarray:
    """Return booleans as 0 and 1."""
    return values.astype(np.uint8) if values.dtype == bool else values


def _columns(name: str, array: np.ndarray) -> list[str]:
    shape = array.shape[1:]
    if not shape:
        return [name]
    return [f"{name}[{','.join(map(str, index))}]" for index in np.ndindex(*shape)]
