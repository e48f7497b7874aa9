"""The tracker `csv`: csv/train.csv and csv/eval.csv in the run directory, with a column for each value.

A split of a user's hook has a file too, named as in a URL: `a%2Fb.csv`.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from horovod_train.output.files import Artifact, Lines, begins, check, open_atomically, remove_drafts
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
        columns = next(self._rows(), [])
        self._columns = columns if tuple(columns[:2]) == _FIRST_COLUMNS else [*_FIRST_COLUMNS]
        self.last_step = max((int(row[0]) for row in self._rows_until(step)), default=-1)
        self._rewrite(self._rows_until(step))

    def append(self, values: Mapping[str, float]) -> None:
        if new := [name for name in values if name not in self._columns]:
            self._add_columns(new)
        self._lines.append(_line([repr(values[name]) if name in values else "" for name in self._columns]))
        self.last_step = int(values["step"])

    def close(self) -> None:
        self._lines.close()

    def _add_columns(self, names: Sequence[str]) -> None:
        self._lines.flush()
        if self._lines.has_pending:  # of the columns before: they would follow the longer rows
            raise OSError(None, "has rows in memory that cannot be written, before a new column", str(self._lines.path))
        columns = self._columns
        self._columns = [*columns, *names]
        try:
            self._rewrite([*row, *[""] * len(names)] for row in itertools.islice(self._rows(), 1, None))
        except OSError:
            self._columns = columns
            raise

    def _rewrite(self, rows: Iterable[Sequence[str]]) -> None:
        with open_atomically(self._lines.path, _TABLE, sync=True) as draft:
            draft.writelines(f"{_line(row)}\n".encode() for row in itertools.chain([self._columns], rows))

    def _rows(self) -> Iterator[list[str]]:
        """Yield the rows of the file, one at a time, because it may be larger than the memory.

        The name of a value may have line breaks, so that the first row has several lines.
        """
        if self._lines.path.exists():
            with self._lines.path.open("rb") as file:
                whole = (line for line in file if line.endswith(b"\n") and b"\0" not in line)  # NUL: after a power cut
                yield from csv.reader(line.decode("utf-8", errors="replace") for line in whole)

    def _rows_until(self, step: int) -> Iterator[list[str]]:
        """Yield the rows of values until `step`."""
        for row in itertools.islice(self._rows(), 1, None):
            if len(row) == len(self._columns) and row[0].isdecimal() and int(row[0]) <= step:
                yield row


def _line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(cells)  # quotes what has a character of the end of a line, which is \r\n
    return text.getvalue().removesuffix("\r\n")
