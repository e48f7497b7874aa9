"""The tracker `csv`: csv/train.csv and csv/eval.csv in the run directory, with a column for each value.

A split of a user's hook has a file too, named as in a URL: `a%2Fb.csv`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from horovod_train.output.files import Artifact, Lines, begins, check, is_cut_short, remove_drafts, write_atomically
from horovod_train.output.trackers.sender import Ended, Row

_FIRST_COLUMNS = ("step", "epoch")
_TABLE = Artifact(
    "a run's table of metrics", r"[^/]+\.csv", content_matches=lambda path: begins(path, ",".join(_FIRST_COLUMNS))
)


class CsvTables:
    """A value that first appears later gets a new column, which is empty in the rows before."""

    def __init__(self) -> None:
        self._folder = Path()
        self._tables: dict[str, _Table] = {}

    def start(self, directory: Path, run_id: str | None, step: int, config: Mapping[str, Any]) -> str:
        self._folder = directory / "csv"
        self._folder.mkdir(exist_ok=True)
        remove_drafts(self._folder, _TABLE)
        for path in self._folder.glob("*.csv"):
            self._tables[unquote(path.stem)] = table = _Table(path)
            table.rewind(step)
        return "csv"

    def last_steps(self) -> dict[str, int]:
        return {split: table.last_step for split, table in self._tables.items()}

    def log(self, row: Row) -> None:
        if row.split not in self._tables:
            self._tables[row.split] = _Table(self._folder / f"{quote(row.split, safe=' ')}.csv")
        self._tables[row.split].append({"step": row.step, "epoch": row.epoch, **row.values})

    def finish(self, ended: Ended, files: Sequence[Path]) -> None:
        for table in self._tables.values():
            table.close()


class _Table:
    """One file. Raises OSError where it must be rewritten and cannot be; what cannot be appended waits in memory."""

    def __init__(self, path: Path) -> None:
        self._lines, self._columns, self.last_step = Lines(path, unit="rows"), [*_FIRST_COLUMNS], -1

    def rewind(self, step: int) -> None:
        """Remove the rows after `step`, and a row that a kill has cut short. Raises OSError."""
        check(self._lines.path, _TABLE)
        lines = list(self._lines.read())
        rows = _rows_in(lines[:-1] if is_cut_short(self._lines.path) else lines)
        self._columns = rows[0] if rows else [*_FIRST_COLUMNS]
        kept_rows = [row for row in rows[1:] if len(row) == len(self._columns) and int(row[0]) <= step]
        self.last_step = int(kept_rows[-1][0]) if kept_rows else -1
        self._rewrite(kept_rows)

    def append(self, values: Mapping[str, float]) -> None:
        if new := [name for name in values if name not in self._columns]:
            self._add_columns(new)
        self._lines.append(_line([repr(values[name]) if name in values else "" for name in self._columns]))
        self.last_step = int(values["step"])

    def close(self) -> None:
        self._lines.close()

    def _add_columns(self, names: Sequence[str]) -> None:
        self._lines.flush()
        rows = _rows_in(self._lines.read())[1:]
        columns = self._columns
        self._columns = [*columns, *names]
        try:
            self._rewrite([[*row, *[""] * len(names)] for row in rows])
        except OSError:
            self._columns = columns
            raise

    def _rewrite(self, rows: Sequence[Sequence[str]]) -> None:
        text = "".join(f"{_line(row)}\n" for row in [self._columns, *rows])
        write_atomically(self._lines.path, text, _TABLE)


def _rows_in(lines: Iterable[str]) -> list[list[str]]:
    """Return the rows of a table. The name of a value may have line breaks, so that the first row has several lines."""
    return list(csv.reader(f"{line}\n" for line in lines))


def _line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(cells)  # quotes what has a character of the end of a line, which is \r\n
    return text.getvalue().removesuffix("\r\n")
