"""Run: what one training run consists of. Handed over whole at the top of training only: to hooks and to the loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from horovod_train.checkpoint.manager import Store
from horovod_train.checkpoint.tensors import Checkpoint
from horovod_train.config.settings import Config
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.watchdog.heartbeat import HOOK
from horovod_train.distributed.watchdog.watchdog import RunEnd
from horovod_train.output.run_dir import Output
from horovod_train.training.build import Components
from horovod_train.training.phase_times import PhaseTimes, Stopwatch
from horovod_train.training.state import TrainState
from horovod_train.training.stopping import StopCoordinator


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
    """Seconds since 1970."""
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
