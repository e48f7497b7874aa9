"""Compiles the model that a run trains: by its own `compile`, and by what the config names, which wins.

After that the model is what `fit` would train. Also says what a step is given of a batch, as `fit` hands it over.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from horovod_train.config.registry import call, choose_keras, is_short, is_users
from horovod_train.config.rules import refuse_given
from horovod_train.config.settings import AUTO, Config, LrScheduleConfig, MetricSpec, Spec
from horovod_train.data.batch_source import FRACTION, Batch
from horovod_train.data.schema import Schema
from horovod_train.errors import UserError, one_line
from horovod_train.keras_seams import class_axis, compile_arguments
from horovod_train.models import OWN_STEPS, overridden
from horovod_train.optim.optimizers import (
    ByFormula,
    add_loss_scale,
    build_optimizer,
    build_schedule,
    limit_weight_decay,
)
from horovod_train.optim.schedules import Horizon
from horovod_train.training.fine_tuning import multiply_rates
from horovod_train.training.losses import (
    LOSSES_OF_LABELS,
    ChosenLoss,
    build_loss,
    pick,
    refuse_probabilities,
    takes_labels,
    takes_logits,
)
from horovod_train.training.steps.optimizers import optimizers_in
from horovod_train.training.steps.shares import Data

_OF_THE_OPTIMIZER = (
    *("optimizer", "lr_schedule", "train.clip_norm", "train.weight_decay_1d", "train.weight_decay_exclude"),
)
"""Settings of the optimizer that the trainer builds or changes."""
_OF_ONE_OPTIMIZER = ("lr_schedule", "train.clip_norm", "optimizer.lr_multipliers")
"""Those by which the trainer changes a compiled optimizer, but not a MultiOptimizer."""
SHORT = ("accuracy", "acc", "crossentropy", "ce")
"""Names that stand for another metric by the shapes of targets and outputs, as in `compile`."""


@dataclass(frozen=True)
class Compiled:
    """What is known of a compiled model besides the model."""

    model: keras.Model
    given: Mapping[str, Any]
    """The arguments of the model's own compile(); none if Keras' was not called."""
    takes: Mapping[str, bool]
    """For each of loss, metrics, weighted_metrics and optimizer, whether it is what the model was compiled with."""
    loss: ChosenLoss
    """That of the config; without a loss if the model's is taken."""
    own: tuple[str, ...]
    """The methods of a step that the model's class overrides: train_step, compute_loss, …"""
    targets: Mapping[str, str]
    """By output, the target that it is compared with; empty: targets are handed over as they are."""
    has_own_optimizers: bool
    """Whether the optimizers are the model's, so that settings of the config do not change them."""

    def data_of(self, outputs: Any, *, has_weights: bool, training: bool) -> Callable[[Batch], Data]:
        """Return what gives a step its data: x, (x, y) or (x, y, sample_weight).

        outputs: specs of the model's, in their structure. has_weights: whether the records have weights.
        """

        def data(batch: Batch) -> Data:
            has_targets = not isinstance(batch.targets, dict) or bool(batch.targets)
            if not has_targets:
                return batch.inputs
            batch = batch._replace(targets=self._with_whole_labels(batch.targets))
            y = self._arranged(batch.targets, outputs)
            by_class = self.loss.class_weights if training else {}
            if not has_weights and not by_class:
                return batch.inputs, y
            weights = batch.weights if has_weights else batch.real
            if "train_step" in self.own and (training or "test_step" in self.own):
                # One for each record: what else the model's own step may do with them is not known.
                return batch.inputs, y, weights * by_class[None](batch.targets) if by_class else weights
            return batch.inputs, y, self._by_output(weights, batch.targets, outputs, by_class)

        return data

    def _with_whole_labels(self, targets: Any) -> Any:
        """Return the targets, after a check that labels are whole numbers: Keras would cut fractions off."""
        by_name = targets if isinstance(targets, Mapping) else {"": targets}
        labels = [pick(targets, name) for name in self.label_counts([*by_name])]
        labels = [label for label in labels if label.dtype.is_floating]
        if not labels:
            return targets
        checks = []
        for label in labels:
            is_whole = tf.math.is_finite(label) & (label == tf.floor(label))
            first = tf.boolean_mask(label, ~is_whole)[:1]
            checks.append(tf.debugging.Assert(tf.reduce_all(is_whole), [FRACTION, first]))
        with tf.control_dependencies(checks):
            return tf.nest.map_structure(tf.identity, targets)

    def _arranged(self, targets: Any, outputs: Any) -> Any:
        """Return the targets as `fit` would get them: as they are, or by the outputs that the config names."""
        if not self.targets:
            return targets
        any_target = next(iter(self.targets.values()))  # also of an output that is compared with nothing
        if not isinstance(outputs, Mapping | list | tuple):
            return pick(targets, any_target)
        names = list(outputs if isinstance(outputs, Mapping) else getattr(self.model, "output_names", ()))
        if len(names) != len(outputs):
            if other := next((each for each in self.targets.items() if each[0] != each[1]), None):
                raise ValueError(f"target {other[1]!r} of {other[0]!r} needs outputs with names: return a dict of them")
            return targets
        missing = [output for output in self.targets if output not in names]
        if missing:
            raise ValueError(f"there is no output {missing[0]!r}; there are {', '.join(names)}")

        def target_of(name: str) -> str:
            own = name if isinstance(targets, Mapping) and name in targets else any_target
            return self.targets.get(name, own)

        return {name: pick(targets, target_of(name)) for name in names}

    def _by_output(self, weights: tf.Tensor, targets: Any, outputs: Any, by_class: Mapping[Any, Any]) -> Any:
        """Return weights [rows] of records for each output, with one more axis for each axis of its values.

        Keras multiplies weights [rows] with values [rows, …] of a loss as NumPy would: by the last axis.
        """

        def of(name: Any, output: Any) -> tf.Tensor:
            counted = by_class.get(name, by_class.get(None))
            of_output = weights if counted is None else weights * counted(targets, output.shape.rank)
            return tf.reshape(of_output, [-1, *[1] * max(0, (output.shape.rank or 0) - 2)])

        if isinstance(outputs, Mapping):
            return {name: of(name, output) for name, output in outputs.items()}
        if isinstance(outputs, list | tuple):
            names = getattr(self.model, "output_names", range(len(outputs)))
            return type(outputs)([of(name, output) for name, output in zip(names, outputs, strict=True)])
        return of(next(iter(by_class), None), outputs)

    def check_classes(self, schema: Schema) -> None:
        """Raise UserError for a weight of a class that the schema excludes, and for classes without an output."""
        for weights in self.loss.class_weights.values():
            weights.check(schema)
        for target, outputs in self.label_counts(schema.targets).items():
            feature = schema.features.get(target)
            if feature is None or not feature.classes or feature.scale is not None:
                continue
            classes = feature.classes + int(feature.offset or 0)  # as the model gets them
            if classes > outputs:
                raise UserError(
                    f"loss: {target} has classes from 0 to {classes - 1}, as {schema.where} says; the model's output "
                    f"has {outputs} values, for classes from 0 to {outputs - 1}. Build the model with {classes} "
                    f"outputs, or correct classes of {target}."
                )

    def check_loss(self, schema: Schema) -> None:
        """Raise UserError for a loss of labels where targets are one-hot, or of numbers where they are labels."""
        loss: Any = compile_arguments(self.model).get("loss")
        outputs: list[Any] = list(getattr(self.model, "outputs", None) or [])
        if len(outputs) != 1 or len(schema.targets) != 1 or {"train_step", "compute_loss"} & {*self.own}:
            return
        feature, shape = schema.features.get(schema.targets[0]), outputs[0].shape
        is_label = feature and not feature.tensor_shape and feature.tensor_dtype.startswith(("int", "uint"))
        logits = ", options: {from_logits: true}" if takes_logits(loss) else ""
        if takes_labels(loss) and feature and shape[-1] != 1 and feature.tensor_shape == (*shape[1:],):
            name = loss if isinstance(loss, str) else getattr(loss, "name", None) or loss.__name__
            raise UserError(
                f"loss: {name} compares each record with the number of its class; {schema.targets[0]} holds "
                f"{shape[-1]} values, as many as there are outputs. If it is one-hot, write loss: {{name: "
                f"categorical_crossentropy{logits}}}."
            )
        is_of_keras = type(loss).__module__.startswith("keras.") and not isinstance(loss, LOSSES_OF_LABELS)
        if not is_label or not is_of_keras or len(shape) != 2 or (shape[1] or 1) < 2:
            return
        raise UserError(
            f"loss: {self.model.name} gives {shape[1]} numbers for each record, and {loss.name} needs as many targets; "
            f"{schema.targets[0]} is one whole number. If it is a class, write loss: {{name: "
            f"sparse_categorical_crossentropy{logits}}}; if it is a quantity, give the model one output."
        )

    def label_counts(self, targets: Sequence[str]) -> dict[str, int]:
        """Return for how many labels the model has outputs, by target: of those that are compared as labels.

        targets: the names of all. Empty where a model's own step computes the loss, or its outputs are not declared.
        """
        if not getattr(self.model, "outputs", None) or {"train_step", "compute_loss"} & {*self.own}:
            return {}
        outputs = self.model.outputs[0] if isinstance(self.model, keras.Sequential) else self.model.output
        loss = compile_arguments(self.model).get("loss")
        if isinstance(outputs, Mapping):
            losses = {name: loss.get(name) if isinstance(loss, Mapping) else loss for name in outputs}
            by_target = {self.targets.get(name, name): (losses[name], outputs[name]) for name in outputs}
        elif isinstance(outputs, list | tuple) or len(targets) != 1 or isinstance(loss, list | tuple):
            return {}
        else:
            only = next(iter(loss.values()), None) if isinstance(loss, Mapping) else loss
            by_target = {targets[0]: (only, outputs)}
        return {
            target: int(output.shape[class_axis(each)])
            for target, (each, output) in by_target.items()
            if takes_labels(each) and len(output.shape) > 1 and output.shape[class_axis(each)]
        }

    def origins(self, applied: Iterable[str]) -> Iterator[str]:
        """Yield for the log where each part comes from, if it is the model's. applied: the optimizers of its step."""
        for part, is_compiled in self.takes.items():
            if is_compiled:
                yield f"{part}: as the model was compiled"
            elif self.given.get(part):
                yield f"{part}: of the config, not as the model was compiled"
        if self.own:
            optimizers = f"; it applies {', '.join(applied)}" if "train_step" in self.own else ""
            yield f"training step: the model's own {', '.join(self.own)}{optimizers}"


