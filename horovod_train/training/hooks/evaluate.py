"""Evaluates, and calls Keras callbacks, as `fit` does at the same points: on every rank, with equal values.

An evaluation uses each record of the set once, at any number of ranks. When it is due, run.build_hooks says.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from horovod_train.checkpoint.layout import Checkpoint
from horovod_train.config.loader import as_dict
from horovod_train.config.settings import Config
from horovod_train.data.batch_source import BatchSource
from horovod_train.distributed.watchdog.heartbeat import HOOK
from horovod_train.shown_text import listed
from horovod_train.training.callbacks import Named
from horovod_train.training.hooks import Hook, every, failing_as, guarded
from horovod_train.training.initial_state import changed_meaning
from horovod_train.training.open_run import Run
from horovod_train.training.state import weights_by_name
from horovod_train.training.steps.step import EvalStep
from horovod_train.training.stopping import StopReason

log = logging.getLogger(__name__)


def evaluate(run: Run, step: int) -> StopReason | None:
    """Evaluate once per step, and pass the values to early stopping and to the search for the best.

    A stop request interrupts it; a run that resumes evaluates first.
    """
    if is_evaluated(run, step):
        return None
    parts, state = run.parts, run.state
    assert parts.eval is not None
    assert parts.eval_step is not None
    with run.outside_training("evaluate"):
        state.settle(run.group)  # before callbacks exchange the weights for their averages
    may_change = parts.callbacks.run_users_code("on_test_begin")
    before = parts.callbacks.state("on_test_begin") if may_change else {}
    forward_state = {str(number): each for number, each in enumerate(parts.eval_step.forward_state.variables)}
    undo = _undoing(weights_by_name(state.model.weights, "model") | state.rates if may_change else forward_state)
    tell(run, step, "on_test_begin")
    with run.outside_training("evaluate"), parts.train_step.figures.kept():
        with nullcontext() if state.averages.are_of_optimizer else state.averages.in_place():
            interrupted = _evaluate_all(run, parts.eval, parts.eval_step)
        # From root, so that they are bit-equal, whatever the hosts.
        values = {} if interrupted else run.group.broadcast_object(parts.eval_step.metrics.result(run.group))
    if interrupted:
        state.averages.put_back()  # callbacks are not told that it ends, and the next start tells them that it begins
        undo()
        if may_change:
            parts.callbacks.restore(before, step)
        return interrupted
    skipped = run.group.union(parts.eval.skipped)
    parts.eval.check_used(len(skipped), "data.eval")
    if skipped:
        values["skipped_records"] = len(skipped)
    parts.evaluated.assign(step)
    run.output.append_metrics("eval", step, int(state.epoch), values)
    tell(run, step, "on_test_end", logs=values)
    parts.best.update(step, values)
    stopped = _stop(run) if parts.callbacks else None
    return parts.early_stopping.update(step, values) or stopped


def is_evaluated(run: Run, step: int) -> bool:
    return int(run.parts.evaluated) == step


def _evaluate_all(run: Run, pipeline: BatchSource, step: EvalStep) -> StopReason | None:
    step.begin(int(run.state.step))
    heartbeat = run.group.heartbeat
    for batches, steps, size in pipeline.one_epoch(run.config.train.steps_per_call):
        compiling = nullcontext() if step.has_compiled(size) else heartbeat.phase("compile", "a step of the evaluation")
        # By default errors are explained from the training data, and progress is that of training.
        with compiling, heartbeat.probing(step.counter), pipeline.explaining():
            step.run(batches, steps, size)
        if reason := run.stopping.vote_periodically():
            return reason
    return None


def tell(
    run: Run,
    step: int,
    method: str,
    *arguments: int,
    logs: Mapping[str, float] | None = None,
    told: Sequence[Named] | None = None,
) -> None:
    """Call METHOD(*arguments, logs) of each callback, or of those `told`, on this rank. Raises RunError if one fails.

    As from `fit` they get one dict, so that a callback sees the figures that those before it add.
    """
    shared = dict(logs or {})
    for named in run.parts.callbacks.named if told is None else told:
        with run.outside_training(HOOK, f"calling {named.name}", method):
            may_freeze = method in ("on_train_begin", "on_train_end")  # before a step is compiled, or after the last
            where = f"callbacks: {named.name}", f"in {method} after step {step}"
            is_users = named.runs_users_code(method)
            with failing_as(run, *where), guarded(run, *where, may_freeze) if is_users else nullcontext():
                getattr(named.callback, method)(*arguments, shared)
    if method == "on_epoch_begin":
        (run.parts.callbacks.epoch_begun,) = arguments
    elif method == "on_train_batch_begin":
        run.parts.callbacks.batch_begun_at = step


def begin_callbacks(run: Run) -> None:
    """Collective: tell the callbacks before the first step that training begins, and give back their state.

    When the run resumes they are told again what had begun before the checkpoint, because some keep no state. What that
    changes is in the checkpoint already, so it is undone, in the variables and in their state. But a learning rate
    stays if the callback that sets it is new in the config, or has other options now.
    """
    callbacks = run.parts.callbacks
    step, epoch = int(run.state.step), int(run.state.epoch)
    then = run.checkpoint
    of_root = [_without_other_values(run, then), then.facts.setting("callbacks")] if then else [{}, []]
    saved, specs = run.group.broadcast_object(of_root)
    if not callbacks:
        callbacks.restore(saved, step)
        return
    run.state.model.stop_training = False
    per_epoch = run.parts.train.steps_per_epoch
    again: list[tuple[str, int]] = []
    new: list[tuple[str, int]] = []
    if step % per_epoch == 0 and saved.get("told", step) != step:
        again = [("on_epoch_begin", epoch - 1)]  # the hook ends it first
    elif step < run.parts.last_step:
        (again if saved.get("begun") == epoch else new).append(("on_epoch_begin", epoch))
        (again if saved.get("batch_begun_at") == step else new).append(("on_train_batch_begin", step % per_epoch))
    may_change_all = callbacks.run_users_code("on_train_begin", "on_epoch_begin", "on_train_batch_begin")
    changeable = run.state.variables() if may_change_all else run.state.rates
    if "told" not in saved:
        specs, changeable = [], {}
    for told, kept in zip(_known_and_added(run, specs), ({}, run.state.rates), strict=True):
        undo = _undoing({name: each for name, each in changeable.items() if name not in kept})
        tell(run, step, "on_train_begin", told=told)
        for method, number in again:
            tell(run, step, method, number, told=told)
        if changed := undo():
            log.info(
                f"resumed with the values of the checkpoint, not with what callbacks have just set: {listed(changed)}"
            )
    callbacks.restore(saved, step)
    for method, number in new:
        tell(run, step, method, number)
    _stop(run)


def _known_and_added(run: Run, specs: Sequence[Any]) -> tuple[list[Named], list[Named]]:
    """Return the callbacks that are among `specs`, those of the checkpoint's config, and the others."""
    known = [_as_json(spec) for spec in specs]
    parts: tuple[list[Named], list[Named]] = [], []
    for named, spec in zip(run.parts.callbacks.named, as_dict(run.config)["callbacks"], strict=True):
        is_known = _as_json(spec) in known
        if is_known:
            known.remove(_as_json(spec))
        parts[not is_known].append(named)
    return parts


