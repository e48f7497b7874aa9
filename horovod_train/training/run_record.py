"""What one training run consists of (Run), and the clocks that tell how fast it is and where its time goes.

A Run is handed over whole at the top of training only: to hooks and to the loop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from horovod_train.checkpoint.layout import Checkpoint
from horovod_train.checkpoint.manager import Store
from horovod_train.config.settings import Config
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.watchdog.heartbeat import HOOK
from horovod_train.distributed.watchdog.watchdog import RunEnd
from horovod_train.output.run_dir import Output
from horovod_train.training.build import Components
from horovod_train.training.state import TrainState
from horovod_train.training.stopping import StopCoordinator

LOOK_EVERY_S = 0.1
"""Where all cores are busy a look takes 0.5 ms of CPU time, alone 30 µs; at 0.01 steps took 5 % longer."""

MEASURED_PHASES = ("input", "compute", HOOK, "exchange")
"""Those of a step, and users' hooks and Keras callbacks between steps."""


@dataclass
class Stopwatch:
    """Measures training time, without evaluation, saving and the first call, which compiles."""

    seconds: float = 0.0
    steps: int = 0
    records: int = 0
    is_running: bool = False
    _lap: float = field(default=0.0, repr=False)
    _blocked: dict[str, float] = field(default_factory=dict, repr=False)

    def count(self, steps: int, records: int) -> None:
        """Add a finished call; the first one only starts the watch."""
        if self.is_running:
            self.steps += steps
            self.records += records
        else:
            self._lap, self.is_running = time.perf_counter(), True

    def read(self) -> tuple[float, int, int]:
        """Return seconds, steps and records so far."""
        if self.is_running:
            now = time.perf_counter()
            self.seconds, self._lap = self.seconds + now - self._lap, now
        return self.seconds, self.steps, self.records

    def s_per_step(self) -> float:
        """Return the mean seconds per step; 0 if nothing has been measured yet."""
        seconds, steps, _ = self.read()
        return seconds / steps if steps else 0.0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.read()
        yield
        self._lap = time.perf_counter()

    def note_blocked(self, name: str, seconds: float) -> None:
        """Note the time for which something has blocked training."""
        self._blocked[name] = self._blocked.get(name, 0.0) + seconds

    def take_blocked(self) -> dict[str, float]:
        """Return by name what was noted since the last call."""
        taken, self._blocked = self._blocked, {}
        return taken


class PhaseTimes:
    """Measures how long this rank is in each phase of training, by looking at it from a thread.

    phase: returns the present one of MEASURED_PHASES, or None in others, such as an evaluation.
    """

    def __init__(self, phase: Callable[[], str | None]) -> None:
        self._phase, self._ended, self._lock = phase, threading.Event(), threading.Lock()
        self._seconds = np.zeros(len(MEASURED_PHASES))
        self._thread = threading.Thread(target=self._look, name="phase times", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(timeout=1.0)  # a look may hang with a stuck process, which then ends without it

    def take(self) -> np.ndarray:
        """Return the seconds in each of MEASURED_PHASES since the last call."""
        with self._lock:
            taken, self._seconds = self._seconds, np.zeros(len(MEASURED_PHASES))
        return taken

    def _look(self) -> None:
        before, last = time.perf_counter(), None
        while not self._ended.wait(LOOK_EVERY_S):
            phase, now = self._phase(), time.perf_counter()
            # The whole time since the last look: a process that was stopped has looked neither before nor after.
            if phase is not None and last is not None:
                with self._lock:
                    self._seconds[MEASURED_PHASES.index(phase)] += now - before
            before, last = now, phase


@dataclass(frozen=True)
class Run:
    """One training run on this rank. `output` and `store` do nothing on ranks other than root.

    Users' hooks may rely on config, group, output and state; the rest may change.
    """

    config: Config
    """With the global batch size and data.inputs filled in."""
    group: WorkerGroup
    output: Output
    store: Store
    stopping: StopCoordinator
    run_end: RunEnd
    parts: Components
    checkpoint: Checkpoint | None
    """On root, the checkpoint to resume from, if there is one."""
    started: float
    """On time.monotonic's clock."""
    phase_times: PhaseTimes
    clock: Stopwatch = field(default_factory=Stopwatch)

    @property
    def state(self) -> TrainState:
        """The model, its optimizer, and the place of the run in the data."""
        return self.parts.state

    @contextmanager
    def outside_training(self, phase: str, detail: str = "") -> Iterator[None]:
        """Leave the block's time out of the training time and of the time between votes.

        phase, detail: what the watchdog reports if the block takes too long.
        """
        began = time.monotonic()
        with self.clock.stopped(), self.stopping.pace.other_calls(), self.group.heartbeat.phase(phase, detail):
            yield
        if phase == HOOK:
            self.stopping.note_hook(time.monotonic() - began)
