"""The run directory and what a person sees of the run; also which commit of the user's code it is of.

Decides once, when opened, who writes: root. Does not decide when, and does not write checkpoints.
"""

from __future__ import annotations

import logging
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from horovod_train.config.paths import link_to_nothing
from horovod_train.config.registry import call, check_methods
from horovod_train.config.settings import LogConfig, Spec
from horovod_train.errors import RunError, UserError, unusable
from horovod_train.host import answer_of
from horovod_train.output.console import Screen, can_redraw, unfailing
from horovod_train.output.files import (
    Artifact,
    begins,
    check,
    json_text,
    must_be_writable,
    read_json,
    remove,
    remove_drafts,
    write_atomically,
)
from horovod_train.output.metrics import (
    ABOUT,
    METRICS,
    NO_ASIDE,
    PARAMETERS,
    PROM,
    TIMES,
    Aside,
    JsonLines,
    MetricsFile,
    MetricsWriter,
    PrometheusFile,
    load_writers,
)
from horovod_train.output.tensorboard import TensorBoard, TensorBoardWriter
from horovod_train.output.trackers import Trackers, build_trackers, load_trackers
from horovod_train.output.trackers.sender import RECORD, Ended, Sender

log = logging.getLogger(__name__)

_CONFIG_HEAD = "# Written by horovod_train: the config that this run trains with\n"
_CONFIG = Artifact("a run's config", r"config\.yaml", content_matches=lambda path: begins(path, _CONFIG_HEAD))
_SUMMARY = Artifact("a run's summary", r"summary\.json", content_matches=lambda path: begins(path, '{\n  "steps": '))
_FILES = {
    "config.yaml": _CONFIG,
    "metrics.jsonl": METRICS,
    "metrics.prom": PROM,
    "parameters.jsonl": PARAMETERS,
    "times.jsonl": TIMES,
    "summary.json": _SUMMARY,
}
_TRACKER_FILES = ("config.yaml", "summary.json", "report.html")
"""Given to trackers at the end of a start, as far as they exist."""
_WRITERS_METHODS = ("write(step, epoch, split, values)", "rewind(step)", "close()")
_GIT_WITHIN_S = 10.0
"""On a shared disk git may take long to read the state of every file."""


