"""Builds the parts that a run trains with, from its config: data, model, state, and the steps of a compiled model.

A step is tried on the shapes of a batch first, and what it uses is distributed. Compiles no model (see compiled), does
not communicate with other ranks and writes no files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from horovod_train.config.registry import is_users, load_function
from horovod_train.config.rules import refuse_given
from horovod_train.config.settings import Config, Watched
from horovod_train.data.batch_source import BatchSource
from horovod_train.data.dataset import Records
from horovod_train.data.pipeline import Pipeline, Ranks, build_pipeline
from horovod_train.distributed.group import WorkerGroup, as_tf_variable, check_have_gradients, check_sendable
from horovod_train.distributed.optimizer import GradientExchange
from horovod_train.distributed.sync_batch_norm import synchronise_batch_norm
from horovod_train.errors import UserError
from horovod_train.keras_seams import averages_of
from horovod_train.models import OWN_STEPS, build_model, overridden
from horovod_train.models.model_parallel import cut_into_stages, follow_inputs, stage_lines
from horovod_train.optim.schedules import build_horizon
from horovod_train.training import refusals
from horovod_train.training.callbacks import Callbacks, load_callbacks
from horovod_train.training.compiled import Compiled, compile_model
from horovod_train.training.fine_tuning import Freezing, enable_lora
from horovod_train.training.hooks import Hook, load_hooks
from horovod_train.training.losses import losses_of
from horovod_train.training.state import Averages, TrainState, find_seeds, moving_averages
from horovod_train.training.steps.figures import Figures, ForwardState, metrics_in
from horovod_train.training.steps.histograms import check_names, find_layers
from horovod_train.training.steps.optimizers import Optimizers, Update, optimizers_in
from horovod_train.training.steps.shares import Rows, Shares
from horovod_train.training.steps.step import EvalStep, PhaseVariable, Seeds, TrainStep
from horovod_train.training.steps.trial import Tried, check_variables, make_metrics, try_outputs, try_step
from horovod_train.training.stopping import BestTracker, EarlyStopping
from horovod_train.training.sync import Local, Stale, SyncStrategy


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
    rate_of: str = ""
    """Of what the learning rate is: "the model", "the compiled optimizer"; "": of the config."""
    averages: str = ""
    """What the averages are for that the optimizer keeps; "" if it keeps none."""

    def checkpoint_bytes(self, ranks: int) -> int:
        """Return the most bytes of all arrays in a checkpoint of so many ranks."""
        return self.state.checkpoint_bytes(ranks) + self.train_step.figures.checkpoint_bytes(ranks)

    def close(self) -> None:
        """Read nothing ahead any more: the end of a stopped run would wait for it."""
        for data in (self.train, self.eval):
            if isinstance(data, Pipeline):
                data.close()


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
    train = build_split(config, group, data, training=True) if isinstance(data, Records) else data
    eval_ = build_split(config, group, eval_data, training=False) if isinstance(eval_data, Records) else eval_data
    horizon = build_horizon(config.train, train.global_batch_size, train.steps_per_epoch)
    model = _prepare_model(model, config, group)
    freezing = Freezing(model, config.model)
    freezing.apply(math.inf)  # whatever is trained at some time has slots, averages and a place in checkpoints
    compiled = compile_model(config, model, horizon)
    for records in (data, eval_data):
        if isinstance(records, Records):
            compiled.check_classes(records.schema)
            compiled.check_loss(records.schema)
    # Always create both, so that a checkpoint loads whether or not the option is on.
    best = BestTracker("best", config.checkpoint.best or Watched())
    early_stopping = EarlyStopping(config.early_stopping)
    evaluated = tf.Variable(-1, dtype=tf.int64, trainable=False, name="evaluated_step")
    tracked = best.variables | early_stopping.best.variables | {"evaluated_step": evaluated}
    shares = Shares(group)
    train_step = build_training(config, group, compiled, train, shares, tracked)
    state, warnings = train_step.state, tuple(refusals.list_warnings(config, group.size, train_step))
    evaluation = build_evaluation(config, group, compiled, eval_, shares) if eval_ else None
    refusals.check_watched(config, evaluation)
    find_layers(model, config.log.activations)
    check_names(model, config.log.graph_names)
    callbacks = load_callbacks(config.callbacks)
    state.failure.name_record = train.name_record
    freezing.apply(0)
    epochs = -(-horizon.total_steps // horizon.steps_per_epoch)
    callbacks.attach(model, state.optimizer, state.averages, epochs=epochs, steps_per_epoch=horizon.steps_per_epoch)
    evaluated_names = [f"val_{name}" for name in evaluation.metrics.names] if evaluation else []
    callbacks.check_monitors([*train_step.figures.names, *evaluated_names])
    keeps_rate = compiled.takes["optimizer"] and config.lr_schedule.base_lr is None
    return Components(
        train=train,
        eval=eval_,
        state=state,
        train_step=train_step,
        eval_step=evaluation,
        best=best,
        early_stopping=early_stopping,
        evaluated=evaluated,
        last_step=horizon.total_steps,
        freezing=freezing,
        origins=tuple(compiled.origins(train_step.update.optimizers.by_path)),
        rate_of="the model" if compiled.has_own_optimizers else "the compiled optimizer" if keeps_rate else "",
        averages=_use_of_averages(state.averages, callbacks, evaluation),
        callbacks=callbacks,
        users_hooks=load_hooks(config.hooks, config.log.every_steps),
        warnings=warnings,
    )


def _cut(model: keras.Model, cut_before: Sequence[str], devices: Sequence[str]) -> keras.Model:
    """Return the model in stages. Raises UserError for one with own steps of which Keras' copy would be a plain one."""
    cut = cut_into_stages(model, cut_before, devices)
    own = overridden(model, OWN_STEPS)
    if own and type(cut) is not type(model):
        raise UserError(
            f"device.cut_before: a cut copies the model, and Keras' copy of a {type(model).__name__} has no "
            f"{', '.join(own)} of its own. Subclass keras.Model with inputs and outputs, and without an __init__."
        )
    return cut


