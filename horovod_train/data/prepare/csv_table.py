"""A csv file with a header: one record per line. Numeric columns become one vector, `inputs`, or stay --separate."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Sequence

import numpy as np

from horovod_train.data.prepare.arrays import Arrays, add_file_arguments, check_names, write
from horovod_train.data.storage import DEFAULT, Storage
from horovod_train.errors import UserError

VECTOR = "inputs"
_BOOLEANS = {"true": 1, "false": 0}
_MISSING = {"na", "n/a", "#n/a", "null", "none", "nil", "-", "?"}
"""Cells that stand for a missing value in tables of other programs, in lower case."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file_arguments(parser, "csv")
    parser.add_argument("--targets", nargs="+", default=[], metavar="COLUMN", help="columns that the loss gets")
    parser.add_argument(
        "--inputs", nargs="+", metavar="COLUMN", help="columns that the model gets; default: the others"
    )
    parser.add_argument("--separate", action="store_true", help="one feature a column, also where all are numbers")


def run(arguments: argparse.Namespace) -> None:
    table = load_table(arguments.file)
    targets = arguments.targets
    inputs = arguments.inputs or [name for name in table if name not in targets]
    check_names([*inputs, *targets], list(table), "--inputs, --targets", arguments.file)
    eval_table = load_table(arguments.eval_file) if arguments.eval_file else None
    if eval_table is not None:
        check_names([*inputs, *targets], list(eval_table), "--inputs, --targets", arguments.eval_file)
    joined = not arguments.separate and all(table[name].dtype.kind in "if" for name in inputs)
    table = _choose(table, inputs, targets, joined)
    eval_table = _choose(eval_table, inputs, targets, joined) if eval_table else None
    write(arguments, table, eval_table, [VECTOR] if joined else inputs)


def load_table(path: str, storage: Storage = DEFAULT) -> Arrays:
    """Return each column as int64, float32 or strings, the narrowest that fits all its cells. Raises UserError.

    Columns of true and false, in any case, are 1 and 0.
    """
    try:
        with io.TextIOWrapper(io.BytesIO(storage.read_all(path)), newline="", encoding="utf-8-sig") as file:
            lines = [(reader.line_num, row) for reader in [csv.reader(file)] for row in reader if row]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: is not a csv file: {error}.") from error
    if len(lines) < 2:
        raise UserError(f"{path}: expected a header and at least one record; it has {len(lines)} lines.")
    names = lines[0][1]
    if len(set(names)) < len(names):
        raise UserError(f"{path}: the header names a column twice: {', '.join(names)}.")
    for number, row in lines[1:]:
        if len(row) != len(names):
            raise UserError(f"{path}:{number}: expected {len(names)} cells, as in the header; got {len(row)}.")
        if "" in row:
            raise UserError(f"{path}:{number}: {names[row.index('')]} is empty; fill it or leave the line out.")
    table = {}
    for name, cells in zip(names, zip(*(row for _, row in lines[1:]), strict=True), strict=True):
        table[name] = _column(cells)
        missing = _find_missing(cells) if table[name].dtype.kind == "U" else None
        if missing is not None:
            raise UserError(
                f"{path}:{lines[1 + missing][0]}: {name} holds numbers, and here {cells[missing]!r}; write a number or "
                "leave the line out."
            )
    return table


def _column(cells: tuple[str, ...]) -> np.ndarray:
    numbers = _as_numbers(cells)
    if numbers is not None:
        return numbers
    if {cell.lower() for cell in cells} <= _BOOLEANS.keys():
        return np.array([_BOOLEANS[cell.lower()] for cell in cells], np.int64)
    return np.array(cells)


def _as_numbers(cells: Sequence[str]) -> np.ndarray | None:
    """Return cells as int64 or float32; None if some are no numbers."""
    for dtype in (np.int64, np.float32):
        try:
            return np.array(cells).astype(dtype)
        except (ValueError, OverflowError):
            continue
    return None


def _find_missing(cells: Sequence[str]) -> int | None:
    """Return the first cell that stands for a missing number, if all others are numbers; else None."""
    missing = [place for place, cell in enumerate(cells) if cell.strip().lower() in _MISSING]
    others = [cell for cell in cells if cell.strip().lower() not in _MISSING] if missing else []
    return missing[0] if others and _as_numbers(others) is not None else None


def _choose(table: Arrays, inputs: list[str], targets: list[str], joined: bool) -> Arrays:
    chosen = {name: table[name] for name in targets}
    if joined:
        return {VECTOR: np.stack([table[name].astype(np.float32) for name in inputs], axis=1), **chosen}
    return {**{name: table[name] for name in inputs}, **chosen}
