"""TensorBoard's files of a run, on root: scalars, histograms, the graph, profiles. Does not compute what it writes.

A disk that is full or gone costs charts, not the run: it is said once, and training goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from horovod_train.removal import rename

BUCKETS = 30
"""As tf.summary.histogram has them, whose many small operations take ten times as long."""


class Board:
    """One event folder for each split, so that train and eval share a chart; profiles where TensorBoard looks for them.

    say: shows a line.
    """

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        import tensorflow as tf  # the run directory must be checked before TensorFlow is loaded

        self._tf, self._directory, self._say = tf, directory, say
        self._writers: dict[str, Any] = {}
        self._is_failing = False
        self._profiled: Any = None
        """The step under way, while it is profiled."""

    def add_scalars(self, split: str, step: int, values: Mapping[str, float]) -> None:
        def write() -> None:
            for name, value in values.items():
                self._tf.summary.scalar(name, value)

        self._write(split, step, write)

    def add_histograms(self, step: int, values: Mapping[str, Any]) -> None:
        """values: floating tensors or variables of any shape, by name; numbers that are not finite are left out."""
        from tensorboard.plugins.histogram.metadata import create_summary_metadata

        def write() -> None:
            for name, value in values.items():
                metadata = create_summary_metadata(display_name=None, description=None)
                self._tf.summary.write(name, _buckets(value.numpy().astype(np.float32).ravel()), metadata=metadata)

        self._write("train", step, write)

    def add_graph(self, graph: Any) -> None:
        """graph: a GraphDef."""
        self._write("train", 0, lambda: self._tf.summary.graph(graph))

    def start_profile(self, step: int) -> None:
        """From now on every op is timed, until `stop_profile`: that is called when `step` is done."""
        profiler = self._tf.profiler.experimental
        # 2: also the ops on the host, and what they allocate.
        with self._failure_is_said():
            profiler.start(str(self._directory), profiler.ProfilerOptions(host_tracer_level=2))
            self._profiled = profiler.Trace("train", step_num=step, _r=1)
            self._profiled.__enter__()

    def stop_profile(self, step: int) -> None:
        """Writes what was seen to `plugins/profile/step-N`, or `step-N-2`, … where that is taken."""
        if self._profiled is None:
            return
        self._profiled.__exit__(None, None, None)
        self._profiled = None
        folder = self._directory / "plugins" / "profile"
        with self._failure_is_said():
            before = set(folder.glob("*"))
            self._tf.profiler.experimental.stop()
            for made in set(folder.glob("*")) - before:
                place, number = folder / f"step-{step:09d}", 1
                while place.exists():  # of a course that the run left
                    number += 1
                    place = folder / f"step-{step:09d}-{number}"
                rename(made, place)

    def close(self) -> None:
        if self._profiled is not None:  # the run left before that step
            self._profiled.__exit__(None, None, None)
            self._tf.profiler.experimental.stop(save=False)
        for writer in self._writers.values():
            with contextlib.suppress(self._tf.errors.OpError):  # said when it began
                writer.close()

    def _write(self, split: str, step: int, write: Callable[[], None]) -> None:
        with self._failure_is_said():
            if split not in self._writers:
                self._writers[split] = self._tf.summary.create_file_writer(str(self._directory / split))
            with self._writers[split].as_default(step):
                write()
            self._writers[split].flush()

    @contextlib.contextmanager
    def _failure_is_said(self) -> Any:
        try:
            yield
            self._is_failing = False
        except (OSError, self._tf.errors.OpError) as error:
            if not self._is_failing:
                self._say(f"warning: {self._directory} cannot be written: {str(error)[:200]}. Training goes on.")
            self._is_failing = True


def _buckets(numbers: np.ndarray) -> np.ndarray:
    """Left edge, right edge and count of each bucket, float64 [BUCKETS, 3]; zeros where there are no numbers."""
    finite = numbers[np.isfinite(numbers)].astype(np.float64)
    if not finite.size:
        return np.zeros((BUCKETS, 3))
    least, most = finite.min(), finite.max()
    if least == most:
        counts = np.zeros(BUCKETS)
        counts[-1] = finite.size
        return np.stack([np.full(BUCKETS, least), np.full(BUCKETS, least), counts], axis=1)
    counts, edges = np.histogram(finite, BUCKETS, (least, most))
    return np.stack([edges[:-1], edges[1:], counts], axis=1)
