"""Losses that a config names: Keras', ours, a user's function, or one for each output; weights of records by class.

They become arguments of `compile`. Refuses those that certainly take logits for probabilities, or the reverse. Finds
all losses that a compiled model holds.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from horovod_train.config.loader import build
from horovod_train.config.registry import call, check_numbers, choose_keras, find_keras, fold
from horovod_train.config.rules import PER_OUTPUT, class_weight_problem
from horovod_train.config.settings import AUTO, Config, LossSpec, LossTerm, Spec
from horovod_train.data.schema import Schema
from horovod_train.distributed.layer_contents import all_parts_in, layers_inside
from horovod_train.errors import UserError
from horovod_train.keras_seams import compile_arguments, compiled_losses
from horovod_train.models import MODELS


def smoothed_sparse_categorical_crossentropy(
    targets: tf.Tensor, outputs: tf.Tensor, label_smoothing: float = 0.1
) -> tf.Tensor:
    """Return the cross-entropy of logits [..., classes] with labels [...], with smoothing spread over all classes.

    Labels may be [..., 1] too, as for Keras' own loss.

    (1 − ε) · CE(label) + ε · mean over classes k of CE(k), ε = label_smoothing. Szegedy et al. 2016 (arXiv:1512.00567),
    section 7, also the source of ε = 0.1. Returns float32 [...].
    """
    refuse_logits(outputs, "smoothed_sparse_categorical_crossentropy")
    if len(targets.shape) == len(outputs.shape) and targets.shape[-1] == 1:
        targets = tf.squeeze(targets, axis=-1)
    log_probabilities = tf.nn.log_softmax(tf.cast(outputs, tf.float32))
    one_hot = tf.one_hot(tf.cast(targets, tf.int32), outputs.shape[-1])
    of_label = tf.reduce_sum(one_hot * log_probabilities, axis=-1)
    return -(1 - label_smoothing) * of_label - label_smoothing * tf.reduce_mean(log_probabilities, axis=-1)


OUR_LOSSES: dict[str, Callable[..., tf.Tensor]] = {
    "smoothed_sparse_categorical_crossentropy": smoothed_sparse_categorical_crossentropy,
}
"""Functions (targets, outputs, **options) → [batch, ...], with the signature of a user's function."""
_CROSSENTROPIES = (
    keras.losses.SparseCategoricalCrossentropy,
    keras.losses.CategoricalCrossentropy,
    keras.losses.BinaryCrossentropy,
)
_PRODUCTS = ("BatchMatMulV2", "Conv1D", "Conv2D", "Conv3D", "Einsum", "MatMul")


def _present(*names: str) -> tuple[type[keras.losses.Loss], ...]:
    """Return those of Keras' losses that this version has: 3.5 lacks Circle and CategoricalGeneralizedCrossEntropy."""
    return tuple(getattr(keras.losses, name) for name in names if hasattr(keras.losses, name))


LOSSES_OF_LABELS = _present("SparseCategoricalCrossentropy", "CategoricalGeneralizedCrossEntropy", "Circle")
"""Those that compare several outputs with the number of a class."""
LOSSES_OVER_BATCHES = _present("Dice", "Tversky", "Circle")
"""Those that compare all records of a batch, so that they are no mean over records."""
_OF_PROBABILITIES = _present("KLDivergence", "CategoricalGeneralizedCrossEntropy")
"""Losses without an option for logits; a metric with thresholds from 0 to 1 has none either."""


class ClassWeights(NamedTuple):
    """The weights of records by the class of their target."""

    by_class: Mapping[int, float]
    """1 for the classes that are not there."""
    target: str | None
    """Of several targets, the one with the classes."""
    where: str
    """The key of the config, for messages."""

    def __call__(self, targets: Any, axes: int | None = None) -> tf.Tensor:
        """Return the weight of each record's class, float32 [batch]. Raises ValueError.

        A target [batch, classes] stands for its largest entry, as in Keras' `fit`. axes: of the output that it is
        compared with, if known: of a label for each of several places there is no largest.
        """
        target = targets if self.target is None else pick(targets, self.target)
        if isinstance(target, Mapping):
            raise ValueError(f"{self.where} needs one target; there are {', '.join(target) or 'none'}")
        largest = max(self.by_class)
        table = tf.constant([self.by_class.get(number, 1.0) for number in range(largest + 2)])  # the last: any other
        classes, other = _classes(target, largest, axes or 2, self.where), tf.constant(largest + 1, tf.int64)
        return tf.gather(table, tf.where(classes < 0, other, tf.minimum(classes, other)))

    def check(self, schema: Schema) -> None:
        """Raise UserError for a class that the schema's `classes` exclude."""
        # A single target is used for every output.
        target = schema.targets[0] if len(schema.targets) == 1 else self.target
        feature = schema.features.get(target) if target else None
        if feature and feature.classes and max(self.by_class) >= feature.classes:
            raise UserError(
                f"{self.where}: there is no class {max(self.by_class)}; {schema.where} says that {target} has "
                f"{feature.classes}, from 0."
            )