def check_writable(directory: str) -> Path:
    """Return the run directory, created if needed.

    Raises UserError if files cannot be written there, or would replace files that no run has written.
    """
    path = Path(directory)
    if problem := link_to_nothing(path):
        raise UserError(f"output_dir: {problem}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise unusable(f"output_dir: cannot write to {directory}", error, "Choose another: --output-dir.") from error
    for name, artifact in _FILES.items():
        with must_be_writable(path / name):
            check(path / name, artifact)
    return path


class Output:
    """What a run writes and shows. Root has a RunOutput; the other ranks have this, which does nothing."""

    directory: Path | None = None
    tensorboard = TensorBoard()

    def start_trackers(self, step: int, config: Mapping[str, Any], *, anew: bool) -> None:
        """Begin or continue the run in each tracker, at `step`; call before `rewind`. anew: begin another run.

        config: all settings, as plain mappings. Raises UserError if a run cannot begin.
        """

    def finish_trackers(self, ended: Ended, *, timeout_s: float = math.inf) -> None:
        """Give trackers the files of the run, and wait for them, but not for long; a later call does nothing."""

    def fail(self) -> None:
        """Finish the trackers, and close all forms of metrics but metrics.prom, which tells alerts that the run did."""

    def write_config(self, text: str, *, held_back: bool = False) -> None:
        """Write config.yaml, and remove the summary.json of an earlier end, which more training follows.

        Raises UserError, as `rewind` does: a run that cannot record itself must not begin.

        held_back: write it with summary.json only.
        """

    def rewind(self, step: int, *, is_evaluated: bool = True) -> None:
        """Remove the metrics after `step`: the run resumes there and will write them again.

        is_evaluated: False if the state is from before the evaluation at `step`, whose row will be written again too.
        """

    def start_progress(self, step: int, last_step: int) -> None:
        """Show a bar, if there is one."""

    def show_progress(self, step: int) -> None:
        """Move the bar."""

    def stop_progress(self) -> None:
        """Let go of the terminal."""

    def append_metrics(
        self, split: str, step: int, epoch: int, values: Mapping[str, float], aside: Aside = NO_ASIDE
    ) -> None:
        """Write metrics in all forms, and log them as one line, unless `aside` says that another one shows them."""

    def append_parameters(self, step: int, moves: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Add one line on how each rank alone changed each parameter: path → figure → by rank."""

    def append_times(self, step: int, verdict: str, seconds: Mapping[str, Sequence[float]]) -> None:
        """Add one line on where the time since the last one went: phase → seconds by rank."""

    def sync(self) -> None:
        """Return when metrics.jsonl, times.jsonl and parameters.jsonl so far would survive a power cut."""

    def last_metrics(self, split: str) -> Mapping[str, float | None]:
        """Return the last metrics of a split, also from before a resume; empty if there are none."""
        return {}

    def tells_end_at(self, step: int) -> bool:
        """Return whether config.yaml and summary.json are there, of a run that was done at `step`."""
        return False

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json. Raises RunError: a run whose end is not recorded has not ended well."""

    def close(self) -> None:
        """Close all files."""


class LostOutput(Output):
    """Of a run whose directory another run has taken: this one writes nothing more, but knows what it has written."""

    def __init__(self, opened: Output) -> None:
        self._opened = opened

    def last_metrics(self, split: str) -> Mapping[str, float | None]:
        return self._opened.last_metrics(split)


class RunOutput(Output):
    """Writes config.yaml, metrics, times.jsonl, parameters.jsonl if there are values, and summary.json; shows a bar."""

    directory: Path

    def __init__(
        self,
        directory: Path,
        *,
        tensorboard: bool = False,
        bar: bool = False,
        user_writers: Sequence[MetricsWriter] = (),
        trackers: Trackers | None = None,
    ) -> None:
        self.directory = directory
        self.tensorboard = TensorBoardWriter(directory / "tensorboard") if tensorboard else TensorBoard()
        self._metrics = MetricsFile(directory)
        self._trackers = trackers or Trackers()
        self._prometheus = PrometheusFile(directory)
        self._config_held_back: str | None = None
        self._writers: list[MetricsWriter] = [self._metrics, self.tensorboard, self._prometheus]
        self._writers += [self._trackers, *user_writers]
        self._held: tuple[int, Mapping[str, float], Aside] = (-1, {}, NO_ASIDE)
        """The training's figures that the next line of an evaluation shows, and their step."""
        self._started = time.monotonic()
        self._times = JsonLines(directory / "times.jsonl", TIMES)
        self._parameters = JsonLines(directory / "parameters.jsonl", PARAMETERS)
        self._bar = _build_bar() if bar else None
        self._task: Any = None

    def start_trackers(self, step: int, config: Mapping[str, Any], *, anew: bool) -> None:
        self.tensorboard.add_config(step, config)
        self._trackers.start(step, config, self._metrics.rows, anew=anew)

    def finish_trackers(self, ended: Ended, *, timeout_s: float = math.inf) -> None:
        files = [self.directory / name for name in _TRACKER_FILES]
        self._trackers.finish(ended, files, timeout_s=timeout_s)

    def fail(self) -> None:
        self.finish_trackers("failed")
        self._writers = [writer for writer in self._writers if writer is not self._prometheus]
        self.close()

    def write_config(self, text: str, *, held_back: bool = False) -> None:
        self._config_held_back = text if held_back else None
        if held_back:
            return
        with must_be_writable(self.directory / "config.yaml"):
            remove(self.directory / "summary.json", _SUMMARY)  # of an end that is none any more
            write_atomically(self.directory / "config.yaml", _CONFIG_HEAD + text, _CONFIG)

    def rewind(self, step: int, *, is_evaluated: bool = True) -> None:
        for writer in self._writers:
            writer.rewind(step)
        if not is_evaluated:
            self._metrics.remove_evaluation(step)
        self._times.rewind(step)
        self._parameters.rewind(step)

    def start_progress(self, step: int, last_step: int) -> None:
        if self._bar is not None:
            self._task = self._bar.add_task("training", total=last_step, completed=step)
            self._bar.start()

    def show_progress(self, step: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step)

    def stop_progress(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def append_metrics(
        self, split: str, step: int, epoch: int, values: Mapping[str, float], aside: Aside = NO_ASIDE
    ) -> None:
        self.show_progress(step)
        if reserved := [name for name in values if name in ABOUT]:
            raise ValueError(f"no value can be called {reserved[0]}: every row of metrics has one")
        # Plain numbers: what computes them may give NumPy's, or tensors.
        numbers = {**values, **aside.figures}
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in numbers.items()}
        for writer in self._writers:
            writer.write(step, epoch, split, numbers)
        seconds = int(time.monotonic() - self._started)
        clock = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        if not aside.shown:
            self._held = step, values, aside
            return
        held_step, train, train_aside = self._held
        if split == "eval" and held_step == step:
            texts = [*_epoch_line(train, values), train_aside.phrase, aside.phrase]
            log.info(f"{clock}  epoch {epoch}  step {step}  {'  '.join(filter(None, texts))}")
        else:
            texts = [*_texts(values), aside.phrase]
            log.info(f"{clock}  {split:<5} step {step}  epoch {epoch}  {'  '.join(filter(None, texts))}")

    def append_parameters(self, step: int, moves: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        rounded = {
            path: {figure: [float(f"{value:.4g}") for value in by_rank] for figure, by_rank in each.items()}
            for path, each in moves.items()
        }
        self._parameters.add_row({"step": step, "parameters": rounded})
        means = {path: math.sqrt(statistics.fmean(x * x for x in each["apart"])) for path, each in moves.items()}
        self.tensorboard.add_scalars("train", step, {f"apart/{path}": mean for path, mean in means.items()})

    def append_times(self, step: int, verdict: str, seconds: Mapping[str, Sequence[float]]) -> None:
        self._times.add_row({"step": step, "verdict": verdict, "seconds": seconds})

    def sync(self) -> None:
        for file in (self._metrics, self._times, self._parameters):
            file.flush(sync=True)

    def last_metrics(self, split: str) -> Mapping[str, float | None]:
        return self._metrics.last(split)

    def tells_end_at(self, step: int) -> bool:
        summary = read_json(self.directory / "summary.json")
        is_end = bool(summary.get("finished")) and summary.get("steps") == step
        return is_end and (self.directory / "config.yaml").exists()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        if self._config_held_back is not None:
            self.write_config(self._config_held_back)
        path = self.directory / "summary.json"
        try:
            write_atomically(path, json_text(summary, indent=2) + "\n", _SUMMARY)
        except OSError as error:
            raise RunError(f"{path}: cannot be written: {error.strerror}.") from error

    def close(self) -> None:
        self.stop_progress()
        while self._writers:
            self._writers.pop(0).close()
        self._times.close()
        self._parameters.close()


def open_output(
    directory: str, config: LogConfig, *, is_root: bool, launched: bool, is_ours: Callable[[], bool] = lambda: True
) -> Output:
    """Open the run directory, of which root has the lease; do nothing elsewhere. Raises UserError if root cannot write.

    is_ours: of the lease; trackers, which have threads of their own, ask it.

    launched: whether a launcher started this process. Then log.progress "auto" draws no bar, because mpirun gives its
    ranks a terminal and forwards what they print there.
    """
    # On every rank: the ranks compare the user's modules that they have loaded.
    writers = load_writers(config.writers)
    load_trackers(config.trackers)
    if not is_root:
        return Output()
    path = check_writable(directory)
    for artifact in _FILES.values():
        remove_drafts(path, artifact)
    remove_drafts(path / "trackers", RECORD)
    user_writers = [call(writer, Spec(name), "log.writers", directory=path) for name, writer in writers.items()]
    for name, writer in zip(writers, user_writers, strict=True):
        check_methods(writer, _WRITERS_METHODS, f"log.writers: {name}")
    bar = config.progress == "bar" or (config.progress == "auto" and can_redraw(sys.stdout) and not launched)
    built = zip(config.trackers, build_trackers(config.trackers), strict=True)
    trackers = Trackers([Sender(spec.name, tracker, path, is_ours=is_ours) for spec, tracker in built])
    return RunOutput(path, tensorboard=config.tensorboard, bar=bar, user_writers=user_writers, trackers=trackers)


def _texts(values: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in values.items()]


def _epoch_line(train: Mapping[str, float], evaluated: Mapping[str, float]) -> list[str]:
    """Return what a line of an epoch shows: what both have side by side, then the rate, the speed and other counts."""
    aside = ("loss_average", "examples_per_s_per_rank", "s_per_step", "save_blocked_s")
    both = {name: train[name] for name in evaluated if name in train}
    others = {name: value for name, value in train.items() if name not in both and name not in aside}
    return _texts(both | {f"val_{name}": value for name, value in evaluated.items()} | others)


def _build_bar() -> Progress:
    """Build a bar that stays below what is printed meanwhile, because it redirects sys.stdout."""
    console = Screen(file=unfailing(sys.stdout), force_terminal=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    return Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console)


def describe_commit(folder: Path) -> str | None:
    """Return `commit 1a2b3c of FOLDER`, and whether files differ from it; None outside a repository or without git."""
    head = _git(folder, "rev-parse", "HEAD")
    top = _git(folder, "rev-parse", "--show-toplevel")
    if not head or not top:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    state = {None: ", perhaps with changes", "": ""}.get(changed, ", with changes that are not committed")
    return f"commit {head} of {top}{state}"


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None if it fails or takes too long."""
    try:
        answer = answer_of(["git", "-C", folder, *arguments], within_s=_GIT_WITHIN_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if answer.returncode else answer.stdout.strip()
