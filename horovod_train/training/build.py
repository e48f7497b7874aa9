"""Builds the parts that a run trains with, from its config: data, model, state, and the steps of a compiled model.

A step is tried on the shapes of a batch first, and what it uses is distributed. Compiles no model (see compiled), does
not communicate with other ranks and writes no files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

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
from horovod_train.distributed.sync_batch_norm import all_parts_in, layers_inside, parts_in, synchronise_batch_norm
from horovod_train.distributed.watchdog.heartbeat import PhaseVariable
from horovod_train.errors import UserError
from horovod_train.keras_seams import averages_of, compile_arguments, compiled_losses
from horovod_train.models import OWN_EVALUATION, OWN_TRAINING, build_model, overridden
from horovod_train.models.model_parallel import cut_into_stages, follow_inputs, stage_lines
from horovod_train.optim.schedules import build_horizon
from horovod_train.training.callbacks import Callbacks, load_callbacks
from horovod_train.training.compiled import Compiled, compile_model
from horovod_train.training.fine_tuning import Freezing, enable_lora
from horovod_train.training.hooks import Hook, load_hooks
from horovod_train.training.state import Averages, MovingAverages, TrainState, find_seeds
from horovod_train.training.steps.figures import Figures, ForwardState, metrics_in
from horovod_train.training.steps.histograms import check_names, find_layers
from horovod_train.training.steps.optimizers import Optimizers, Update, inside_optimizer, optimizers_in
from horovod_train.training.steps.shares import Rows, Shares
from horovod_train.training.steps.step import EvalStep, Seeds, TrainStep
from horovod_train.training.steps.trial import Tried, check_variables, make_metrics, try_outputs, try_step
from horovod_train.training.stopping import BestTracker, EarlyStopping
from horovod_train.training.sync import STRATEGIES, SyncParts

_OVER_BATCHES = (keras.losses.Dice, keras.losses.Tversky, keras.losses.Circle)
"""Losses of Keras that compare all records of a batch, so that they are no mean over records."""


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
    state, warnings = train_step.state, tuple(list_warnings(config, group.size, train_step))
    evaluation = build_evaluation(config, group, compiled, eval_, shares) if eval_ else None
    _check_watched(config, evaluation)
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
    own = overridden(model, sorted({*OWN_TRAINING, *OWN_EVALUATION}))
    if own and type(cut) is not type(model):
        raise UserError(
            f"device.cut_before: a cut copies the model, and Keras' copy of a {type(model).__name__} has no "
            f"{', '.join(own)} of its own. Subclass keras.Model with inputs and outputs, and without an __init__."
        )
    return cut


def _prepare_model(model: keras.Model, config: Config, group: WorkerGroup) -> keras.Model:
    """Return the model as it trains: on this rank's devices, cut into stages if there are several. Raises UserError."""
    devices = group.devices[group.rank].logical
    check_precision(model, config.precision)
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


def _use_of_averages(averages: Averages, callbacks: Callbacks, evaluation: EvalStep | None) -> str:
    """Return for the log what the averages of an optimizer are for."""
    if not averages.are_of_optimizer:
        return ""
    evaluated = ""
    if evaluation and callbacks.evaluate_averages:
        evaluated = "SwapEMAWeights has them evaluated; "
    elif evaluation:
        evaluated = "evaluations see the trained weights, because SwapEMAWeights is not in callbacks; "
    return f"kept by the optimizer (use_ema); {evaluated}export, evaluate and predict take them, as fit ends with them"


