"""Builds the parts that a run trains with, from its config. Does not communicate with other ranks; writes no files."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args, get_type_hints

import keras
import tensorflow as tf

from horovod_train.config.settings import Config, Watched
from horovod_train.data.dataset import Records
from horovod_train.data.pipeline.batch_source import BatchSource
from horovod_train.data.pipeline.loader import Ranks
from horovod_train.data.pipeline.pipeline import Pipeline, build_pipeline
from horovod_train.distributed.group import WorkerGroup, check_have_gradients, check_sendable
from horovod_train.distributed.sync_batch_norm import layers_inside, synchronise_batch_norm
from horovod_train.errors import UserError
from horovod_train.models import build_model
from horovod_train.models.model_parallel import cut_into_stages, stage_lines
from horovod_train.optim.schedules import Horizon, build_horizon
from horovod_train.training.averages import Averages, MovingAverages
from horovod_train.training.callbacks import Callbacks, load_callbacks
from horovod_train.training.compiled import compile_model
from horovod_train.training.early_stopping import BestTracker, EarlyStopping
from horovod_train.training.fine_tuning import Freezing, enable_lora
from horovod_train.training.hooks import Hook
from horovod_train.training.hooks.users import load_hooks
from horovod_train.training.initial_weights import check_source
from horovod_train.training.state import TrainState
from horovod_train.training.steps.build import Evaluation, Training, build_evaluation, build_training
from horovod_train.training.steps.histograms import check_names, find_layers
from horovod_train.training.steps.step import EvalStep, TrainStep
from horovod_train.training.sync import SyncParts, build_strategy


@dataclass(frozen=True)
class Components:
    """The parts that a run trains with."""

    train: BatchSource
    eval: BatchSource | None
    state: TrainState
    train_step: TrainStep
    eval_step: EvalStep | None
    """None: there is no evaluation."""
    best: BestTracker
    early_stopping: EarlyStopping
    evaluated: tf.Variable
    """int64: the step of the last completed evaluation."""
    last_step: int
    users_hooks: tuple[Hook, ...]
    callbacks: Callbacks
    warnings: tuple[str, ...]
    """Effects of this config that a user may not expect."""
    freezing: Freezing
    """Applied as at the start of the first epoch."""
    origins: tuple[str, ...] = ()
    """Where the parts come from that a compiled model has too."""
    keeps_compiled_rate: bool = False
    """Whether the learning rate is that of the optimizer that the model was compiled with."""
    averages: str = ""
    """What the averages are for that the optimizer keeps; "" if it keeps none."""


def build_first_model(config: Config) -> keras.Model:
    """Build the model that the config names, under its seed and precision, for `build_components`. Raises UserError."""
    keras.utils.set_random_seed(config.seed)
    keras.mixed_precision.set_dtype_policy(config.precision)
    return build_model(config.model)


def build_components(
    config: Config,
    group: WorkerGroup,
    data: Records | BatchSource,
    eval_data: Records | BatchSource | None,
    model: keras.Model | None = None,
) -> Components:
    """Build data, model, optimizer with slots, and compiled steps. Raises UserError for what the user must fix.

    `config` is resolved: its global batch size is known. data: records, or batches that were built before. model: by
    `build_first_model`, if it was built before.
    """
    if model is None:
        model = build_first_model(config)
    train = _build_batches(config, group, data, training=True)
    eval_ = _build_batches(config, group, eval_data, training=False) if eval_data else None
    horizon = build_horizon(config.train, train.global_batch_size, train.steps_per_epoch)
    model = _prepare_model(model, config, group)
    freezing = Freezing(model, config.model)
    freezing.apply(math.inf)  # whatever is trained at some time has slots, averages and a place in checkpoints
    compiled = compile_model(config, model, horizon)
    if isinstance(data, Records):
        compiled.check_classes(data.schema)
    if isinstance(eval_data, Records):
        compiled.check_classes(eval_data.schema)
    training = build_training(config, group, compiled, train)
    evaluation = build_evaluation(config, group, compiled, eval_) if eval_ else None
    _check_watched(config, evaluation)
    find_layers(model, config.log.activations)
    check_names(model, config.log.graph_names)
    # Always create both, so that a checkpoint loads whether or not the option is on.
    best = BestTracker("best", config.checkpoint.best or Watched())
    early_stopping = EarlyStopping(config.early_stopping)
    evaluated = tf.Variable(-1, dtype=tf.int64, trainable=False, name="evaluated_step")
    tracked = best.variables | early_stopping.best.variables | {"evaluated_step": evaluated}
    callbacks = load_callbacks(config.callbacks)
    state = build_state(config, group, model, training, tracked)
    state.failure.name_record = train.name_record
    freezing.apply(0)
    train_step = training.make_step(state)
    _attach_callbacks(callbacks, state, train_step.figures.names, evaluation, horizon)
    return Components(
        train=train,
        eval=eval_,
        state=state,
        train_step=train_step,
        eval_step=evaluation.step if evaluation else None,
        best=best,
        early_stopping=early_stopping,
        evaluated=evaluated,
        last_step=horizon.total_steps,
        freezing=freezing,
        origins=training.origins,
        keeps_compiled_rate=compiled.takes["optimizer"] and config.lr_schedule.base_lr is None,
        averages=_use_of_averages(state.averages, callbacks, evaluation),
        callbacks=callbacks,
        users_hooks=load_hooks(config.hooks, config.log.every_steps),
        warnings=training.warnings,
    )


def build_state(
    config: Config, group: WorkerGroup, model: keras.Model, training: Training, tracked: Mapping[str, tf.Variable]
) -> TrainState:
    averages: Averages = training.averages or MovingAverages(model, config.train.ema_decay)
    if training.averages and config.train.ema_decay is not None:
        raise UserError("train.ema_decay: the optimizer keeps averages itself (use_ema); leave out one of the two.")
    # Slots of an optimizer are among its variables.
    averaged = [] if averages.are_of_optimizer else list(averages.variables.values())
    optimizers, exchange = training.optimizers, training.exchange
    strategy = build_strategy(
        SyncParts(
            config.train,
            group,
            model,
            functools.partial(exchange.combine_each, name="settled.gradient"),
            optimizers.variables,
            [*optimizers.learning_rates.values()],
            training.forward_state.variables,
            averaged,
            config.horovod.sparse_as_dense,
        )
    )
    return TrainState(
        model, optimizers, tracked, averages=averages, synchronization=strategy, knows_loss=training.knows_loss
    )


def _prepare_model(model: keras.Model, config: Config, group: WorkerGroup) -> keras.Model:
    """Return the model as it trains: on this rank's devices, cut into stages if there are several. Raises UserError."""
    devices = group.devices[group.rank].logical
    check_precision(model, config.precision)
    check_source(config.model)
    enable_lora(model, config.model.lora)
    check_sendable(model.weights)
    check_have_gradients(model.trainable_weights)
    if config.train.sync_batch_norm:
        synchronise_batch_norm(model, deterministic=config.deterministic)
    model = cut_into_stages(model, config.device.cut_before, devices)
    if not model.trainable_weights:
        raise UserError("model: it has no weights to train.")
    lines = stage_lines(model)
    if len(lines) < config.device.per_rank:
        raise UserError(
            f"device.per_rank: {config.device.per_rank} devices, but the model has {'; '.join(lines) or 'no weights'}. "
            "Cut it with device.cut_before, or build its layers under tf.device."
        )
    return model


