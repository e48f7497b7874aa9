"""Builds the parts that a run trains with, from its config. Does not communicate with other ranks; writes no files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import keras
import tensorflow as tf

from horovod_train.config.settings import Config, Watched
from horovod_train.data.batch import Batch
from horovod_train.data.dataset import Records
from horovod_train.data.loader import Ranks
from horovod_train.data.pipeline import Pipeline, build_pipeline
from horovod_train.distributed.group import WorkerGroup, check_sendable
from horovod_train.distributed.optimizer import CombiningOptimizer, DistributedOptimizer
from horovod_train.distributed.sync_batch_norm import synchronise_batch_norm
from horovod_train.errors import UserError
from horovod_train.models import build_model
from horovod_train.models.model_parallel import cut_into_stages, follow_inputs, stage_lines
from horovod_train.optim.optimizers import limit_weight_decay
from horovod_train.optim.schedules import build_horizon
from horovod_train.training.compiled import brings, choose_loss, choose_metrics, choose_optimizer, origins
from horovod_train.training.early_stopping import BestTracker, EarlyStopping
from horovod_train.training.fine_tuning import Freezing, enable_lora
from horovod_train.training.graph import check_names
from horovod_train.training.histograms import find_layers
from horovod_train.training.hooks import Hook
from horovod_train.training.hooks.users import load_hooks
from horovod_train.training.initial_weights import check_source
from horovod_train.training.losses import Loss
from horovod_train.training.lr_multipliers import multiply_rates
from horovod_train.training.metrics import Accumulator
from horovod_train.training.objective import Objective, check_fits
from horovod_train.training.state import MovingAverages, TrainState
from horovod_train.training.step import EvalStep, TrainStep
from horovod_train.training.sync import build_strategy
from horovod_train.training.sync.strategy import SyncParts


@dataclass(frozen=True)
class Components:
    """The parts that a run trains with."""

    train: Pipeline
    eval: Pipeline | None
    state: TrainState
    train_step: TrainStep
    eval_step: EvalStep
    best: BestTracker
    early_stopping: EarlyStopping
    evaluated: tf.Variable
    """int64: the step of the last completed evaluation."""
    last_step: int
    users_hooks: tuple[Hook, ...]
    warnings: tuple[str, ...]
    """Effects of this config that a user may not expect."""
    freezing: Freezing
    """Applied as at the start of the first epoch."""
    origins: tuple[str, ...] = ()
    """Where the parts come from that a compiled model has too."""


def build_components(config: Config, group: WorkerGroup, records: Records, eval_records: Records | None) -> Components:
    """Build data, model, optimizer with slots, and compiled steps. Raises UserError for what the user must fix.

    `config` is resolved: its global batch size is known.
    """
    keras.utils.set_random_seed(config.seed)
    keras.mixed_precision.set_dtype_policy(config.precision)
    train = build_split(config, group, records, training=True)
    eval_ = build_split(config, group, eval_records, training=False) if eval_records else None
    horizon = build_horizon(config.train, train.global_batch_size, train.steps_per_epoch)
    model = _build_model(config, group)
    loss = choose_loss(config, model)
    freezing = Freezing(model, config.model)
    freezing.apply(math.inf)  # whatever is trained at some time has slots, averages and a place in checkpoints
    loss.check_classes(records.schema)
    losses = [*loss.names, "penalty"]
    train_metrics = build_accumulator(config, model, loss, train.scaled_spec, also=["penalty"])
    eval_metrics = build_accumulator(config, model, loss, (eval_ or train).scaled_spec)
    has_own_losses = check_fits(model, loss, train_metrics, train.scaled_spec, "data.train")
    if eval_ is not None:
        check_fits(model, loss, eval_metrics, eval_.scaled_spec, "data.eval")
    _check_watched(config, eval_metrics)
    find_layers(model, config.log.activations)
    check_names(model, config.log.graph_names)
    plain = choose_optimizer(config, model, horizon)
    multiply_rates(plain, model.trainable_variables, config.optimizer.lr_multipliers)
    optimizer = DistributedOptimizer(
        plain,
        op=config.horovod.op,
        compression=config.horovod.compression,
        sparse_as_dense=config.horovod.sparse_as_dense,
        predivide=config.horovod.predivide,
        deterministic=config.deterministic,
    )
    is_compiled = brings(model, config)["optimizer"]
    limit_weight_decay(optimizer, model.trainable_variables, config, is_compiled=is_compiled)
    # Always create both, so that a checkpoint loads whether or not the option is on.
    best = BestTracker("best", config.checkpoint.best or Watched())
    early_stopping = EarlyStopping(config.early_stopping)
    evaluated = tf.Variable(-1, dtype=tf.int64, trainable=False, name="evaluated_step")
    followed = best.variables | early_stopping.best.variables | {"evaluated_step": evaluated}
    state = _build_state(config, group, model, optimizer, followed, losses)
    freezing.apply(0)
    return Components(
        train=train,
        eval=eval_,
        state=state,
        train_step=_build_train_step(config, group, state, loss, train_metrics, train),
        eval_step=EvalStep(model, loss, eval_metrics, (eval_ or train).scaled),
        best=best,
        early_stopping=early_stopping,
        evaluated=evaluated,
        last_step=horizon.total_steps,
        freezing=freezing,
        origins=tuple(origins(model, config)),
        users_hooks=load_hooks(config.hooks, config.log.every_steps),
        warnings=tuple(_warnings(config, group.size, train, has_own_losses, _weighs_records(config, loss))),
    )


def _build_state(
    config: Config,
    group: WorkerGroup,
    model: keras.Model,
    optimizer: CombiningOptimizer,
    followed: Mapping[str, tf.Variable],
    losses: Sequence[str],
) -> TrainState:
    optimizer.build(model.trainable_variables)  # slots must exist before the broadcast
    averages = MovingAverages(model, config.train.ema_decay)
    kept = list(averages.variables.values())
    strategy = build_strategy(SyncParts(config.train, group, model, optimizer, kept, config.horovod.sparse_as_dense))
    return TrainState(model, optimizer, followed, averages=averages, synchronization=strategy, losses=losses)


def _build_train_step(
    config: Config, group: WorkerGroup, state: TrainState, loss: Loss, metrics: Accumulator, train: Pipeline
) -> TrainStep:
    objective = Objective(
        state.model,
        state.optimizer,
        loss,
        size=group.size,
        accumulate_steps=config.train.accumulate_steps,
        l2=config.train.l2,
        jit_compile=config.jit_compile,
    )
    return TrainStep(
        state,
        objective,
        metrics,
        rank=group.rank,
        seed=config.seed,
        max_skips_in_a_row=config.train.max_skips_in_a_row if config.train.non_finite == "skip" else 0,
        count_over_ranks=_counting(config, group, loss),
        scaled=train.scaled,
        placement=follow_inputs if config.device.per_rank > 1 else nullcontext,
    )


def _warnings(config: Config, size: int, train: Pipeline, has_own_losses: bool, has_weights: bool) -> Iterator[str]:
    counts = {train.count(step) for step in (0, train.steps_per_epoch - 1)}
    if has_own_losses and any(count % size for count in counts):
        yield (
            f"the model's layers add losses that depend on records, and ranks hold uneven numbers of records in a step "
            f"({', '.join(map(str, sorted(counts)))} on {size} ranks): these losses are averaged over ranks, not over "
            "records; see docs/models.md."
        )
    if config.train.synchronization == "local" and config.data.on_bad_record == "skip":
        yield "data.on_bad_record: skip makes ranks meet in every step, under synchronization: local too."
    if config.train.synchronization == "local" and has_weights:
        yield "weights of records make ranks meet in every step, under synchronization: local too."


def _build_model(config: Config, group: WorkerGroup) -> keras.Model:
    """Build the model as it trains: on this rank's devices, cut into stages if there are several."""
    devices = group.devices[group.rank].logical
    model = build_model(config.model)
    check_source(config.model)
    enable_lora(model, config.model.lora)
    check_sendable(model.weights)
    if config.train.sync_batch_norm:
        synchronise_batch_norm(model, deterministic=config.deterministic)
    model = cut_into_stages(model, config.device.cut_before, devices)
    lines = stage_lines(model)
    if len(lines) < config.device.per_rank:
        raise UserError(
            f"device.per_rank: {config.device.per_rank} devices, but the model has {'; '.join(lines) or 'no weights'}. "
            "Cut it with device.cut_before, or build its layers under tf.device."
        )
    return model


