"""Builds the steps of a model that has its own, and refuses settings that would have no effect with them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

import keras
import tensorflow as tf

from horovod_train.config.rules import lookup
from horovod_train.config.settings import Config
from horovod_train.data.pipeline.batch import Batch
from horovod_train.data.pipeline.batch_source import BatchSource
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.optimizer import CombiningOptimizer, GradientExchange
from horovod_train.errors import UserError
from horovod_train.models import OWN_EVALUATION, OWN_TRAINING, overridden
from horovod_train.optim.schedules import Horizon
from horovod_train.training.parts.averages import AverageSlots
from horovod_train.training.parts.compiled import brings, exchange_options, prepare_optimizer
from horovod_train.training.state import TrainState, find_seeds
from horovod_train.training.steps.built import Evaluation, Training
from horovod_train.training.steps.own.logs import Logs, metrics_in
from horovod_train.training.steps.own.optimizers import Optimizers, optimizers_in
from horovod_train.training.steps.own.step import OwnEvalStep, OwnTrainStep
from horovod_train.training.steps.own.trial import Tried, try_step
from horovod_train.training.steps.step import Seeds
from horovod_train.training.steps.traced import check_variables

_BY_OUR_STEP = (
    *("train.accumulate_steps", "train.l2", "train.non_finite", "train.synchronization", "jit_compile"),
    *("log.histograms_every_steps", "loss.class_weight", "device.per_rank"),
)
"""Settings that only the trainer's own step follows."""
_BY_OUR_OPTIMIZER = (
    *("optimizer", "lr_schedule", "train.clip_norm", "train.weight_decay_1d", "train.weight_decay_exclude"),
)
"""Settings of the optimizer that the trainer builds."""
_BY_OUR_EVALUATION = ("loss", "metrics", "weighted_metrics")


def build_own_training(
    config: Config,
    group: WorkerGroup,
    model: keras.Model,
    horizon: Horizon,
    train: BatchSource,
    count_over_ranks: Callable[[Batch], tf.Tensor],
) -> Training:
    """Build what a model's own train_step needs, and try it on the shapes of a batch. Raises UserError."""
    why = f"the model trains by its own {_own(model, OWN_TRAINING)}"
    _refuse(config, _BY_OUR_STEP, why)
    if config.precision == "mixed_float16":
        raise UserError(f"precision: mixed_float16 does not go with it: {why}. Use mixed_bfloat16.")
    optimizers, slots = _choose_optimizers(config, model, horizon, why)
    if scaling := optimizers.scaling_loss:
        raise UserError(
            f"model.name: {', '.join(scaling)} is a LossScaleOptimizer, which leaves out updates, and {why}, in which "
            "nothing would end a run of updates left out. Give the optimizer inside it."
        )
    tried = _try(
        model, "train_step", train.scaled_spec, "data.dataset" if config.data.dataset else "data.train", optimizers
    )
    if not optimizers.by_path:
        paths = ", ".join(optimizers.paths) or "none"
        raise UserError(f"model.name: train_step applies none of the optimizers that the model holds ({paths}).")
    if slots is None:
        _check_averages_are_read(optimizers)
    optimizers.distribute(GradientExchange(**exchange_options(config)))
    origin = f"training step: the model's own {_own(model, OWN_TRAINING)}; it applies {', '.join(optimizers.by_path)}"
    metrics = Logs(tried.sources, metrics_in(model))
    warnings = _padding("train_step", tried, train, group.size)
    averages = slots.averages() if slots else None

    def make_step(state: TrainState) -> OwnTrainStep:
        state.failure.knows_loss = False
        return OwnTrainStep(
            state,
            optimizers,
            metrics,
            rank=group.rank,
            seed=config.seed,
            size=group.size,
            count_over_ranks=count_over_ranks,
            scaled=train.scaled,
        )

    # A TrainState looks at the variables of the optimizers only.
    return Training(cast(CombiningOptimizer, optimizers), [], make_step, (origin,), warnings, averages)