def _check_watched(config: Config, evaluation: EvalStep | None) -> None:
    if evaluation is None:
        return
    stops, names = config.early_stopping, evaluation.metrics.names
    is_asked = stops.patience is not None or stops.target is not None or stops.metric != Watched().metric
    watched = {"checkpoint.best": config.checkpoint.best, "early_stopping": stops if is_asked else None}
    for key, value in watched.items():
        if value is not None and value.metric not in names:
            raise UserError(f"{key}.metric: the evaluation has no {value.metric!r}; it has {', '.join(names)}.")


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
    _check_norms_are_trained(config, model)
    optimizers = Optimizers(optimizers_in(model))
    rows = _rows(config, group, compiled, train, training=True)
    if not compiled.own:
        make_metrics(model, train.scaled_spec, rows.data_of)
    # Before the trial, which shows what they refuse, and after it, because names may be no losses before.
    _take_on_losses(model, shares)
    penalties = add_l2(model, config.train.l2)
    with shares.noting_exchanged():
        tried = try_step(model, "train_step", train.scaled_spec, rows.data_of, where, optimizers.only_noted)
    _check_step(config, compiled, optimizers, tried)
    _check_exchanges(tried, train, group, "train_step")
    _check_added_losses(tried, compiled)
    _check_l2_is_read(config, penalties, compiled)
    _take_on_losses(model, shares)
    changed = _changed_by_forward_pass(model, tried)
    forward_state = ForwardState(group, changed, in_each_step=config.train.synchronization != "local")
    _check_sums_are_exchanged(config, changed, forward_state)
    needs_divisors = bool(_losses(model)) and (config.jit_compile or config.train.accumulate_steps > 1)
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
    parts = SyncParts(
        config.train,
        group,
        model,
        functools.partial(exchange.combine_each, name="settled.gradient"),
        optimizers.variables,
        [*optimizers.learning_rates.values()],
        forward_state.of_kind("mean"),
        forward_state.of_kind("first"),
        # Slots of an optimizer are among its variables.
        [] if averages.are_of_optimizer else list(averages.variables.values()),
        sent.sparse_as_dense,
    )
    synchronization = STRATEGIES[config.train.synchronization](parts)
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
        losses_inside=bool(_held_losses(model)),
        jit_compile=config.jit_compile,
        counts_ranks=sent.op == "adasum",
        labels=compiled.label_counts([*targets] if isinstance(targets, dict) else [""]),
        assigned=tried.assigns,
        max_skips_in_a_row=max_skips,
        placement=follow_inputs if config.device.per_rank > 1 else nullcontext,
    )


def _averages(config: Config, compiled: Compiled) -> Averages:
    kept = [] if compiled.has_own_optimizers else averages_of(compiled.model.optimizer)
    if kept and config.train.ema_decay is not None:
        raise UserError("train.ema_decay: the optimizer keeps averages itself (use_ema); leave out one of the two.")
    return Averages(kept, are_of_optimizer=True) if kept else MovingAverages(compiled.model, config.train.ema_decay)


def build_evaluation(
    config: Config, group: WorkerGroup, compiled: Compiled, pipeline: BatchSource, shares: Shares
) -> EvalStep:
    """Try the model's test_step on the shapes of a batch. Raises UserError."""
    model = compiled.model
    if "train_step" in compiled.own and "test_step" not in compiled.own:
        _check_loss_is_known(compiled)
    rows = _rows(config, group, compiled, pipeline, training=False)
    _take_on_losses(model, shares)
    tried = try_step(model, "test_step", pipeline.scaled_spec, rows.data_of, _where(config, "eval"))
    known = [*model.variables, *(variable for metric in metrics_in(model) for variable in metric.variables)]
    check_variables(tried.assigns, known, "test_step changes", "model.name")
    _check_exchanges(tried, pipeline, group, "test_step")
    _check_added_losses(tried, compiled)
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
    needs_outputs = bool(compiled.targets) or has_weights or (training and bool(compiled.loss.class_weights))
    outputs = None
    if needs_outputs:
        outputs = try_outputs(compiled.model, source.scaled_spec.inputs, _where(config, "train"))
    return Rows(
        group,
        compiled.data_of(outputs, has_weights=has_weights, training=training),
        source.scaled,
        are_counted=config.data.on_bad_record == "skip" or config.data.dataset is not None,
    )


def _check_step(config: Config, compiled: Compiled, optimizers: Optimizers, tried: Tried) -> None:
    """Raise UserError for a step that cannot be distributed, or with which a setting would have no effect."""
    model, own_step = compiled.model, "train_step" in compiled.own
    if not optimizers.by_path:
        paths = ", ".join(optimizers.by_attribute) or "none"
        raise UserError(f"model.name: train_step applies none of the optimizers that the model holds ({paths}).")
    metrics = [variable for metric in metrics_in(model) for variable in metric.variables]
    known = [*model.variables, *metrics, *optimizers.all_variables]
    check_variables(tried.reads if own_step else tried.assigns, known, "train_step uses", "model.name")
    if not own_step and tried.shape_of_losses is not None:
        _check_is_reduced(model, tried.shape_of_losses)
    if own_step and config.jit_compile:
        raise UserError(
            "jit_compile: has no effect, because the model trains by its own train_step, in which the exchange of "
            "gradients stands, and XLA cannot compile that. Leave it out."
        )
    if own_step and not tried.calls_compute_loss and not (config.data.eval or config.data.dataset):
        why = "because the model's own train_step does not call compute_loss, and there is no data.eval. Leave it out."
        refuse_given(config, ("loss", "metrics", "weighted_metrics"), f"has no effect, {why}")
    if optimizers.scales_loss and config.train.synchronization != "every_step":
        raise UserError(
            "train.synchronization: an optimizer scales the loss, which needs every_step; received "
            f"{config.train.synchronization}."
        )
    if config.train.synchronization == "stale":
        _check_can_wait(model, optimizers.updated)
    _check_averages_are_read(optimizers, compiled)


