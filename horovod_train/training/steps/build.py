"""Builds the steps of a run from a compiled model: tries them on the shapes of a batch, and distributes what they use.

Does not compile the model (see parts.compiled), and builds neither data nor state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import keras

from horovod_train.config.rules import lookup
from horovod_train.config.settings import Config
from horovod_train.data.pipeline.batch_source import Batch
from horovod_train.distributed.group import WorkerGroup, as_tf_variable
from horovod_train.distributed.optimizer import GradientExchange
from horovod_train.distributed.sync_batch_norm import layers_inside, parts_in
from horovod_train.distributed.watchdog.heartbeat import PhaseVariable
from horovod_train.errors import UserError
from horovod_train.keras_seams import compile_arguments, compiled_losses
from horovod_train.models.model_parallel import follow_inputs
from horovod_train.training.averages import OptimizerAverages
from horovod_train.training.compiled import Compiled, exchange_options
from horovod_train.training.state import TrainState, find_seeds
from horovod_train.training.steps.figures import Figures, ForwardState, metrics_in
from horovod_train.training.steps.optimizers import Optimizers, Update, optimizers_in
from horovod_train.training.steps.passes import Passes
from horovod_train.training.steps.shares import Shares
from horovod_train.training.steps.step import EvalStep, Rows, Seeds, TrainStep
from horovod_train.training.steps.trial import Tried, check_variables, try_outputs, try_step

_OVER_BATCHES = (keras.losses.Dice, keras.losses.Tversky, keras.losses.Circle)
"""Losses of Keras that compare all records of a batch, so that they are no mean over records."""


class Batched(Protocol):
    """What a step is built for: the batches of a BatchSource."""

    @property
    def scaled_spec(self) -> Batch: ...

    @property
    def has_weights(self) -> bool: ...

    def scaled(self, batch: Batch) -> Batch: ...


@dataclass(frozen=True)
class Training:
    """What a state is built with, and then a step with the state. The optimizers have their slots."""

    optimizers: Optimizers
    exchange: GradientExchange
    forward_state: ForwardState
    knows_loss: bool
    """Whether the step calls `compute_loss`."""
    make_step: Callable[[TrainState], TrainStep]
    origins: tuple[str, ...]
    warnings: tuple[str, ...]
    averages: OptimizerAverages | None
    """Those that the optimizer keeps, if it does."""


@dataclass(frozen=True)
class Evaluation:
    """The step of an evaluation."""

    step: EvalStep


def build_training(config: Config, group: WorkerGroup, compiled: Compiled, train: Batched) -> Training:
    """Try the model's train_step, build slots, and distribute its optimizers. Raises UserError."""
    model, where = compiled.model, _where(config, "train")
    shares = Shares(group)
    held = optimizers_in(model)
    optimizers = Optimizers(held, are_kept_by_the_model=compiled.has_own_optimizers)
    rows = _rows(config, group, compiled, train, training=True)
    _take_on_losses(model, shares)  # before the trial, which shows what they refuse; names are not losses yet
    tried = try_step(model, "train_step", train.scaled_spec, rows.data_of, where, optimizers.only_noted)
    _check_step(config, compiled, optimizers, tried)
    losses = _take_on_losses(model, shares)
    _add_l2(model, config.train.l2)
    changed = _changed_by_forward_pass(model, tried)
    forward_state = ForwardState(group, changed, in_each_step=config.train.synchronization != "local")
    needs_divisors = bool(losses) and (config.jit_compile or config.train.accumulate_steps > 1)

    figures = Figures(tried.sources, metrics_in(model), tried.updates)

    def make_step(state: TrainState) -> TrainStep:
        phase_variable = PhaseVariable(state.step)
        exchange = GradientExchange(**exchange_options(config))
        max_skips = config.train.max_skips_in_a_row if config.train.non_finite == "skip" else 0
        holds_back = bool(max_skips) or optimizers.scales_loss or config.train.synchronization != "every_step"
        enter = phase_variable.enter
        update = Update(optimizers, exchange, state.synchronization, shares, state.step, enter, holds_back)
        optimizers.distribute(update)
        passes = Passes(
            model,
            rows.data_of,
            shares,
            update,
            lambda: [*figures.variables, *([] if forward_state.in_each_step else forward_state.variables)],
            counts_ahead=needs_divisors and "train_step" not in compiled.own,
            jit_compile=config.jit_compile,
        )
        state.failure.knows_loss = tried.calls_compute_loss
        return TrainStep(
            state,
            rows,
            passes,
            update,
            shares,
            forward_state,
            figures,
            seed=config.seed,
            phase_variable=phase_variable,
            accumulate_steps=config.train.accumulate_steps,
            labels=compiled.label_counts(
                [*train.scaled_spec.targets] if isinstance(train.scaled_spec.targets, dict) else [""]
            ),
            max_skips_in_a_row=max_skips,
            placement=follow_inputs if config.device.per_rank > 1 else nullcontext,
        )

    origins = [*compiled.origins()]
    if compiled.own:
        applied = f"; it applies {', '.join(optimizers.by_path)}" if "train_step" in compiled.own else ""
        origins.append(f"training step: the model's own {', '.join(compiled.own)}{applied}")
    return Training(
        optimizers,
        GradientExchange(**exchange_options(config)),
        forward_state,
        tried.calls_compute_loss,
        make_step,
        tuple(origins),
        (*_warnings(config, group.size, losses, figures),),
        compiled.slots.averages() if compiled.slots else None,
    )


