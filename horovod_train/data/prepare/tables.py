"""Tables: arrays in npz or npy files, and csv files. One record per row."""

from __future__ import annotations

import argparse
import codecs
import csv
import io
import logging
import os
import re
import shlex
import sys
from array import array as array_of
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import cast

import numpy as np

from horovod_train.data.prepare.writing import Kind, add_split_arguments, encode_rows, split_by_fraction, write_dataset
from horovod_train.data.schema import Feature, RawDtype, Schema
from horovod_train.data.storage import DEFAULT, Storage
from horovod_train.errors import RunError, UserError, reading

Arrays = dict[str, np.ndarray]

VECTOR = "inputs"
_RAW_VALUES = 16
"""From this many small integers on, a record stores them as raw bytes: one byte each, not a varint list."""
_ALL_WHOLE = 2**24
"""float32 holds each whole number up to this."""
_SHARED = 4
"""Cells of up to so many characters are kept once: an object for each would take 20 times their room."""
_BOOLEANS = {"true": 1, "false": 0}
_GROUPED = re.compile(r"[+-]?(\d{1,3}(\.\d{3})*|\d+)(,\d+)?")
"""A number with a point between thousands, or none, and a decimal comma, or none."""
_MISSING = {"na", "n/a", "#n/a", "null", "none", "nil", "nan", "-nan", "-", "?"}
"""Cells that stand for a missing value in tables of other programs, in lower case."""

log = logging.getLogger(__name__)


def _add_file_arguments(parser: argparse.ArgumentParser, suffix: str) -> None:
    parser.add_argument("--file", required=True, metavar=f"FILE.{suffix}", help="the records")
    parser.add_argument("--eval-file", metavar=f"FILE.{suffix}", help="to evaluate on; else --eval-fraction of --file")
    add_split_arguments(parser, "--file")


def _check_names(arguments: argparse.Namespace, path: str, inputs: Sequence[str], columns: Sequence[str]) -> None:
    """Raise UserError for a name that no column has."""
    for name in [*inputs, *arguments.targets]:
        if name not in columns:
            raise UserError(f"--inputs, --targets: {path} has no {name}; it has {', '.join(columns)}.")


def _write(arguments: argparse.Namespace, arrays: Arrays, eval_arrays: Arrays | None, inputs: Sequence[str]) -> None:
    arrays, splits = join_splits(arguments, arrays, eval_arrays, arguments.eval_file)
    features = {name: _feature(array) for name, array in arrays.items()}
    schema = Schema(features, tuple(inputs), tuple(arguments.targets))
    write_dataset(arguments, schema, splits, encode_rows(schema, arrays))


def join_splits(
    arguments: argparse.Namespace, arrays: Arrays, eval_arrays: Arrays | None, eval_path: str
) -> tuple[Arrays, dict[str, np.ndarray]]:
    """Return all rows, and those of each split: `eval_arrays` are the eval split, else --eval-fraction of `arrays`.

    Raises UserError if those of eval_path have another shape or kind.
    """
    records = len(next(iter(arrays.values())))
    if eval_arrays is None:
        return arrays, split_by_fraction(records, arguments)
    for name, array in arrays.items():
        other = eval_arrays.get(name)
        if other is None or other.shape[1:] != array.shape[1:] or other.dtype.kind != array.dtype.kind:
            actual = "nothing" if other is None else _form(other)
            raise UserError(f"{eval_path}: {name}: expected {_form(array)}, as for training; received {actual}.")
    splits = split_by_fraction(records, arguments, len(next(iter(eval_arrays.values()))))
    return {name: np.concatenate([array, eval_arrays[name]]) for name, array in arrays.items()}, splits


def _form(array: np.ndarray) -> str:
    dtype = "text" if array.dtype.kind in "SUO" else array.dtype.name
    return f"{dtype}{list(array.shape[1:])}"


