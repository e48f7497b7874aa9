"""Runs one training from start to end: opens, starts and trains it, then closes. Every rank runs every line.

Read it top to bottom. All ranks leave the loop at the same step: each stop reason comes from reduced values or a vote.
To add a hook: a function in a file of hooks/, and a line in build_hooks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from horovod_train.checkpoint.layout import count_saves, most_at_once
from horovod_train.config.loader import as_dict, dump
from horovod_train.config.settings import Config
from horovod_train.data.audit import Audit, AuditLog, Start
from horovod_train.data.batch_source import Batch, Batches, BatchSource
from horovod_train.data.dataset import class_names
from horovod_train.distributed import consistency
from horovod_train.distributed.layer_contents import contents, finalize, how_built, structure
from horovod_train.errors import START_AGAIN, STOPPED, DivergedError, RanksDisagree, RanksStartApart, RunError
from horovod_train.models import is_stored
from horovod_train.models.model_parallel import stage_lines
from horovod_train.output.files import STOP_FILE
from horovod_train.output.logs import said_if_slow
from horovod_train.output.run_dir import describe_commit
from horovod_train.shown_text import listed
from horovod_train.training import initial_state
from horovod_train.training.hooks import Hook, HookFunction, at, every
from horovod_train.training.hooks.evaluate import (
    begin_callbacks,
    build_callback_hooks,
    end_callbacks,
    evaluate,
    is_evaluated,
    saved_state,
)
from horovod_train.training.hooks.log import LogTraining
from horovod_train.training.hooks.save import Save, check_agreement, place, save_by_time, saving
from horovod_train.training.open_run import Run, open_run
from horovod_train.training.state import LOSS_AVERAGE_BY_RANK, TrainState
from horovod_train.training.steps.figures import FIGURES_BY_RANK
from horovod_train.training.steps.histograms import Summaries, draw_step
from horovod_train.training.stopping import LEASE_LOST, SAVES_FAILED, STOP_FILE_REASON, StopReason

DONE = StopReason("done")

log = logging.getLogger(__name__)


def run(config: Config) -> int:
    """Train as `config` says; return the exit code: 0, START_AGAIN or STOPPED.

    Collective: called by every rank. Raises UserError or RanksStartApart before the first step for problems that the
    user must fix. Raises DivergedError or RanksDisagree on all ranks where training must not continue.
    """
    with open_run(config) as run:
        of_ranks = initial_state.restore(run)
        initial_state.take_initial_weights(run)
        code, model = initial_state.users_code(as_dict(run.config)), run.state.model
        facts = code | initial_state.steps_of_hooks(run) | structure(model)
        consistency.check(run.group, facts, "at the start", RanksStartApart)
        _describe_parts(run)
        # On a fresh start and on a resume alike: slots and counters exist by now.
        train_step = run.parts.train_step
        run.group.broadcast([*run.state.variables().values(), train_step.skipped, train_step.skipped_in_a_row])
        run.state.restore_loss_average(run.group, of_ranks.get(LOSS_AVERAGE_BY_RANK))
        train_step.figures.restore(run.group, of_ranks.get(FIGURES_BY_RANK))
        finalize(model)
        with run.group.raise_together():
            held = contents(model) | initial_state.contents_of_preprocess(run.config.data.preprocess)
        consistency.check(run.group, held, "at the start", RanksStartApart)
        held |= code | how_built(model)
        with run.group.raise_together():
            if run.checkpoint:
                initial_state.check_contents(held, run.checkpoint)
        # At the end of an epoch before hooks: an evaluation that a stop interrupted comes before more is trained.
        run.parts.freezing.apply(int(run.state.epoch) - (int(run.state.records) == 0))
        consistency.check(run.group, run.state.settle(run.group).digests(), "after the broadcast")
        is_told = _is_over(run) and run.output.tells_end_at(int(run.state.step))
        audit = _begin_files(run, is_told=is_told)
        with (
            _last_save_finished(run),
            closing(audit),
            closing(run.parts),
            run.parts.train.explaining(),
            run.phase_times,
        ):
            begin_callbacks(run)
            start = place(run, int(run.state.step))
            reason = fit(run, build_hooks(run, audit, held), audit)
        # Else an evaluation or a hook has been made up, and the files tell of that.
        return _finish(run, reason, is_told=is_told and place(run, int(run.state.step)) == start)


def _is_over(run: Run) -> bool:
    """Return whether nothing is left to train; what a stop has interrupted may be left to do."""
    told = saved_state(run.checkpoint, run.config) if run.checkpoint else {}
    has_ended = told.get("have_stopped", False) or told.get("hook_ended") is not None
    return has_ended or run.parts.early_stopping.ended() is not None or int(run.state.step) >= run.parts.last_step


def _describe_parts(run: Run) -> None:
    stages = stage_lines(run.state.model) if run.config.device.per_rank > 1 else []
    averages = [f"averages of weights: {run.parts.averages}"] if run.parts.averages else []
    for line in (*stages, *run.parts.origins, *averages):
        log.info(line)
    for line in run.parts.warnings:
        log.warning(line)


def _begin_files(run: Run, *, is_told: bool) -> Audit:
    """Collective: make the run directory as it was at the first step, and add what does not change; open the audit.

    is_told: whether its files tell of a run that is done, and stay as they are unless there is more to tell.
    """
    first_step = int(run.state.step)
    if run.group.is_root and (commit := describe_commit(Path.cwd())):
        log.info(f"code: {commit}")
    if first_step == 0:
        model = run.config.model
        log.info(f"starting from {model.init_from or (model.name if is_stored(model) else 'initial weights')}")
    with run.group.raise_together():
        _check_room(run, first_step)
        is_anew = run.config.checkpoint.resume == "never"
        run.output.start_trackers(first_step, as_dict(run.config), anew=is_anew)
        best = int(run.parts.best.step) if run.config.checkpoint.best else -1
        # Before metrics are removed: a kill in between leaves them beside the checkpoint.
        run.store.rewind(first_step, best if best >= 0 else None)
        run.output.rewind(first_step, is_evaluated=run.parts.eval is None or is_evaluated(run, first_step))
        run.output.write_config(dump(run.config), held_back=is_told)
        audit = _open_audit(run)
    if run.config.log.graph:
        step, train, rank, names = run.parts.train_step, run.parts.train, run.group.rank, run.config.log.graph_names
        spec, size = train.element_spec, train.size_of(0)
        with run.group.heartbeat.phase("compile"):
            run.output.tensorboard.add_graph(lambda: draw_step(step, spec, size, rank=rank, names=names))
    log.info(f"ends at step {run.parts.last_step}")
    if _is_over(run):
        log.info(f"nothing is left to train: the run has come to its end at step {first_step}")
    run.output.start_progress(first_step, run.parts.last_step)
    return audit


def _check_room(run: Run, first_step: int) -> None:
    """Raise UserError on root if no checkpoint fits on the disk; warn if not all that are kept do."""
    if first_step >= run.parts.last_step:
        return  # a run that is done must end without room too; a save at its end that fails is said then
    config = run.config.checkpoint
    saves = count_saves(config, run.parts.train.steps_per_epoch, run.parts.last_step)
    bytes_each = run.parts.checkpoint_bytes(run.group.size)
    run.stopping.expect_save(bytes_each)
    run.store.check_room(bytes_each, most_at_once(config, saves))


def _open_audit(run: Run) -> Audit:
    train, directory = run.parts.train, run.config.output_dir
    if not run.config.data.audit or directory is None:
        return Audit()
    start = Start(
        epoch=int(run.state.epoch),
        step=position(run.state, train),
        rank=run.group.rank,
        size=run.group.size,
        num_records=train.num_records,
        global_batch_size=train.global_batch_size,
        steps_per_epoch=train.steps_per_epoch,
        data=train.content,
        data_sets=[(data_set.name, data_set.records, data_set.repeats) for data_set in train.data_sets],
    )
    return AuditLog(directory, start)


def build_hooks(run: Run, audit: Audit, held: Mapping[str, str]) -> list[Hook]:
    """Build the hooks, in the order in which they run at a step where several are due: log, evaluate, users', save.

    held: what the model computes with besides weights, for checkpoints.
    """
    config, profiled = run.config, run.config.log.profile_at_steps
    first_step, per_call = int(run.state.step), config.train.steps_per_call
    per_epoch = run.parts.train.steps_per_epoch
    # Short epochs have a line each, of all their steps, which also shows the evaluation at their end.
    is_by_epoch = run.parts.eval is not None and config.eval.every_epochs == 1 and per_epoch < config.log.every_steps
    save = Save(run, audit, held)
    log_training = LogTraining(first_step, per_epoch if is_by_epoch else None)

    def epochs(count: int | None) -> int | None:
        return count * per_epoch if count else None

    evaluations = [
        every(config.eval.every_steps, evaluate, is_done=is_evaluated),
        every(epochs(config.eval.every_epochs), evaluate, at_end="done", is_done=is_evaluated),
    ]
    if run.parts.eval is None:
        evaluations = []
    return [
        at(profiled, stop_profile),  # first: the profile holds only the step
        every(per_call, lambda run, step: run.output.show_progress(step)),
        every(None if is_by_epoch else config.log.every_steps, log_training),
        every(per_epoch if run.parts.callbacks or is_by_epoch else None, log_training),
        # Where a run ends between two lines, of which the next counts all steps. At the last step before it is saved: a
        # checkpoint must not be newer than its line.
        at([run.parts.last_step], partial(log_training, keep=True), at_end="always"),
        *([every(config.log.histograms_every_steps, _histograms(run))] if config.log.histograms_every_steps else []),
        *build_callback_hooks(run, evaluations),
        *run.parts.users_hooks,  # before saves, so that a checkpoint contains what they change
        *(
            every(hook.every_steps, save.if_best, is_done=is_evaluated)
            for hook in evaluations
            if config.checkpoint.best
        ),
        every(config.train.check_agreement_every_steps, check_agreement),
        save_by_time(run, config.checkpoint.every_minutes, save, per_call),
        every(config.checkpoint.every_steps, save),
        every(epochs(config.checkpoint.every_epochs), save),
        every(None, save.at_end, at_end="always"),
        every(None, end_callbacks, at_end="stopped"),  # after the save: the run that resumes has not ended
        # A run that resumes at one of these steps must still unfreeze, or start the profile.
        at([epoch * per_epoch for epoch in run.parts.freezing.epochs], unfreeze, is_done=lambda run, step: False),
        at([step - 1 for step in profiled], start_profile, is_done=lambda run, step: False),
    ]


def _histograms(run: Run) -> HookFunction:
    train, step = run.parts.train, run.parts.train_step

    def first_batch() -> Batch:
        return train.scaled(next(train.batches(epoch=0, epochs=1)))

    summaries = Summaries(step, first_batch, train.size_of(0), run.config.log.activations)

    def show_histograms(run: Run, step: int) -> None:
        with run.outside_training("histograms"):
            run.output.tensorboard.add_histograms(step, summaries.compute())

    return show_histograms


def start_profile(run: Run, step: int) -> None:
    with run.outside_training("profile"):
        run.output.tensorboard.start_profile(step + 1)


def stop_profile(run: Run, step: int) -> None:
    with run.outside_training("profile"):
        run.output.tensorboard.stop_profile(step)


def unfreeze(run: Run, step: int) -> None:
    """Unfreeze what is due at the end of this epoch, and compile the steps again."""
    epoch = int(run.state.epoch)
    run.parts.freezing.apply(epoch)
    run.parts.train_step.retrace()
    if run.parts.eval_step:
        run.parts.eval_step.retrace()
    names = run.parts.freezing.unfrozen_at(epoch)
    log.info(f"after epoch {epoch}: {len(names)} more weights are trained: {listed(names)}")


def fit(run: Run, hooks: Sequence[Hook], audit: Audit) -> StopReason:
    """Train until the last step or a stop reason; a compiled call never runs past a step at which a hook is due.

    Raises DivergedError, on all ranks, where loss or gradients are no longer finite; RunError if root cannot save.
    """
    state, parts, stopping = run.state, run.parts, run.stopping
    step = first_step = int(state.step)
    batches = _remaining_batches(run)
    requested, ended = stopping.vote(), parts.early_stopping.ended() or parts.callbacks.ended()
    run.group.heartbeat.phase("compile")
    run.group.heartbeat.set_probe(parts.train_step.phase_variable)
    run.clock.start()
    if step and not requested:
        # First finish what the last stop interrupted, such as an evaluation.
        due = [hook for hook in hooks if hook.is_due(step)]
        left = [hook for hook in due if not hook.is_done(run, step) or _is_users_left(run, step, hook)]
        reason = _call(run, step, left)
        ended = ended or reason
        requested = stopping.vote() if ended else None
    while step < parts.last_step and not ended:
        sync_step = state.synchronization.next_sync_step(step)
        if requested and step in (sync_step, first_step):  # as it was saved, it can be left
            break
        last_step = min(parts.last_step, sync_step if requested else parts.last_step)
        hook_step = min((hook.next_step(step) for hook in hooks), default=last_step)
        until = int(min(last_step, step + run.config.train.steps_per_call, hook_step))
        step = _train_until(run, parts.train.same_size_until(position(state, parts.train), step, until), batches, audit)
        ended = _call(run, step, [hook for hook in hooks if hook.is_due(step)])
        # A hook that ends the run may be an evaluation interrupted by a stop request.
        asked = stopping.vote() if ended else stopping.vote_periodically()
        if ended and ended.restartable and not asked:
            asked, ended = ended, None  # a user's hook stops it as a signal does: where a resume changes nothing
        requested = requested or asked
    state.check_finite(run.group)
    stop = requested or ended
    if stop in (LEASE_LOST, SAVES_FAILED):
        with run.group.raise_together():
            stopping.lease.must_be_ours()
            if run.store.given_up:
                raise RunError(run.store.given_up)
    at_end = [hook for hook in hooks if not hook.is_due(step) or _is_users_left(run, step, hook)]
    reason = _call_at_end(run, step, at_end, stop)
    if reason and not requested:  # may be an evaluation interrupted by a stop request
        requested = stopping.vote()
    return requested or ended or reason or DONE


def position(state: TrainState, pipeline: BatchSource) -> int:
    """Return the index, within the epoch, of the next step."""
    return -(-int(state.records) // pipeline.global_batch_size)


def _remaining_batches(run: Run) -> Batches:
    pipeline, first_step = run.parts.train, position(run.state, run.parts.train)
    epochs = -(-(first_step + run.parts.last_step - int(run.state.step)) // pipeline.steps_per_epoch)
    return pipeline.batches(int(run.state.epoch), first_step, max(1, epochs))


def _train_until(run: Run, step: int, batches: Batches, audit: Audit) -> int:
    """Train in one compiled call until `step`; return the step reached. Raises DivergedError on all ranks."""
    state, train_step = run.state, run.parts.train_step
    size = run.parts.train.size_of(position(state, run.parts.train))
    compiles = not train_step.has_compiled(size)  # alike on all ranks: their sizes change at the same steps
    with _compiling(run) if compiles else nullcontext():
        done, continues, ids = train_step.run(batches, step - int(state.step), size)
    run.group.heartbeat.phase("train")
    run.group.heartbeat.has_stepped = True
    records = _move_on(state, run.parts.train, ids, audit)
    if not compiles:
        run.clock.count(done, records)
    if not continues:
        raise state.divergence(run.group)
    to_safe_step = state.synchronization.next_sync_step(step) - step + run.config.train.steps_per_call
    run.stopping.margin.time_to_safe_step_s = run.clock.s_per_step() * to_safe_step
    return step


@contextmanager
def _compiling(run: Run) -> Iterator[None]:
    """The block compiles a step: the first one, one of another size, or one that trains other weights.

    Its time is neither training time, nor a time by which ranks vote, nor limited as that of a step is.
    """
    which = "the step again" if run.group.heartbeat.has_stepped else "the first step"
    line = f"compiling {which}, which takes minutes for large models"
    with run.clock.stopped(), run.group.heartbeat.phase("compile"), said_if_slow(line):
        yield
    run.stopping.pace.forget()


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
    """Call all hooks; return the first stop reason, or None. What is due by steps and by epochs is called once.

    A stop request may interrupt an evaluation: then users' hooks are left to the run that resumes, which evaluates
    first.
    """
    reason, callbacks = None, run.parts.callbacks
    evaluates = any(hook.function is evaluate for hook in hooks)
    callbacks.hooks_left_at = -1
    for hook in {hook.function: hook for hook in hooks}.values():
        is_users = hook in run.parts.users_hooks
        if is_users and evaluates and not is_evaluated(run, step):
            callbacks.hooks_left_at = step
            continue
        given = hook.function(run, step)
        reason = reason or given
        if is_users and given and not given.restartable and callbacks.hook_ended is None:
            callbacks.hook_ended = given.text  # before the save of this step, so that a later start ends too
    return reason


def _is_users_left(run: Run, step: int, hook: Hook) -> bool:
    """Return whether the last stop has left a user's hook to be called, at the step at which the run resumes."""
    return run.parts.callbacks.hooks_left_at == step and hook in run.parts.users_hooks