def compile_model(config: Config, model: keras.Model, horizon: Horizon | None) -> Compiled:
    """Compile the model with what the config names, if that is needed. Raises UserError.

    horizon: None: it will only be evaluated, so that it needs no optimizer.
    """
    own = tuple(overridden(model, OWN_STEPS))
    compiles_itself = bool(overridden(model, ["compile"]))
    holds = optimizers_in(model)
    has_own_optimizers = "train_step" in own and (compiles_itself or not set(holds) <= {"optimizer"})
    given = {} if compiles_itself else compile_arguments(model)
    is_in_config = {
        "loss": config.loss.name != AUTO,
        "metrics": bool(config.metrics),
        "weighted_metrics": bool(config.weighted_metrics),
        "optimizer": config.optimizer.name != AUTO,
    }
    takes = {part: bool(given.get(part)) and not is_given for part, is_given in is_in_config.items()}
    arguments = {name: given.get(name) for name in ("loss", "loss_weights", "metrics", "weighted_metrics")}
    arguments, chosen = _with_config(config, model, arguments, own)
    optimizer = model.optimizer if model.compiled else None
    if has_own_optimizers:
        why = (
            "has no effect, because the model trains by its own train_step, with optimizers that it keeps itself: "
            f"{', '.join(holds) or 'none'}. Leave it out."
        )
        refuse_given(config, _OF_THE_OPTIMIZER, why)
    elif horizon is not None:
        optimizer = _prepare_optimizer(config, model, horizon, is_compiled=takes["optimizer"])
    changes = any(arguments[name] is not given.get(name) for name in arguments)
    if changes or not model.compiled:
        keras.Model.compile(model, optimizer=optimizer or "sgd", **arguments, auto_scale_loss=False)
    if not has_own_optimizers and optimizer is not None:
        model.optimizer = optimizer
    targets = targets_of([*config.metrics, *config.weighted_metrics], chosen.targets)
    return Compiled(model, given, takes, chosen, own, targets, has_own_optimizers)


