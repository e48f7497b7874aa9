"""The state before the first step: resumed, from other weights, or new; and the same on all ranks.

Root reads; the caller broadcasts. What layers hold besides weights, such as constants and vocabularies, is not sent:
it is made anew, and compared between ranks and with the checkpoint. Writes no checkpoints.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from horovod_train.checkpoint.layout import CHECKPOINTS, Checkpoint, Facts, step_name
from horovod_train.checkpoint.tensors import load
from horovod_train.config.loader import as_dict
from horovod_train.config.paths import is_remote
from horovod_train.config.registry import fold, is_users, loaded_code
from horovod_train.config.settings import Config
from horovod_train.data import source
from horovod_train.data.batch_source import BatchSource
from horovod_train.data.schema import check_same_classes, settings_of
from horovod_train.data.transforms import load_preprocess
from horovod_train.distributed import consistency
from horovod_train.distributed.layer_contents import OPTIONS, TABLE, VOCABULARY, contents_of_function
from horovod_train.errors import UserError
from horovod_train.shown_text import listed
from horovod_train.training.fine_tuning import assign, match, slots_like_weights
from horovod_train.training.open_run import Run
from horovod_train.training.steps.figures import FIGURES_BY_RANK

_MEANING = (
    *("data.features", "data.inputs", "data.targets", "data.weight", "data.preprocess", "data.parse", "data.source"),
    *("data.dataset", "train.ema_decay"),
)
"""Settings on which all values of an evaluation depend; of the records their digest is compared."""
_OF_THE_STATE = (
    *("model.name", "model.options", "model.lora", "model.freeze", "model.unfreeze"),
    *("precision", "optimizer", "lr_schedule", "loss"),
    *("train.synchronization", "train.ema_decay", "data.features", "data.inputs", "data.preprocess", "data.parse"),
)
"""Settings on which it depends which variables there are, and their shapes."""
log = logging.getLogger(__name__)


def restore(run: Run) -> dict[str, np.ndarray]:
    """Collective: on root, load the checkpoint into the state; return the arrays in it that have a row for each rank.

    Raises UserError for a checkpoint that does not fit.
    """
    with run.group.raise_together():
        return {} if run.checkpoint is None else _load(run, run.checkpoint)


def _load(run: Run, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    config, train, train_step, facts = run.config, run.parts.train, run.parts.train_step, checkpoint.facts
    rates = run.state.rates
    variables = {name: variable for name, variable in run.state.variables().items() if name not in rates}
    versions = _changed_versions(facts)
    arrays = load(variables, checkpoint, changes=facts.changes(config, _OF_THE_STATE) | versions)
    _restore_rates(run, arrays, facts)
    # The rates of a run without a schedule are left too; the log says what the rate is.
    state = ("optimizer/", "ema/", "exchange/")
    if dropped := [name for name in arrays if name.startswith(state) and not name.endswith("/learning_rate")]:
        log.warning(f"{checkpoint.folder}: this run drops what it has no use for: {listed(dropped)}")
    check_held_out(config, train, checkpoint)
    check_position(config, train, checkpoint)
    _forget_values(run, checkpoint)
    log.info(f"resumed from {checkpoint.folder} at step {int(run.state.step)}")
    if changes := _changed_settings(run, facts) | versions:
        changed = [f"{name} {change}" for name, change in changes.items()]
        if "model.init_from" in changes:
            changed.append("model.init_from has no effect on a run that resumes")
        log.info(f"changed since this checkpoint: {'; '.join(changed)}")
    train_step.skipped.assign(facts.skipped)
    train_step.skipped_in_a_row.assign(facts.skipped_in_a_row)
    of_figures = _changed_settings(run, facts, [*_MEANING, "loss", "train.l2", "metrics", "weighted_metrics"])
    if of_figures or facts.figures != train_step.figures.layout:
        arrays.pop(FIGURES_BY_RANK, None)
    return {name: array for name, array in arrays.items() if name.startswith("ranks/")}


def _changed_versions(facts: Facts) -> dict[str, str]:
    now = consistency.versions()
    return {name: f"{then} → {now[name]}" for name, then in facts.versions.items() if now.get(name, then) != then}


def _changed_settings(run: Run, facts: Facts, keys: Sequence[str] = ()) -> dict[str, str]:
    features = {name: settings_of(feature) for name, feature in run.parts.train.features.items()}
    return facts.changes(run.config, keys, features or None)


def changed_meaning(run: Run, facts: Facts, metric: str) -> list[str]:
    """Return the settings that give a metric of an evaluation other values than in the run of a checkpoint."""
    of_loss = ("loss", "train.l2") if metric == "loss" or metric.endswith("_loss") else ()  # the latter of an output
    changed = [*_changed_settings(run, facts, [*_MEANING, *of_loss]), *_changed_metrics(run.config, facts, metric)]
    settings = as_dict(run.config)
    then = _averages_seen(facts.setting("callbacks"), facts.setting("optimizer"))
    if then != _averages_seen(settings["callbacks"], settings["optimizer"]):
        changed.append("SwapEMAWeights")
    if run.parts.eval and facts.eval_data and facts.eval_data != run.parts.eval.content:
        changed.append("data.eval")
    return changed


def _averages_seen(callbacks: Sequence[Mapping[str, Any]], optimizer: Mapping[str, Any]) -> tuple[bool, Any]:
    """Return whether evaluations see the averages of a Keras optimizer, and the momentum that these have."""
    sees = any(fold(spec["name"]) == fold("SwapEMAWeights") for spec in callbacks)
    return sees, optimizer["options"].get("ema_momentum") if sees else None


def _forget_values(run: Run, checkpoint: Checkpoint) -> None:
    """Forget the best value, and early stopping's, where they stand for something else now."""
    config, facts = run.config, checkpoint.facts
    best, stopping = run.parts.best, run.parts.early_stopping.best
    if facts.setting("checkpoint.best") != as_dict(config.checkpoint.best):
        best.forget()  # belongs to another metric
    then = tuple(facts.setting(f"early_stopping.{key}") for key in ("metric", "mode"))
    if (config.early_stopping.metric, config.early_stopping.mode) != then:
        stopping.forget()
    elif facts.setting("early_stopping.patience") is None:
        stopping.evaluations_since.assign(0)  # that run did not count them
    stops = config.early_stopping.patience is not None or config.early_stopping.target is not None
    for name, tracker, is_used in [
        ("checkpoint.best", best, config.checkpoint.best),
        ("early_stopping", stopping, stops),
    ]:
        if changed := changed_meaning(run, facts, tracker.metric):
            if is_used and int(tracker.step) >= 0:
                value = f"the best {tracker.metric} so far, {float(tracker.value):.6g} at step {int(tracker.step)}"
                stays = "; its checkpoint stays" if tracker is best else ""
                log.info(f"{name}: {value}, is forgotten, because another {listed(changed)} gives other values{stays}")
            tracker.forget()
    step, folder = int(best.step), Path(config.output_dir or "") / CHECKPOINTS
    if config.checkpoint.best and step >= 0 and not (folder / step_name(step)).is_dir():
        log.info(f"checkpoint.best: {folder} does not have {step_name(step)}, the best so far; it is sought anew")
        best.forget()
    if config.checkpoint.best and int(best.step) < 0:
        run.store.seek_best_anew()