def _check_exchanges(tried: Tried, source: BatchSource, group: WorkerGroup, method: str) -> None:
    """Raise UserError for an exchange of the step in which ranks would not find each other in a short step.

    Their graphs differ there: see named_by_call.
    """
    if not tried.named_by_graph or group.size == 1:
        return
    last = source.size_of(source.steps_per_epoch - 1)
    if last.rows is not None and not last.is_full:
        may_drop = method == "train_step" and source.global_batch_size % group.size == 0
        instead = "; or write data.drop_remainder: true" if may_drop else ""
        raise UserError(
            f"model.name: {method} calls {tried.named_by_graph[0]} by a name that differs between ranks in the last "
            "step of an epoch, which has fewer records. Call the function of horovod_train.tensorflow, outside of "
            f"branches, loops and tf.function{instead}."
        )


def _check_can_wait(model: keras.Model, updated: Sequence[Any]) -> None:
    """Raise UserError if not each of the weights that a step updates has one gradient in it, which waits in its place.

    updated: what optimizers are given gradients of, call by call.
    """
    trained = {id(as_tf_variable(weight)) for weight in model.trainable_variables}
    seen: set[int] = set()
    for weight in updated:
        number = id(as_tf_variable(weight))
        if number in seen or number not in trained:
            how = "more than once" if number in seen else "though it is not trained"
            raise UserError(
                "train.synchronization: stale has one gradient of each trained weight wait for a step; train_step "
                f"updates {weight.path} {how}. Write synchronization: every_step or local."
            )
        seen.add(number)


def _check_is_reduced(model: keras.Model, shape: Sequence[Any]) -> None:
    """Raise UserError for a loss of several numbers, which Keras' train_step adds up: ranks average what they compute.

    shape: of what `compute_loss` returned.
    """
    names = [loss.name for loss in compiled_losses(model) if loss.reduction in (None, "none")]
    if names:
        lead = f"{', '.join(names)} has no reduction, and gives"
        advice = "Write reduction: sum for their sum, or leave reduction out for their mean"
    elif [*shape] == [1] * len(shape):
        return
    else:
        lead, advice = "the model's compute_loss gives", "Return their sum or their mean"
    raise UserError(f"loss: {lead} numbers of shape {list(shape)}, which fit adds up; expected one number. {advice}.")


def _check_added_losses(tried: Tried, compiled: Compiled) -> None:
    """Raise UserError for an `add_loss` of several numbers, if Keras' compute_loss adds them up."""
    if tried.added_losses and tried.calls_compute_loss and "compute_loss" not in compiled.own:
        name, shape = next(iter(tried.added_losses.items()))
        raise UserError(
            f"loss: add_loss of {name} gives numbers of shape {shape}, which fit adds up; expected one number. Give it "
            "their mean, or their sum if they are not of records."
        )


def _check_averages_are_read(optimizers: Optimizers, compiled: Compiled) -> None:
    """Raise UserError for an optimizer that keeps averages and never overwrites weights with them, save that of a run.

    Those inside others count too, such as in a MultiOptimizer.
    """
    of_run = None if compiled.has_own_optimizers else compiled.model.optimizer
    averaging = [
        path if each is optimizer else f"{each.name} in {path}"
        for path, optimizer in optimizers.by_path.items()
        for each in (optimizer, *inside_optimizer(optimizer))
        if getattr(each, "use_ema", False) and not each.ema_overwrite_frequency
        if of_run is None or each is not getattr(of_run, "inner_optimizer", of_run)
    ]
    if averaging:
        raise UserError(
            f"model.name: {', '.join(averaging)} has use_ema, whose averages nothing reads; give train.ema_decay."
        )


def _check_loss_is_known(compiled: Compiled) -> None:
    """Raise UserError if a model with its own train_step is to be evaluated, and no loss is given anywhere."""
    if not compiled_losses(compiled.model) and getattr(compiled.model, "loss", None) is None:
        raise UserError(
            "data.eval: the model has a train_step of its own and no test_step, so its loss is not known. Give it a "
            "test_step; or give a loss, here or in compile, for the outputs of call(); or leave data.eval out."
        )


