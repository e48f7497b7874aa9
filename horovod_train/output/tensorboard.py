"""TensorBoard's files of a run, on root: scalars, histograms, the graph, profiles. Does not compute what it writes.

A disk that is full or gone costs charts, not the run: one warning, and training continues.

    python -m horovod_train.output.tensorboard FILE.xplane.pb …       prints the most expensive ops of profiles, as JSON

The package xprof reads the profiles. It runs in another process, because it is C++ that logs to standard error,
and whose failure must not end a run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from horovod_train.config.loader import by_key
from horovod_train.config.registry import import_extra
from horovod_train.errors import UserError
from horovod_train.host import answer_of
from horovod_train.output.files import Appender, free_path, rename
from horovod_train.output.metrics import FIGURES
from horovod_train.tfrecord_framing import frame

_WRITE_FROM_BYTES = 1 << 20
BUCKETS = 30
"""As in tf.summary.histogram, whose many small operations take ten times as long."""
NUMBERS_A_PIECE = 1 << 20
"""Of a weight, which are counted together; some copies of them take 20 MB."""

MOST_OPS = 10
READ_WITHIN_S = 60.0

_LOOP = re.compile(r"(?<![\w-])while/(body/_\d+/)?")
"""A part of each name, from the loop over the steps of a compiled call."""

_EVENTS = re.compile(r"events\.out\.tfevents\.(\d{10})\.")

log = logging.getLogger(__name__)


class Events(Appender):
    """An event file in TensorBoard's format: a TFRecord file whose records are Event messages.

    TensorFlow's own writer ignores records that cannot be written, and leaves half of one in the file.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        """first_step: the step that this start began at."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        # TensorBoard looks for names of this form; each start has a separate file.
        name = f"events.out.tfevents.{_number(folder):.6f}.{socket.gethostname()}.{os.getpid()}.v2"
        super().__init__(folder / name, unit="events", write_from_bytes=_WRITE_FROM_BYTES)
        self.put(file_version="brain.Event:2")
        # TensorBoard then forgets what earlier starts wrote from there on, before the run resumed.
        self.put(step=first_step + 1, session_log=SessionLog(status=SessionLog.START))

    def put(self, **content: Any) -> None:
        """Add an Event message with these fields and the time."""
        from tensorboard.compat.proto.event_pb2 import Event

        self.add(frame(Event(wall_time=time.time(), **content).SerializeToString()))

    def _write(self, data: bytes, sync: bool) -> None:
        folder = self.path.parent
        if not folder.is_dir():
            folder.parent.mkdir(exist_ok=True)  # no parents: if the run directory is gone, so is its disk
            folder.mkdir(exist_ok=True)
        super()._write(data, sync)


