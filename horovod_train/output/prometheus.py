"""metrics.prom in a run directory: the newest figures, in the text format that Prometheus' node exporter reads."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from horovod_train.output.files import must_be_writable, write_atomically
from horovod_train.output.removal import Artifact, begins

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

PROM = Artifact("a run's metrics for Prometheus", r"metrics\.prom", content_matches=lambda path: begins(path, _HEAD))

log = logging.getLogger(__name__)


class PrometheusFile:
    """Replaced as a whole at each line of metrics. A disk that is full or gone costs one warning."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "metrics.prom"
        self._run = str(directory.resolve())
        self._newest: dict[str, Mapping[str, float]] = {}
        self._step = self._epoch = 0
        self._progress = time.time()
        self._is_failing = False

    def write(self, step: int, epoch: int, split: str, values: Mapping[str, float]) -> None:
        self._newest[split] = dict(values)
        self._step, self._epoch, self._progress = step, epoch, time.time()
        self._try_to_write(is_running=True)

    def rewind(self, step: int) -> None:
        """Begin at `step`. Raises UserError."""
        self._step, self._progress = step, time.time()
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
            "epoch": [({}, self._epoch)],
            "examples_per_second": [
                ({}, values["examples_per_s"]) for values in self._newest.values() if "examples_per_s" in values
            ],
            "metric": [
                ({"split": split, "name": name}, value)
                for split, values in self._newest.items()
                for name, value in values.items()
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