def _changed_metrics(config: Config, facts: Facts, metric: str) -> list[str]:
    """Return the settings in which a metric of this name, as evaluations show it, is another than then."""

    def is_it(spec: Any) -> bool:
        name = spec["options"].get("name")
        return name in metric if name else fold(spec["name"].rpartition(":")[2]) in fold(metric)

    def of_it(specs: Any) -> list[Any]:
        unnamed = [spec for spec in specs if is_users(spec["name"]) and "name" not in spec["options"]]
        return list(filter(is_it, specs)) or unnamed  # a user's class gives itself any name

    if metric == "loss":
        return []
    now = json.loads(json.dumps(as_dict(config), default=str))
    return [key for key in ("metrics", "weighted_metrics") if of_it(facts.setting(key)) != of_it(now[key])]


def _restore_rates(run: Run, arrays: dict[str, Any], facts: Facts) -> None:
    """Set rates that callbacks may have changed to what was saved, unless the config or the model has another now."""
    is_same_schedule = facts.setting("lr_schedule") == as_dict(run.config)["lr_schedule"]
    for name, rate in run.state.rates.items():
        saved, built = arrays.pop(name, None), run.state.built_rates[name]
        if saved is None:
            continue
        if is_same_schedule and facts.built_rates.get(name, built) == built:
            rate.assign(saved)
            if float(saved) != built and "callbacks" in facts.changes(run.config, ["callbacks"]):
                log.info(
                    f"resumed with the learning rate {float(saved):g}, which callbacks had set; it began at {built:g}"
                )
        elif float(saved) != built:
            why = "as the config or the model says"
            log.info(f"the learning rate is {built:g} from here on, {why}; it was {float(saved):g}")


def check_held_out(config: Config, train: BatchSource, checkpoint: Checkpoint) -> None:
    """Raise UserError if another part of the checkpoint's data is held out, on which its run has trained.

    Warn if it is a part of changed files, because records are held out by their numbers. Of data that lie elsewhere
    nothing is known.
    """
    facts, data = checkpoint.facts, config.data
    then = [entry["path"] if isinstance(entry, Mapping) else entry for entry in facts.setting("data.train")]
    is_known = {*map(_place, data.paths("train"))} & {*map(_place, then)} or list(then) == list(data.train)
    for key, value in (("fold", data.fold), ("eval_fraction", data.eval_fraction)):
        before = facts.setting(f"data.{key}")
        if value is None or not is_known:
            continue
        if value != before:
            raise UserError(
                f"{checkpoint.folder}: was trained with data.{key} {'null' if before is None else before}; {value} "
                f"would evaluate on records that the run has trained on. Resume with data.{key} as it was, or begin "
                "anew in another --output-dir."
            )
        if changed := _changed_files(train, checkpoint):
            log.warning(
                f"data.{key}: data.train now {changed}, so other records are held out than before: evaluations are "
                "also on some that this run has trained on, and look better than they are"
            )