def _with_config(
    config: Config, model: keras.Model, arguments: dict[str, Any], own: Sequence[str]
) -> tuple[dict[str, Any], ChosenLoss]:
    """Return the arguments of `compile` with what the config names, and what it says of the loss."""
    chosen = ChosenLoss(None)
    is_loss_known = arguments["loss"] is not None or model.compiled or "train_step" in own
    if config.loss.name != AUTO or not is_loss_known:
        refuse_probabilities(config)
        chosen = build_loss(config.loss)
        arguments |= {"loss": chosen.loss, "loss_weights": chosen.factors}
        if "train_step" in own and (output := next(filter(None, chosen.class_weights), None)):
            raise UserError(
                f"loss.options.{output}.class_weight: has no effect, because the model's own train_step gets one "
                "weight for each record. Leave it out, or have the step weigh classes."
            )
    elif config.loss.options:
        raise UserError("loss.options: the model is compiled with a loss; give loss.name too.")
    elif config.loss.class_weight:
        if isinstance(arguments["loss"], Mapping | list | tuple) and len(arguments["loss"]) > 1:
            raise UserError("loss.class_weight: is for one loss; the model is compiled with one for each output.")
        chosen = build_loss(config.loss)._replace(loss=None)
    for part in ("metrics", "weighted_metrics"):
        if specs := getattr(config, part):
            arguments[part] = build_metrics(specs)
    return arguments, chosen


