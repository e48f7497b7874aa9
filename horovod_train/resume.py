"""Where a run goes on: the checkpoint to start from, and whether its place in the data still means the same.

Root reads; what it finds is broadcast by the caller. Does not write checkpoints.
"""

from __future__ import annotations

from typing import Any

from horovod_train import loop
from horovod_train.build import Parts
from horovod_train.checkpoint import NoStore
from horovod_train.checkpoint_files import Checkpoint, load
from horovod_train.config import Config
from horovod_train.config_yaml import as_dict
from horovod_train.data.audit import AuditLog, NoAudit, Start
from horovod_train.distributed.group import WorkerGroup
from horovod_train.errors import UserError
from horovod_train.output import NoOutput


def restore(config: Config, store: NoStore, parts: Parts, output: NoOutput) -> dict[str, Any]:
    """Gives root's state the values of the checkpoint to start from; returns the statistics of each rank in it."""
    found = store.find(config.checkpoint.resume)
    if found is None:
        output.say("starting from initial weights")
        return {}
    arrays = load(parts.state.variables(), found)
    _check_position(parts, found)
    if found.facts.config["checkpoint"]["best"] != as_dict(config.checkpoint.best):
        parts.best.forget()  # the best of another metric
    watched, then = as_dict(config.early_stopping), found.facts.config["early_stopping"]
    if (watched["metric"], watched["mode"]) != (then["metric"], then["mode"]):
        parts.early_stopping.best.forget()
    output.say(f"resumed from {found.folder} at step {int(parts.state.step)}")
    return {name: array for name, array in arrays.items() if name.startswith("ranks/")}


def _check_position(parts: Parts, found: Checkpoint) -> None:
    """A saved place inside an epoch means something only where the same order of records leads there."""
    if found.facts.records and found.facts.data != parts.train.fingerprint:
        was = found.facts.config
        raise UserError(
            f"{found.folder}: stands after record {found.facts.records} of an epoch whose order is no longer the same. "
            f"Go on with the training files of then, seed {was['seed']}, data.global_batch_size "
            f"{was['data']['global_batch_size']} and the same data.shuffle… settings; or from the end of an epoch."
        )


def open_audit(config: Config, group: WorkerGroup, parts: Parts) -> NoAudit:
    if not config.data.audit:
        return NoAudit()
    assert config.output_dir is not None
    return AuditLog(
        config.output_dir,
        Start(
            epoch=int(parts.state.epoch),
            step=loop.position(parts.state, parts.train),
            rank=group.rank,
            size=group.size,
            num_records=parts.train.num_records,
            global_batch_size=parts.train.global_batch_size,
            steps_per_epoch=parts.train.steps_per_epoch,
        ),
    )