def _prepare_model(model: keras.Model, config: Config, group: WorkerGroup) -> keras.Model:
    """Return the model as it trains: on this rank's devices, cut into stages if there are several. Raises UserError."""
    devices = group.devices[group.rank].logical
    refusals.check_precision(model, config.precision)
    if config.model.init_from and is_users(config.model.init_from):
        load_function(config.model.init_from, "model.init_from")  # on every rank, so that their code can be compared
    enable_lora(model, config.model.lora)
    check_sendable(model.weights)
    check_have_gradients(model.trainable_weights)
    if config.train.sync_batch_norm:
        synchronise_batch_norm(model, deterministic=config.deterministic, owner="train.sync_batch_norm")
    model = _cut(model, config.device.cut_before, devices)
    if not model.trainable_weights:
        raise UserError("model: it has no weights to train.")
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
    if not training:  # by default the same batches at any number of ranks: some losses are means over batches
        of_ranks = (config.eval.batch_size_per_rank or 0) * group.size
        global_batch_size = of_ranks or max(global_batch_size, group.size)
    return build_pipeline(
        records,
        data,
        Ranks(group.rank, group.size, group.local_size, group.devices[group.rank].logical[0]),
        seed=config.seed,
        training=training,
        global_batch_size=global_batch_size,
    )


def _use_of_averages(averages: Averages, callbacks: Callbacks, evaluation: EvalStep | None) -> str:
    """Return for the log what the averages of an optimizer are for."""
    if not averages.are_of_optimizer:
        return ""
    if callbacks.evaluate_averages:
        evaluated, taken = "SwapEMAWeights has them evaluated; ", "export, evaluate and predict take them"
    else:
        evaluated = "evaluations see the trained weights, because SwapEMAWeights is not in callbacks; "
        taken = "export and predict take them, as fit ends with them"
    return f"kept by the optimizer (use_ema); {evaluated if evaluation else ''}{taken}"


