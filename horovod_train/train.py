"""One run from beginning to end: builds every part in order, hands them to the loop, says how it ended.

Reads top to bottom. Every rank runs every line; what only root may do is behind `output` and `store`.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

import horovod_train
from horovod_train import hooks, loop
from horovod_train.checkpoint import open_store
from horovod_train.config import Config, resolve
from horovod_train.config_yaml import as_dict, dump
from horovod_train.data.pipeline import Pipeline, build_pipeline
from horovod_train.data.records import open_records
from horovod_train.distributed import agreement
from horovod_train.distributed.group import WorkerGroup, start
from horovod_train.distributed.optimizer import DistributedOptimizer
from horovod_train.errors import UserError
from horovod_train.metrics import Accumulator, build_metrics
from horovod_train.models import build_model
from horovod_train.optim import Horizon, build_optimizer
from horovod_train.output import NoOutput, open_output
from horovod_train.state import TrainState
from horovod_train.step import EvalStep, TrainStep, build_loss, check_fits


@dataclass
class Parts:
    """What a run trains with, built before the ranks exchange anything."""

    train: Pipeline
    eval: Pipeline | None
    state: TrainState
    train_step: TrainStep
    eval_step: EvalStep
    last_step: int


def run(config: Config) -> dict[str, Any]:
    """Trains as `config` says; returns what `summary.json` holds.

    Collective: called by every rank. Raises UserError before the first step for what the user must mend,
    DivergedError or RanksDisagree on all ranks where training must not go on.
    """
    started = time.time()
    group = start(config.horovod, config.device, deterministic=config.deterministic)
    with group.together():
        config = resolve(config, group.size)
        assert config.output_dir is not None
        output = open_output(
            config.output_dir,
            is_root=group.is_root,
            tensorboard=config.log.tensorboard,
            progress=config.log.progress,
            launched=group.launcher != "none",
        )
    _introduce(group, output, config)
    agreement.check(group, _facts(config), "at the start")

    keras.utils.set_random_seed(config.seed)
    keras.mixed_precision.set_dtype_policy(config.precision)
    with group.together():
        parts = _build(config, group)
        store = open_store(output.directory, config.checkpoint.keep)
        found = store.find(config.checkpoint.resume)
        if found is not None:
            store.load(parts.state, found)
            _check_position(parts, found)
    # Once, on a fresh start and on a resume alike: slots and counters exist by now.
    group.broadcast(list(parts.state.variables().values()))
    agreement.check(group, parts.state.digests(), "after the broadcast")

    first_step = int(parts.state.step)
    output.rewind(first_step)
    output.write_config(dump(config))
    output.say(f"resumed from {found} at step {first_step}" if found else "starting from initial weights")
    output.start_progress(first_step, parts.last_step)
    watch = hooks.Stopwatch()
    log, evaluate, save = _build_actions(config, group, output, store, parts, watch)
    try:
        loop.train(
            parts.state,
            parts.train_step,
            parts.train,
            [
                hooks.every(config.train.steps_per_call, output.show_progress),
                *_hooks(config, parts.train.steps_per_epoch, log, evaluate, save),
            ],
            last_step=parts.last_step,
            steps_per_call=config.train.steps_per_call,
            watch=watch,
        )
    except tf.errors.OpError as error:
        raise parts.train.explain(error) or error from error

    summary = _summary(config, group, parts.state, watch, started)
    summary |= {"train": log.newest, "eval": evaluate.newest if evaluate else {}}
    output.write_summary(summary)
    output.say(f"Done training for {summary['epochs']} epochs, {summary['steps']} steps")
    group.close()
    output.close()
    return summary


def _introduce(group: WorkerGroup, output: NoOutput, config: Config) -> None:
    output.say(
        f"{group.size} rank(s) on {len(set(group.hosts))} host(s), launcher {group.launcher}, exchange over "
        f"{group.exchange}; global batch {config.data.global_batch_size}; output in {config.output_dir}"
    )
    for rank, device in enumerate(group.devices):
        output.say(f"{group.name(rank)} uses {device.name}; found {device.found}")


def _facts(config: Config) -> dict[str, str]:
    """What must be equal on all ranks before they build anything."""
    return {
        "config": agreement.digest(dump(config).encode()),
        "code of horovod_train": agreement.code_digest(),
        **{f"version of {name}": version for name, version in _versions().items()},
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {
        "horovod_train": horovod_train.__version__,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "horovod": version("horovod"),
    }


def _build(config: Config, group: WorkerGroup) -> Parts:
    data = config.data
    assert data.global_batch_size is not None
    train = build_pipeline(
        open_records(data, "train"),
        data,
        rank=group.rank,
        size=group.size,
        seed=config.seed,
        training=True,
        global_batch_size=data.global_batch_size,
    )
    eval_ = None
    if data.eval:
        per_rank = config.eval.batch_size_per_rank or -(-data.global_batch_size // group.size)
        eval_ = build_pipeline(
            open_records(data, "eval"),
            data,
            rank=group.rank,
            size=group.size,
            seed=config.seed,
            training=False,
            global_batch_size=per_rank * group.size,
        )
    horizon = _horizon(config, train)
    model, loss = build_model(config.model), build_loss(config.loss)
    seen = {split: Accumulator(["loss"], build_metrics(config.metrics)) for split in ("train", "eval")}
    check_fits(model, loss, seen["train"], train.element_spec, "data.train")
    if eval_ is not None:
        check_fits(model, loss, seen["eval"], eval_.element_spec, "data.eval")
    optimizer = DistributedOptimizer(
        build_optimizer(config, horizon), op=config.horovod.op, compression=config.horovod.compression
    )
    state = TrainState(model, optimizer)
    train_step = TrainStep(
        state,
        loss,
        seen["train"],
        rank=group.rank,
        size=group.size,
        seed=config.seed,
        accumulate_steps=config.train.accumulate_steps,
    )
    return Parts(train, eval_, state, train_step, EvalStep(model, loss, seen["eval"]), horizon.total_steps)


def _horizon(config: Config, train: Pipeline) -> Horizon:
    in_epochs = (config.train.epochs or math.inf) * train.steps_per_epoch
    return Horizon(
        global_batch_size=train.global_batch_size,
        steps_per_epoch=train.steps_per_epoch,
        total_steps=int(min(in_epochs, config.train.max_steps or math.inf)),
    )


def _build_actions(
    config: Config, group: WorkerGroup, output: NoOutput, store: Any, parts: Parts, watch: hooks.Stopwatch
) -> tuple[hooks.LogTraining, hooks.Evaluate | None, hooks.Save]:
    log = hooks.LogTraining(group, output, parts.state, parts.train_step.seen, watch)
    save = hooks.Save(group, store, parts.state, watch)
    if parts.eval is None:
        return log, None, save
    return log, hooks.Evaluate(group, output, parts.state, parts.eval, parts.eval_step, watch), save


def _hooks(
    config: Config,
    steps_per_epoch: int,
    log: hooks.LogTraining,
    evaluate: hooks.Evaluate | None,
    save: hooks.Save,
) -> list[hooks.Hook]:
    """In the order in which they run at a step where several are due: what is saved has been evaluated."""

    def both(every_steps: int | None, every_epochs: int | None, action: Callable[[int], None]) -> list[hooks.Hook]:
        in_steps = every_epochs * steps_per_epoch if every_epochs else None
        return [hooks.every(every_steps, action), hooks.every(in_steps, action, at_end=True)]

    return [
        hooks.every(config.log.every_steps, log, at_end=True),
        *(both(config.eval.every_steps, config.eval.every_epochs, evaluate) if evaluate else []),
        *both(config.checkpoint.every_steps, config.checkpoint.every_epochs, save),
    ]


def _check_position(parts: Parts, path: str) -> None:
    """A saved place in the data means something only where the same batches lead there."""
    records, batch = int(parts.state.records), parts.train.global_batch_size
    if records > parts.train.num_records or (records % batch and records != parts.train.num_records):
        raise UserError(
            f"{path}: stands after record {records} of its epoch; with {parts.train.num_records} records in batches of "
            f"{batch} no step ends there. Go on with the data and global batch size that it was trained with."
        )


def _summary(
    config: Config, group: WorkerGroup, state: TrainState, watch: hooks.Stopwatch, started: float
) -> dict[str, Any]:
    seconds, _, records = watch.read()
    return {
        "ended": "done",
        "steps": int(state.step),
        "epochs": int(state.epoch),
        "ranks": group.size,
        "seconds": round(time.time() - started, 3),
        "examples_per_s": round(records / seconds, 1) if seconds else None,
        "weights_sha256": state.weights_sha256(),
        "versions": _versions(),
        "config": as_dict(config),
    }
