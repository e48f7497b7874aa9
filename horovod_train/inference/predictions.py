"""The file of a model's outputs for each record, in the order of the records, as npz or csv. Only root has one.

Rows may come in any order, with padding between them. Computes nothing, and needs no TensorFlow.
"""

from __future__ import annotations

import contextlib
import csv
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from horovod_train.errors import RunError, UserError
from horovod_train.output.removal import Artifact, draft_of, remove, replace, zip_members

Specs = dict[str, tuple[tuple[int, ...], np.dtype]]
"""Name of an output → shape and dtype of one row."""

_ROWS = 4096
"""Rows written to csv at a time."""


_CLASS = "class"
"""The last column of a table: the name of the class with the largest output."""


def _is_csv_of_outputs(path: Path) -> bool:
    """Return whether a table has a column record, and in its first row nothing but numbers, and the name of a class."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.reader(file)
        head, row = next(rows, []), next(rows, [])
    try:
        numbers = row[:-1] if head[-1:] == [_CLASS] else row
        all_are_numbers = len([float(value) for value in numbers]) == len(numbers)
        return all_are_numbers and head[:1] == ["record"] and len(row) in (0, len(head))
    except ValueError:
        return False


PREDICTIONS = Artifact(
    "a file that predict wrote",
    r".+\.(npz|csv)",
    content_matches=lambda path: _is_csv_of_outputs(path) or "record.npy" in zip_members(path),
)
_DRAFT = Artifact("unfinished predictions", r"\..+\.[0-9a-f]{8}\.partial", "folder", (r"\d+\.npy", "whole"))


class Predictions:
    """Takes rows in any order, and writes a file of them at the end. Ranks other than root have this: no file."""

    def put(self, ids: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        """Take rows [n, ...] of every output, and the numbers of their records, int64 [n], -1 for padding."""

    def finish(self) -> int:
        """Write the complete file; return the number of records in it. Raises RunError."""
        return 0

    def close(self) -> None:
        """Remove unfinished files."""


class PredictionsFile(Predictions):
    """Collects rows in files next to the final one, so that memory does not grow with the number of records."""

    def __init__(self, path: Path, specs: Specs, num_records: int, class_names: Sequence[str] = ()) -> None:
        """class_names: of the last axis of the only output; () if it is not one score for each class."""
        self._class_names = class_names
        self._path, self._records = path, num_records
        self._folder, self._arrays = draft_of(path), dict[str, np.ndarray]()
        try:
            self._folder.mkdir()
            for number, (name, spec) in enumerate(specs.items()):
                self._arrays[name] = self._open(f"{number}.npy", *spec)
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

    def finish(self) -> int:
        draft = self._folder / "whole"
        try:
            (self._write_csv if self._path.suffix == ".csv" else self._write_npz)(draft)
            replace(draft, self._path, PREDICTIONS)
        except OSError as error:
            raise RunError(f"{self._path}: cannot be written: {error.strerror or error}.") from error
        return int(self._is_there.sum())

    def close(self) -> None:
        self._arrays.clear()
        with contextlib.suppress(OSError):
            remove(self._folder, _DRAFT)

    def _open(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        path = self._folder / name
        array = np.lib.format.open_memmap(path, "w+", dtype, (self._records, *shape))
        with path.open("r+b") as file:
            # Reserve the space now: a mapped file on a disk that fills up later would kill the process without a
            # message.
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return array

    def _write_npz(self, draft: Path) -> None:
        record = np.flatnonzero(self._is_there)
        with zipfile.ZipFile(draft, "x", allowZip64=True) as archive:
            for name, array in [("record", record), *self._arrays.items()]:
                values = array if len(array) == len(record) else array[record]  # without records that were left out
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, values, allow_pickle=False)

    def _write_csv(self, draft: Path) -> None:
        record = np.flatnonzero(self._is_there)
        with draft.open("x", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            columns = [column for name, array in self._arrays.items() for column in _columns(name, array)]
            writer.writerow(["record", *columns, *([_CLASS] if self._class_names else [])])
            for first in range(0, len(record), _ROWS):
                some = record[first : first + _ROWS]
                flat = [array[some].reshape(len(some), -1) for array in self._arrays.values()]
                for number, *rows in zip(some.tolist(), *flat, strict=True):
                    named = [self._class_names[int(np.argmax(rows[0]))]] if self._class_names else []
                    writer.writerow([number, *(str(value) for row in rows for value in row), *named])


def open_predictions(
    out: str, specs: Specs, num_records: int, class_names: Sequence[str] = (), *, is_root: bool
) -> Predictions:
    """Open the file on root; do nothing elsewhere. Raises UserError if it cannot be written.

    class_names: of the target that the model has learned. A table names the class with the largest output, if the model
    has one output, with one score for each class.
    """
    if not is_root:
        return Predictions()
    are_scores = [shape for shape, _ in specs.values()] == [(len(class_names),)]
    return PredictionsFile(Path(out), specs, num_records, class_names if are_scores else ())


def _columns(name: str, array: np.ndarray) -> list[str]:
    shape = array.shape[1:]
    if not shape:
        return [name]
    return [f"{name}[{','.join(map(str, index))}]" for index in np.ndindex(*shape)]