def _warn_of_rounding(numbers: np.ndarray, path: str, name: str) -> None:
    """Warn of different whole numbers, such as ids or times, of which float32 makes one. Others are only rounded."""
    if numbers.dtype == np.float16:  # holds no such numbers, nor the limit itself
        return
    beyond = np.abs(numbers) > _ALL_WHOLE
    if not beyond.any():
        return
    whole = numbers[beyond]
    if numbers.dtype.kind == "f":  # of larger ones float64 may have made one already
        whole = whole[(whole == np.rint(whole)) & (np.abs(whole) < 2**53)]
    if len(np.unique(whole.astype(np.float32))) < len(np.unique(whole)):
        log.warning(
            f"{path}: {name}: some of its whole numbers beyond 2^24 become one as float32. Subtract their least, or "
            "split them, if they must stay different."
        )


def _feature(array: np.ndarray) -> Feature:
    shape, dtype = array.shape[1:], array.dtype
    if dtype.kind in "SUO":
        return Feature("bytes", shape)
    if dtype.kind == "f":
        return Feature("float", shape)
    if dtype.kind in "iu" and dtype.itemsize < 8 and dtype != np.uint32 and array[0].size >= _RAW_VALUES:
        return Feature("bytes", shape, decode="raw", raw_dtype=cast(RawDtype, dtype.name))
    return Feature("int64", shape)


# --- npz and npy ------------------------------------------------------------------------------------------------


def _add_npz_arguments(parser: argparse.ArgumentParser) -> None:
    _add_file_arguments(parser, "npz")
    parser.add_argument("--inputs", nargs="+", required=True, metavar="NAME", help="arrays that the model gets")
    parser.add_argument("--targets", nargs="+", default=[], metavar="NAME", help="arrays that the loss gets")


def _write_npz(arguments: argparse.Namespace) -> None:
    arrays = _load_arrays(arguments, arguments.file)
    eval_arrays = _load_arrays(arguments, arguments.eval_file) if arguments.eval_file else None
    _write(arguments, arrays, eval_arrays, arguments.inputs)


def _load_arrays(arguments: argparse.Namespace, path: str) -> Arrays:
    """Load the inputs and targets. A folder of NAME.npy files works like an npz file. Raises UserError."""
    names = [*arguments.inputs, *arguments.targets]
    try:
        with reading(path):
            if os.path.isdir(path):
                available = sorted(name[:-4] for name in os.listdir(path) if name.endswith(".npy"))
                _check_names(arguments, path, arguments.inputs, available)
                arrays = {name: np.load(os.path.join(path, f"{name}.npy"), allow_pickle=False) for name in names}
            else:
                with np.load(path, allow_pickle=False) as saved:
                    _check_names(arguments, path, arguments.inputs, saved.files)
                    arrays = {name: saved[name] for name in names}
    except RunError:
        raise
    except Exception as error:  # zipfile and NumPy raise whatever a damaged header leads to
        raise UserError(f"{path}: is not an npz file of plain arrays, nor a folder of npy files.") from error
    for name, array in arrays.items():
        if array.ndim < 1 or array.dtype.kind not in "biufSU" or not len(array):
            raise UserError(f"{path}: {name} is {array.dtype}{list(array.shape)}; expected rows of numbers or strings.")
        if array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max:
            raise UserError(f"{path}: {name} holds {array.max()}; records hold whole numbers up to 2^63 - 1.")
        if array.dtype.kind == "f":
            with np.errstate(over="ignore"):
                too_large = np.isinf(array.astype(np.float32)) & np.isfinite(array)
            if too_large.any():
                raise UserError(
                    f"{path}: {name} holds {array[too_large][0]:g}; records hold numbers as float32, up to 3.4e38. "
                    "Scale the array."
                )
            _warn_of_rounding(array, path, name)
        if len(array) != len(arrays[names[0]]):
            raise UserError(
                f"{path}: {name} has {len(array)} rows, {names[0]} {len(arrays[names[0]])}; they must match."
            )
    return arrays


NPZ = Kind(
    "Arrays in an npz file, or in npy files: one record per row, one feature per array.",
    _add_npz_arguments,
    _write_npz,
)

# --- csv --------------------------------------------------------------------------------------------------------


def _add_csv_arguments(parser: argparse.ArgumentParser) -> None:
    _add_file_arguments(parser, "csv")
    parser.add_argument("--targets", nargs="+", default=[], metavar="COLUMN", help="columns that the loss gets")
    parser.add_argument(
        "--inputs", nargs="+", metavar="COLUMN", help="columns that the model gets; default: the others"
    )
    parser.add_argument("--separate", action="store_true", help="one feature a column, also where all are numbers")