def build_own_evaluation(config: Config, group: WorkerGroup, model: keras.Model, pipeline: BatchSource) -> Evaluation:
    """Build the evaluation by a model's own test_step, and try it on the shapes of a batch. Raises UserError."""
    why = f"the model evaluates by its own {_own(model, OWN_EVALUATION)}"
    _refuse(config, _BY_OUR_EVALUATION, why)
    tried = _try(model, "test_step", pipeline.scaled_spec, "data.dataset" if config.data.dataset else "data.eval", None)
    metrics, seeds = Logs(tried.sources, metrics_in(model)), Seeds(find_seeds(model), config.seed, group.rank)
    steps = pipeline.steps_per_epoch
    # Of a stream `num_records` is the room in its steps.
    records = sum(map(pipeline.count, range(steps)))
    scale = pipeline.batch_size_per_rank * group.size * steps / records
    step = OwnEvalStep(model, metrics, seeds, scale, pipeline.scaled)
    origin = f"evaluation step: the model's own {_own(model, OWN_EVALUATION)}"
    return Evaluation(step, (origin,), _padding("test_step", tried, pipeline, group.size))


def refuse_unused_loss(config: Config) -> None:
    """Raise UserError for a loss or metrics where a model trains by its own step and nothing is evaluated."""
    _refuse(config, _BY_OUR_EVALUATION, "the model trains by its own step, and there is no data.eval")


def check_loss_is_known(config: Config, model: keras.Model) -> None:
    """Raise UserError if a model with its own train_step is to be evaluated, and no loss is given anywhere."""
    if lookup(config, "loss") == lookup(Config(), "loss") and not brings(model, config)["loss"]:
        raise UserError(
            "data.eval: the model has a train_step of its own and no test_step, so its loss is not known. Give it a "
            "test_step; or give a loss, here or in compile, for the outputs of call(); or leave data.eval out."
        )


def _own(model: keras.Model, methods: tuple[str, ...]) -> str:
    return ", ".join(overridden(model, methods))


def _padding(method: str, tried: Tried, pipeline: BatchSource, size: int) -> tuple[str, ...]:
    """Return what to say of a step without sample_weight, if steps are filled up."""
    rows = pipeline.batch_size_per_rank * size
    counts = {pipeline.count(step) for step in (0, pipeline.steps_per_epoch - 1)}
    if tried.uses_weights or counts == {rows}:
        return ()
    fewer = ", ".join(str(count) for count in sorted(counts - {rows}))
    return (
        f"the model's {method} does not use sample_weight: in steps of fewer than {rows} records ({fewer}) the rows "
        "that pad them count like records; see docs/models.md.",
    )


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


def _choose_optimizers(
    config: Config, model: keras.Model, horizon: Horizon, why: str
) -> tuple[Optimizers, AverageSlots | None]:
    """Return the model's optimizers; if it has only that of Keras' own `compile`, or none, the config's wins.

    Then also what averages that one keeps.
    """
    optimizers = optimizers_in(model)
    if overridden(model, ["compile"]) or not set(optimizers) <= {"optimizer"}:
        _refuse(
            config, _BY_OUR_OPTIMIZER, f"{why}, with optimizers that it keeps itself: {', '.join(optimizers) or 'none'}"
        )
        return Optimizers(optimizers), None
    optimizer, slots = prepare_optimizer(config, model, horizon)
    if model.compiled:
        model.optimizer = optimizer
    else:
        model.compile(optimizer)
    return Optimizers({"optimizer": optimizer}, are_kept_by_the_model=False), slots


def _try(model: keras.Model, method: str, batch: Batch, where: str, optimizers: Optimizers | None) -> Tried:
    tried = try_step(model, method, batch, where, optimizers.only_noted if optimizers else nullcontext)
    metrics = [variable for metric in metrics_in(model) for variable in metric.variables]
    known = [*model.variables, *metrics, *(optimizers.all_variables if optimizers else [])]
    check_variables(tried.variables, known, f"{method} uses", "model.name")
    return tried


def _refuse(config: Config, keys: tuple[str, ...], why: str) -> None:
    for key in keys:
        if lookup(config, key) != lookup(Config(), key):
            raise UserError(f"{key}: has no effect, because {why}. Leave it out.")
