"""Metrics in files of the run directory: what a writer must do; metrics.jsonl, written and read; metrics.prom.

metrics.prom holds the newest figures, in the text format that Prometheus' node exporter reads. For TensorBoard see
tensorboard.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from horovod_train.config.registry import load_function
from horovod_train.output.files import (
    Artifact,
    Lines,
    begins,
    json_text,
    must_be_writable,
    parse_json,
    write_atomically,
)

ABOUT = ("step", "epoch", "split", "seconds")
"""Entries of a row of metrics that are not metrics."""


class Figure(NamedTuple):
    """What the trainer adds to rows of metrics, beside the metrics of the model. unit: what an axis says."""

    unit: str
    group: str = ""
    """Of charts."""
    is_brief: bool = False
    """Whether a short look at a run shows it: not what a verdict sums up, or another figure says."""


_SHARE = Figure("share of all ranks' time", "time")
_OWN = Figure("seconds a step, without the exchange", "time")
FIGURES: dict[str, Figure] = {
    "examples_per_s": Figure("examples / s, all ranks", "speed", is_brief=True),
    "examples_per_s_per_rank": Figure("examples / s, one rank", "speed"),
    "s_per_step": Figure("seconds a step", "speed"),
    **dict.fromkeys(("input_share", "compute_share", "hook_share", "exchange_share"), _SHARE),
    **dict.fromkeys(("own_s_per_step_min", "own_s_per_step_median", "own_s_per_step_max"), _OWN),
    "slowest_rank": Figure("rank", "time"),
    "save_blocked_s": Figure("seconds that saving held up training", "time", is_brief=True),
    "check_agreement_s": Figure("seconds that comparing ranks held up training", "time", is_brief=True),
    "learning_rate": Figure("learning rate", is_brief=True),
}
MOST_DRAWN = 1e100
"""Larger numbers are left out of curves: the difference of two may be infinite."""
_MOST_BYTES = 1 << 24
_STEP = re.compile(r'\{"step": (\d{1,18}), ')
_STEP_AND_SPLIT = re.compile(r'\{"step": (\d{1,18}), "epoch": \d+, "split": ("[^"\\]*"), ')
"""How JsonLines and MetricsFile begin a row."""
_FAMILIES = {
    "running": "1 while the run trains or has been killed, 0 when it has ended by itself",
    "last_progress_timestamp_seconds": "Time of the newest line of metrics, or of the start",
    "step": "Updates done",
    "epoch": "Complete passes over the training records",
    "examples_per_second": "Training records per second, all ranks",
    "metric": "Newest value in metrics.jsonl",
}
"""Each with its help; all are gauges. https://prometheus.io/docs/instrumenting/exposition_formats/"""
_HEAD = f"# HELP horovod_train_running {_FAMILIES['running']}\n"


def _begins_with(*names: str) -> Callable[[Path], bool]:
    """Return a check that the first row of a file begins with these entries: others' rows may begin with a step too.

    Lines with NUL bytes do not count.
    """

    def begins_with_names(path: Path) -> bool:
        with path.open("rb") as file:
            while b"\0" in (line := file.readline(_MOST_BYTES)):  # a power cut has left them
                pass
        if not line.endswith(b"\n"):  # a kill has cut the file short
            return begins(path, '{"step": ')
        try:
            row = parse_json(line)
        except ValueError:
            return False
        return isinstance(row, dict) and tuple(row)[: len(names)] == names

    return begins_with_names


METRICS = Artifact("a run's metrics", r"metrics\.jsonl", content_matches=_begins_with(*ABOUT))
TIMES = Artifact("a run's times", r"times\.jsonl", content_matches=_begins_with("step", "verdict", "seconds"))
PARAMETERS = Artifact("a run's parameters", r"parameters\.jsonl", content_matches=_begins_with("step", "parameters"))
PROM = Artifact("a run's metrics for Prometheus", r"metrics\.prom", content_matches=lambda path: begins(path, _HEAD))

log = logging.getLogger(__name__)


class Aside(NamedTuple):
    """What a line of metrics has besides them: figures, which are not shown, and a phrase, which is only shown."""

    figures: Mapping[str, float]
    phrase: str
    shown: bool = True
    """False if the line of the evaluation at this step shows the metrics, as `fit` shows both side by side."""


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


class JsonLines(Lines):
    """A file of JSON objects, one a line, each with the `step` that it is of. Exists once it has a line."""

    def __init__(self, path: Path, artifact: Artifact) -> None:
        super().__init__(path)
        self._artifact = artifact

    def add_row(self, row: Mapping[str, Any]) -> None:
        self.append(json_text(row))

    def rewind(self, step: int) -> None:
        """Remove the rows after `step`. Raises UserError."""
        with must_be_writable(self.path):
            self.keep(lambda line: _step_of(line) <= step, self._artifact)