def build_evaluation(config: Config, group: WorkerGroup, compiled: Compiled, pipeline: Batched) -> Evaluation:
    """Try the model's test_step on the shapes of a batch. Raises UserError."""
    model, shares = compiled.model, Shares(group)
    if "train_step" in compiled.own and "test_step" not in compiled.own:
        _check_loss_is_known(compiled)
    rows = _rows(config, group, compiled, pipeline, training=False)
    for loss in _losses(model):
        shares = shares.take_on(loss)
    tried = try_step(model, "test_step", pipeline.scaled_spec, rows.data_of, _where(config, "eval"))
    known = [*model.variables, *(variable for metric in metrics_in(model) for variable in metric.variables)]
    check_variables(tried.assigns, known, "test_step changes", "model.name")
    for key in ("metrics", "weighted_metrics"):
        if not tried.calls_compute_metrics and lookup(config, key) != lookup(Config(), key):
            raise UserError(
                f"{key}: has no effect in evaluations, because the model's own test_step does not call "
                "compute_metrics. Leave it out."
            )
    for loss in _losses(model):
        shares = shares.take_on(loss)
    step = EvalStep(
        model,
        rows,
        shares,
        Figures(tried.sources, metrics_in(model), tried.updates),
        Seeds(find_seeds(model), config.seed, group.rank),
    )
    return Evaluation(step)


def _where(config: Config, split: str) -> str:
    return "data.dataset" if config.data.dataset else f"data.{split}"


def _rows(config: Config, group: WorkerGroup, compiled: Compiled, source: Batched, *, training: bool) -> Rows:
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
        paths = ", ".join(optimizers.paths) or "none"
        raise UserError(f"model.name: train_step applies none of the optimizers that the model holds ({paths}).")
    metrics = [variable for metric in metrics_in(model) for variable in metric.variables]
    known = [*model.variables, *metrics, *optimizers.all_variables]
    check_variables(tried.reads if own_step else tried.assigns, known, "train_step uses", "model.name")
    if own_step and config.jit_compile:
        raise UserError(
            "jit_compile: has no effect, because the model trains by its own train_step, in which the exchange of "
            "gradients stands, and XLA cannot compile that. Leave it out."
        )
    if own_step and not tried.calls_compute_loss and not (config.data.eval or config.data.dataset):
        for key in ("loss", "metrics", "weighted_metrics"):
            if lookup(config, key) != lookup(Config(), key):
                raise UserError(
                    f"{key}: has no effect, because the model's own train_step does not call compute_loss, and there "
                    "is no data.eval. Leave it out."
                )
    if optimizers.scales_loss and config.train.synchronization != "every_step":
        raise UserError(
            "train.synchronization: an optimizer scales the loss, which needs every_step; received "
            f"{config.train.synchronization}."
        )
    if compiled.slots is None:
        _check_averages_are_read(optimizers)


def _check_averages_are_read(optimizers: Optimizers) -> None:
    """Raise UserError for an optimizer of the model that keeps averages and never overwrites weights with them."""
    averaging = [
        path
        for path, optimizer in optimizers.by_path.items()
        if getattr(optimizer, "use_ema", False) and not optimizer.ema_overwrite_frequency
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


def _losses(model: keras.Model) -> list[keras.losses.Loss]:
    """Return the losses that a model was compiled with and those that it and its layers hold."""
    held = [
        loss
        for layer in layers_inside(model)
        for name, value in vars(layer).items()
        if not name.startswith("_")  # among those is Keras' own sum of losses
        for loss in parts_in(value, keras.losses.Loss)
    ]
    given = parts_in(compile_arguments(model).get("loss"), keras.losses.Loss)
    return list({id(loss): loss for loss in [*compiled_losses(model), *given, *held]}.values())


def _take_on_losses(model: keras.Model, shares: Shares) -> list[keras.losses.Loss]:
    losses = _losses(model)
    for loss in losses:
        shares.take_on(loss)
    return losses


def _add_l2(model: keras.Model, l2: float) -> None:
    """Add l2 · ½ Σ W² to the regularizer of each trained matrix; ½ Σ W² is tf.nn.l2_loss."""
    for variable in model.trainable_variables if l2 else ():
        if len(variable.shape) > 1:
            variable.regularizer = _Sum(variable.regularizer, keras.regularizers.L2(l2 / 2))


class _Sum(keras.regularizers.Regularizer):
    """The sum of two regularizers, of which one may be missing."""

    def __init__(self, first: Callable[[Any], Any] | None, second: Callable[[Any], Any]) -> None:
        self._first, self._second = first, second

    def __call__(self, x: Any) -> Any:
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


def _warnings(config: Config, size: int, losses: Sequence[keras.losses.Loss], figures: Figures) -> Iterator[str]:
    for loss in losses:
        if isinstance(loss, _OVER_BATCHES) and size > 1:
            yield f"the loss {loss.name} compares the records of a batch; it is averaged over ranks."
    for path in figures.averaged if size > 1 else ():
        yield (
            f"metrics: the state {path} is neither a sum nor a maximum or minimum, so it is averaged over ranks. Add "
            "to it, or give add_variable its aggregation."
        )
    if config.train.synchronization == "local" and config.data.on_bad_record == "skip":
        yield "data.on_bad_record: skip requires an exchange in every step, under synchronization: local too."
    if config.train.synchronization == "local" and config.data.dataset:
        yield "the lengths of streams differ, so there is an exchange in every step, under synchronization: local too."
