"""Named arrays with one row per record, and the records made from them. Knows no file formats."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from horovod_train.data.features import Feature
from horovod_train.data.prepare.writing import Values, add_split_arguments, split_by_fraction, write_dataset
from horovod_train.data.schema import Schema
from horovod_train.errors import UserError

Columns = dict[str, np.ndarray]

_RAW_VALUES = 16
"""From this many small integers on, a record stores them as raw bytes: one byte each, not a varint list."""


def add_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    """Add the arguments that all kinds with tables share."""
    parser.add_argument("--file", required=True, metavar=f"FILE.{kind}", help="the records")
    parser.add_argument(
        "--eval-file", metavar=f"FILE.{kind}", help="held-out records; default: a fraction of the others"
    )
    add_split_arguments(parser, "--file")


def write(columns: Columns, held_out: Columns | None, arguments: argparse.Namespace, inputs: Sequence[str],
          targets: Sequence[str]) -> None:  # fmt: skip
    """Write the records; `held_out` becomes the eval split, else --eval-fraction of them."""
    features = {name: _feature(array) for name, array in columns.items()}
    records = len(next(iter(columns.values())))
    splits = split_by_fraction(records, arguments)
    if held_out is not None:
        _check_same(columns, held_out, arguments.eval_file)
        splits["eval"] = np.arange(records, records + len(next(iter(held_out.values()))))
        columns = {name: np.concatenate([array, held_out[name]]) for name, array in columns.items()}

    def encode(record: int) -> Values:
        return {name: _value(features[name], array[record]) for name, array in columns.items()}

    schema = Schema(features, tuple(inputs), tuple(targets))
    write_dataset(arguments.out, schema, splits, encode, shards=arguments.shards, force=arguments.force)


def check_names(given: Sequence[str], columns: Sequence[str], option: str, path: str) -> None:
    """Raise UserError for a name that no column has."""
    for name in given:
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
        return Feature("bytes", shape, decode="raw", raw_dtype=array.dtype.name)
    return Feature("int64", shape)


def _value(feature: Feature, row: np.ndarray) -> bytes | np.ndarray:
    if feature.decode == "raw":
        return np.ascontiguousarray(row, row.dtype.newbyteorder("<")).tobytes()
    return row


def _check_same(columns: Columns, held_out: Columns, path: str) -> None:
    for name, array in columns.items():
        other = held_out.get(name)
        if other is None or other.shape[1:] != array.shape[1:] or other.dtype.kind != array.dtype.kind:
            found = "nothing" if other is None else f"{other.dtype}{list(other.shape[1:])}"
            raise UserError(
                f"--eval-file {path}: {name} is {array.dtype}{list(array.shape[1:])} in --file; here {found}."
            )
