"""Builds losses by name: Keras', ours, a user's function, or a weighted sum with one for each output. No exchange.

A loss knows how much each record counts in it: the weight that the batch carries, times that of the record's class.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from horovod_train.config.class_weights import PER_OUTPUT, class_weight_problem
from horovod_train.config.loader import build
from horovod_train.config.registry import call, choose_keras
from horovod_train.config.settings import AUTO, LossSpec, LossTerm, Spec
from horovod_train.data.schema import Schema
from horovod_train.errors import UserError
from horovod_train.training.parts.logits import refuse_logits
from horovod_train.training.parts.per_record import RecordLosses, check_is_per_record, mask_of, per_record

LossFunction = Callable[[Any, Any], RecordLosses]
"""(targets, outputs) → the loss of each record."""


def smoothed_sparse_categorical_crossentropy(
    targets: tf.Tensor, outputs: tf.Tensor, label_smoothing: float = 0.1
) -> tf.Tensor:
    """Return the cross-entropy of logits [..., classes] with labels [...], with smoothing spread over all classes.

    (1 − ε) · CE(label) + ε · mean over classes k of CE(k), ε = label_smoothing. Szegedy et al. 2016 (arXiv:1512.00567),
    section 7, also the source of ε = 0.1. Returns float32 [...].
    """
    refuse_logits(outputs, "smoothed_sparse_categorical_crossentropy")
    log_probabilities = tf.nn.log_softmax(tf.cast(outputs, tf.float32))
    one_hot = tf.one_hot(tf.cast(targets, tf.int32), outputs.shape[-1])
    of_label = tf.reduce_sum(one_hot * log_probabilities, axis=-1)
    return -(1 - label_smoothing) * of_label - label_smoothing * tf.reduce_mean(log_probabilities, axis=-1)


OUR_LOSSES: dict[str, Callable[..., tf.Tensor]] = {
    "smoothed_sparse_categorical_crossentropy": smoothed_sparse_categorical_crossentropy,
}
"""Functions (targets, outputs, **options) → [batch, ...], with the signature of a user's function."""


class ClassWeights(NamedTuple):
    """The weights of records by the class of their target."""

    by_class: Mapping[int, float]
    """1 for the classes that are not there."""
    target: str | None
    """Of several targets, the one with the classes."""
    where: str
    """The key of the config, for messages."""

    def __call__(self, targets: Any) -> tf.Tensor:
        """Return the weight of each record's class, float32 [batch]. Raises ValueError.

        A target [batch, classes] stands for its largest entry, as in Keras' `fit`.
        """
        target = targets if self.target is None else pick(targets, self.target, "target")
        if isinstance(target, Mapping):
            raise ValueError(f"{self.where} needs one target; there are {', '.join(target) or 'none'}")
        largest = max(self.by_class)
        table = tf.constant([self.by_class.get(number, 1.0) for number in range(largest + 2)])  # the last: any other
        return tf.gather(table, tf.clip_by_value(_classes(target, largest, self.where), 0, largest + 1))

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


class Term(NamedTuple):
    """A loss in the sum."""

    factor: float
    function: LossFunction
    class_weights: ClassWeights | None = None
    """None: all classes count alike."""


class Weighed(NamedTuple):
    """The losses of a batch on this rank, by name, with what each is divided by for a mean."""

    sums: dict[str, tf.Tensor]
    """float32: Σ weight · loss over the records."""
    totals: dict[str, tf.Tensor]
    """float32: Σ weight over the records."""
    weights: dict[str, tf.Tensor]
    """float32 [batch]: the weight of each record, 0 for padding; with a mask [batch, ...], of each position."""
    masks: Any
    """The mask of each output, or None: bool [batch, ...], in the structure of the outputs."""


