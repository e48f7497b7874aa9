"""Runs steps and hooks from the state's current step until the last step or a stop reason. Builds nothing.

All ranks leave at the same step: each stop reason comes from reduced values or from a vote.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from horovod_train.data.audit import Audit
from horovod_train.data.pipeline.batch_source import Batches, BatchSource
from horovod_train.errors import RunError
from horovod_train.training.hooks import Hook
from horovod_train.training.run_record import Run
from horovod_train.training.state import TrainState
from horovod_train.training.stopping import LEASE_LOST, SAVES_FAILED, StopReason

DONE = StopReason("done")


def fit(run: Run, hooks: Sequence[Hook], audit: Audit) -> StopReason:
    """Train until the last step or a stop reason; a compiled call never runs past a step at which a hook is due.

    Raises DivergedError, on all ranks, where loss or gradients are no longer finite; RunError if root cannot save.
    """
    state, parts, stopping = run.state, run.parts, run.stopping
    step, batches = int(state.step), _remaining_batches(run)
    requested, ended = stopping.vote(), parts.early_stopping.ended() or parts.callbacks.ended()
    run.group.heartbeat.phase("compile")
    run.group.heartbeat.set_probe(parts.train_step.phase_variable)
    if step and not requested:
        # First finish hooks that the last stop interrupted, such as an evaluation.
        reason = _call(run, step, [hook for hook in hooks if hook.is_due(step) and not hook.is_done(run, step)])
        ended = ended or reason
        requested = stopping.vote() if ended else None
    while step < parts.last_step and not ended:
        sync_step = state.synchronization.next_sync_step(step)
        if requested and step == sync_step:
            break
        last_step = min(parts.last_step, sync_step if requested else parts.last_step)
        hook_step = min((hook.next_step(step) for hook in hooks), default=last_step)
        until = int(min(last_step, step + run.config.train.steps_per_call, hook_step))
        step = _train_until(run, parts.train.same_size_until(position(state, parts.train), step, until), batches, audit)
        ended = _call(run, step, [hook for hook in hooks if hook.is_due(step)])
        # A hook that ends the run may be an evaluation interrupted by a stop request.
        requested = requested or (stopping.vote() if ended else stopping.vote_periodically())
    state.check_finite(run.group)
    stop = requested or ended
    if stop in (LEASE_LOST, SAVES_FAILED):
        _raise_on_root(run)
    at_end = ("stopped" if stop and stop.restartable else "done", "always")
    reason = _call(run, step, [hook for hook in hooks if hook.at_end in at_end and not hook.is_due(step)])
    if reason and not requested:  # may be an evaluation interrupted by a stop request
        requested = stopping.vote()
    return requested or ended or reason or DONE


def _raise_on_root(run: Run) -> None:
    """Collective: raise on the rank that knows why nothing more can be saved, and FailedElsewhere on the others."""
    with run.group.raise_together():
        if run.stopping.lease.lost:
            raise RunError("output_dir: another run has taken the directory, so this one ends and saves nothing more.")
        if run.store.given_up:
            raise RunError(run.store.given_up)


def position(state: TrainState, pipeline: BatchSource) -> int:
    """Return the index, within the epoch, of the next step."""
    return -(-int(state.records) // pipeline.global_batch_size)


def _remaining_batches(run: Run) -> Batches:
    pipeline, first_step = run.parts.train, position(run.state, run.parts.train)
    epochs = -(-(first_step + run.parts.last_step - int(run.state.step)) // pipeline.steps_per_epoch)
    return pipeline.batches(int(run.state.epoch), first_step, max(1, epochs))


def _train_until(run: Run, step: int, batches: Batches, audit: Audit) -> int:
    """Train in one compiled call until `step`; return the step reached. Raises DivergedError on all ranks."""
    state, clock, stopping = run.state, run.clock, run.stopping
    size = run.parts.train.size_of(position(state, run.parts.train))
    done, continues, ids = run.parts.train_step.run(batches, step - int(state.step), size)
    run.group.heartbeat.phase("train")
    run.group.heartbeat.record_first_step()
    if not clock.is_running:
        stopping.pace.forget()  # the first call compiles; later ones are faster
    clock.count(done, _move_on(state, run.parts.train, ids, audit))
    if not continues:
        raise state.divergence(run.group)
    to_safe_step = state.synchronization.next_sync_step(step) - step + run.config.train.steps_per_call
    stopping.note_time_to_safe_step(clock.s_per_step() * to_safe_step)
    return step


def _move_on(state: TrainState, pipeline: BatchSource, ids: np.ndarray, audit: Audit) -> int:
    """Advance the state's place in the data by the steps of `ids`; return the records that all ranks used in them.

    ids: of the records that this rank used, int64 [steps, rows].
    """
    epoch, first, records = int(state.epoch), position(state, pipeline), 0
    while len(ids):
        steps = min(len(ids), pipeline.steps_per_epoch - first)
        audit.append(epoch, first, ids[:steps])
        records += sum(pipeline.count(step) for step in range(first, first + steps))
        ids, first = ids[steps:], first + steps
        if first == pipeline.steps_per_epoch:
            epoch, first = epoch + 1, 0
    if epoch != int(state.epoch):
        state.epoch.assign(epoch)
    state.records.assign(min(first * pipeline.global_batch_size, pipeline.num_records))
    return records


def _call(run: Run, step: int, hooks: Sequence[Hook]) -> StopReason | None:
    """Call all hooks; return the first stop reason, or None."""
    reasons = [hook.function(run, step) for hook in hooks]
    return next((reason for reason in reasons if reason), None)
