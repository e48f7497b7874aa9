"""What a compiled model brings along: loss, loss weights, metrics, optimizer. What the config names wins.

Takes what `compile` was given, by `get_compile_config`, and builds it anew, so that two splits have metrics of their
own and the optimizer begins without state. The trainer computes the loss of each record and weights it itself: the
reduction of a compiled loss does not matter, except that a sum is refused.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from horovod_train.config.registry import raised_at
from horovod_train.config.settings import AUTO, Config, LrScheduleConfig
from horovod_train.data.pipeline.batch import Batch
from horovod_train.errors import UserError, one_line
from horovod_train.models import overridden
from horovod_train.optim.optimizers import add_loss_scale, build_optimizer, build_schedule, limit_weight_decay
from horovod_train.optim.schedules import Horizon
from horovod_train.training.parts.averages import AverageSlots
from horovod_train.training.parts.logits import refuse_probabilities
from horovod_train.training.parts.losses import Loss, LossFunction, Term, build_class_weights, build_loss, pick
from horovod_train.training.parts.lr_multipliers import multiply_rates
from horovod_train.training.parts.metrics import Metric, OfOutput, build_metrics
from horovod_train.training.parts.per_record import RecordLosses, check_is_per_record, per_record

_SHORT = ("accuracy", "acc", "crossentropy", "ce")
"""Names that stand for another metric by the shapes of targets and outputs."""


def brings(model: keras.Model, config: Config) -> dict[str, bool]:
    """Return for each of loss, metrics, weighted_metrics and optimizer whether the run takes the compiled model's."""
    compiled = _compile_config(model)
    in_config = {
        "loss": config.loss.name != AUTO,
        "metrics": bool(config.metrics),
        "weighted_metrics": bool(config.weighted_metrics),
        "optimizer": config.optimizer.name != AUTO,
    }
    return {part: bool(compiled.get(part)) and not in_config[part] for part in in_config}


def origins(model: keras.Model, config: Config) -> Iterator[str]:
    """Yield for the log where each part comes from, if the model is compiled."""
    compiled = _compile_config(model)
    for part, is_compiled in brings(model, config).items():
        if is_compiled:
            yield f"{part}: as the model was compiled"
        elif compiled.get(part):
            yield f"{part}: of the config, not as the model was compiled"


def choose_loss(config: Config, model: keras.Model) -> Loss:
    """Build the config's loss or the compiled model's. Raises UserError."""
    if not brings(model, config)["loss"]:
        refuse_probabilities(config)
        return build_loss(config.loss)
    if config.loss.options:
        raise UserError("loss.options: the model is compiled with a loss; give loss.name too.")
    compiled = _compile_config(model)
    loss, factors = compiled["loss"], compiled.get("loss_weights")
    if isinstance(loss, list) and len(loss) == 1:
        (loss,) = loss
    if isinstance(loss, list):
        raise UserError("model.name: is compiled with a list of losses; expected one loss, or a dict by output.")
    if not isinstance(loss, Mapping):
        (factor,) = keras.tree.flatten(1.0 if factors is None else factors)  # Keras has checked that there is one
        weights = build_class_weights(config.loss.class_weight, None, "loss")
        return Loss({"loss": Term(float(factor), _per_record(loss, None), weights)})
    if config.loss.class_weight:
        raise UserError("loss.class_weight: is for one loss; the model is compiled with one for each output.")
    if isinstance(factors, list | tuple):
        factors = dict(zip(loss, factors, strict=True))
    factors = factors or {}
    terms = {
        f"{output}_loss": Term(float(factors.get(output, 1.0)), _per_record(output_loss, output))
        for output, output_loss in loss.items()
        if output_loss is not None
    }
    return Loss(terms)


