"""What happens between steps: every(n, action), and the actions log, evaluate, check and save.

Every rank runs all of them, in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import tensorflow as tf

from horovod_train.checkpoint import NoStore
from horovod_train.checkpoint_files import Facts
from horovod_train.data.audit import NoAudit
from horovod_train.data.pipeline import Pipeline
from horovod_train.distributed import agreement
from horovod_train.distributed.group import WorkerGroup
from horovod_train.leaving import Leaving, Pace
from horovod_train.output import NoOutput
from horovod_train.state import TrainState
from horovod_train.step import EvalStep, TrainStep

Action = Callable[[int], str | None]
"""step → why the run must end, or None. Decided on reduced values, so that every rank answers the same."""


@dataclass(frozen=True)
class Hook:
    """Calls `action(step)` after every step that is a multiple of `every_steps` and, if asked, at the end.

    at_end: "done" where training came to its end; "always" also where the run leaves early, to be started again.
    """

    every_steps: int | None
    action: Action
    at_end: Literal["no", "done", "always"] = "no"
    is_done: Callable[[int], bool] = lambda step: True
    """Whether a run that goes on from a step at which the hook was due need not make up for it."""

    def next_step(self, step: int) -> float:
        """The first step after `step` at which it is due."""
        return math.inf if self.every_steps is None else (step // self.every_steps + 1) * self.every_steps

    def is_due(self, step: int) -> bool:
        return self.every_steps is not None and step % self.every_steps == 0


def every(steps: int | None, action: Action, **options: Any) -> Hook:
    return Hook(steps, action, **options)


@dataclass(frozen=True)
class HookAt(Hook):
    """Calls `action(step)` after each of some steps."""

    steps: tuple[int, ...] = ()

    def next_step(self, step: int) -> float:
        return min((at for at in self.steps if at > step), default=math.inf)

    def is_due(self, step: int) -> bool:
        return step in self.steps


def at(steps: Sequence[int], action: Action, **options: Any) -> Hook:
    return HookAt(None, action, steps=tuple(steps), **options)


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

    def s_per_step(self) -> float:
        """The mean so far; 0 as long as nothing has been measured."""
        seconds, steps, _ = self.read()
        return seconds / steps if steps else 0.0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.read()
        yield
        self._lap = time.perf_counter()


class LogTraining:
    """Shows the mean training loss and metrics since the last time, the learning rate and the speed."""

    def __init__(
        self,
        group: WorkerGroup,
        output: NoOutput,
        state: TrainState,
        pipeline: Pipeline,
        train_step: TrainStep,
        watch: Stopwatch,
    ) -> None:
        self.group, self.output, self.state = group, output, state
        self.pipeline, self.train_step, self.watch = pipeline, train_step, watch
        self.last_read: tuple[float, int, int] = (0.0, 0, 0)
        self.last_step = int(state.step)
        self.more: dict[str, float] = {}
        """Figures of others for the next line, such as how long saving has held up training."""

    def add(self, name: str, seconds: float) -> None:
        """For the next line: how long something has held up training since the last."""
        self.more[name] = self.more.get(name, 0.0) + seconds

    def __call__(self, step: int) -> None:
        if step == self.last_step:
            return  # nothing to tell since
        self.last_step = step
        values = self.train_step.seen.result(self.group)
        values["loss_average"] = self.state.average_loss(self.group)
        if not values["penalty"]:
            del values["penalty"]
        read = self.watch.read()
        seconds, steps, records = (now - before for now, before in zip(read, self.last_read, strict=True))
        self.last_read = read
        values |= self.state.synchronization.figures(self.group)
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
        leaving: Leaving,
        steps_per_call: int,
        evaluated: tf.Variable,
    ) -> None:
        self.group, self.output, self.state, self.pipeline = group, output, state, pipeline
        self.evaluated = evaluated
        self.eval_step, self.watch, self.leaving, self.steps_per_call = eval_step, watch, leaving, steps_per_call
        self.watchers: list[Callable[[int, Mapping[str, float]], str | None]] = []
        """Told (step, values) after each evaluation; what they return ends the run."""

    def is_done(self, step: int) -> bool:
        return int(self.evaluated) == step

    def __call__(self, step: int) -> str | None:
        if self.is_done(step):
            return None
        with self.watch.stopped(), self.group.heartbeat.phase("evaluate"):
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
        self.leaving.pace.start_anew()
        while left:
            steps = min(left, self.steps_per_call)
            self.group.heartbeat.phase("evaluate")  # each call is progress
            with self.pipeline.explaining():  # the caller would look for it in the training data
                self.eval_step.run(batches, steps)
            left -= steps
            if reason := self.leaving.vote_now_and_then():
                return reason
        return None


class CheckAgreement:
    """Ends the run where ranks do not hold the same weights, slots and counters."""

    def __init__(self, group: WorkerGroup, state: TrainState, log: LogTraining) -> None:
        self.group, self.state, self.log = group, state, log

    def __call__(self, step: int) -> None:
        started = time.perf_counter()
        self.state.settle(self.group)
        agreement.check(self.group, self.state.digests(), f"at step {step}")
        self.log.add("check_agreement_s", time.perf_counter() - started)


class Save:
    """Hands a copy of the state to the store, after all ranks have shown that they hold the same."""

    def __init__(
        self,
        group: WorkerGroup,
        store: NoStore,
        state: TrainState,
        watch: Stopwatch,
        leaving: Leaving,
        log: LogTraining,
        audit: NoAudit,
        facts: Callable[[], Facts],
    ) -> None:
        self.group, self.store, self.state, self.watch = group, store, state, watch
        self.leaving, self.log, self.audit, self.facts = leaving, log, audit, facts
        self.last_step = int(state.step)

    def __call__(self, step: int) -> str | None:
        if step == self.last_step:
            return None
        started = time.perf_counter()
        with self.watch.stopped(), self.group.heartbeat.phase("save"):
            self.state.settle(self.group)
            agreement.check(self.group, self.state.digests(), f"at step {step}")
            arrays = self.state.snapshot(self.group)
            self.audit.flush()
            self.store.save(arrays, self.facts())
        self.last_step = step
        seconds = time.perf_counter() - started
        self.leaving.keep_in_hand(seconds)
        self.log.add("save_blocked_s", seconds)
        return None


class EveryMinutes:
    """Runs an action when root's clock says so: after a call, about once a second, every rank asks root."""

    def __init__(self, group: WorkerGroup, minutes: float, action: Action) -> None:
        self.group, self.seconds, self.action = group, 60 * minutes, action
        self.last, self.pace = time.monotonic(), Pace()

    def __call__(self, step: int) -> str | None:
        if not self.pace.is_due():
            return None
        is_over = self.group.is_root and time.monotonic() - self.last >= self.seconds
        over, seconds = self.group.sum([float(is_over), self.pace.since()])
        self.pace.met(float(seconds) / self.group.size)
        if not over:
            return None
        self.last = time.monotonic()
        return self.action(step)