def _prepare_optimizer(
    config: Config, model: keras.Model, horizon: Horizon, *, is_compiled: bool
) -> keras.optimizers.Optimizer:
    """Return the optimizer as it is before its slots, with its rates and weight decay. Raises UserError."""
    if is_compiled:
        _refuse_for_several(config, model.optimizer, _OF_ONE_OPTIMIZER)
    optimizer = _change_optimizer(config, model, horizon) if is_compiled else build_optimizer(config, horizon)
    _refuse_for_several(config, optimizer, ("optimizer.lr_multipliers",))
    multiply_rates(optimizer, model.trainable_variables, config.optimizer.lr_multipliers)
    limit_weight_decay(optimizer, model.trainable_variables, config, is_compiled=is_compiled)
    return optimizer


def _refuse_for_several(config: Config, optimizer: keras.optimizers.Optimizer, keys: Sequence[str]) -> None:
    """Raise UserError for settings that a MultiOptimizer would not follow, because others update the weights for it."""
    kind = getattr(keras.optimizers, "MultiOptimizer", None)  # Keras 3.5 has none
    if kind is None or not isinstance(getattr(optimizer, "inner_optimizer", optimizer), kind):
        return
    if config.model.unfreeze:
        raise UserError(
            "model.unfreeze: a MultiOptimizer must be given all weights in each step, not some of them later. Leave it "
            "out, or compile the model with one optimizer."
        )
    why = (
        "has no effect on a MultiOptimizer, because the optimizers inside it update the weights. Leave it "
        "out, and give those what it stands for, such as global_clipnorm or another learning_rate."
    )
    refuse_given(config, keys, why)


