"""Runs steps and hooks from the state's current step until the last step or a stop reason. Builds nothing.

All ranks leave at the same step: each stop reason comes from reduced values or from a vote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from horovod_train.data.pipeline import Batch, Pipeline
from horovod_train.distributed.group import WorkerGroup
from horovod_train.training.hooks import Hook, Stopwatch
from horovod_train.training.state import TrainState
from horovod_train.training.step import TrainStep
from horovod_train.training.stopping import StopCoordinator

DONE = "done"

Used = Callable[[int, int, np.ndarray], None]
"""Called after each compiled call with the records this rank used: (epoch, first step in it, ids [steps, rows])."""


def train(
    group: WorkerGroup,
    state: TrainState,
    train_step: TrainStep,
    pipeline: Pipeline,
    hooks: Sequence[Hook],
    stopping: StopCoordinator,
    *,
    last_step: int,
    steps_per_call: int,
    watch: Stopwatch,
    used: Used,
    ended: str | None = None,
) -> tuple[str, bool]:
    """Train until `last_step`; a compiled call never runs past a step at which a hook is due.

    ended: why a resumed run has already ended, if it has.
    Returns the stop reason and whether the run was asked to stop; if so, it can be restarted.
    Raises DivergedError, on all ranks, where loss or gradients are no longer finite.
    """
    step, first = int(state.step), position(state, pipeline)
    epochs = max(1, -(-(first + last_step - step) // pipeline.steps_per_epoch))
    batches: Iterator[Batch] = iter(pipeline.batches(int(state.epoch), first, epochs))
    asked = stopping.vote()
    group.heartbeat.phase("compile")
    group.heartbeat.set_probe(train_step.phase_variable)
    if step and not asked and not ended:
        # First finish hooks that the last stop interrupted, such as an evaluation.
        ended = _run(step, [hook for hook in hooks if hook.is_due(step) and not hook.is_done(step)])
        asked = stopping.vote() if ended else None
    while step < last_step and not ended:
        rest = state.synchronization.next_sync_step(step)
        if asked and step == rest:
            break
        until = rest if asked else last_step
        next_stop = min([until, last_step, step + steps_per_call, *(hook.next_step(step) for hook in hooks)])
        done, goes_on, ids = train_step.run(batches, int(next_stop) - step)
        group.heartbeat.phase("train")
        if not watch.is_running:
            stopping.pace.forget()  # the first call compiles; later ones are faster
        watch.count(done, _move_on(state, pipeline, ids, used))
        step += done
        if not goes_on:
            raise state.failure.divergence(group)
        stopping.margin.time_to_safe_step_s = watch.s_per_step() * (
            state.synchronization.next_sync_step(step) - step + steps_per_call
        )
        ended = _run(step, [hook for hook in hooks if hook.is_due(step)])
        # A hook that ends the run may be an evaluation interrupted by a stop request.
        asked = asked or (stopping.vote() if ended else stopping.vote_periodically())
    state.check_finite(group)
    at_end = ("always",) if asked else ("done", "always")
    late = _run(step, [hook for hook in hooks if hook.at_end in at_end and not (hook.is_due(step) and not asked)])
    if late:  # may be an evaluation interrupted by a stop request
        asked = asked or stopping.vote()
    return asked or ended or late or DONE, bool(asked)


def position(state: TrainState, pipeline: Pipeline) -> int:
    """Return the index, within the epoch, of the next step."""
    return -(-int(state.records) // pipeline.global_batch_size)


def _move_on(state: TrainState, pipeline: Pipeline, ids: np.ndarray, used: Used) -> int:
    """Advance the state's place in the data by the steps of `ids`; return the records that all ranks used in them."""
    epoch, at, records = int(state.epoch), position(state, pipeline), 0
    while len(ids):
        steps = min(len(ids), pipeline.steps_per_epoch - at)
        used(epoch, at, ids[:steps])
        records += sum(pipeline.count(step) for step in range(at, at + steps))
        ids, at = ids[steps:], at + steps
        if at == pipeline.steps_per_epoch:
            epoch, at = epoch + 1, 0
    state.move_to(epoch, min(at * pipeline.global_batch_size, pipeline.num_records))
    return records


def _run(step: int, hooks: Sequence[Hook]) -> str | None:
    """Run all hooks; return the first stop reason, or None."""
    reasons = [hook.action(step) for hook in hooks]
    return next((reason for reason in reasons if reason), None)
