"""Decides where a run resumes: from which checkpoint, and whether its place in the data still has the same meaning.

Root reads; the caller broadcasts. Does not write checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from horovod_train.checkpoint.tensors import Checkpoint, load
from horovod_train.config.loader import as_dict
from horovod_train.config.rules import resolve
from horovod_train.config.settings import Config
from horovod_train.data import source
from horovod_train.data.pipeline.batch_source import BatchSource
from horovod_train.errors import UserError
from horovod_train.training.run_record import Run
from horovod_train.training.state import LOSS_AVERAGE_BY_RANK

log = logging.getLogger(__name__)


def batch_of(checkpoint: Checkpoint | None) -> int | None:
    """Return the global batch size of the run that wrote the checkpoint."""
    return checkpoint.facts.setting("data.global_batch_size") if checkpoint else None


def resolve_as_before(config: Config, size: int, batch_before: int | None) -> Config:
    """Resolve the config for `size` ranks; keep the previous global batch size if the config sets none.

    So a run resumes unchanged at any number of ranks. Raises UserError as `resolve` does.
    """
    resolved = resolve(config, size, batch_before)
    alone = config.data.global_batch(size)
    if resolved.data.global_batch_size != alone:
        per_rank = config.data.batch_size_per_rank
        log.info(
            f"the global batch stays {batch_before}; data.batch_size_per_rank {per_rank} would make it {alone} here"
        )
    return resolved


def restore(run: Run) -> Any:
    """Collective: on root, load the checkpoint into the state; return the average of the loss of each rank in it.

    Raises UserError for a checkpoint that does not fit.
    """
    with run.group.raise_together():
        return None if run.checkpoint is None else _load(run, run.checkpoint)


def _load(run: Run, checkpoint: Checkpoint) -> Any:
    config, parts = run.config, run.parts
    rates = run.state.rates
    arrays = load({name: variable for name, variable in run.state.variables().items() if name not in rates}, checkpoint)
    _restore_rates(rates, arrays, is_same=checkpoint.facts.setting("lr_schedule") == as_dict(config)["lr_schedule"])
    check_position(parts.train, checkpoint)
    if checkpoint.facts.setting("checkpoint.best") != as_dict(config.checkpoint.best):
        parts.best.forget()  # belongs to another metric
    then = tuple(checkpoint.facts.setting(f"early_stopping.{key}") for key in ("metric", "mode"))
    if (config.early_stopping.metric, config.early_stopping.mode) != then:
        parts.early_stopping.best.forget()
    elif checkpoint.facts.setting("early_stopping.patience") is None:
        parts.early_stopping.best.evaluations_since.assign(0)  # that run did not count them
    log.info(f"resumed from {checkpoint.folder} at step {int(run.state.step)}")
    return arrays.get(LOSS_AVERAGE_BY_RANK)


def _restore_rates(rates: Mapping[str, tf.Variable], arrays: dict[str, Any], *, is_same: bool) -> None:
    """Set the rates that callbacks may have changed to what was saved, unless the config has another rate now."""
    for name, rate in rates.items():
        saved = arrays.pop(name, None)
        if saved is not None and is_same:
            rate.assign(saved)
        elif saved is not None and float(saved) != float(rate):
            log.info(f"the learning rate is {float(rate):g} from here on, as lr_schedule says; it was {float(saved):g}")


def check_position(train: BatchSource, checkpoint: Checkpoint) -> None:
    """Check that a saved place inside an epoch is reached by the same order of the same records.

    Checks also that epochs have equal length, because learning rates and the run's end are counted in steps. At the end
    of an epoch, different records of the same number are allowed, with a warning. Raises UserError.
    """
    facts = checkpoint.facts
    seed, batch = facts.setting("seed"), facts.setting("data.global_batch_size")
    changed = _changed_files(train, checkpoint)
    if facts.records and changed:
        raise UserError(
            f"{checkpoint.folder}: stands after record {facts.records} of an epoch of other data: data.train now "
            f"{changed}. Resume with the training files as they were then, or from a checkpoint at the end of an epoch."
        )
    if facts.records and facts.data != train.fingerprint:
        raise UserError(
            f"{checkpoint.folder}: stands after record {facts.records} of an epoch whose order is no longer the same. "
            f"Resume with {train.order_settings.format(seed=seed, batch=batch)}; or from the end of an epoch."
        )
    if changed:
        log.warning(f"the training data are not those of {checkpoint.folder}: data.train now {changed}")
    steps, epochs = facts.step, facts.epoch
    if not facts.records and steps != epochs * train.steps_per_epoch:
        raise UserError(
            f"{checkpoint.folder}: its {steps} steps were {epochs} epochs of {steps / max(1, epochs):g}; with the data "
            f"and data.global_batch_size {train.global_batch_size} of this config an epoch has "
            f"{train.steps_per_epoch} steps, and learning rates and the end are counted in steps. Resume with "
            f"data.global_batch_size {batch} and the training files as they were then."
        )


def _changed_files(train: BatchSource, checkpoint: Checkpoint) -> str:
    """Return how data.train files differ from those of the checkpoint; "" if equal or unknown."""
    now, then = source.unpack(train.files), source.unpack(checkpoint.facts.data_files)
    return source.difference(now, then, "the checkpoint") if now and then and now != then else ""