def choose_metrics(config: Config, model: keras.Model, part: str, batch: Batch) -> list[Metric]:
    """Build the config's metrics or the compiled model's. part: "metrics" or "weighted_metrics". Raises UserError.

    batch: its tf.TensorSpecs. With them short names such as "accuracy" are resolved as `fit` does.
    """
    if not brings(model, config)[part]:
        return build_metrics(getattr(config, part))
    metrics: list[Metric] = []
    compiled = _compile_config(model)
    unweighted = list(_by_output(compiled["metrics"], "metrics")) if part == "weighted_metrics" else []
    for output, entry in _by_output(compiled[part], part):
        # The same metric twice gets another name, as in `fit`.
        metric = _metric(entry, output, model, batch, "weighted_" if (output, entry) in unweighted else "")
        metrics.append(metric if output is None else OfOutput(metric, output, output, f"{output}_{metric.name}"))
    return metrics


def choose_optimizer(config: Config, model: keras.Model, horizon: Horizon) -> keras.optimizers.Optimizer:
    """Build the config's optimizer or the compiled model's.

    The compiled one keeps its learning rate or schedule unless the config has lr_schedule; without base_lr that begins
    at the compiled rate. Raises UserError.
    """
    if not brings(model, config)["optimizer"]:
        return build_optimizer(config, horizon)
    if config.optimizer.options:
        raise UserError("optimizer.options: the model is compiled with an optimizer; give optimizer.name too.")
    compiled = _compile_config(model)["optimizer"]
    settings = compiled.get_config()
    if config.lr_schedule != LrScheduleConfig():
        settings["learning_rate"] = build_schedule(_with_base_rate(config.lr_schedule, compiled), horizon)
    if config.train.clip_norm is not None:
        settings["global_clipnorm"] = config.train.clip_norm
    try:
        return add_loss_scale(type(compiled).from_config(settings), config)
    except ValueError as error:
        raise UserError(f"optimizer: the compiled one cannot be used: {one_line(error)}") from error


def prepare_optimizer(
    config: Config, model: keras.Model, horizon: Horizon
) -> tuple[keras.optimizers.Optimizer, AverageSlots]:
    """Build the optimizer as it is before its slots, with its rates and weight decay. Raises UserError."""
    optimizer = choose_optimizer(config, model, horizon)
    multiply_rates(optimizer, model.trainable_variables, config.optimizer.lr_multipliers)
    slots = AverageSlots(optimizer)
    is_compiled = brings(model, config)["optimizer"]
    limit_weight_decay(optimizer, model.trainable_variables, config, is_compiled=is_compiled)
    return optimizer, slots


def exchange_options(config: Config) -> dict[str, Any]:
    """Return the fields of a GradientExchange that the config sets."""
    names = ("op", "compression", "sparse_as_dense", "predivide")
    return {name: getattr(config.horovod, name) for name in names} | {"deterministic": config.deterministic}


def _with_base_rate(schedule: LrScheduleConfig, optimizer: keras.optimizers.Optimizer) -> LrScheduleConfig:
    if schedule.base_lr is not None:
        return schedule
    rate = optimizer.get_config()["learning_rate"]
    if not isinstance(rate, int | float):
        raise UserError(
            "lr_schedule.base_lr: is required with other settings of lr_schedule, because the model's optimizer is "
            "compiled with a schedule."
        )
    return dataclasses.replace(schedule, base_lr=float(rate))


def _compile_config(model: keras.Model) -> dict[str, Any]:
    """Return new objects of what Keras' own `compile` was given; empty if it was not called. Raises UserError."""
    if not model.compiled or overridden(model, ["compile"]):
        return {}
    try:
        with warnings.catch_warnings():  # of lambdas, which are an error here
            warnings.filterwarnings("ignore", "The object being serialized includes a `lambda`")
            compiled: dict[str, Any] = keras.saving.deserialize_keras_object(model.get_compile_config())
    except (TypeError, ValueError, ImportError, AttributeError) as error:
        text = one_line(error)[:300]
        raise UserError(
            f"model.name: what the model is compiled with cannot be built again: {text}{raised_at(error)} Give loss, "
            "metrics and optimizer in the config and leave compile() out."
        ) from error
    return compiled


