"""The run directory and what a person sees of the run: RunOutput on root, NullOutput elsewhere, with the same methods.

Decides once, when opened, who writes. Does not decide when, and does not write checkpoints.
"""

from __future__ import annotations

import json
import logging
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from horovod_train.errors import RunError, UserError
from horovod_train.output.console import unfailing
from horovod_train.output.files import Lines, write_whole
from horovod_train.output.removal import Made, NotOurs, check
from horovod_train.output.tensorboard import TensorBoardWriter

log = logging.getLogger(__name__)

_CONFIG_HEAD = "# Written by horovod_train: the config that this run trains with\n"
_SETTINGS_IN_ORDER = re.compile(rb"output_dir: [^\n]+\nseed: \d+\nprecision: \w+\njit_compile: \w+\ndeterministic: ")


def _begins(path: Path, head: str) -> bool:
    with path.open("rb") as file:
        found = file.read(len(head))
    return head.encode().startswith(found)  # also a partial head, which a kill may leave


def _is_resolved_config(path: Path) -> bool:
    """Return whether a file is a resolved config, also one that a version without heads wrote: it has all settings."""
    return _begins(path, _CONFIG_HEAD) or bool(_SETTINGS_IN_ORDER.match(path.read_bytes()))


_CONFIG = Made("a run's config", r"config\.yaml", is_ours=_is_resolved_config)
_METRICS = Made("a run's metrics", r"metrics\.jsonl", is_ours=lambda path: _begins(path, '{"step": '))
_PARAMETERS = Made("a run's parameters", r"parameters\.jsonl", is_ours=lambda path: _begins(path, '{"step": '))
_SUMMARY = Made("a run's summary", r"summary\.json", is_ours=lambda path: _begins(path, '{\n  "steps": '))
_FILES = {"config.yaml": _CONFIG, "metrics.jsonl": _METRICS, "parameters.jsonl": _PARAMETERS, "summary.json": _SUMMARY}


def check_writable(directory: str) -> Path:
    """Return the run directory, created if needed.

    Raises UserError if files cannot be written there, or would replace files that no run has written.
    """
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name, made in _FILES.items():
            check(path / name, made)
        with tempfile.TemporaryFile(dir=path):
            pass
    except NotOurs as error:
        raise UserError(
            f"output_dir: {error.filename} {error.strerror}, and a run would replace it. Choose another: --output-dir."
        ) from error
    except OSError as error:
        reason = f"{error.strerror}: {error.filename or directory}"
        raise UserError(
            f"output_dir: cannot write to {directory}: {reason}. Choose another with --output-dir."
        ) from error
    return path


@contextmanager
def _needed(path: Path) -> Iterator[Path]:
    """Run a block that must be able to write this file. Raises UserError if it cannot."""
    try:
        yield path
    except OSError as error:
        raise UserError(f"output_dir: cannot write {path}: {error.strerror}. Choose another: --output-dir.") from error


_ABOUT = ("step", "epoch", "split", "seconds")
"""First entries of a line of metrics: where it comes from."""