def _call_at_end(run: Run, step: int, hooks: Sequence[Hook], stop: StopReason | None) -> StopReason | None:
    """Call the hooks of a done or of a stopped run; return the first stop reason, or None.

    A stop request may interrupt the last evaluation: then the run is a stopped one from there on.
    """
    reason, is_done = None, not (stop and stop.restartable)
    # An earlier start has come to this end, called them and saved.
    were_called = run.parts.callbacks.train_ended_at == step and (is_done or step >= run.parts.last_step)
    left_out = run.parts.users_hooks if were_called else ()
    for hook in hooks:
        if hook.at_end in ("done" if is_done else "stopped", "always") and hook not in left_out:
            given = hook.function(run, step)
            reason = reason or given
            is_done = is_done and not (given and given.restartable)
    return reason


@contextmanager
def _last_save_finished(run: Run) -> Iterator[None]:
    """If the block fails, wait until root has finished the checkpoint it is writing, then re-raise."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if run.store.step_under_way is not None:
            run.group.heartbeat.phase("save")  # phase stays on: the watchdog allows for the rest of the exit too
        run.store.finish(timeout_s=0.9 * run.config.watch.stop_after_s)  # before the watchdog reports a stall
        if isinstance(error, DivergedError | RanksDisagree):
            run.group.barrier()  # raised on all ranks; a launcher kills all ranks when the first one exits
        raise


def _finish(run: Run, reason: StopReason, *, is_told: bool) -> int:
    """Collective: wait for the last save, write the summary, and close what other ranks and the watchdog know of.

    is_told: whether the files of the run directory tell all this already.
    """
    with saving(run):
        failure = run.store.wait()
    with run.group.raise_together():
        run.stopping.lease.must_be_ours()
        if failure:
            raise RunError(f"the last checkpoint could not be saved: {failure}")
    summary = _summary(run, reason)
    with run.group.raise_together():
        if not is_told:
            run.output.write_summary(summary)
    why = "" if reason == DONE else f" ({reason.text})"
    saved = "; saved" if summary["steps"] else ""
    remove = f"remove {run.config.output_dir}/{STOP_FILE} and " if reason.text == STOP_FILE_REASON else ""
    option = " with --resume auto" if run.config.checkpoint.resume == "never" else ""
    again = f"{saved}; to resume, {remove}start it again{option}" if reason.restartable else ""
    epochs, steps = summary["epochs"], summary["steps"]
    log.info(f"Done training for {epochs} epoch{'s' * (epochs != 1)}, {steps} step{'s' * (steps != 1)}{why}{again}")
    timeout_s = run.config.watch.stop_after_s / 2  # before the watchdog reports a stall
    run.output.finish_trackers("stopped" if reason.restartable else "done", timeout_s=timeout_s)
    run.output.close()
    run.group.close()
    exit_code = 0
    if reason.restartable:
        exit_code = STOPPED if reason.text == STOP_FILE_REASON else START_AGAIN
    run.run_end.close("stopped" if exit_code else "done", exit_code)
    return exit_code


def _summary(run: Run, reason: StopReason) -> dict[str, Any]:
    seconds, _, records = run.clock.read()
    state, at_walltime = run.state, run.stopping.at_walltime
    names = class_names(run.config.data, run.parts.train.class_names)
    return {
        "steps": int(state.step),
        "epochs": int(state.epoch),
        "ranks": run.group.size,
        "seconds": round(time.monotonic() - run.started, 3),
        "examples_per_s": round(records / seconds, 1) if seconds else None,
        "weights_sha256": state.weights_sha256(),
        "versions": consistency.versions(),
        "config": as_dict(run.config),
        **({"class_names": list(names)} if names else {}),
        "ended": reason.text,
        "finished": not reason.restartable,
        **({"at_walltime": at_walltime} if at_walltime else {}),
        **{split: run.output.last_metrics(split) for split in ("train", "eval")},
    }
