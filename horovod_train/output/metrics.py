"""Metrics in files of the run directory: what a writer must do, and metrics.jsonl. For TensorBoard see tensorboard."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from horovod_train.config.registry import load_function
from horovod_train.output.files import Lines, json_text, must_be_writable
from horovod_train.output.removal import Artifact, begins

ABOUT = ("step", "epoch", "split", "seconds")
"""Entries of a row of metrics that are not metrics."""


def _begins_with(*names: str) -> Callable[[Path], bool]:
    """Return a check that the first row of a file begins with these entries: others' rows may begin with a step too."""

    def begins_with_names(path: Path) -> bool:
        with path.open("rb") as file:
            line = file.readline(_MOST_BYTES)
        if not line.endswith(b"\n"):  # a kill has cut the file short
            return begins(path, '{"step": ')
        try:
            row = json.loads(line)
        except ValueError:
            return False
        return isinstance(row, dict) and tuple(row)[: len(names)] == names

    return begins_with_names


_MOST_BYTES = 1 << 24
METRICS = Artifact("a run's metrics", r"metrics\.jsonl", content_matches=_begins_with(*ABOUT))
TIMES = Artifact("a run's times", r"times\.jsonl", content_matches=_begins_with("step", "verdict", "seconds"))
PARAMETERS = Artifact("a run's parameters", r"parameters\.jsonl", content_matches=_begins_with("step", "parameters"))


class Aside(NamedTuple):
    """What a line of metrics has besides them: figures, which are not shown, and a phrase, which is only shown."""

    figures: Mapping[str, float]
    phrase: str


NO_ASIDE = Aside({}, "")


class MetricsWriter(Protocol):
    """A form in which root writes metrics. RunOutput has the list of those in use."""

    def write(self, step: int, epoch: int, split: str, values: Mapping[str, float]) -> None:
        """Add the metrics of a split ("train", "eval") at a step. Must not raise because of a full or failing disk."""

    def rewind(self, step: int) -> None:
        """Remove what comes after `step`, before the first write: the run resumes there. Raises UserError."""

    def close(self) -> None:
        """Return when all is on disk, if the disk accepts it."""


def load_writers(names: Sequence[str]) -> dict[str, Callable[..., MetricsWriter]]:
    """Import the classes of log.writers. Raises UserError for a name that does not exist."""
    return {name: load_function(name, "log.writers") for name in names}


class JsonLines:
    """A file of JSON objects, one a line, each with the `step` that it is of. Exists once it has a line."""

    def __init__(self, path: Path, artifact: Artifact) -> None:
        self._lines, self._artifact = Lines(path), artifact

    def append(self, row: Mapping[str, Any]) -> None:
        self._lines.append(json_text(row))

    def rewind(self, step: int) -> None:
        """Remove the rows after `step`. Raises UserError."""
        with must_be_writable(self._lines.path):
            self._lines.keep(lambda line: _step_of(line) <= step, self._artifact)

    def sync(self) -> None:
        self._lines.flush(sync=True)

    def close(self) -> None:
        self._lines.close()


class MetricsFile(JsonLines):
    """metrics.jsonl in a run directory: step, epoch, split, seconds since this start, and the values.

    Exists from the start of a run, so that readers need not ask.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "metrics.jsonl", METRICS)
        self._started = time.time()
        self.last: dict[str, Mapping[str, float | None]] = {}
        """The last values of each split, also from before a resume."""

    def write(self, step: int, epoch: int, split: str, values: Mapping[str, float]) -> None:
        seconds = round(time.time() - self._started, 3)
        self.append({"step": step, "epoch": epoch, "split": split, "seconds": seconds, **values})
        self.last[split] = values

    def rewind(self, step: int) -> None:
        super().rewind(step)
        with must_be_writable(self._lines.path):
            self._lines.path.touch()
        self.last |= {row.split: row.values for row in self.rows()}

    def rows(self) -> list[Row]:
        """Return the rows, without what a kill has cut short. Raises UserError."""
        with must_be_writable(self._lines.path):
            return list(metrics_in(self._lines.read()))


class Row(NamedTuple):
    """A line of metrics.jsonl. seconds: since the start that wrote it. values: None for one that was not finite."""

    step: int
    epoch: int
    split: str
    seconds: float
    values: Mapping[str, float | None]


def metrics_in(lines: Iterable[str]) -> Iterator[Row]:
    """Yield the rows of metrics.jsonl. What a kill has cut short, or is something else, is left out."""
    for row in objects_in(lines):
        if _is_of_numbers(row):
            values = {name: value for name, value in row.items() if name not in ABOUT}
            yield Row(row["step"], row.get("epoch") or 0, row["split"], row.get("seconds") or 0.0, values)


def objects_in(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects; a line that a kill has cut short is left out."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _is_of_numbers(row: Mapping[str, Any]) -> bool:
    values = [value for name, value in row.items() if name != "split"]
    is_placed = isinstance(row.get("step"), int) and isinstance(row.get("split"), str)
    return is_placed and all(value is None or isinstance(value, int | float) for value in values)


def _step_of(line: str) -> float:
    """Return the step of a row; a line cut short by a kill counts as later than any step."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
