"""Arrays in an npz file, or in npy files: one record per row, one feature per array."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import cast

import numpy as np

from horovod_train.data.prepare.writing import add_split_arguments, encode_rows, split_by_fraction, write_dataset
from horovod_train.data.schema import Feature, RawDtype, Schema
from horovod_train.errors import UserError

Arrays = dict[str, np.ndarray]

_RAW_VALUES = 16
"""From this many small integers on, a record stores them as raw bytes: one byte each, not a varint list."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file_arguments(parser, "npz")
    parser.add_argument("--inputs", nargs="+", required=True, metavar="NAME", help="arrays that the model gets")
    parser.add_argument("--targets", nargs="+", default=[], metavar="NAME", help="arrays that the loss gets")


def run(arguments: argparse.Namespace) -> None:
    names = [*arguments.inputs, *arguments.targets]
    arrays = load_arrays(arguments.file, names)
    eval_arrays = load_arrays(arguments.eval_file, names) if arguments.eval_file else None
    write(arguments, arrays, eval_arrays, arguments.inputs)


def add_file_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    """Add the arguments that all kinds with tables share."""
    parser.add_argument("--file", required=True, metavar=f"FILE.{kind}", help="the records")
    parser.add_argument("--eval-file", metavar=f"FILE.{kind}", help="to evaluate on; default: a fraction of --file")
    add_split_arguments(parser, "--file")


def load_arrays(path: str, names: list[str]) -> Arrays:
    """Load the arrays of these names. A folder of NAME.npy files works like an npz file. Raises UserError."""
    try:
        if os.path.isdir(path):
            available = sorted(name[:-4] for name in os.listdir(path) if name.endswith(".npy"))
            check_names(names, available, "--inputs, --targets", path)
            arrays = {name: np.load(os.path.join(path, f"{name}.npy"), allow_pickle=False) for name in names}
        else:
            with np.load(path, allow_pickle=False) as saved:
                check_names(names, saved.files, "--inputs, --targets", path)
                arrays = {name: saved[name] for name in names}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except UserError:
        raise
    except Exception as error:  # zipfile and NumPy raise whatever a damaged header leads to
        raise UserError(f"{path}: is not an npz file of plain arrays, nor a folder of npy files.") from error
    for name, array in arrays.items():
        if array.ndim < 1 or array.dtype.kind not in "biufSU" or not len(array):
            raise UserError(f"{path}: {name} is {array.dtype}{list(array.shape)}; expected rows of numbers or strings.")
        if array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max:
            raise UserError(f"{path}: {name} holds {array.max()}; records hold whole numbers up to 2^63 - 1.")
        if len(array) != len(arrays[names[0]]):
            raise UserError(
                f"{path}: {name} has {len(array)} rows, {names[0]} {len(arrays[names[0]])}; they must match."
            )
    return arrays


def write(arguments: argparse.Namespace, arrays: Arrays, eval_arrays: Arrays | None, inputs: Sequence[str]) -> None:
    """Write the records; `eval_arrays` become the eval split, else --eval-fraction of them."""
    arrays, splits = join_splits(arguments, arrays, eval_arrays, arguments.eval_file)
    features = {name: _feature(array) for name, array in arrays.items()}
    schema = Schema(features, tuple(inputs), tuple(arguments.targets))
    write_dataset(arguments, schema, splits, encode_rows(schema, arrays))


def join_splits(
    arguments: argparse.Namespace, arrays: Arrays, eval_arrays: Arrays | None, eval_path: str
) -> tuple[Arrays, dict[str, np.ndarray]]:
    """Return all rows, and those of each split. Raises UserError if those of eval_path have another shape or kind."""
    records = len(next(iter(arrays.values())))
    if eval_arrays is None:
        return arrays, split_by_fraction(records, arguments)
    for name, array in arrays.items():
        other = eval_arrays.get(name)
        if other is None or other.shape[1:] != array.shape[1:] or other.dtype.kind != array.dtype.kind:
            actual = "nothing" if other is None else f"{other.dtype}{list(other.shape[1:])}"
            expected = f"{array.dtype}{list(array.shape[1:])}"
            raise UserError(f"{eval_path}: {name}: expected {expected}, as for training; received {actual}.")
    splits = split_by_fraction(records, arguments, len(next(iter(eval_arrays.values()))))
    return {name: np.concatenate([array, eval_arrays[name]]) for name, array in arrays.items()}, splits


def check_names(names: Sequence[str], columns: Sequence[str], option: str, path: str) -> None:
    """Raise UserError for a name that no column has."""
    for name in names:
        if name not in columns:
            raise UserError(f"{option}: {path} has no {name}; it has {', '.join(columns)}.")


def _feature(array: np.ndarray) -> Feature:
    shape = array.shape[1:]
    if array.dtype.kind in "SU":
        return Feature("bytes", shape)
    if array.dtype.kind == "f":
        return Feature("float", shape)
    if (
        array.dtype.kind in "iu"
        and array.dtype.itemsize < 8
        and array.dtype != np.uint32
        and array[0].size >= _RAW_VALUES
    ):
        return Feature("bytes", shape, decode="raw", raw_dtype=cast(RawDtype, array.dtype.name))
    return Feature("int64", shape)