class ChosenLoss(NamedTuple):
    """What a config says of the loss, as `compile` and a step take it."""

    loss: Any
    """A loss of Keras, or a dict of them by output."""
    factors: dict[str, float] | None = None
    """`loss_weights` of compile."""
    targets: Mapping[str, str] = {}
    """By output, the target that it is compared with; empty: targets are handed over as they are."""
    class_weights: Mapping[str | None, ClassWeights] = {}
    """By output; None: of the only one."""


class LossOfFunction(keras.losses.Loss):
    """Calls a function (targets, outputs, **options) as `fit` calls one.

    A last axis of length 1 that only one of the two has is added to, or taken from, the other, as in Keras.
    """

    def __init__(self, function: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._function, self._options = function, dict(options)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        if not any(map(keras.tree.is_nested, (y_true, y_pred))):
            y_true, y_pred = _to_same_rank(y_true, y_pred)
        return self._function(y_true, y_pred, **self._options)


def _to_same_rank(first: Any, second: Any) -> tuple[Any, Any]:
    ranks = len(first.shape), len(second.shape)
    if ranks[0] + 1 == ranks[1] and second.shape[-1] == 1:
        return (keras.ops.expand_dims(first, -1), second) if ranks[0] == 1 else (first, keras.ops.squeeze(second, -1))
    if ranks[1] + 1 == ranks[0] and first.shape[-1] == 1:
        return (first, keras.ops.expand_dims(second, -1)) if ranks[1] == 1 else (keras.ops.squeeze(first, -1), second)
    return first, second


def takes_labels(loss: Any) -> bool:
    """Return whether a loss, as `compile` takes it, compares outputs with a label for each, and leaves none out."""
    if isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        return loss.ignore_class is None
    if isinstance(loss, LossOfFunction) and loss._function not in OUR_LOSSES.values():
        return False  # a user's, whatever its name
    return _name_of(loss).endswith(fold("sparse_categorical_crossentropy"))


def takes_logits(loss: Any) -> bool | None:
    """Return whether a loss, as `compile` takes it, compares classes with logits; False: with probabilities.

    None: with neither, or that is not known.
    """
    if isinstance(loss, LossOfFunction):
        return True if loss._function in OUR_LOSSES.values() else None
    if isinstance(loss, _CROSSENTROPIES):
        return bool(loss.get_config().get("from_logits"))
    return False if _name_of(loss) in {fold(kind.__name__) for kind in _CROSSENTROPIES} else None


def takes_one_class(loss: Any) -> bool:
    """Return whether a loss, as `compile` takes it, is a crossentropy of classes of which each record has one."""
    name = _name_of(loss)
    return "categorical" in name and name.endswith("crossentropy")


def _name_of(loss: Any) -> str:
    """Return the name of a loss that is, or calls, a function, without case and underscores; "" of others."""
    if isinstance(loss, LossOfFunction):
        loss = loss._function
    function = getattr(loss, "fn", loss)  # of what `compile` makes of a name or a function
    return fold(loss if isinstance(loss, str) else getattr(function, "__name__", ""))


def build_loss(spec: Spec) -> ChosenLoss:
    """Build a loss: Keras' or ours by name, a user's function by package.module:function, or one for each output.

    For one per output, the name is per_output, whose options map outputs to such losses. Raises UserError.
    """
    if spec.name == AUTO:
        spec = dataclasses.replace(spec, name="sparse_categorical_crossentropy")
    if spec.name == PER_OUTPUT:
        return _build_terms(spec.options)
    class_weights: dict[str | None, ClassWeights] = {}
    if isinstance(spec, LossSpec) and spec.class_weight:
        class_weights[None] = build_class_weights(spec.class_weight, None, "loss")
    return ChosenLoss(_build_one(spec, "loss"), class_weights=class_weights)


def _build_one(spec: Spec, where: str) -> keras.losses.Loss:
    factory = OUR_LOSSES.get(spec.name) or choose_keras(keras.losses, keras.losses.Loss, spec.name, f"{where}.name")
    if isinstance(factory, type) and issubclass(factory, keras.losses.Loss):
        return call(factory, spec, where)
    check_numbers(spec, where)
    try:
        inspect.signature(factory).bind(None, None, **spec.options)
    except TypeError as error:
        takes = ", ".join(list(inspect.signature(factory).parameters)[2:]) or "no options"
        raise UserError(f"{where}.options: {spec.name}(targets, outputs, …): {error}; it takes: {takes}.") from error
    return LossOfFunction(factory, spec.name.rpartition(":")[2], spec.options)


def _build_terms(options: Mapping[str, Any]) -> ChosenLoss:
    if not options:
        raise UserError("loss.options: per_output needs a loss for each output, like {digit: {name: …, weight: 1.0}}.")
    terms = {output: build(LossTerm, value, f"loss.options.{output}") for output, value in options.items()}
    targets = {output: term.target or output for output, term in terms.items()}
    class_weights: dict[str | None, ClassWeights] = {
        output: build_class_weights(term.class_weight, targets[output], f"loss.options.{output}")
        for output, term in terms.items()
        if term.class_weight
    }
    return ChosenLoss(
        {output: _build_one(term, f"loss.options.{output}") for output, term in terms.items()},
        {output: term.weight for output, term in terms.items()},
        targets,
        class_weights,
    )


def build_class_weights(by_class: Mapping[str, Any], target: str | None, where: str) -> ClassWeights:
    """Return the weights of classes. Raises UserError."""
    if problem := class_weight_problem(by_class):
        raise UserError(f"{where}.class_weight: {problem}")
    weights = {int(name): float(weight) for name, weight in by_class.items()}
    return ClassWeights(weights, target, f"{where}.class_weight")


def _classes(targets: Any, largest: int, axes: int, where: str) -> tf.Tensor:
    """Return the class of each record, int64 [batch]. largest: the largest class with a weight. axes: of the output."""
    shape = targets.shape
    if shape.rank == 1 or (shape.rank == 2 and shape[1] == 1):
        return tf.cast(tf.round(tf.reshape(targets, [-1])), tf.int64)
    if shape.rank != 2 or axes > 2:
        of_output = f", and the output {axes - 1} axes" if axes > 2 else ""
        raise ValueError(f"{where} needs a class for each record; the target has shape {shape[1:]}{of_output}")
    if shape[1] is not None and shape[1] <= largest:
        raise ValueError(f"{where}: there is no class {largest}; the target has {shape[1]} entries")
    return tf.argmax(targets, axis=1)


def pick(targets: Any, name: str) -> Any:
    """Return the target with this name; a single one stands for each. Raises ValueError."""
    if not isinstance(targets, Mapping):
        return targets
    if name not in targets:
        raise ValueError(f"there is no target {name!r}; there are {', '.join(targets)}")
    return targets[name]


def refuse_probabilities(config: Config) -> None:
    """Raise UserError for a loss or metric of probabilities with a built-in model, as all of those return logits."""
    if config.model.name not in MODELS:
        return
    losses, metrics = (keras.losses, keras.losses.Loss), (keras.metrics, keras.metrics.Metric)
    of_metrics = [(part, metrics, spec) for part in ("metrics", "weighted_metrics") for spec in getattr(config, part)]
    for part, classes, spec in [("loss", losses, config.loss), *of_metrics]:
        name = "sparse_categorical_crossentropy" if spec.name == AUTO else spec.name
        kind = find_keras(*classes, name)
        option = _option_for_logits(kind, spec.options) if kind else None
        if option is not None:
            hint = f"; write {{name: {name}, options: {{{option}}}}}" if option else ""
            raise UserError(
                f"{part}: {name} takes probabilities, but the model {config.model.name} returns logits{hint}."
            )


def _option_for_logits(kind: type, options: Mapping[str, Any]) -> str | None:
    """Return the option that has a class of Keras take logits; None: with these options it does; "": there is none."""
    takes = inspect.signature(kind).parameters
    if "from_logits" in takes:
        return None if options.get("from_logits") else "from_logits: true"
    if "threshold" in takes and takes["threshold"].default == 0.5:
        return None if "threshold" in options else "threshold: 0.0"
    if "thresholds" in takes:
        return None if {"thresholds", "top_k"} & {*options} else "thresholds: 0.0"
    return "" if kind in _OF_PROBABILITIES or "num_thresholds" in takes else None


def refuse_logits(outputs: Any, name: str) -> None:
    """In a compiled step: raise ValueError if the outputs for a loss of logits come from a softmax or a sigmoid."""
    made_by = outputs.op.type if isinstance(outputs, tf.Tensor) and tf.is_symbolic_tensor(outputs) else ""
    if made_by in ("Softmax", "Sigmoid"):
        raise ValueError(
            f"loss {name} takes logits, but the model ends in a {made_by.lower()}, which makes probabilities of them; "
            "leave one of the two out"
        )


def ends_in_logits(outputs: Any) -> bool:
    """In a compiled step: return whether outputs are certainly no probabilities: a product with weights, or its sum."""
    if not isinstance(outputs, tf.Tensor) or not tf.is_symbolic_tensor(outputs):
        return False
    operation = _without_shape(outputs)
    if operation.type in ("AddV2", "BiasAdd"):
        return any(map(ends_in_logits, operation.inputs))
    # A matrix may also mix probabilities, as where labels are noisy.
    of_what = {_without_shape(tensor).type for tensor in operation.inputs}
    return operation.type in _PRODUCTS and not of_what & {"Softmax", "Sigmoid"}


def _without_shape(tensor: tf.Tensor) -> Any:
    """Return the operation that a tensor's values come from."""
    operation = tensor.op
    while operation.type in ("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze"):
        operation = operation.inputs[0].op
    return operation


def losses_of(model: keras.Model) -> list[keras.losses.Loss]:
    """Return the losses that a model was compiled with and those that it and its layers hold; those in them, too."""
    held = [value for layer in layers_inside(model) for name, value in vars(layer).items() if name != "_compile_loss"]
    given = compile_arguments(model).get("loss")  # `_compile_loss` is Keras' own sum of losses
    return list(all_parts_in([*compiled_losses(model), given, *held], keras.losses.Loss))