def _step_of(line: str) -> float:
    """Return the step of a row; a line cut short by a kill counts as later than any step."""
    # All ranks wait for root at a start, where to parse each row of a long run would take minutes.
    if (begin := _STEP.match(line)) and line.endswith("}") and line.count("{") == line.count("}"):
        return int(begin[1])
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class MetricsFile(JsonLines):
    """metrics.jsonl in a run directory: step, epoch, split, seconds since this start, and the values.

    Exists from the start of a run, so that readers need not ask.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "metrics.jsonl", METRICS)
        self._started = time.monotonic()
        self._newest = _Newest()

    def last(self, split: str) -> Mapping[str, float | None]:
        """Return the last values of a split, also from before a resume; {} if there are none."""
        return self._newest.values.get(split, {})

    def write(self, step: int, epoch: int, split: str, values: Mapping[str, float]) -> None:
        seconds = round(time.monotonic() - self._started, 3)
        self.add_row({"step": step, "epoch": epoch, "split": split, "seconds": seconds, **values})
        self._newest.add(step, split, values)

    def rewind(self, step: int) -> None:
        super().rewind(step)
        with must_be_writable(self.path):
            self.path.touch()
        self._look_at_rows()

    def remove_evaluation(self, step: int) -> None:
        """Remove the row of the evaluation at `step`, if there is one. Raises UserError."""
        with must_be_writable(self.path):
            self.keep(
                lambda line: _step_of(line) != step or all(row.split != "eval" for row in metrics_in([line])), METRICS
            )
        self._look_at_rows()

    def _look_at_rows(self) -> None:
        self._newest = _Newest()
        with must_be_writable(self.path):
            for row in metrics_in(_newest_in(self.read())):
                self._newest.add(row.step, row.split, row.values)

    def rows(self) -> Iterator[Row]:
        """Yield the rows, without what a kill has cut short. Raises UserError."""
        with must_be_writable(self.path):
            yield from metrics_in(self.read())


def _newest_in(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of each split at its newest step, and those that do not begin as ours do."""
    newest: dict[str, tuple[str, list[str]]] = {}
    for line in lines:
        begin = _STEP_AND_SPLIT.match(line)
        if begin is None:
            yield line
            continue
        step, split = begin.groups()
        if split not in newest or newest[split][0] != step:
            newest[split] = step, []
        newest[split][1].append(line)
    for _, of_split in newest.values():
        yield from of_split


class _Newest:
    """The values of each split at its newest step; a hook may add a row to one of ours."""

    def __init__(self) -> None:
        self.values: dict[str, Mapping[str, float | None]] = {}
        self._steps: dict[str, int] = {}

    def add(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
        before = self.values[split] if self._steps.get(split) == step else {}
        self.values[split], self._steps[split] = {**before, **values}, step


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


def _is_of_numbers(row: Mapping[str, Any]) -> bool:
    values = [value for name, value in row.items() if name != "split"]
    is_placed = isinstance(row.get("step"), int) and isinstance(row.get("split"), str)
    # Neither NaN, nor a whole number that no float can hold: the commands that read rows compute with floats.
    return is_placed and all(
        value is None or (isinstance(value, int | float) and abs(value) <= sys.float_info.max) for value in values
    )


def objects_in(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects; a line that a kill has cut short is left out."""
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


class PrometheusFile:
    """Replaced as a whole at each line of metrics. A disk that is full or gone costs one warning."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "metrics.prom"
        self._run = str(directory.resolve()).encode(errors="replace").decode()
        self._newest = _Newest()
        self._step = 0
        self._epoch: int | None = 0
        """None from a resume to its first line, which knows."""
        self._progress = time.time()
        self._is_failing = False

    def write(self, step: int, epoch: int, split: str, values: Mapping[str, float]) -> None:
        self._newest.add(step, split, values)
        self._step, self._epoch, self._progress = step, epoch, time.time()
        self._try_to_write(is_running=True)

    def rewind(self, step: int) -> None:
        """Begin at `step`. Raises UserError."""
        self._step, self._epoch, self._progress = step, None if step else 0, time.time()
        with must_be_writable(self._path):
            self._write(is_running=True)

    def close(self) -> None:
        self._try_to_write(is_running=False)

    def _try_to_write(self, *, is_running: bool) -> None:
        try:
            self._write(is_running=is_running)
        except OSError as error:
            if not self._is_failing:
                log.warning(f"{self._path} cannot be written: {error.strerror}. Training continues.")
            self._is_failing = True
            return
        if self._is_failing:
            log.info(f"{self._path} can be written again.")
        self._is_failing = False

    def _write(self, *, is_running: bool) -> None:
        # Not synchronised with the disk: after a power cut nothing would read it.
        write_atomically(self._path, "".join(self._lines(is_running=is_running)), PROM, sync=False)

    def _lines(self, *, is_running: bool) -> Iterator[str]:
        samples: dict[str, list[tuple[dict[str, str], float]]] = {
            "running": [({}, float(is_running))],
            "last_progress_timestamp_seconds": [({}, self._progress)],
            "step": [({}, self._step)],
            "epoch": [] if self._epoch is None else [({}, self._epoch)],
            "examples_per_second": [
                ({}, speed)
                for values in self._newest.values.values()
                if (speed := values.get("examples_per_s")) is not None
            ],
            "metric": [
                ({"split": split, "name": name}, value)
                for split, values in self._newest.values.items()
                for name, value in values.items()
                if value is not None
            ],
        }
        for family, about in _FAMILIES.items():
            yield f"# HELP horovod_train_{family} {about}\n# TYPE horovod_train_{family} gauge\n"
            for labels, value in samples[family]:
                label_text = ",".join(f'{key}="{_escaped(text)}"' for key, text in {"run": self._run, **labels}.items())
                yield f"horovod_train_{family}{{{label_text}}} {_number(value)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
