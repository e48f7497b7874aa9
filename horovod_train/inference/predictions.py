"""Writes a model's outputs for each record, in the order of the records, as npz or csv. Only root has a file.

Rows may come in any order, with padding between them. Does not know where they come from.
"""

from __future__ import annotations

import contextlib
import csv
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from horovod_train.data.pipeline.batch_source import Batch, Batches, Cursor, for_each_batch
from horovod_train.data.pipeline.pipeline import Pipeline
from horovod_train.errors import RunError, UserError, one_line
from horovod_train.inference.artifacts import CLASS, PREDICTIONS, PREDICTIONS_DRAFT
from horovod_train.output.removal import draft_of, remove, replace

Specs = dict[str, tuple[tuple[int, ...], np.dtype]]
"""Name of an output → shape and dtype of one row."""

_MOST_BYTES = 16 << 20
"""Bytes of outputs that one rank keeps before sending them to root."""
_ROWS = 4096
"""Rows written to csv at a time."""


class Outputs:
    """Computes a model's outputs by name: keys of a dict, layer names for a list, or "output" for a single one.

    bfloat16, which numpy lacks, becomes float32.
    """

    def __init__(self, model: keras.Model, pipeline: Pipeline, where: str) -> None:
        """Raises UserError if the model rejects the pipeline's batches or does not return one row a record."""
        self._model, self._scaled, batch = model, pipeline.scaled, pipeline.scaled_spec
        self._run = tf.function(self._run_steps, autograph=False)
        rows = batch.ids.shape[0]
        try:
            outputs = tf.function(self._forward, autograph=False).get_concrete_function(batch).structured_outputs
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            shapes = tf.nest.map_structure(lambda spec: f"{spec.dtype.name}{spec.shape}", batch.inputs)
            text = one_line(error)
            raise UserError(f"{where}: the model does not fit inputs of {shapes}: {text}") from error
        if "record" in outputs:
            raise UserError(
                "predict: an output of the model is called record, as the numbers of records are; rename it."
            )
        for name, output in outputs.items():
            if not output.shape.is_fully_defined() or not output.shape.rank or output.shape[0] != rows:
                raise UserError(f"predict: expected output {name} to be one row a record; it is {output.shape}.")
            if output.dtype == tf.string:
                raise UserError(f"predict: expected numbers; output {name} is of strings.")
        self.specs: Specs = {
            name: (tuple(output.shape[1:]), output.dtype.as_numpy_dtype) for name, output in outputs.items()
        }
        step_bytes = sum(rows * np.dtype(dtype).itemsize * int(np.prod(shape)) for shape, dtype in self.specs.values())
        self.steps_per_call = max(1, min(_MOST_BYTES // max(step_bytes, 1), 100))

    def compute(self, batches: Batches, steps: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Compute the next `steps` batches. Return ids, int64 [rows], -1 for padding, and the outputs [rows, ...]."""
        ids, outputs = batches.call(self._run, tf.constant(steps, tf.int32))
        return ids.numpy(), {name: values.numpy() for name, values in outputs.items()}

    def _run_steps(self, cursor: Cursor, steps: tf.Tensor) -> tuple[Cursor, tuple[tf.Tensor, dict[str, tf.Tensor]]]:
        def write_step(
            batch: Batch, index: tf.Tensor, ids: tf.TensorArray, arrays: dict[str, tf.TensorArray]
        ) -> tuple[Any, ...]:
            outputs = self._forward(self._scaled(batch))
            arrays = {name: array.write(index, outputs[name]) for name, array in arrays.items()}
            return ids.write(index, batch.ids), arrays

        ids = tf.TensorArray(tf.int64, size=steps)
        arrays = {name: tf.TensorArray(tf.as_dtype(dtype), size=steps) for name, (_, dtype) in self.specs.items()}
        cursor, (ids, arrays) = for_each_batch(cursor, steps, write_step, (ids, arrays))
        return cursor, (ids.concat(), {name: array.concat() for name, array in arrays.items()})

    def _forward(self, batch: Batch) -> dict[str, tf.Tensor]:
        outputs = self._model(batch.inputs, training=False)
        return {name: _for_numpy(output) for name, output in _named(self._model, outputs).items()}


class Predictions(Protocol):
    """Takes rows in any order, and writes a file of them at the end."""

    def put(self, ids: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        """Take rows [n, ...] of every output, and the numbers of their records, int64 [n], -1 for padding."""

    def finish(self) -> int:
        """Write the complete file; return the number of records in it. Raises RunError."""

    def close(self) -> None:
        """Remove unfinished files."""


class NullPredictions:
    """Used by every rank except root: writes nothing."""

    def put(self, ids: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        return None

    def finish(self) -> int:
        return 0

    def close(self) -> None:
        return None


class PredictionsFile:
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
            remove(self._folder, PREDICTIONS_DRAFT)

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
            writer.writerow(["record", *columns, *([CLASS] if self._class_names else [])])
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
    are_scores = [shape for shape, _ in specs.values()] == [(len(class_names),)]
    if not is_root:
        return NullPredictions()
    return PredictionsFile(Path(out), specs, num_records, class_names if are_scores else ())


def _named(model: keras.Model, outputs: Any) -> dict[str, tf.Tensor]:
    if isinstance(outputs, Mapping):
        return {str(name): output for name, output in outputs.items()}
    if not isinstance(outputs, list | tuple):
        return {"output": outputs}
    names = getattr(model, "output_names", None) or ()
    if len(set(names)) != len(outputs):
        names = [f"output_{number}" for number in range(len(outputs))]
    return dict(zip(names, outputs, strict=True))


def _for_numpy(output: Any) -> tf.Tensor:
    return tf.cast(output, tf.float32) if output.dtype == tf.bfloat16 else tf.identity(output)


def _columns(name: str, array: np.ndarray) -> list[str]:
    shape = array.shape[1:]
    if not shape:
        return [name]
    return [f"{name}[{','.join(map(str, index))}]" for index in np.ndindex(*shape)]