def _write_csv(arguments: argparse.Namespace) -> None:
    header: Sequence[str] = []

    def choose_columns(names: Sequence[str]) -> Sequence[str]:
        nonlocal header
        header = [name for name in names if name]
        return [name for name in names if not arguments.inputs or name in {*arguments.inputs, *arguments.targets}]

    table = load_table(arguments.file, choose=choose_columns)
    inputs = arguments.inputs or [name for name in table if name not in arguments.targets]
    _check_names(arguments, arguments.file, inputs, header)
    if not inputs:
        raise UserError(f"--targets: names every column of {arguments.file}; leave one at least for the inputs.")
    joined = not arguments.separate and all(table[name].dtype.kind in "if" for name in inputs)
    if joined and VECTOR in arguments.targets:
        raise UserError(
            f"--targets: {VECTOR} is also what the vector of the numeric columns is called; rename the column in "
            f"{arguments.file}, or give --separate."
        )
    for name in arguments.targets:
        if name in table and table[name].dtype == object:
            log.warning(
                f"{arguments.file}: target {name} is text, which no loss takes. If these are classes, train on the "
                f"file itself, with data.features: {{{name}: {{class_names: [...]}}}}; see: init table."
            )
    eval_table: Arrays | None = None
    if arguments.eval_file:  # text stays text where all of it reads as numbers, too
        texts = {name for name, column in table.items() if column.dtype == object}
        eval_table = load_table(arguments.eval_file, texts=texts, choose=choose_columns)
        _check_names(arguments, arguments.eval_file, inputs, header)
        text = next((name for name in inputs if joined and eval_table[name].dtype == object), None)
        if text is not None:
            raise UserError(f"{arguments.eval_file}: {text}: expected numbers, as for training; received text.")
        _make_floats_alike([*inputs, *arguments.targets], {arguments.file: table, arguments.eval_file: eval_table})

    def choose(table: Arrays, path: str) -> Arrays:
        chosen = {name: table[name] for name in [*inputs, *arguments.targets]}
        if not joined:
            return chosen
        for name in inputs:
            _warn_of_rounding(table[name], path, name)
        vector = np.stack([table[name].astype(np.float32) for name in inputs], axis=1)
        return {VECTOR: vector, **{name: table[name] for name in arguments.targets}}

    eval_arrays = eval_table and choose(eval_table, arguments.eval_file)
    _write(arguments, choose(table, arguments.file), eval_arrays, [VECTOR] if joined else inputs)


def _make_floats_alike(names: Sequence[str], tables: Mapping[str, Arrays]) -> None:
    """Make whole numbers floats in columns that are of floats in another table. tables: by path."""
    for name in names:
        kinds = {path: table[name].dtype.kind for path, table in tables.items() if name in table}
        for path in [path for path in kinds if kinds[path] == "i" and "f" in kinds.values()]:
            _warn_of_rounding(tables[path][name], path, name)
            tables[path][name] = tables[path][name].astype(np.float32)