class NullOutput:
    """The output of every rank except root: writes nothing, shows nothing."""

    directory: Path | None = None

    def write_config(self, text: str) -> None: ...

    def rewind(self, step: int) -> None: ...

    def start_progress(self, step: int, last_step: int) -> None: ...

    def show_progress(self, step: int) -> None: ...

    def append_metrics(self, split: str, step: int, epoch: int, values: Mapping[str, float]) -> None: ...

    def append_parameters(self, step: int, moves: Mapping[str, Mapping[str, Sequence[float]]]) -> None: ...

    def append_histograms(self, step: int, values: Mapping[str, Any]) -> None: ...

    def write_graph(self, draw: Callable[[], Any]) -> None: ...

    def start_profile(self, step: int) -> None: ...

    def stop_profile(self, step: int) -> None: ...

    def last_metrics(self, split: str) -> Mapping[str, float]:
        """Return the values of a split's last line of metrics, also from before a resume; empty if there is none."""
        return {}

    def write_summary(self, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class RunOutput(NullOutput):
    """Writes config.yaml, metrics.jsonl, summary.json, tensorboard/ and, if there are values, parameters.jsonl.

    Shows a progress bar.
    """

    def __init__(self, directory: Path, *, tensorboard: bool, bar: bool) -> None:
        self.directory = directory
        self.started = time.time()
        self._last: dict[str, Mapping[str, float]] = {}
        self._metrics = self._lines("metrics.jsonl")
        self._parameters: Lines | None = None
        self._tensorboard = TensorBoardWriter(directory / "tensorboard") if tensorboard else None
        self._bar = _build_bar() if bar else None
        self._task: Any = None

    def write_config(self, text: str) -> None:
        """Write config.yaml. Raises UserError, as `rewind` does: a run that cannot record itself must not begin."""
        with _needed(self._path("config.yaml")) as path:
            write_whole(path, _CONFIG_HEAD + text, _CONFIG)

    def rewind(self, step: int) -> None:
        """Remove the metrics after `step`: the run resumes there and will write them again."""
        for lines, made in ((self._metrics, _METRICS), (self._lines("parameters.jsonl"), _PARAMETERS)):
            with _needed(lines.path):
                lines.keep(lambda line: _step_of(line) <= step, made)
        with _needed(self._metrics.path):
            rows = self._metrics.read()
        for row in map(json.loads, rows):
            self._last[row["split"]] = {name: value for name, value in row.items() if name not in _ABOUT}

    def last_metrics(self, split: str) -> Mapping[str, float]:
        return self._last.get(split, {})

    def start_progress(self, step: int, last_step: int) -> None:
        if self._bar is not None:
            self._task = self._bar.add_task("training", total=last_step, completed=step)
            self._bar.start()

    def show_progress(self, step: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step)

    def append_metrics(self, split: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Add one line of metrics, a point to each TensorBoard curve and a line to the log."""
        seconds = round(time.time() - self.started, 3)
        row = {"step": step, "epoch": epoch, "split": split, "seconds": seconds, **values}
        self._metrics.append(_json(row))
        self._last[split] = values
        self.show_progress(step)
        if self._tensorboard is not None:
            self._tensorboard.add_scalars(split, step, values)
        log.info(f"{_clock(seconds)}  {split:<5} step {step}  epoch {epoch}  {_readable(values)}")

    def append_parameters(self, step: int, moves: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Add one line on how each rank alone changed each parameter: path → figure → by rank."""
        self._parameters = self._parameters or self._lines("parameters.jsonl")
        self._parameters.append(_json({"step": step, "parameters": moves}))
        if self._tensorboard is not None:
            means = {path: math.sqrt(statistics.fmean(x * x for x in each["apart"])) for path, each in moves.items()}
            self._tensorboard.add_scalars("train", step, {f"apart/{path}": mean for path, mean in means.items()})

    def append_histograms(self, step: int, values: Mapping[str, Any]) -> None:
        """values: tensors or variables by name. Without TensorBoard, this and the methods below write nothing."""
        if self._tensorboard is not None:
            self._tensorboard.add_histograms(step, values)

    def write_graph(self, draw: Callable[[], Any]) -> None:
        """draw: builds the GraphDef; called only if it will be written."""
        if self._tensorboard is not None:
            self._tensorboard.add_graph(draw())

    def start_profile(self, step: int) -> None:
        """Before `step`: start recording the time and memory of every op."""
        if self._tensorboard is not None:
            self._tensorboard.start_profile(step)

    def stop_profile(self, step: int) -> None:
        if self._tensorboard is not None:
            self._tensorboard.stop_profile(step)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json. Raises RunError: a run whose end is not recorded has not ended well."""
        try:
            write_whole(self._path("summary.json"), _json(summary, indent=2) + "\n", _SUMMARY)
        except OSError as error:
            raise RunError(f"{self._path('summary.json')}: cannot be written: {error.strerror}.") from error

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._metrics.close()
        if self._parameters is not None:
            self._parameters.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _lines(self, name: str) -> Lines:
        return Lines(self._path(name))

    def _path(self, name: str) -> Path:
        assert self.directory is not None
        return self.directory / name


def open_output(
    directory: str,
    *,
    is_root: bool,
    tensorboard: bool,
    progress: Literal["auto", "bar", "plain"],
    launched: bool,
) -> NullOutput:
    """Open the run directory on root; do nothing elsewhere. Raises UserError if it cannot be written.

    progress: "auto" draws a bar only on a terminal, and never under a launcher (`launched`), because mpirun gives its
    ranks a terminal and forwards what they print there.
    """
    if not is_root:
        return NullOutput()
    bar = progress == "bar" or (progress == "auto" and sys.stdout.isatty() and not launched)
    return RunOutput(check_writable(directory), tensorboard=tensorboard, bar=bar)


def _build_bar() -> Progress:
    """Build a bar that stays below what is printed meanwhile, because it redirects sys.stdout."""
    console = Console(file=unfailing(sys.stdout), force_terminal=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    return Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console)


def _json(value: Any, indent: int | None = None) -> str:
    """Return JSON text; NaN and infinity, which JSON lacks, become null."""

    def known(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {name: known(each) for name, each in part.items()}
        if isinstance(part, list | tuple):
            return [known(each) for each in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return json.dumps(known(value), indent=indent, allow_nan=False)


def _step_of(line: str) -> float:
    """Return the step of a line of metrics; a line cut short by a kill counts as later than any step."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _clock(seconds: float) -> str:
    minutes, whole = divmod(int(seconds), 60)
    return f"{minutes // 60:d}:{minutes % 60:02d}:{whole:02d}"


def _readable(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())
