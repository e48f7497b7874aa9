"""The actions of a run between steps: log, evaluate, check, save. hooks and agenda decide when they are due.

Every rank runs all of them, in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from horovod_train.checkpoint.manager import Store
from horovod_train.checkpoint.tensors import Facts
from horovod_train.data.audit import Audit
from horovod_train.data.pipeline import Pipeline
from horovod_train.distributed import consistency
from horovod_train.distributed.group import WorkerGroup
from horovod_train.output.run_dir import Output
from horovod_train.training.hooks import Action, Stopwatch
from horovod_train.training.state import TrainState
from horovod_train.training.step import EvalStep, TrainStep
from horovod_train.training.stopping import PeriodicSync, StopCoordinator


@dataclass(eq=False)
class LogTraining:
    """Logs mean training loss and metrics since the last log, the learning rate and the speed."""

    group: WorkerGroup
    output: Output
    state: TrainState
    pipeline: Pipeline
    train_step: TrainStep
    watch: Stopwatch
    more: dict[str, float] = field(default_factory=dict, init=False)
    """Values that other actions add to the next log line, such as the time that saving blocked training."""

    def __post_init__(self) -> None:
        self.last_read: tuple[float, int, int] = (0.0, 0, 0)
        self.last_step = int(self.state.step)

    def add(self, name: str, seconds: float) -> None:
        """Add to the next log line the time for which something has blocked training."""
        self.more[name] = self.more.get(name, 0.0) + seconds

    def __call__(self, step: int) -> None:
        if step == self.last_step:
            return  # no new steps
        self.last_step = step
        values = self.train_step.seen.result(self.group)
        averages = self.state.average_losses(self.group)
        averages["total_loss"] = averages["loss"] + averages["penalty"]
        values["total_loss"] = values["loss"] + values["penalty"]
        if not values["penalty"]:  # without a penalty, total_loss is the loss
            for name in ("penalty", "total_loss"):
                del values[name], averages[name]
        values |= {f"{name}_average": average for name, average in averages.items()}
        read = self.watch.read()
        seconds, steps, records = (now - before for now, before in zip(read, self.last_read, strict=True))
        self.last_read = read
        if drift := self.state.synchronization.drift():
            values["ranks_apart"], moves = drift
            if moves:
                values["unchanged_parameters"] = sum(not changed for each in moves.values() for changed in each.changed)
                self.output.append_parameters(step, {path: each._asdict() for path, each in moves.items()})
        values["learning_rate"] = float(self.state.optimizer.learning_rate)
        if steps and seconds:
            values["examples_per_s"] = records / seconds
            values["examples_per_s_per_rank"] = records / seconds / self.group.size
            values["s_per_step"] = seconds / steps
        if skipped := int(self.train_step.skipped):
            values["skipped_updates"] = skipped
        if bad := int(self.group.sum([self.pipeline.skipped])[0]):
            values["skipped_records"] = bad
        values, self.more = values | self.more, {}
        self.output.append_metrics("train", step, int(self.state.epoch), values)


@dataclass(eq=False)
class Evaluate:
    """Computes loss and metrics over the whole evaluation set: each record once, at any number of ranks."""

    group: WorkerGroup
    output: Output
    state: TrainState
    pipeline: Pipeline
    eval_step: EvalStep
    watch: Stopwatch
    stopping: StopCoordinator
    steps_per_call: int
    evaluated: tf.Variable
    """int64: the step of the last completed evaluation."""
    watchers: Sequence[Callable[[int, Mapping[str, float]], str | None]]
    """Called with (step, values) after each evaluation; a returned stop reason ends the run."""

    def is_done(self, step: int) -> bool:
        return int(self.evaluated) == step

    def __call__(self, step: int) -> str | None:
        if self.is_done(step):
            return None
        other_calls = self.stopping.pace.other_calls()
        with self.watch.stopped(), other_calls, self.group.heartbeat.phase("evaluate"):
            self.state.settle(self.group)
            own = self.state.average_statistics(self.group)
            with self.state.averages.in_place():
                reason = self._run_all()
            values = self.eval_step.seen.result(self.group)
            self.state.set_statistics(own)
        if reason:
            return reason
        self.evaluated.assign(step)
        self.output.append_metrics("eval", step, int(self.state.epoch), values)
        reasons = [watcher(step, values) for watcher in self.watchers]
        return next((reason for reason in reasons if reason), None)

    def _run_all(self) -> str | None:
        batches = iter(self.pipeline.batches(epoch=0, epochs=1))
        left = self.pipeline.steps_per_epoch
        while left:
            steps = min(left, self.steps_per_call)
            self.group.heartbeat.phase("evaluate")  # tells the stall detector that there is progress
            with self.pipeline.explaining():  # by default errors are explained from the training data
                self.eval_step.run(batches, steps)
            left -= steps
            if reason := self.stopping.vote_periodically():
                return reason
        return None


@dataclass(eq=False)
class CheckAgreement:
    """Ends the run if weights, slots or counters differ between ranks."""

    group: WorkerGroup
    state: TrainState
    log: LogTraining

    def __call__(self, step: int) -> None:
        started = time.perf_counter()
        consistency.check(self.group, self.state.settle(self.group).digests(), f"at step {step}")
        self.log.add("check_agreement_s", time.perf_counter() - started)


@dataclass(eq=False)
class Save:
    """Passes a copy of the state to the store, after checking that it is equal on all ranks."""

    group: WorkerGroup
    store: Store
    state: TrainState
    watch: Stopwatch
    stopping: StopCoordinator
    log: LogTraining
    audit: Audit
    facts: Callable[[], Facts]

    def __post_init__(self) -> None:
        self.last_step = int(self.state.step)

    def __call__(self, step: int) -> str | None:
        if step == self.last_step:
            return None
        started = time.perf_counter()
        with self.watch.stopped(), self.group.heartbeat.phase("save"):
            settled = self.state.settle(self.group)
            consistency.check(self.group, settled.digests(), f"at step {step}")
            arrays = settled.snapshot(self.group)
            self.audit.flush()
            self.store.save(arrays, self.facts())
        self.last_step = step
        seconds = time.perf_counter() - started
        self.stopping.note_save(seconds)
        self.log.add("save_blocked_s", seconds)
        return None


@dataclass(eq=False)
class EveryMinutes:
    """Runs an action every `minutes` by root's clock, which all ranks read about once a second, after a call."""

    group: WorkerGroup
    minutes: float
    action: Action

    def __post_init__(self) -> None:
        self.last, self.pace = time.monotonic(), PeriodicSync(self.group)

    def __call__(self, step: int) -> str | None:
        if not self.pace.is_due():
            return None
        is_over = self.group.is_root and time.monotonic() - self.last >= 60 * self.minutes
        (over,) = self.pace.meet([float(is_over)])
        if not over:
            return None
        self.last = time.monotonic()
        return self.action(step)