def load_table(
    path: str,
    storage: Storage = DEFAULT,
    class_names: Mapping[str, Sequence[str]] | None = None,
    texts: Set[str] = frozenset(),
    *,
    choose: Callable[[Sequence[str]], Collection[str]] = list,
    may_be_empty: bool = False,
) -> Arrays:
    """Return each column as int64, float32 or str objects, the narrowest that fits all its cells. Raises UserError.

    The header says which of , ; | and tab is between cells; blanks around cells are left out. With a semicolon, numbers
    may have decimal commas. Columns of true and false, in any case, are 1 and 0. One without a name is left out.

    class_names: names of classes, by column. A column stays text if one of its names reads as a number, or as true or
    false: else the same label would be a name in one file and a number in the next. texts: columns that stay text.
    choose: the names in the header → those of the columns to read; others may hold anything. may_be_empty: whether a
    header may stand alone.
    """
    with reading(path):
        content = storage.read_all(path).removeprefix(codecs.BOM_UTF8)
    try:
        separator = _separator(content.partition(b"\n")[0].decode())
        columns, lines = _read_columns(content, separator, path, choose)
    except UnicodeDecodeError as error:
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        which = "It is UTF-16" if is_utf16 else "If it is Latin-1, as spreadsheets often write"
        raise UserError(
            f"{path}: is not UTF-8 text. {which}: iconv -f {'utf-16' if is_utf16 else 'latin1'} -t utf-8 "
            f"{shlex.quote(path)} > utf8.csv"
        ) from error
    del content
    if not columns or (not lines and not may_be_empty):
        found = "a header alone" if columns else "no line"
        raise UserError(f"{path}: expected a header and at least one record; it has {found}.")
    if not lines:
        return {name: np.empty(0, object) for name, _ in columns}
    table, point = Arrays(), "," if separator == ";" else "."
    stay_text = texts | {
        name
        for name, names in (class_names or {}).items()
        if any(_column([each], point).dtype != object for each in names)
    }
    has_commas, with_point = False, ""
    while columns:  # each column's cells are freed when it is an array
        name, cells = columns.pop(0)
        if not name and (table or columns):
            log.warning(f"{path}: a column without a name, as pandas writes its index, is left out")
            continue
        table[name] = np.array(cells, object) if name in stay_text else _column(cells, point)
        commas = point == "," and any("," in cell for cell in cells)
        if table[name].dtype == object:
            if missing := _find_missing(cells, point, is_text=name in stay_text):
                rest = {name: cells, **dict(columns)}
                gaps = {each: _find_missing(rest[each], point, is_text=each in stay_text) for each in rest}
                raise _missing_cells(f"{path}:{lines[missing[0]]}: {name}", rest, gaps, path, separator)
            # Without a comma it may be a column of versions.
            if name in stay_text or not commas or not all(map(_GROUPED.fullmatch, cells)):
                continue
        elif table[name].dtype.kind == "f":
            _check_floats(table[name], cells, point, path, name, lines)
        if point == ",":
            has_commas = has_commas or commas
            found_here = (f"{lines[at]}: {name}: {cell}" for at, cell in enumerate(cells) if "." in cell)
            with_point = with_point or next(found_here, "")
    if has_commas and with_point:  # it may stand between thousands
        raise UserError(
            f"{path}:{with_point} has a point, and other numbers of the file have decimal commas; write thousands "
            "without points, and decimals alike."
        )
    return table


def _missing_cells(
    where: str, columns: Mapping[str, Sequence[str]], gaps: Mapping[str, Sequence[int]], path: str, separator: str
) -> UserError:
    """Return the error for missing cells. where: the first one. gaps: by column, the records that have none."""
    cells = next(iter(columns.values()))
    first = cells[next(iter(gaps.values()))[0]]
    problem = f"holds numbers, and here {first!r}; write a number" if first else "is empty; fill it"
    counts = ", ".join(f"{name} ({len(places)})" for name, places in gaps.items() if places)
    words = sorted({columns[name][place] for name, places in gaps.items() for place in places} - {""})
    between = "" if separator == "," else f"sep={separator!r}, "
    read = f"{path!r}, {between}dtype=str{f', na_values={words}' if words else ''}"
    lacking = [name for name, places in gaps.items() if places]
    return UserError(
        f"{where} {problem} or leave the line out. Cells are missing in {counts} of {len(cells)} records. Without "
        f"those lines: pandas.read_csv({read}).dropna(subset={lacking}).to_csv('complete.csv', {between}index=False)"
    )


def _check_floats(
    numbers: np.ndarray, cells: Sequence[str], point: str, path: str, name: str, lines: Sequence[int]
) -> None:
    """Raise UserError for a cell that float32 does not hold; warn of different whole numbers of which it makes one."""
    if np.isinf(numbers).any():
        place = int(np.isinf(numbers).argmax())
        raise UserError(
            f"{path}:{lines[place]}: {name}: expected a finite number that float32 holds; received "
            f"{cells[place]!r:.60}."
        )
    if (np.abs(numbers) >= _ALL_WHOLE).any():
        _warn_of_rounding(np.array([float(cell.replace(point, ".")) for cell in cells]), path, name)