def _as_json(settings: Any) -> str:
    return json.dumps(settings, default=str, sort_keys=True)


def _undoing(variables: Mapping[str, tf.Variable]) -> Callable[[], list[str]]:
    """Return what gives variables the values that they have now, and returns the names of those that had others."""
    # Of those that nothing changes, this is no copy.
    values = {name: variable.read_value() for name, variable in variables.items()}

    def undo() -> list[str]:
        changed = [
            name for name, value in values.items() if variables[name].numpy().tobytes() != value.numpy().tobytes()
        ]
        for name in changed:
            variables[name].assign(values[name])
        return changed

    return undo


def saved_state(checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
    """Return the state of the callbacks in a checkpoint.

    That callbacks or hooks have ended the run counts only while the config names the same ones.
    """
    ends = {"have_stopped": "callbacks", "hook_ended": "hooks"}
    changed = checkpoint.facts.changes(config, [*ends.values()])
    return {name: value for name, value in checkpoint.facts.callbacks.items() if ends.get(name) not in changed}


def _without_other_values(run: Run, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the saved state of the callbacks without the best values that mean something else now; say so."""
    saved = saved_state(checkpoint, run.config)
    kept = dict(saved.get("states", {}))
    for named in run.parts.callbacks.named:
        monitor = named.keeps_best_of
        if named.name not in kept or monitor is None:
            continue
        changed = changed_meaning(run, checkpoint.facts, monitor.removeprefix("val_"))
        if changed := [setting for setting in changed if monitor.startswith("val_") or setting != "data.eval"]:
            log.info(f"callbacks: {named.name} begins anew, because another {listed(changed)} gives other values")
            del kept[named.name]
    return {**saved, "states": kept} if "states" in saved else saved


def build_callback_hooks(run: Run, evaluations: Sequence[Hook]) -> list[Hook]:
    """Build the hooks that evaluate and call the callbacks, in the order of `fit`. evaluations: those that evaluate."""
    callbacks, per_epoch = run.parts.callbacks, run.parts.train.steps_per_epoch
    end = every(None, end_callbacks, at_end="done")
    if not callbacks:
        # Users' hooks at the end change what is saved too, so a checkpoint must tell whether they were called.
        return [*evaluations, *([end] if any(hook.at_end != "no" for hook in run.parts.users_hooks) else [])]

    def end_epoch(run: Run, step: int) -> StopReason | None:
        # A stop request may have interrupted an evaluation; then a run that resumes ends the epoch after that.
        is_over = all(hook.is_done(run, step) for hook in evaluations if hook.is_due(step))
        return _end_epoch(run, step) if is_over else None

    return [
        *([every(1, _end_batch)] if callbacks.see_batches else []),
        *evaluations,
        every(per_epoch, end_epoch, is_done=lambda run, step: run.parts.callbacks.epoch_ended_at == step),
        end,
    ]


def _end_batch(run: Run, step: int) -> StopReason | None:
    per_epoch = run.parts.train.steps_per_epoch
    tell(run, step, "on_train_batch_end", (step - 1) % per_epoch)
    if step % per_epoch and step < run.parts.last_step:
        tell(run, step, "on_train_batch_begin", step % per_epoch)
    return _stop(run)


def _end_epoch(run: Run, step: int) -> StopReason | None:
    epoch = step // run.parts.train.steps_per_epoch
    _settle(run)
    logs = run.group.broadcast_object(_logs(run, step))
    tell(run, step, "on_epoch_end", epoch - 1, logs=logs)
    run.parts.callbacks.epoch_ended_at = step
    reason = _stop(run)
    if reason is None and step < run.parts.last_step:
        tell(run, step, "on_epoch_begin", epoch)
        tell(run, step, "on_train_batch_begin", 0)
        reason = _stop(run)
    run.state.averages.put_back()  # a run that ends here is saved with the weights that it resumes with
    return reason


def _settle(run: Run) -> None:
    """Collective: make weights equal on all ranks before callbacks read them, or change them by what they are."""
    with run.outside_training(HOOK, "exchanging weights for callbacks"):
        run.state.settle(run.group)


def _logs(run: Run, step: int) -> dict[str, float]:
    """Return on root the figures of the newest line of training, and of the evaluation at this step, as `val_…`."""
    figures = {name: run.output.last_metrics("train").get(name) for name in run.parts.train_step.figures.names}
    if run.parts.eval_step and is_evaluated(run, step):
        values = run.output.last_metrics("eval")
        figures |= {f"val_{name}": values.get(name) for name in run.parts.eval_step.metrics.names}
    return {name: float(value) for name, value in figures.items() if value is not None}


def end_callbacks(run: Run, step: int) -> None:
    """Collective: tell the callbacks that training ends, unless they were told at this step in an earlier start."""
    averages, callbacks = run.state.averages, run.parts.callbacks
    if callbacks.train_ended_at == step:
        return
    if callbacks:
        _settle(run)
    logs = run.group.broadcast_object(_logs(run, step))
    # As `fit` does: with use_ema it ends with the averages in the model, and with what callbacks make of them.
    with averages.in_place() if averages.are_of_optimizer else nullcontext():
        tell(run, step, "on_train_end", logs=logs)
        if averages.are_of_optimizer:
            averages.restart()
    callbacks.train_ended_at = step


def _stop(run: Run) -> StopReason | None:
    """Collective: return why to stop, on all ranks, if `stop_training` is set on any."""
    (stops,) = run.group.sum([bool(run.state.model.stop_training)])
    run.parts.callbacks.have_stopped |= bool(stops)
    return run.parts.callbacks.ended()