def build_training(
    config: Config,
    group: WorkerGroup,
    compiled: Compiled,
    train: BatchSource,
    shares: Shares,
    tracked: Mapping[str, tf.Variable],
) -> TrainStep:
    """Try the model's train_step; build slots, state and step, and distribute its optimizers. Raises UserError.

    shares: one for training and evaluation, because the model's losses follow one.
    """
    model, where = compiled.model, _where(config, "train")
    refusals.check_norms_are_trained(config, model)
    refusals.check_xla_gets_no_text(config, train)
    optimizers = Optimizers(optimizers_in(model))
    rows = _rows(config, group, compiled, train, training=True)
    if not compiled.own:
        make_metrics(model, train.scaled_spec, rows.data_of)
    # Before the trial, which shows what they refuse, and after it, because names may be no losses before.
    _take_on_losses(model, shares)
    penalties = add_l2(model, config.train.l2)
    tried = try_step(model, "train_step", train.scaled_spec, rows.data_of, where, optimizers.only_noted)
    refusals.check_step(config, compiled, optimizers, tried)
    refusals.check_exchanges(tried, train, group, "train_step")
    refusals.check_added_losses(tried, compiled)
    refusals.check_l2_is_read(config, compiled, [penalty.is_read for penalty in penalties])
    _take_on_losses(model, shares)
    changed = _changed_by_forward_pass(model, tried)
    forward_state = ForwardState(group, changed, in_each_step=config.train.synchronization != "local")
    refusals.check_sums_are_exchanged(config, changed, forward_state)
    needs_divisors = bool(losses_of(model)) and (config.jit_compile or config.train.accumulate_steps > 1)
    sent = config.horovod
    exchange = GradientExchange(
        op=sent.op,
        compression=sent.compression,
        sparse_as_dense=sent.sparse_as_dense,
        predivide=sent.predivide,
        deterministic=config.deterministic,
        owner="horovod",
    )
    averages = _averages(config, compiled)
    synchronization = _synchronization(config, group, optimizers, averages, forward_state, exchange, model)
    knows_loss = tried.calls_compute_loss
    state = TrainState(
        model, optimizers, tracked, averages=averages, synchronization=synchronization, knows_loss=knows_loss
    )
    phase_variable = PhaseVariable(state.step)
    max_skips = config.train.max_skips_in_a_row if config.train.non_finite == "skip" else 0
    holds_back = bool(max_skips) or optimizers.scales_loss or config.train.synchronization != "every_step"
    update = Update(optimizers, exchange, synchronization, shares, state.step, phase_variable.enter, holds_back)
    optimizers.distribute(update)
    targets = train.scaled_spec.targets
    return TrainStep(
        state,
        rows,
        update,
        shares,
        forward_state,
        Figures(tried.sources, metrics_in(model), tried.updates),
        seed=config.seed,
        phase_variable=phase_variable,
        accumulate_steps=config.train.accumulate_steps,
        counts_ahead=needs_divisors and "train_step" not in compiled.own,
        jit_compile=config.jit_compile,
        labels=compiled.label_counts([*targets] if isinstance(targets, dict) else [""]),
        assigned=tried.assigns,
        max_skips_in_a_row=max_skips,
        placement=follow_inputs if config.device.per_rank > 1 else nullcontext,
    )


def _synchronization(
    config: Config,
    group: WorkerGroup,
    optimizers: Optimizers,
    averages: Averages,
    forward_state: ForwardState,
    exchange: GradientExchange,
    model: keras.Model,
) -> SyncStrategy:
    train = config.train
    if train.synchronization == "stale":
        combine = functools.partial(exchange.combine_each, name="settled.gradient")
        return Stale(model, combine, sparse_as_dense=config.horovod.sparse_as_dense, skips=train.non_finite == "skip")
    if train.synchronization == "local":
        assert train.average_every_steps is not None
        rates = {id(rate) for rate in optimizers.learning_rates.values()}
        slots = [slot for slot in optimizers.variables if id(slot) not in rates]
        kept = [] if averages.are_of_optimizer else averages.variables.values()  # those are slots
        beside = [*slots, *kept, *forward_state.of_kind("mean")]
        return Local(group, model, train.average_every_steps, beside, forward_state.of_kind("first"))
    assert train.synchronization == "every_step"
    return SyncStrategy()


def _averages(config: Config, compiled: Compiled) -> Averages:
    kept = [] if compiled.has_own_optimizers else averages_of(compiled.model.optimizer)
    if kept and config.train.ema_decay is not None:
        raise UserError("train.ema_decay: the optimizer keeps averages itself (use_ema); leave out one of the two.")
    if config.train.ema_decay is not None:
        return moving_averages(compiled.model, config.train.ema_decay)
    return Averages(kept, are_of_optimizer=bool(kept))