def _number(folder: Path) -> float:
    """Return the number in the name of a new event file: the time, but more than in the names of those that exist.

    TensorBoard reads them in the order of their names. The clock may have been ahead at an earlier start.
    """
    numbers: list[int] = []
    with contextlib.suppress(OSError):  # the first start makes the folder
        numbers = [int(match[1]) for name in os.listdir(folder) if (match := _EVENTS.match(name))]
    return max(time.time(), 1.0 + max(numbers, default=0))


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
        """Begin at `step`, before all else: add the settings, as text and as hyperparameters."""

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
        self._first_step = 0
        self._profiled: Any = None
        """The current step, while it is profiled."""

    def add_scalars(self, split: str, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        events = self._of(split)
        for name, value in values.items():
            events.put(step=step, summary=scalar_pb(name, value))
        events.flush()

    def add_config(self, step: int, config: Mapping[str, Any]) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._first_step = step
        events, settings = self._of("train"), dict(by_key(config))
        table = ["| setting | value |", "|---|---|", *(f"| {key} | {json.dumps(settings[key])} |" for key in settings)]
        events.put(step=step, summary=text_pb("config", "\n".join(table)))
        plain = {key: value for key, value in settings.items() if isinstance(value, bool | int | float | str)}
        events.put(step=step, summary=hparams_pb(plain, trial_id=str(self._directory)))
        events.flush()

    def add_histograms(self, step: int, values: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.histogram.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        metadata, events = create_summary_metadata(display_name=None, description=None), self._of("train")
        for name, value in values.items():
            buckets = make_tensor_proto(_buckets(value.numpy().ravel()))
            row = Summary.Value(tag=name, metadata=metadata, tensor=buckets)
            events.put(step=step, summary=Summary(value=[row]))
        events.flush()

    def add_graph(self, draw: Callable[[], Any]) -> None:
        events = self._of("train")
        events.put(graph_def=draw().SerializeToString())
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
                place = free_path(folder / f"step-{step:09d}")  # one may be there from before the run was resumed
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
            self._events[split] = Events(self._directory / split, self._first_step)
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
    group = FIGURES[name].group if name in FIGURES else ""
    return f"{group}/{name}" if group else name


def _buckets(numbers: np.ndarray) -> np.ndarray:
    """Return left edge, right edge and count of each bucket, float64 [BUCKETS, 3]; zeros without numbers.

    numbers: float [n], of which copies are made piece by piece, because a weight may be as large as the memory left.
    """
    bounds = [(finite.min(), finite.max()) for finite in _finite_in(numbers)]
    if not bounds:
        return np.zeros((BUCKETS, 3))
    lowest, highest = min(low for low, _ in bounds), max(high for _, high in bounds)
    if lowest == highest:
        counts = np.zeros(BUCKETS)
        counts[-1] = sum(finite.size for finite in _finite_in(numbers))
        return np.stack([np.full(BUCKETS, lowest), np.full(BUCKETS, lowest), counts], axis=1)
    counts = np.sum([np.histogram(finite, BUCKETS, (lowest, highest))[0] for finite in _finite_in(numbers)], axis=0)
    edges = np.histogram_bin_edges([], BUCKETS, (lowest, highest))
    return np.stack([edges[:-1], edges[1:], counts], axis=1)


def _finite_in(numbers: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the numbers that are finite as float32, in float64 and in pieces that are not empty."""
    for begin in range(0, numbers.size, NUMBERS_A_PIECE):
        piece = numbers[begin : begin + NUMBERS_A_PIECE].astype(np.float32)
        if (finite := piece[np.isfinite(piece)]).size:
            yield finite.astype(np.float64)


class Op(NamedTuple):
    """An op, or all of its occurrences in the step. ms: own time, without what it calls, in all threads together."""

    kind: str
    name: str
    ms: float


class Costs(NamedTuple):
    """The ops of a profiled step. place: "Host" or "Device"; ms: of all its ops. problem: why there are none, or ""."""

    step: int
    place: str
    ms: float
    ops: Sequence[Op]
    problem: str = ""

    @property
    def heading(self) -> str:
        if self.problem:
            return f"profile of step {self.step}: {self.problem}"
        return f"profile of step {self.step}: {self.ms:.1f} ms in ops on the {self.place.lower()}, all threads together"

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield ms, share, kind and name of each of the most expensive ops."""
        for op in self.ops:
            yield f"{op.ms:.2f}", f"{op.ms / self.ms:.1%}".replace("%", " %"), op.kind, op.name

    def text(self) -> str:
        """Return the heading and, below it, a line for each op."""
        lines = [f"{ms:>10} ms  {share:>6}  {kind:<36}  {name}" for ms, share, kind, name in self.rows()]
        return "\n".join([self.heading, *lines])


def find_profiles(run_dir: Path) -> list[Path]:
    """Return the folders of profiled steps, in their order."""
    return sorted((run_dir / "tensorboard" / "plugins" / "profile").glob("step-*"))


def read_profiles(folders: Sequence[Path]) -> list[Costs]:
    """Return what the ops in each folder cost, or why that cannot be read."""
    files = [next(folder.glob("*.xplane.pb"), None) for folder in folders]
    steps = [int(folder.name.split("-")[1]) for folder in folders]
    existing_files = [str(file) for file in files if file]
    costs_by_file, problem = _read_in_subprocess(existing_files) if existing_files else ({}, "")
    costs = []
    for step, file in zip(steps, files, strict=True):
        why = problem or ("" if file else "there is no file *.xplane.pb")
        place, ms, ops = costs_by_file.get(str(file), ("", 0.0, []))
        if not why and not ops:
            why = f"{file} holds no ops"
        costs.append(Costs(step, place, ms, [Op(*op) for op in ops], why and f"cannot be read: {why}."))
    return costs


def _read_in_subprocess(files: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Run this module; return what it prints, and what went wrong or ""."""
    if importlib.util.find_spec("xprof") is None:
        return {}, "it needs xprof: pip install 'horovod_train[profile]'"
    command = [sys.executable, "-m", __name__, *files]
    try:
        completed = answer_of(command, within_s=READ_WITHIN_S)
        completed.check_returncode()
        return json.loads(completed.stdout.splitlines()[-1]), ""
    except subprocess.TimeoutExpired:
        return {}, f"xprof took more than {READ_WITHIN_S:.0f} s"
    except subprocess.CalledProcessError as error:
        messages = error.stderr.strip().splitlines() or ["no word"]
        return {}, f"xprof ended with exit code {error.returncode}: {messages[-1]}"
    except (OSError, ValueError, IndexError) as error:
        return {}, f"{type(error).__name__}: {error}"


def most_expensive(file: str) -> tuple[str, float, list[Op]]:
    """Return place, ms of all ops, and the most expensive ops. A step that used a GPU is told by its ops there.

    Raises UserError if xprof is not installed.
    """
    convert: Any = import_extra("xprof.convert.raw_to_tool_data", "profile", "log.profile_at_steps")
    with tempfile.TemporaryDirectory() as folder:  # xprof leaves a file next to the profile
        link = Path(folder) / Path(file).name
        link.symlink_to(Path(file).resolve())
        answer, _ = convert.xspace_to_tool_data([str(link)], "framework_op_stats", {})
    tables = json.loads(answer or b"[]")  # as Google Charts take them
    if not tables:
        return "", 0.0, []
    columns = [column["id"] for column in tables[0]["cols"]]
    rows = [dict(zip(columns, (cell["v"] for cell in row["c"]), strict=True)) for row in tables[0]["rows"]]
    busy = [row for row in rows if row["type"] != "IDLE" and row["total_self_time"] > 0]
    place = "Device" if any(row["host_or_device"] == "Device" for row in busy) else "Host"
    ops = [
        Op(str(row["type"]), _LOOP.sub("", str(row["operation"])), row["total_self_time"] / 1000)
        for row in busy
        if row["host_or_device"] == place
    ]
    ops.sort(key=lambda op: op.ms, reverse=True)
    return place, sum(op.ms for op in ops), ops[:MOST_OPS]


if __name__ == "__main__":
    try:
        print(json.dumps({file: most_expensive(file) for file in sys.argv[1:]}))
    except UserError as error:
        sys.exit(str(error))