def build_split(config: Config, group: WorkerGroup, records: Records, *, training: bool) -> Pipeline:
    """Build the pipeline of this rank's batches. Raises UserError."""
    data = config.data
    assert data.global_batch_size is not None
    global_batch_size = data.global_batch_size
    if not training:
        per_rank = config.eval.batch_size_per_rank or -(-global_batch_size // group.size)
        global_batch_size = per_rank * group.size
    return build_pipeline(
        records,
        data,
        Ranks(group.rank, group.size, group.local_size, group.devices[group.rank].logical[0]),
        seed=config.seed,
        training=training,
        global_batch_size=global_batch_size,
    )


def build_accumulator(
    config: Config, model: keras.Model, loss: Loss, batch: Batch, also: Sequence[str] = ()
) -> Accumulator:
    """Build the loss and the metrics of one split, with variables of their own. batch: of specs. Raises UserError."""
    plain, weighted = (choose_metrics(config, model, part, batch) for part in ("metrics", "weighted_metrics"))
    return Accumulator(loss, plain, weighted, also=also)


def _weighs_records(config: Config, loss: Loss) -> bool:
    return config.data.weight is not None or loss.has_class_weights


def _counting(config: Config, group: WorkerGroup, loss: Loss) -> Callable[[Batch], tf.Tensor]:
    """Return a function that gives what the sums of the losses are divided by in a step: records, or weights."""
    if _weighs_records(config, loss):  # each rank knows only the weights of its own records
        return lambda batch: group.sum_in_step(loss.total_weights(batch.targets, batch.weights), "step.count")
    if config.data.on_bad_record == "error":
        return lambda batch: batch.count  # exact as planned; no exchange needed
    # Bad records may have been skipped, so only the sum over ranks gives the number.
    return lambda batch: tf.maximum(group.sum_in_step(tf.reduce_sum(batch.real), "step.count"), 1.0)


def _check_watched(config: Config, seen: Accumulator) -> None:
    # Early stopping tracks its metric whenever there is an evaluation, even without a stop condition.
    watched = {"checkpoint.best": config.checkpoint.best}
    watched["early_stopping"] = config.early_stopping if config.data.eval else None
    for key, value in watched.items():
        if value is not None and value.metric not in seen.names:
            raise UserError(f"{key}.metric: the evaluation has no {value.metric!r}; it has {', '.join(seen.names)}.")
