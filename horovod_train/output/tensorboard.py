"""TensorBoard's files of a run, on root: scalars, histograms, the graph, profiles. Does not compute what it writes.

A disk that is full or gone costs charts, not the run: one warning, and training continues.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from horovod_train.config.loader import by_key
from horovod_train.output.files import Appender, rename
from horovod_train.output.profile import read_profiles
from horovod_train.tfrecord_framing import frame

_WRITE_FROM_BYTES = 1 << 20
BUCKETS = 30
"""As in tf.summary.histogram, whose many small operations take ten times as long."""

log = logging.getLogger(__name__)


class Events(Appender):
    """An event file in TensorBoard's format: a TFRecord file whose records are Event messages.

    TensorFlow's own writer ignores records that cannot be written, and leaves half of one in the file.
    """

    def __init__(self, folder: Path) -> None:
        # TensorBoard looks for names of this form; each start has a separate file.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}.v2"
        super().__init__(folder / name, unit="events", write_from_bytes=_WRITE_FROM_BYTES)
        self._add(file_version="brain.Event:2")

    def add_summary(self, step: int, summary: Any) -> None:
        self._add(step=step, summary=summary)

    def add_graph(self, graph: Any) -> None:
        self._add(graph_def=graph.SerializeToString())

    def _add(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.add(frame(Event(wall_time=time.time(), **content).SerializeToString()))

    def _write(self, data: bytes, sync: bool) -> None:
        folder = self.path.parent
        if not folder.is_dir():
            folder.parent.mkdir(exist_ok=True)  # no parents: if the run directory is gone, so is its disk
            folder.mkdir(exist_ok=True)
        super()._write(data, sync)


class TensorBoard:
    """The charts of a run. This one, of ranks other than root and of runs without TensorBoard, writes nothing."""

    def write(self, step: int, epoch: int, split: str, values: Mapping[str, float]) -> None:
        """Add the metrics of a split at a step, as MetricsWriter does."""
        self.add_scalars(split, step, {_chart(name): value for name, value in values.items()})

    def rewind(self, step: int) -> None:
        """Do nothing: each start writes new files, and those of earlier starts stay as they are."""

    def add_scalars(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each of these charts."""

    def add_config(self, step: int, config: Mapping[str, Any]) -> None:
        """Add the settings, as text and as hyperparameters."""

    def add_histograms(self, step: int, values: Mapping[str, Any]) -> None:
        """values: floating tensors or variables of any shape, by name; non-finite numbers are left out."""

    def add_graph(self, draw: Callable[[], Any]) -> None:
        """draw: builds the GraphDef."""

    def start_profile(self, step: int) -> None:
        """Time every op from now on, until `stop_profile`, which is called when `step` is done."""

    def stop_profile(self, step: int) -> None:
        """Write the profile to `plugins/profile/step-N`, or `step-N-2`, … if that exists; log what its ops cost."""

    def close(self) -> None:
        """Return when all is on disk, if the disk accepts it."""


class TensorBoardWriter(TensorBoard):
    """Writes an event folder for each split, so that train and eval share a chart; profiles where TensorBoard looks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._events: dict[str, Events] = {}
        self._profiled: Any = None
        """The current step, while it is profiled."""

    def add_scalars(self, split: str, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        events = self._of(split)
        for name, value in values.items():
            events.add_summary(step, scalar_pb(name, value))
        events.flush()

    def add_config(self, step: int, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        events, settings = self._of("train"), dict(by_key(config))
        table = ["| setting | value |", "|---|---|", *(f"| {key} | {json.dumps(settings[key])} |" for key in settings)]
        metadata = create_summary_metadata(display_name=None, description=None)
        text = make_tensor_proto("\n".join(table).encode())
        events.add_summary(step, Summary(value=[Summary.Value(tag="config", metadata=metadata, tensor=text)]))
        plain = {key: value for key, value in settings.items() if isinstance(value, bool | int | float | str)}
        events.add_summary(step, hparams_pb(plain, trial_id=str(self._directory)))
        events.flush()

    def add_histograms(self, step: int, values: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.histogram.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        metadata, events = create_summary_metadata(display_name=None, description=None), self._of("train")
        for name, value in values.items():
            buckets = make_tensor_proto(_buckets(value.numpy().astype(np.float32).ravel()))
            row = Summary.Value(tag=name, metadata=metadata, tensor=buckets)
            events.add_summary(step, Summary(value=[row]))
        events.flush()

    def add_graph(self, draw: Callable[[], Any]) -> None:
        events = self._of("train")
        events.add_graph(draw())
        events.flush()

    def start_profile(self, step: int) -> None:
        from tensorflow.profiler import experimental as profiler

        # Level 2 also records the ops on the host, and what they allocate.
        with self._failure_is_logged():
            profiler.start(str(self._directory), profiler.ProfilerOptions(host_tracer_level=2))
            self._profiled = profiler.Trace("train", step_num=step, _r=1)
            self._profiled.__enter__()

    def stop_profile(self, step: int) -> None:
        from tensorflow.profiler import experimental as profiler

        if self._profiled is None:
            return
        self._profiled.__exit__(None, None, None)
        self._profiled = None
        folder = self._directory / "plugins" / "profile"
        with self._failure_is_logged():
            before = set(folder.glob("*"))
            profiler.stop()
            for new_folder in set(folder.glob("*")) - before:
                place, number = folder / f"step-{step:09d}", 1
                while place.exists():  # from before the run was resumed
                    number += 1
                    place = folder / f"step-{step:09d}-{number}"
                log.info(read_profiles([rename(new_folder, place)])[0].text())

    def close(self) -> None:
        if self._profiled is not None:  # the run ended before that step
            from tensorflow.profiler import experimental as profiler

            self._profiled.__exit__(None, None, None)
            profiler.stop(save=False)
        for events in self._events.values():
            events.close()

    def _of(self, split: str) -> Events:
        if split not in self._events:
            self._events[split] = Events(self._directory / split)
        return self._events[split]

    @contextlib.contextmanager
    def _failure_is_logged(self) -> Iterator[None]:
        from tensorflow.errors import OpError

        try:
            yield
        except (OSError, OpError) as error:
            log.warning(f"{self._directory}: a profile was not written: {str(error)[:200]}. Training continues.")


def _chart(name: str) -> str:
    """Return the name of a figure's chart: TensorBoard shows charts by groups, which names before a `/` make."""
    if name.startswith(("examples_per_s", "s_per_step")):
        return f"speed/{name}"
    if name.endswith("_share") or name.startswith(("own_s_per_step", "slowest_rank", "save_blocked")):
        return f"time/{name}"
    return name


def _buckets(numbers: np.ndarray) -> np.ndarray:
    """Return left edge, right edge and count of each bucket, float64 [BUCKETS, 3]; zeros without numbers."""
    finite = numbers[np.isfinite(numbers)].astype(np.float64)
    if not finite.size:
        return np.zeros((BUCKETS, 3))
    lowest, highest = finite.min(), finite.max()
    if lowest == highest:
        counts = np.zeros(BUCKETS)
        counts[-1] = finite.size
        return np.stack([np.full(BUCKETS, lowest), np.full(BUCKETS, lowest), counts], axis=1)
    counts, edges = np.histogram(finite, BUCKETS, (lowest, highest))
    return np.stack([edges[:-1], edges[1:], counts], axis=1)