def _held_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """Return the losses that a model and its layers hold, besides those of `compile`."""
    given = {id(loss) for loss in parts_in(compile_arguments(model).get("loss"), keras.losses.Loss)}
    return [
        loss
        for layer in layers_inside(model)
        for name, value in vars(layer).items()
        if name != "_compile_loss"  # Keras' own sum of losses
        for loss in parts_in(value, keras.losses.Loss)
        if id(loss) not in given
    ]


def _losses(model: keras.Model) -> list[keras.losses.Loss]:
    """Return the losses that a model was compiled with and those that it and its layers hold; those in them, too."""
    given = compile_arguments(model).get("loss")
    return list(all_parts_in([*compiled_losses(model), given, *_held_losses(model)], keras.losses.Loss))


def _take_on_losses(model: keras.Model, shares: Shares) -> None:
    for loss in _losses(model):
        shares.take_on(loss)


def add_l2(model: keras.Model, l2: float) -> list[_Sum]:
    """Add l2 · ½ Σ W² to the regularizer of each trained matrix, and return those; ½ Σ W² is tf.nn.l2_loss."""
    penalties = []
    for variable in model.trainable_variables if l2 else ():
        if len(variable.shape) > 1:
            variable.regularizer = _Sum(variable.regularizer, keras.regularizers.L2(l2 / 2))
            penalties.append(variable.regularizer)
    return penalties


def _check_norms_are_trained(config: Config, model: keras.Model) -> None:
    norms = [layer for layer in layers_inside(model) if isinstance(layer, keras.layers.BatchNormalization)]
    if config.train.sync_batch_norm and not any(layer.trainable for layer in norms):
        raise UserError(
            "train.sync_batch_norm: has no effect, because all BatchNormalization layers are frozen, and normalise by "
            "their moving statistics. Leave it out."
        )


def _check_sums_are_exchanged(config: Config, changed: Sequence[keras.Variable], forward_state: ForwardState) -> None:
    """Raise UserError for a weight to which ranks add in each pass, if they do not exchange in each step."""
    if config.train.synchronization == "local" and (sums := forward_state.of_kind("sum")):
        path = next(weight.path for weight in changed if as_tf_variable(weight) is sums[0])
        raise UserError(
            f"train.synchronization: local averages weights now and then, and cannot add up what ranks have added to "
            f"{path}, whose aggregation is sum. Leave that out, or write synchronization: every_step."
        )


def _check_l2_is_read(config: Config, penalties: Sequence[_Sum], compiled: Compiled) -> None:
    """After the trial of a step: raise UserError if it has read none of the penalties, so that l2 would do nothing."""
    if config.train.l2 and not penalties:
        raise UserError("train.l2: has no effect, because no weight with more than one axis is trained. Leave it out.")
    if not penalties or any(penalty.is_read for penalty in penalties):
        return
    own = "train_step" in compiled.own
    step = "train_step neither calls compute_loss nor reads" if own else "compute_loss does not read"
    raise UserError(
        f"train.l2: has no effect, because the model's own {step} self.losses. Add sum(self.losses) to its loss, or "
        "leave train.l2 out."
    )


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
    trained = {as_tf_variable(variable).ref() for variable in model.trainable_weights}
    return [
        weight
        for weight in model.weights
        if as_tf_variable(weight).ref() in changed and as_tf_variable(weight).ref() not in trained
    ]


def list_warnings(config: Config, size: int, step: TrainStep) -> Iterator[str]:
    """Yield a line for each effect of a config that a user may not expect on so many ranks."""
    for loss in _losses(step.state.model):
        if isinstance(loss, _OVER_BATCHES) and size > 1:
            yield f"the loss {loss.name} compares the records of a batch; it is averaged over ranks."
    for path in step.figures.averaged if size > 1 else ():
        yield (
            f"metrics: the state {path} is neither a sum nor a maximum or minimum, so it is averaged over ranks. Add "
            "to it, or give add_variable its aggregation."
        )
    if config.train.synchronization == "local" and config.data.on_bad_record == "skip":
        yield "data.on_bad_record: skip requires an exchange in every step, under synchronization: local too."
    if config.train.synchronization == "local" and config.data.dataset:
        yield "the lengths of streams differ, so there is an exchange in every step, under synchronization: local too."
    if config.train.synchronization == "local" and size > 1 and step.shares.exchanged:
        names = ", ".join(step.shares.exchanged)
        yield (
            f"the loss {names} is divided by what a mask or weights count, which ranks exchange in every step, under "
            "synchronization: local too."
        )
