"""What happens between steps: every(n, action), and the actions log, evaluate and save. Every rank runs all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from horovod_train.checkpoint import NoStore
from horovod_train.data.pipeline import Pipeline
from horovod_train.distributed import agreement
from horovod_train.distributed.group import WorkerGroup
from horovod_train.errors import DivergedError
from horovod_train.metrics import Accumulator
from horovod_train.output import NoOutput
from horovod_train.state import TrainState
from horovod_train.step import EvalStep

Action = Callable[[int], None]


@dataclass(frozen=True)
class Hook:
    """Calls `action(step)` after every step that is a multiple of `every_steps` and, if asked, after the last."""

    every_steps: int | None
    action: Action
    at_end: bool = False

    def next_step(self, step: int) -> float:
        """The first step after `step` at which it is due."""
        return math.inf if self.every_steps is None else (step // self.every_steps + 1) * self.every_steps

    def is_due(self, step: int, last_step: int) -> bool:
        if step == last_step and self.at_end:
            return True
        return self.every_steps is not None and step % self.every_steps == 0


def every(steps: int | None, action: Action, *, at_end: bool = False) -> Hook:
    return Hook(steps, action, at_end)


@dataclass
class Stopwatch:
    """Seconds spent training, without those spent evaluating and saving, nor the first call, which compiles."""

    seconds: float = 0.0
    steps: int = 0
    records: int = 0
    _lap: float = field(default=0.0, repr=False)
    _runs: bool = field(default=False, repr=False)

    def count(self, steps: int, records: int) -> None:
        """After each call: what it did. The first only starts the watch."""
        if self._runs:
            self.steps += steps
            self.records += records
        else:
            self._lap, self._runs = time.perf_counter(), True

    def read(self) -> tuple[float, int, int]:
        """Seconds, steps and records so far."""
        if self._runs:
            now = time.perf_counter()
            self.seconds, self._lap = self.seconds + now - self._lap, now
        return self.seconds, self.steps, self.records

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.read()
        yield
        self._lap = time.perf_counter()


class LogTraining:
    """Shows the mean training loss and metrics since the last time, the learning rate and the speed."""

    def __init__(
        self, group: WorkerGroup, output: NoOutput, state: TrainState, seen: Accumulator, watch: Stopwatch
    ) -> None:
        self.group, self.output, self.state, self.seen, self.watch = group, output, state, seen, watch
        self.last_read: tuple[float, int, int] = (0.0, 0, 0)
        self.newest: dict[str, float] = {}

    def __call__(self, step: int) -> None:
        values = self.seen.result(self.group)
        read = self.watch.read()
        seconds, steps, records = (now - before for now, before in zip(read, self.last_read, strict=True))
        self.last_read = read
        values["learning_rate"] = float(self.state.optimizer.learning_rate)
        if steps and seconds:
            values["examples_per_s"] = records / seconds
            values["examples_per_s_per_rank"] = records / seconds / self.group.size
            values["s_per_step"] = seconds / steps
        self.newest = values
        self.output.append_metrics("train", step, int(self.state.epoch), values)
        # The reduced loss: all ranks see the same number and leave at the same step.
        if not math.isfinite(values["loss"]):
            shown = "NaN" if math.isnan(values["loss"]) else str(values["loss"])
            raise DivergedError(f"Model diverged with loss = {shown} at step {step}. Lower lr_schedule.base_lr?")


class Evaluate:
    """Loss and metrics over the whole evaluation set, each record once, whatever the number of ranks."""

    def __init__(
        self,
        group: WorkerGroup,
        output: NoOutput,
        state: TrainState,
        pipeline: Pipeline,
        eval_step: EvalStep,
        watch: Stopwatch,
    ) -> None:
        self.group, self.output, self.state, self.pipeline = group, output, state, pipeline
        self.eval_step, self.watch = eval_step, watch
        self.newest: dict[str, float] = {}

    def __call__(self, step: int) -> None:
        with self.watch.stopped():
            self.state.average_statistics(self.group)
            batches = iter(self.pipeline.batches(epoch=0, epochs=1))
            self.eval_step.run(batches, self.pipeline.steps_per_epoch)
            self.newest = self.eval_step.seen.result(self.group)
            self.output.append_metrics("eval", step, int(self.state.epoch), self.newest)


class Save:
    """Writes a checkpoint, after all ranks have shown that they hold the same state."""

    def __init__(self, group: WorkerGroup, store: NoStore, state: TrainState, watch: Stopwatch) -> None:
        self.group, self.store, self.state, self.watch = group, store, state, watch

    def __call__(self, step: int) -> None:
        with self.watch.stopped():
            self.state.average_statistics(self.group)
            agreement.check(self.group, self.state.digests(), f"at step {step}")
            self.store.save(self.state)