def _per_record(entry: Any, output: str | None) -> LossFunction:
    """Return what gives the loss of each record for a loss as `compile` takes it."""
    try:
        loss = keras.losses.get(entry)
    except ValueError as error:
        raise UserError(f"model.name: is compiled with {entry!r}; expected the full name of a loss.") from error
    name = getattr(loss, "name", getattr(loss, "__name__", str(entry)))
    check_is_per_record(loss, name, "model.name: the compiled loss")
    if isinstance(loss, keras.losses.Loss):
        if loss.reduction == "sum":
            raise UserError(f"model.name: is compiled with a sum, {name}; the trainer takes means: leave it out.")
        loss = copy.copy(loss)
        loss.reduction = "none"
    else:
        loss = _OfFunction(loss, name)

    def of_records(targets: Any, outputs: Any) -> RecordLosses:
        if output is not None:
            targets, outputs = pick(targets, output, "target"), pick(outputs, output, "output")
        return per_record(loss, targets, outputs, name)

    return of_records


class _OfFunction(keras.losses.Loss):
    """Calls a function as `fit` does: with floats, and without a last axis of length 1 that only one argument has.

    [batch] becomes [batch, 1] instead.
    """

    def __init__(self, function: Callable[[Any, Any], Any], name: str) -> None:
        super().__init__(name, reduction="none")
        self._function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        arguments = [y_true, y_pred]
        if not any(map(keras.tree.is_nested, arguments)):
            short, long = sorted((0, 1), key=lambda index: len(arguments[index].shape))
            rank = len(arguments[short].shape)
            if rank + 1 == len(arguments[long].shape) and arguments[long].shape[-1] == 1:
                if rank == 1:
                    arguments[short] = keras.ops.expand_dims(arguments[short], -1)
                else:
                    arguments[long] = keras.ops.squeeze(arguments[long], -1)
        return self._function(*arguments)


def _by_output(entries: Any, part: str) -> Iterator[tuple[str | None, Any]]:
    """Yield (output, metric) from metrics as `compile` takes them; output None: of the only one."""
    if isinstance(entries, Mapping):
        for output, metrics in entries.items():
            for metric in metrics if isinstance(metrics, list | tuple) else [metrics]:
                yield output, metric
        return
    for metric in entries if isinstance(entries, list | tuple) else [entries]:
        if isinstance(metric, list | tuple):
            raise UserError(f"model.name: is compiled with lists of {part}; expected one list, or a dict by output.")
        yield None, metric


def _metric(entry: Any, output: str | None, model: keras.Model, batch: Batch, prefix: str = "") -> keras.metrics.Metric:
    """Build a metric from what `compile` takes: a metric, a function or a name. prefix: of the name that it shows."""
    is_short = isinstance(entry, str) and entry in _SHORT
    metric = _resolve(entry, output, model, batch) if is_short else keras.metrics.get(entry)
    if isinstance(metric, keras.metrics.Metric):
        return metric
    name = entry if isinstance(entry, str) else getattr(metric, "__name__", str(entry))
    return keras.metrics.MeanMetricWrapper(metric, name=f"{prefix}{name}", dtype="float64")


def _resolve(name: str, output: str | None, model: keras.Model, batch: Batch) -> Callable[[Any, Any], Any]:
    """Return the function that a short name stands for, as Keras' documentation of `compile` says."""

    def forward(inputs: Any) -> Any:
        return model(inputs, training=False)

    outputs = tf.function(forward, autograph=False).get_concrete_function(batch.inputs).structured_outputs
    targets = batch.targets
    if output is not None:
        targets, outputs = pick(targets, output, "target"), pick(outputs, output, "output")
    if isinstance(targets, Mapping) or isinstance(outputs, Mapping | list | tuple):
        raise UserError(f"model.name: is compiled with the metric {name!r} for several outputs; give a dict by output.")
    is_binary = outputs.shape[-1] == 1
    is_sparse = targets.shape.rank < outputs.shape.rank or targets.shape[-1] == 1
    kind = "binary" if is_binary else "sparse_categorical" if is_sparse else "categorical"
    measure = "accuracy" if name in ("accuracy", "acc") else "crossentropy"
    function: Callable[[Any, Any], Any] = getattr(keras.metrics, f"{kind}_{measure}")
    return function