def _change_optimizer(config: Config, model: keras.Model, horizon: Horizon) -> keras.optimizers.Optimizer:
    """Return the compiled model's optimizer with what the config changes of it.

    It keeps its learning rate or schedule unless the config has lr_schedule; without base_lr that begins at the
    compiled rate. Raises UserError.
    """
    if config.optimizer.options:
        raise UserError("optimizer.options: the model is compiled with an optimizer; give optimizer.name too.")
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    try:
        if config.lr_schedule != LrScheduleConfig():
            schedule = _with_base_rate(config.lr_schedule, inner)
            try:
                inner.learning_rate = build_schedule(schedule, horizon)
            except TypeError:  # Keras puts no number in the place of a schedule
                inner.learning_rate = ByFormula(dataclasses.asdict(schedule), dataclasses.asdict(horizon))
        if config.train.clip_norm is not None:
            inner.global_clipnorm = config.train.clip_norm
            if inner.clipnorm is not None or inner.clipvalue is not None:
                raise ValueError(
                    "train.clip_norm: it clips gradients itself, by clipnorm or clipvalue; give one of the two."
                )
    except (AttributeError, ValueError) as error:
        raise UserError(f"optimizer: the compiled one cannot be used: {one_line(error)}") from error
    return add_loss_scale(optimizer, config)


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


def build_metrics(specs: Sequence[Spec]) -> Any:
    """Return metrics as `compile` takes them: a list, or a dict of lists by output. Raises UserError."""
    metrics = [(spec.output if isinstance(spec, MetricSpec) else None, _build(spec)) for spec in specs]
    if all(output is None for output, _ in metrics):
        return [metric for _, metric in metrics]
    by_output: dict[str, list[Any]] = {}
    for output, metric in metrics:
        if output is None:
            raise UserError("metrics: give each metric its output, or none of them.")
        by_output.setdefault(output, []).append(metric)
    return by_output


def targets_of(specs: Sequence[Spec], of_loss: Mapping[str, str]) -> Mapping[str, str]:
    """Return the targets that outputs are compared with, in the loss or by metrics. Raises UserError."""
    targets = dict(of_loss)
    for spec in specs:
        if not isinstance(spec, MetricSpec) or (spec.output is None and spec.target is None):
            continue
        if spec.output is None:
            raise UserError(f"metrics: {spec.name}: target {spec.target!r} needs an output to be compared with.")
        target = spec.target or spec.output
        if targets.setdefault(spec.output, target) != target:
            both = f"{targets[spec.output]} and {target}"
            raise UserError(f"metrics: {spec.output} has two targets, {both}; loss and metrics of an output share one.")
    return targets


def _build(spec: Spec) -> Any:
    kinds = (keras.metrics, keras.metrics.Metric)
    if not spec.options and (spec.name in SHORT or is_short(*kinds, spec.name)):
        return spec.name  # shown by this name, as in `fit`
    factory = choose_keras(*kinds, spec.name, "metrics", SHORT)
    if is_users(spec.name) and _compares(factory, spec.options):
        return keras.metrics.MeanMetricWrapper(factory, **{"name": factory.__name__} | spec.options)
    metric = call(factory, spec, "metrics")
    if not isinstance(metric, keras.metrics.Metric):
        raise UserError(f"metrics: {spec.name} must make a keras.metrics.Metric; it made {type(metric).__name__}.")
    return metric


def _compares(function: Any, options: Mapping[str, Any]) -> bool:
    """Return whether it is a function of (targets, outputs), as `compile` takes it too, not one that makes a metric."""
    own = {name: value for name, value in options.items() if name != "name"}
    return inspect.isfunction(function) and not _takes(function, (), options) and _takes(function, (None, None), own)


def _takes(function: Any, values: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*values, **options)
    except TypeError:
        return False
    return True