def _place(path: str) -> str:
    return path.rstrip("/") if is_remote(path) else os.path.realpath(path)


def check_position(config: Config, train: BatchSource, checkpoint: Checkpoint) -> None:
    """Check that a saved place inside an epoch is reached by the same order of the same records.

    Checks also that epochs have equal length, because learning rates and the run's end are counted in steps. At the end
    of an epoch, different records of the same number are allowed, with a warning. Raises UserError.
    """
    facts = checkpoint.facts
    seed, batch = facts.setting("seed"), facts.setting("data.global_batch_size")
    changed = _changed_files(train, checkpoint)
    of_data = {name: change for name, change in facts.changes(config).items() if name.startswith(("data.", "seed"))}
    said = "".join(f" {name}: {change}." for name, change in of_data.items())
    if facts.records and changed:
        raise UserError(
            f"{checkpoint.folder}: stands after record {facts.records} of an epoch of other data: data.train now "
            f"{changed}.{said} Resume with the training files as they were then, or from a checkpoint at the end of an "
            "epoch."
        )
    if facts.records and facts.data != train.fingerprint:
        raise UserError(
            f"{checkpoint.folder}: stands after record {facts.records} of an epoch whose order is no longer the same."
            f"{said} Resume with {train.order_settings.format(seed=seed, batch=batch)}; or from the end of an epoch."
        )
    advice = "Resume with the classes as they were, or begin a run with model.init_from."
    check_same_classes(facts.class_names, str(checkpoint.folder), train.class_names, "data.train", advice)
    if changed:
        log.warning(f"the training data are not those of {checkpoint.folder}: data.train now {changed}")
    steps, epochs = facts.step, facts.epoch
    if not facts.records and steps != epochs * train.steps_per_epoch:
        raise UserError(
            f"{checkpoint.folder}: its {steps} steps were {epochs} epochs of {steps / max(1, epochs):g}; with the data "
            f"and data.global_batch_size {train.global_batch_size} of this config an epoch has "
            f"{train.steps_per_epoch} steps, and learning rates and the end are counted in steps.{said} Resume with "
            f"data.global_batch_size {batch} and the training files and settings of then, or begin a run with "
            "model.init_from."
        )


def _changed_files(train: BatchSource, checkpoint: Checkpoint) -> str:
    """Return how data.train files differ from those of the checkpoint; "" if equal or unknown."""
    now, then = source.unpack(train.files), source.unpack(checkpoint.facts.data_files)
    return source.difference(now, then, "the checkpoint") if now and then and now != then else ""


def take_initial_weights(run: Run) -> None:
    """Collective: on root, give the model the weights that `model.init_from` names, unless the run resumes."""
    with run.group.raise_together():
        if run.group.is_root and run.checkpoint is None and run.config.model.init_from:
            of_preprocess = contents_of_preprocess(run.config.data.preprocess)
            matched = match(run.state.model, run.config.model, run.parts.train.class_names, of_preprocess)
            copies = slots_like_weights(run.state.optimizer.variables, run.state.model.trainable_variables)
            assign(run.state.model, matched.taken)
            for slot, weight in copies:
                slot.assign(weight)
            run.state.averages.restart()
            log.info(f"model.init_from: {run.config.model.init_from}: {matched.line()}")
            for warning in matched.warnings:
                log.warning(warning)


def users_code(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of the user's own modules that a config names, by name; call after importing them."""
    return {f"code of {name}": consistency.digest(code) for name, code in loaded_code(settings).items()}


def contents_of_preprocess(name: str | None) -> dict[str, str]:
    """Return digests, by name, of what the function or preset of this `data.preprocess` computes with."""
    preprocess = load_preprocess(name)
    return contents_of_function(preprocess, f"data.preprocess {name}") if preprocess else {}


def steps_of_hooks(run: Run) -> dict[str, str]:
    """Return when the user's hooks are called, which must be equal on all ranks."""
    steps = zip(run.config.hooks, run.parts.users_hooks, strict=True)
    return {f"steps of {name}": f"{hook.every_steps} {hook.at_steps} {hook.at_end}" for name, hook in steps}


def check_contents(held: Mapping[str, str], checkpoint: Checkpoint) -> None:
    """Raise UserError if another vocabulary or table is held than in a checkpoint; warn of what else differs.

    Constants that are computed differ in the last bits between machines, and with the precision; files that a user's
    layer saves, by the time; options of layers, by the version of Keras. held: by `contents` and `how_built`, and by
    `contents_of_preprocess`: in its names is the setting, so that nothing is said of another function or folder.
    """
    then = checkpoint.facts.contents
    changed = [name for name, value in held.items() if then.get(name, value) != value]
    if "keras" in _changed_versions(checkpoint.facts):
        changed = [name for name in changed if not name.startswith(OPTIONS)]
    line = f"{checkpoint.folder}: changed since it was saved: {listed(changed)}"
    if any(name.startswith((TABLE, VOCABULARY)) for name in changed):
        raise UserError(f"{line}; so weights would stand for other words. Give it those of then.")
    if changed:
        log.warning(line)