def build_evaluation(
    config: Config, group: WorkerGroup, compiled: Compiled, pipeline: BatchSource, shares: Shares
) -> EvalStep:
    """Try the model's test_step on the shapes of a batch. Raises UserError."""
    model = compiled.model
    if "train_step" in compiled.own and "test_step" not in compiled.own:
        refusals.check_loss_is_known(compiled)
    rows = _rows(config, group, compiled, pipeline, training=False)
    _take_on_losses(model, shares)
    tried = try_step(model, "test_step", pipeline.scaled_spec, rows.data_of, _where(config, "eval"))
    known = [*model.variables, *(variable for metric in metrics_in(model) for variable in metric.variables)]
    check_variables(tried.assigns, known, "test_step changes")
    refusals.check_exchanges(tried, pipeline, group, "test_step")
    refusals.check_added_losses(tried, compiled)
    if not tried.calls_compute_metrics:
        why = "because the model's own test_step does not call compute_metrics. Leave it out."
        refuse_given(config, ("metrics", "weighted_metrics"), f"has no effect in evaluations, {why}")
    _take_on_losses(model, shares)
    figures = Figures(tried.sources, metrics_in(model), tried.updates)
    forward_state = ForwardState(group, _changed_by_forward_pass(model, tried))
    return EvalStep(model, rows, shares, forward_state, figures, Seeds(find_seeds(model), config.seed, group.rank))


def _where(config: Config, split: str) -> str:
    return "data.dataset" if config.data.dataset else f"data.{split}"


def _rows(config: Config, group: WorkerGroup, compiled: Compiled, source: BatchSource, *, training: bool) -> Rows:
    has_weights = source.has_weights
    targets = source.scaled_spec.targets
    if has_weights and isinstance(targets, Mapping) and not targets:
        raise UserError(
            f"{'data.dataset' if config.data.dataset else 'data.weight'}: weights of records have no effect without "
            "targets: Keras hands over neither. Leave them out, or give data.targets."
        )
    outputs = None
    if compiled.targets or has_weights or (training and compiled.loss.class_weights):
        outputs = try_outputs(compiled.model, source.scaled_spec.inputs, _where(config, "train"))
    return Rows(
        group,
        compiled.data_of(outputs, has_weights=has_weights, training=training),
        source.scaled,
        are_counted=config.data.on_bad_record == "skip" or config.data.dataset is not None,
    )


def _take_on_losses(model: keras.Model, shares: Shares) -> None:
    for loss in losses_of(model):
        shares.take_on(loss)


def add_l2(model: keras.Model, l2: float) -> list[_Sum]:
    """Add l2 · ½ Σ W² to the regularizer of each trained matrix, and return those; ½ Σ W² is tf.nn.l2_loss."""
    penalties = []
    for variable in model.trainable_variables if l2 else ():
        if len(variable.shape) > 1:
            variable.regularizer = _Sum(variable.regularizer, keras.regularizers.L2(l2 / 2))
            penalties.append(variable.regularizer)
    return penalties


class _Sum(keras.regularizers.Regularizer):
    """The sum of two regularizers, of which one may be missing."""

    def __init__(self, first: Callable[[Any], Any] | None, second: Callable[[Any], Any]) -> None:
        self._first, self._second = first, second
        self.is_read = False
        """Whether anything has computed it, as `losses` of a layer does."""

    def __call__(self, x: Any) -> Any:
        self.is_read = True
        return self._second(x) if self._first is None else self._first(x) + self._second(x)


def _changed_by_forward_pass(model: keras.Model, tried: Tried) -> list[Any]:
    """Return the weights that are not trained and that the step assigns, in the model's order."""
    changed = {variable.ref() for variable in tried.assigns}
    # A subclass may leave weights out of trainable_weights, which Keras' non_trainable_weights then lack too.
    changed -= {as_tf_variable(weight).ref() for weight in model.trainable_weights}
    return [weight for weight in model.weights if as_tf_variable(weight).ref() in changed]
