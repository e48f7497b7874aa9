"""Builds what a run trains and evaluates with: the trainer's own steps, or those of a model that has some.

Does not build the model, the data or the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import keras
import tensorflow as tf

from horovod_train.config.settings import Config
from horovod_train.data.pipeline.batch import Batch
from horovod_train.data.pipeline.batch_source import BatchSource
from horovod_train.data.schema import Schema
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.optimizer import DistributedOptimizer
from horovod_train.models import OWN_EVALUATION, OWN_TRAINING, overridden
from horovod_train.models.model_parallel import follow_inputs
from horovod_train.optim.schedules import Horizon
from horovod_train.training.parts.compiled import (
    choose_loss,
    choose_metrics,
    exchange_options,
    origins,
    prepare_optimizer,
)
from horovod_train.training.parts.losses import Loss
from horovod_train.training.parts.metrics import Accumulator
from horovod_train.training.state import TrainState
from horovod_train.training.steps.built import Evaluation, Training
from horovod_train.training.steps.objective import Objective, check_fits
from horovod_train.training.steps.own.build import (
    build_own_evaluation,
    build_own_training,
    check_loss_is_known,
    refuse_unused_loss,
)
from horovod_train.training.steps.step import EvalStep, TrainStep


def build_training(
    config: Config, group: WorkerGroup, model: keras.Model, train: BatchSource, horizon: Horizon, schema: Schema | None
) -> Training:
    """Build loss, metrics and optimizer, and try them on the shapes of a batch. Raises UserError."""
    if overridden(model, OWN_TRAINING):
        if not (config.data.eval or config.data.dataset):
            refuse_unused_loss(config)
        return build_own_training(config, group, model, horizon, train, _counting(config, group, None))
    loss = choose_loss(config, model)
    if schema is not None:
        loss.check_classes(schema)
    metrics = build_accumulator(config, model, loss, train.scaled_spec, also=["penalty"])
    where = "data.dataset" if config.data.dataset else "data.train"
    traced = check_fits(model, loss, metrics, train.scaled_spec, where, training=True)
    plain, slots = prepare_optimizer(config, model, horizon)
    optimizer = DistributedOptimizer(plain, **exchange_options(config))
    optimizer.build(model.trainable_variables)  # slots must exist before the broadcast

    def build_step(state: TrainState) -> TrainStep:
        objective = Objective(
            state.model,
            state.optimizer,
            loss,
            size=group.size,
            accumulate_steps=config.train.accumulate_steps,
            l2=config.train.l2,
            has_masks=traced.has_masks,
            jit_compile=config.jit_compile,
        )
        return TrainStep(
            state,
            objective,
            metrics,
            rank=group.rank,
            seed=config.seed,
            max_skips_in_a_row=config.train.max_skips_in_a_row if config.train.non_finite == "skip" else 0,
            count_over_ranks=_counting(config, group, objective),
            scaled=train.scaled,
            placement=follow_inputs if config.device.per_rank > 1 else nullcontext,
        )

    return Training(
        optimizer,
        [*loss.names, "penalty"],
        build_step,
        tuple(origins(model, config)),
        tuple(_warnings(config, group.size, train, traced.has_own_losses, _needs_sums(config, loss, traced.has_masks))),
        slots.averages(),
    )


def build_evaluation(config: Config, group: WorkerGroup, model: keras.Model, pipeline: BatchSource) -> Evaluation:
    """Build the evaluation of a split, and try it on the shapes of a batch. Raises UserError."""
    if overridden(model, OWN_EVALUATION):
        return build_own_evaluation(config, group, model, pipeline)
    if overridden(model, OWN_TRAINING):
        check_loss_is_known(config, model)
    loss = choose_loss(config, model)
    metrics = build_accumulator(config, model, loss, pipeline.scaled_spec)
    check_fits(model, loss, metrics, pipeline.scaled_spec, "data.dataset" if config.data.dataset else "data.eval")
    return Evaluation(EvalStep(model, loss, metrics, pipeline.scaled))


def _warnings(config: Config, size: int, train: BatchSource, has_own_losses: bool, needs_sums: bool) -> Iterator[str]:
    counts = {train.count(step) for step in (0, train.steps_per_epoch - 1)}
    if has_own_losses and any(count % size for count in counts):
        yield (
            f"the model's layers add losses that depend on records, and ranks hold uneven numbers of records in a step "
            f"({', '.join(map(str, sorted(counts)))} on {size} ranks): these losses are averaged over ranks, not over "
            "records; see docs/models.md."
        )
    if config.train.synchronization == "local" and config.data.on_bad_record == "skip":
        yield "data.on_bad_record: skip requires an exchange in every step, under synchronization: local too."
    if config.train.synchronization == "local" and config.data.dataset:
        yield "the lengths of streams differ, so there is an exchange in every step, under synchronization: local too."
    elif config.train.synchronization == "local" and needs_sums:
        yield "weights of records and masks require an exchange in every step, under synchronization: local too."


def build_accumulator(
    config: Config, model: keras.Model, loss: Loss, batch: Batch, also: Sequence[str] = ()
) -> Accumulator:
    """Build the loss and the metrics of one split, with their own variables. batch: of specs. Raises UserError."""
    plain, weighted = (choose_metrics(config, model, part, batch) for part in ("metrics", "weighted_metrics"))
    return Accumulator(loss, plain, weighted, also=also)


def _needs_sums(config: Config, loss: Loss, has_masks: bool) -> bool:
    """Return whether a rank knows what it divides by only from the other ranks: from weights, masks or streams."""
    has_weights = config.data.weight is not None or loss.has_class_weights
    return has_weights or has_masks or config.data.dataset is not None


def _counting(config: Config, group: WorkerGroup, objective: Objective | None) -> Callable[[Batch], tf.Tensor]:
    """Return a function that gives what the sums of the losses are divided by in a step: records, or weights.

    objective: None if the model computes its own loss, whose weights are those of the records.
    """
    if objective is None and (config.data.weight is not None or config.data.dataset is not None):
        return lambda batch: group.sum_in_step(tf.reduce_sum(batch.weights), "step.count")
    if objective is not None and _needs_sums(config, objective.loss, objective.has_masks):
        return lambda batch: group.sum_in_step(objective.total_weights(batch), "step.count")
    if config.data.on_bad_record == "error":
        return lambda batch: batch.count  # exact as planned; no exchange needed
    # Bad records may have been skipped, so only the sum over ranks gives the number.
    return lambda batch: tf.maximum(group.sum_in_step(tf.reduce_sum(batch.real), "step.count"), 1.0)