def check_precision(model: keras.Model, precision: str) -> None:
    """Raise UserError if layers have another policy than the config's, as those of a file have that of its run."""
    parts = [layer for layer in layers_inside(model) if layer.weights and not isinstance(layer, keras.Model)]
    policies = {layer.dtype_policy.name for layer in parts} & {*get_args(get_type_hints(Config)["precision"])}
    mixed = policies - {"float32"} or policies  # some layers of a mixed model are float32
    if mixed and precision not in mixed:
        theirs = ", ".join(sorted(mixed))
        raise UserError(
            f"precision: {precision}, but the model is made of layers in {theirs}; write precision: {theirs}."
        )


def _build_batches(config: Config, group: WorkerGroup, data: Records | BatchSource, *, training: bool) -> BatchSource:
    return build_split(config, group, data, training=training) if isinstance(data, Records) else data


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


def _attach_callbacks(
    callbacks: Callbacks, state: TrainState, trained: Sequence[str], evaluation: Evaluation | None, horizon: Horizon
) -> None:
    epochs = -(-horizon.total_steps // horizon.steps_per_epoch)
    steps = horizon.steps_per_epoch
    callbacks.attach(state.model, state.optimizer, state.averages, epochs=epochs, steps_per_epoch=steps)
    evaluated = evaluation.step.metrics.names if evaluation else []
    callbacks.check_monitors([*trained, *(f"val_{name}" for name in evaluated)])


def _use_of_averages(averages: Averages, callbacks: Callbacks, evaluation: Evaluation | None) -> str:
    """Return for the log what the averages of an optimizer are for."""
    if not averages.are_of_optimizer:
        return ""
    evaluated = ""
    if evaluation and callbacks.evaluate_averages:
        evaluated = "SwapEMAWeights has them evaluated; "
    elif evaluation:
        evaluated = "evaluations see the trained weights, because SwapEMAWeights is not in callbacks; "
    return f"kept by the optimizer (use_ema); {evaluated}export, evaluate and predict take them, as fit ends with them"


def _check_watched(config: Config, evaluation: Evaluation | None) -> None:
    if evaluation is None:
        return
    stops, names = config.early_stopping, evaluation.step.metrics.names
    is_asked = stops.patience is not None or stops.target is not None or stops.metric != Watched().metric
    watched = {"checkpoint.best": config.checkpoint.best, "early_stopping": stops if is_asked else None}
    for key, value in watched.items():
        if value is not None and value.metric not in names:
            raise UserError(f"{key}.metric: the evaluation has no {value.metric!r}; it has {', '.join(names)}.")
