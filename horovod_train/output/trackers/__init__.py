"""Trackers of experiments: MLflow, W&B, CSV files or a class of the user's, which get what metrics.jsonl gets.

Makes those that a config names, and hands rows to all of them. To add one: a file here with a class like `Tracker` in
sender, and a line in TRACKERS.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from horovod_train.config.registry import call, check_methods, choose
from horovod_train.config.settings import Spec
from horovod_train.output import metrics
from horovod_train.output.trackers.csv_table import CsvTables
from horovod_train.output.trackers.mlflow import MlflowTracker
from horovod_train.output.trackers.sender import Ended, Row, Sender, Tracker
from horovod_train.output.trackers.wandb import WandbTracker

TRACKERS: dict[str, Callable[..., Tracker]] = {"csv": CsvTables, "mlflow": MlflowTracker, "wandb": WandbTracker}

FINISH_WITHIN_S: dict[Ended, float] = {"done": 30.0, "stopped": 10.0, "failed": 3.0}
"""How long the end of a run waits for rows and files to arrive. A run that stops may have little time left; when one
fails, the watchdog ends the process after some seconds."""

_METHODS = ("start(directory, run_id, step, config)", "log(row)", "finish(ended, files)")


class Trackers:
    """Hands rows to trackers; none of its methods fails because of one, except the first start of a run."""

    def __init__(self, senders: Sequence[Sender] = ()) -> None:
        self._senders = senders

    def start(
        self, step: int, config: Mapping[str, Any], rows: Callable[[], Iterable[metrics.Row]], *, anew: bool
    ) -> None:
        """rows: reads metrics.jsonl; of its rows until `step` each tracker gets what it lacks. For the rest see Sender.

        The file may be written meanwhile.
        """
        for sender in self._senders:
            sender.start(step, config, lambda: (_row_of(row) for row in rows() if row.step <= step), anew=anew)

    def write(self, step: int, epoch: int, split: str, values: Mapping[str, float]) -> None:
        row = Row(step, epoch, split, values, time.time())
        for sender in self._senders:
            sender.write(row)

    def rewind(self, step: int) -> None:
        """Do nothing: `start` does it."""

    def finish(self, ended: Ended, files: Sequence[Path], *, timeout_s: float = math.inf) -> None:
        """Hand over the files that exist; wait until all is kept, but not for long. Later calls do nothing."""
        for sender in self._senders:
            sender.ask_to_finish(ended, [file for file in files if file.exists()])
        deadline = time.monotonic() + min(FINISH_WITHIN_S[ended], timeout_s)
        for sender in self._senders:
            sender.wait_until_finished(deadline)
        self._senders = ()

    def close(self) -> None:
        """Do nothing: `finish` does it, which must know how the run ended."""


def load_trackers(specs: Sequence[Spec]) -> list[Callable[..., Tracker]]:
    """Import the classes of log.trackers, but nothing that they need. Raises UserError for a wrong name."""
    return [choose(TRACKERS, spec.name, "log.trackers") for spec in specs]


def build_trackers(specs: Sequence[Spec]) -> list[Tracker]:
    """Make the trackers of log.trackers. Raises UserError if an option is wrong or a package is missing."""
    return [_build(tracker_class, spec) for tracker_class, spec in zip(load_trackers(specs), specs, strict=True)]


def _build(tracker_class: Callable[..., Tracker], spec: Spec) -> Tracker:
    tracker: Tracker = call(tracker_class, spec, "log.trackers")
    check_methods(tracker, _METHODS, f"log.trackers: {spec.name}")
    return tracker


def _row_of(row: metrics.Row) -> Row:
    """Return a line of metrics.jsonl as a Row. When it was written is not known."""
    values = {name: math.nan if value is None else value for name, value in row.values.items()}
    return Row(row.step, row.epoch, row.split, values, time.time())
