"""What a run is refused before it trains, and what it is warned of: steps that cannot be distributed, idle settings.

Reads what the trial of a step found (see steps.trial); builds and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_type_hints

import keras
import tensorflow as tf

from horovod_train.config.rules import refuse_given
from horovod_train.config.settings import Config, Watched
from horovod_train.data.batch_source import BatchSource
from horovod_train.distributed.group import WorkerGroup, as_tf_variable
from horovod_train.distributed.layer_contents import layers_inside
from horovod_train.errors import UserError
from horovod_train.keras_seams import compiled_losses
from horovod_train.training.compiled import Compiled
from horovod_train.training.losses import LOSSES_OVER_BATCHES, losses_of
from horovod_train.training.steps.figures import ForwardState, metrics_in
from horovod_train.training.steps.optimizers import Optimizers, inside_optimizer, variables_of
from horovod_train.training.steps.step import EvalStep, TrainStep
from horovod_train.training.steps.trial import Tried, check_variables


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


def check_watched(config: Config, evaluation: EvalStep | None) -> None:
    if evaluation is None:
        return
    stops, names = config.early_stopping, evaluation.metrics.names
    is_asked = stops.patience is not None or stops.target is not None or stops.metric != Watched().metric
    watched = {"checkpoint.best": config.checkpoint.best, "early_stopping": stops if is_asked else None}
    for key, value in watched.items():
        if value is not None and value.metric not in names:
            plain = value.metric.removeprefix("val_")
            known = f"write {plain}: its figures have no val_" if plain in names else f"it has {', '.join(names)}"
            raise UserError(f"{key}.metric: the evaluation has no {value.metric!r}; {known}.")


def check_norms_are_trained(config: Config, model: keras.Model) -> None:
    norms = [layer for layer in layers_inside(model) if isinstance(layer, keras.layers.BatchNormalization)]
    if config.train.sync_batch_norm and not any(layer.trainable for layer in norms):
        raise UserError(
            "train.sync_batch_norm: has no effect, because all BatchNormalization layers are frozen, and normalise by "
            "their moving statistics. Leave it out."
        )


def check_xla_gets_no_text(config: Config, source: BatchSource) -> None:
    """Raise UserError if the model is given text, which the step that XLA compiles cannot take."""
    given = [*tf.nest.flatten(source.scaled_spec.inputs), *tf.nest.flatten(source.scaled_spec.targets)]
    if config.jit_compile and any(spec.dtype == tf.string for spec in given):
        raise UserError(
            "jit_compile: XLA computes with numbers only, and the model is given text. Leave it out, or have "
            "data.preprocess look words up."
        )


def check_step(config: Config, compiled: Compiled, optimizers: Optimizers, tried: Tried) -> None:
    """Raise UserError for a step that cannot be distributed, or with which a setting would have no effect."""
    model, own_step = compiled.model, "train_step" in compiled.own
    if not optimizers.by_path:
        paths = ", ".join(optimizers.by_attribute) or "none"
        raise UserError(f"model.name: train_step applies none of the optimizers that the model holds ({paths}).")
    metrics = [variable for metric in metrics_in(model) for variable in metric.variables]
    known = [*model.variables, *metrics, *variables_of(optimizers.by_attribute.values())]
    check_variables(tried.reads if own_step else tried.assigns, known, "train_step uses")
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
    _check_gradients_leave_branches(config, optimizers)
    if config.train.synchronization == "stale":
        _check_can_wait(model, optimizers.updated)
    _check_averages_are_read(optimizers, compiled)


def _check_gradients_leave_branches(config: Config, optimizers: Optimizers) -> None:
    """Raise UserError for a setting that needs gradients outside of the branch, loop or function that applies them."""
    conditional = [path for path, is_branch in optimizers.inside.items() if is_branch]
    needing = {
        "train.accumulate_steps": list(optimizers.inside) if config.train.accumulate_steps > 1 else [],
        "log.histograms_every_steps": list(optimizers.inside) if config.log.histograms_every_steps else [],
        # They wait for the next step, and are then those of the step before or older ones.
        "train.synchronization: stale": conditional if config.train.synchronization == "stale" else [],
    }
    for setting, paths in needing.items():
        if paths:
            where = "a branch or a loop" if paths[0] in conditional else "a tf.function of its own"
            raise UserError(
                f"{setting}: takes gradients out of the step, but train_step applies {paths[0]} in {where}. Leave it "
                "out, or apply the optimizer in the step itself."
            )


def check_exchanges(tried: Tried, source: BatchSource, group: WorkerGroup, method: str) -> None:
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


def check_added_losses(tried: Tried, compiled: Compiled) -> None:
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


def check_loss_is_known(compiled: Compiled) -> None:
    """Raise UserError if a model with its own train_step is to be evaluated, and no loss is given anywhere."""
    if not compiled_losses(compiled.model) and getattr(compiled.model, "loss", None) is None:
        raise UserError(
            "data.eval: the model has a train_step of its own and no test_step, so its loss is not known. Give it a "
            "test_step; or give a loss, here or in compile, for the outputs of call(); or leave data.eval out."
        )


def check_sums_are_exchanged(config: Config, changed: Sequence[keras.Variable], forward_state: ForwardState) -> None:
    """Raise UserError for a weight to which ranks add in each pass, if they do not exchange in each step."""
    if config.train.synchronization == "local" and (sums := forward_state.of_kind("sum")):
        path = next(weight.path for weight in changed if as_tf_variable(weight) is sums[0])
        raise UserError(
            f"train.synchronization: local averages weights now and then, and cannot add up what ranks have added to "
            f"{path}, whose aggregation is sum. Leave that out, or write synchronization: every_step."
        )


def check_l2_is_read(config: Config, compiled: Compiled, are_read: Sequence[bool]) -> None:
    """After the trial of a step: raise UserError if it has read none of the penalties, so that l2 would do nothing."""
    if config.train.l2 and not are_read:
        raise UserError("train.l2: has no effect, because no weight with more than one axis is trained. Leave it out.")
    if not are_read or any(are_read):
        return
    own = "train_step" in compiled.own
    step = "train_step neither calls compute_loss nor reads" if own else "compute_loss does not read"
    raise UserError(
        f"train.l2: has no effect, because the model's own {step} self.losses. Add sum(self.losses) to its loss, or "
        "leave train.l2 out."
    )


def list_warnings(config: Config, size: int, step: TrainStep) -> Iterator[str]:
    """Yield a line for each effect of a config that a user may not expect on so many ranks."""
    for loss in losses_of(step.state.model):
        if isinstance(loss, LOSSES_OVER_BATCHES) and size > 1:
            yield f"the loss {loss.name} compares the records of a batch; it is averaged over ranks."
    for name in step.shares.weighted_as_one if size > 1 else ():
        yield (
            f"the loss {name} returns one number for a batch, which weights of records only multiply by their mean, on "
            "each rank by itself: the result depends on the number of ranks. Have it return one number for each record."
        )
    is_split = size > 1 or config.train.accumulate_steps > 1
    over_batches = {loss.name for loss in losses_of(step.state.model) if isinstance(loss, LOSSES_OVER_BATCHES)}
    for name in [name for name in step.shares.given_as_one if is_split and name not in over_batches]:
        yield (
            f"the loss {name} returns one number for a batch; over ranks and parts of a step its mean by records is "
            "taken, which is that of the whole batch if the number is a mean over records. If not, have it return one "
            "number for each record."
        )
    for name in step.shares.given_logits:
        yield (
            f"the loss {name} takes probabilities, but the model ends without softmax or sigmoid, so that it does not "
            "learn as it should. Give the loss from_logits: true, in its options or in compile; or end it with one."
        )
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