class Loss:
    """The mean loss: Σ factor · mean of term(targets, outputs) over records, each mean by the records' weights.

    `names`: "loss" and, with several outputs, `<output>_loss`, as in Keras' `fit`. `terms`: those that are added up.
    """

    def __init__(self, terms: Mapping[str, Term]) -> None:
        """terms: by name; a single one is called "loss"."""
        self._terms = terms
        self.terms = list(terms)
        self.names = list({"loss": ..., **terms})

    @property
    def has_class_weights(self) -> bool:
        return any(term.class_weights is not None for term in self._terms.values())

    def check_classes(self, schema: Schema) -> None:
        """Raise UserError for a weight of a class that the schema excludes."""
        for term in self._terms.values():
            if term.class_weights is not None:
                term.class_weights.check(schema)

    def __call__(self, targets: Any, outputs: Any) -> dict[str, RecordLosses]:
        """Return the unweighted losses of the records by the name of the term."""
        return {name: term.function(targets, outputs) for name, term in self._terms.items()}

    def weigh(self, targets: Any, outputs: Any, weights: tf.Tensor) -> Weighed:
        """Return the weighted sums over a batch. weights: float32 [batch], one for each record.

        Where there is a mask, a record counts by its weight in each position that the mask keeps.
        """
        losses, by_record = self(targets, outputs), self.record_weights(targets, weights)
        counted = {name: spread(by_record[name], losses[name].mask) for name in self.terms}
        sums = {name: tf.reduce_sum(tf.math.multiply_no_nan(losses[name].values, counted[name])) for name in self.terms}
        masks = keras.tree.map_structure(mask_of, outputs)
        return Weighed(sums, {name: tf.reduce_sum(counted[name]) for name in self.terms}, counted, masks)

    def record_weights(self, targets: Any, weights: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return how much each record counts in each term: its weight times that of its class, float32 [batch]."""
        return {
            name: weights if term.class_weights is None else weights * term.class_weights(targets)
            for name, term in self._terms.items()
        }

    def total_weights(self, targets: Any, weights: tf.Tensor) -> tf.Tensor:
        """Return Σ weight over a batch for each term, float32 [terms], for `means`. There must be no masks."""
        return tf.stack([tf.reduce_sum(counted) for counted in self.record_weights(targets, weights).values()])

    def means(self, sums: Mapping[str, tf.Tensor], totals: tf.Tensor) -> dict[str, tf.Tensor]:
        """Divide the sums of the terms by the total weights, [terms] or one for all; return them and "loss".

        A term whose records weigh nothing is 0.
        """
        totals = tf.cast(totals, tf.float32)
        divisors = tf.unstack(totals) if totals.shape.rank else [totals] * len(self.terms)
        pairs = zip(self.terms, divisors, strict=True)
        means = {name: tf.math.divide_no_nan(sums[name], divisor) for name, divisor in pairs}
        return means | {"loss": self.add_up(means)}

    def add_up(self, means: Mapping[str, Any]) -> Any:
        """Return the loss that the means of the terms make, tensors or numbers."""
        parts = [means[name] if term.factor == 1 else term.factor * means[name] for name, term in self._terms.items()]
        return functools.reduce(operator.add, parts)


def build_loss(spec: Spec) -> Loss:
    """Build a loss: Keras' or ours by name, a user's function by package.module:function, or one for each output.

    For one per output, the name is per_output, whose options map outputs to such losses. Values [batch, ...] are
    averaged over all axes but the batch. Raises UserError.
    """
    if spec.name == AUTO:
        spec = dataclasses.replace(spec, name="sparse_categorical_crossentropy")
    if spec.name == PER_OUTPUT:
        return _build_terms(spec.options)
    function = _build_function(spec, "loss")

    def loss(targets: Any, outputs: Any) -> RecordLosses:
        return per_record(function, targets, outputs, spec.name)

    class_weight = spec.class_weight if isinstance(spec, LossSpec) else {}
    return Loss({"loss": Term(1.0, loss, build_class_weights(class_weight, None, "loss"))})


def _build_function(spec: Spec, where: str) -> Callable[[Any, Any], Any]:
    factory = OUR_LOSSES.get(spec.name) or choose_keras(keras.losses, keras.losses.Loss, spec.name, f"{where}.name")
    if isinstance(factory, type) and issubclass(factory, keras.losses.Loss):
        if "reduction" in spec.options:
            raise UserError(f"{where}.options.reduction: the trainer takes the mean over records; leave it out.")
        function = call(factory, spec, where, reduction="none")
        check_is_per_record(function, spec.name, where)
        return function
    try:
        inspect.signature(factory).bind(None, None, **spec.options)
    except TypeError as error:
        takes = ", ".join(list(inspect.signature(factory).parameters)[2:]) or "no options"
        raise UserError(f"{where}.options: {spec.name}(targets, outputs, …): {error}; it takes: {takes}.") from error
    return lambda targets, outputs: factory(targets, outputs, **spec.options)


def _build_terms(options: Mapping[str, Any]) -> Loss:
    if not options:
        raise UserError("loss.options: per_output needs a loss for each output, like {digit: {name: …, weight: 1.0}}.")
    return Loss({f"{output}_loss": _build_term(output, value) for output, value in options.items()})


def _build_term(output: str, value: Any) -> Term:
    """Return the loss of targets[target] and outputs[output]."""
    where = f"loss.options.{output}"
    term = build(LossTerm, value, where)
    function, target = _build_function(term, where), term.target or output

    def loss_of_output(targets: Any, outputs: Any) -> RecordLosses:
        return per_record(function, pick(targets, target, "target"), pick(outputs, output, "output"), output)

    return Term(term.weight, loss_of_output, build_class_weights(term.class_weight, target, where))


def build_class_weights(by_class: Mapping[str, Any], target: str | None, where: str) -> ClassWeights | None:
    """Return the weights of classes; None if there are none. Raises UserError."""
    if problem := class_weight_problem(by_class):
        raise UserError(f"{where}.class_weight: {problem}")
    if not by_class:
        return None
    return ClassWeights(
        {int(name): float(weight) for name, weight in by_class.items()}, target, f"{where}.class_weight"
    )


def spread(weights: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Return the weight of each position, 0 where the mask is False; without a mask, the weights of the records.

    weights: float32 [batch]. mask: bool [batch, ...]. Returns float32 of the mask's shape.
    """
    if mask is None:
        return weights
    return tf.reshape(weights, [-1] + [1] * (mask.shape.rank - 1)) * tf.cast(mask, weights.dtype)


def _classes(targets: Any, largest: int, where: str) -> tf.Tensor:
    """Return the class of each record, int64 [batch]. largest: the largest class with a weight."""
    shape = targets.shape
    if shape.rank == 1 or (shape.rank == 2 and shape[1] == 1):
        return tf.cast(tf.round(tf.reshape(targets, [-1])), tf.int64)
    if shape.rank != 2:
        raise ValueError(f"{where} needs a class for each record; the target has shape {shape[1:]}")
    if shape[1] is not None and shape[1] <= largest:
        raise ValueError(f"{where}: there is no class {largest}; the target has {shape[1]} entries")
    return tf.argmax(targets, axis=1)


def pick(values: Any, name: str, kind: str) -> Any:
    """Return the target or output with this name. kind: "target" or "output", for the ValueError."""
    if not isinstance(values, Mapping):
        if kind == "target":
            return values  # a single target is used for every output
        raise ValueError(f"there is no output {name!r}: the model must return a dict of its outputs by name")
    if name not in values:
        raise ValueError(f"there is no {kind} {name!r}; there are {', '.join(values)}")
    return values[name]