def _read_columns(
    content: bytes, separator: str, path: str, choose: Callable[[Sequence[str]], Collection[str]]
) -> tuple[list[tuple[str, list[str]]], Sequence[int]]:
    """Return the names and the cells of columns, and the line of each record. Raises UserError, UnicodeDecodeError."""
    rows = _rows(content, separator, path)
    names = next((row for _, row in rows), [])
    chosen = {*choose(names)}
    if any(count > 1 and name in chosen for name, count in Counter(names).items()):
        raise UserError(f"{path}: the header names a column twice: {', '.join(names)}.")
    places = [place for place, name in enumerate(names) if name in chosen]
    columns, lines = [(names[place], list[str]()) for place in places], array_of("q")
    for line, row in rows:
        if len(row) != len(names):
            raise UserError(f"{path}:{line}: expected {len(names)} cells, as in the header; got {len(row)}.")
        for (_, cells), place in zip(columns, places, strict=True):
            cells.append(sys.intern(row[place]) if len(row[place]) <= _SHARED else row[place])
        lines.append(line)
    return columns, lines


def _rows(content: bytes, separator: str, path: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the last line and the cells of each row. Raises UserError for a quote that is not closed, or not doubled.

    Python's reader would otherwise take all that follows such a quote for one cell, up to the next one.
    """
    blanks = " \t\f\v".replace(separator, "")
    after_quotes = rf"(?:[{blanks}]|\xc2\xa0)+(?=[{separator}\r\n]|$)"
    if re.search(f'"{after_quotes}'.encode(), content):  # blanks that a strict reader refuses
        quoted_cell = rf'((?:^|[{separator}\r\n]) *"[^"]*(?:""[^"]*)*")(?:{after_quotes})?'
        content = re.sub(quoted_cell.encode(), rb"\1", content)
    text = io.TextIOWrapper(io.BytesIO(content), "utf-8", newline="")
    reader = csv.reader(text, delimiter=separator, skipinitialspace=True, strict=True)
    line = 0
    limit = csv.field_size_limit(sys.maxsize)  # of the process; the text is in memory already
    try:
        for row in reader:
            line = reader.line_num
            if row:
                yield line, [cell.strip() for cell in row]
    except csv.Error as error:
        raise UserError(
            f"{path}:{line + 1}: expected a row of a csv file; up to line {reader.line_num}: {error}. A cell that "
            "begins with a quote ends with one, and has those inside doubled."
        ) from error
    finally:
        csv.field_size_limit(limit)


def _separator(header: str) -> str:
    try:
        return csv.Sniffer().sniff(header, ",;|\t").delimiter
    except csv.Error:  # a single column
        return ","


def _column(cells: Sequence[str], point: str) -> np.ndarray:
    numbers = _as_numbers(cells, point)
    if numbers is not None:
        return numbers
    if {cell.lower() for cell in cells} <= _BOOLEANS.keys():
        return np.array([_BOOLEANS[cell.lower()] for cell in cells], np.int64)
    return np.array(cells, object)  # not numpy's own texts, of which each takes the room of the longest


def _as_numbers(cells: Sequence[str], point: str) -> np.ndarray | None:
    """Return cells as int64 or float32; None if some are no numbers. point: what stands before decimals.

    Whole numbers that int64 does not hold are none: float32 would make one number of many. Nor is "nan".
    """
    if any("_" in cell for cell in cells):  # Python would leave it out
        return None
    try:
        return np.array([int(cell) for cell in cells], np.int64)
    except OverflowError:
        return None
    except ValueError:
        pass
    try:
        with np.errstate(over="ignore"):
            numbers = np.array([float(cell.replace(point, ".")) for cell in cells], np.float32)
    except ValueError:
        return None
    return None if np.isnan(numbers).any() else numbers


def _find_missing(cells: Sequence[str], point: str, *, is_text: bool) -> list[int]:
    """Return the cells that are empty or, if all others are numbers and the column is no text, stand for nothing."""
    missing = [place for place, cell in enumerate(cells) if not cell or cell.lower() in _MISSING]
    others = [cell for cell in cells if cell and cell.lower() not in _MISSING] if missing and not is_text else []
    are_numbers = bool(others) and _as_numbers(others, point) is not None
    return missing if are_numbers else [place for place in missing if not cells[place]]


CSV = Kind(
    "A csv file with a header: one record per line. Numeric columns become one vector, `inputs`, or stay --separate.",
    _add_csv_arguments,
    _write_csv,
)
