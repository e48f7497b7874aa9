"""Builds losses by name: Keras', ours, a user's function, or a weighted sum with one for each output. No exchange."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from horovod_train.config.loader import build
from horovod_train.config.registry import call, choose_keras
from horovod_train.config.settings import LossTerm, Spec
from horovod_train.errors import UserError

LossFunction = Callable[[Any, Any], tf.Tensor]
"""(targets, outputs) → float32 [batch]."""

PER_OUTPUT = "per_output"


def smoothed_sparse_categorical_crossentropy(
    targets: tf.Tensor, outputs: tf.Tensor, label_smoothing: float = 0.1
) -> tf.Tensor:
    """Return the cross-entropy of logits [..., classes] with labels [...], with smoothing spread over all classes.

    (1 − ε) · CE(label) + ε · mean over classes k of CE(k), ε = label_smoothing. Szegedy et al. 2016 (arXiv:1512.00567),
    section 7, also the source of ε = 0.1. Returns float32 [...].
    """
    log_probabilities = tf.nn.log_softmax(tf.cast(outputs, tf.float32))
    one_hot = tf.one_hot(tf.cast(targets, tf.int32), outputs.shape[-1])
    own = tf.reduce_sum(one_hot * log_probabilities, axis=-1)
    return -(1 - label_smoothing) * own - label_smoothing * tf.reduce_mean(log_probabilities, axis=-1)


OWN: dict[str, Callable[..., tf.Tensor]] = {
    "smoothed_sparse_categorical_crossentropy": smoothed_sparse_categorical_crossentropy,
}
"""Functions (targets, outputs, **options) → [batch, ...], with the signature of a user's function."""


class Loss:
    """The loss of each record: Σ weight · term(targets, outputs), and the terms, unweighted.

    `names`: "loss" and, with several outputs, `<output>_loss`, as in Keras' `fit`.
    """

    def __init__(self, terms: Mapping[str, tuple[float, LossFunction]]) -> None:
        """terms: name → (weight, function); a single term is called "loss"."""
        self._terms = terms
        self.names = list({"loss": ..., **terms})

    def __call__(self, targets: Any, outputs: Any) -> dict[str, tf.Tensor]:
        """Return float32 [batch] by name."""
        values = {name: function(targets, outputs) for name, (_, function) in self._terms.items()}
        return values | {"loss": tf.add_n([weight * values[name] for name, (weight, _) in self._terms.items()])}

    def sums(self, targets: Any, outputs: Any, weights: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return float32 sums over a batch by name. weights: float32 [batch], one for each record."""
        return {
            name: tf.reduce_sum(tf.math.multiply_no_nan(values, weights))
            for name, values in self(targets, outputs).items()
        }


def build_loss(spec: Spec) -> Loss:
    """Build a loss: Keras' or ours by name, a user's function by package.module:function, or one for each output.

    For one per output, the name is per_output, whose options map outputs to such losses. Values [batch, ...] are
    averaged over all axes but the batch. Raises UserError.
    """
    if spec.name == PER_OUTPUT:
        return _build_terms(spec.options)
    function = _build_function(spec, "loss")
    return Loss({"loss": (1.0, lambda targets, outputs: _per_record(function(targets, outputs), spec.name))})


def _build_function(spec: Spec, where: str) -> Callable[[Any, Any], Any]:
    factory = OWN.get(spec.name) or choose_keras(keras.losses, keras.losses.Loss, spec.name, f"{where}.name")
    if isinstance(factory, type) and issubclass(factory, keras.losses.Loss):
        return call(factory, spec, where, reduction="none")
    try:
        inspect.signature(factory).bind(None, None, **spec.options)
    except TypeError as error:
        takes = ", ".join(list(inspect.signature(factory).parameters)[2:]) or "no options"
        raise UserError(f"{where}.options: {spec.name}(targets, outputs, …): {error}; it takes: {takes}.") from error
    return lambda targets, outputs: factory(targets, outputs, **spec.options)


def _per_record(values: Any, name: str) -> tf.Tensor:
    values = tf.cast(values, tf.float32)
    if not values.shape.rank:
        raise ValueError(f"loss {name} must give one value a record, [batch]; it gave a single number")
    return tf.reduce_mean(tf.reshape(values, [tf.shape(values)[0], -1]), axis=1)


def _build_terms(options: Mapping[str, Any]) -> Loss:
    if not options:
        raise UserError("loss.options: per_output needs a loss for each output, like {digit: {name: …, weight: 1.0}}.")
    return Loss({f"{output}_loss": _build_term(output, value) for output, value in options.items()})


def _build_term(output: str, value: Any) -> tuple[float, LossFunction]:
    """Return the weight and the loss function of targets[target] and outputs[output]."""
    where = f"loss.options.{output}"
    term = build(LossTerm, value, where)
    function, target = _build_function(term, where), term.target or output

    def loss_of_output(targets: Any, outputs: Any) -> tf.Tensor:
        return _per_record(function(pick(targets, target, "target"), pick(outputs, output, "output")), output)

    return term.weight, loss_of_output


def pick(values: Any, name: str, kind: str) -> Any:
    """Return the target or output with this name. kind: "target" or "output", for the ValueError."""
    if not isinstance(values, Mapping):
        if kind == "target":
            return values  # a single target is used for every output
        raise ValueError(f"there is no output {name!r}: the model must return a dict of its outputs by name")
    if name not in values:
        raise ValueError(f"there is no {kind} {name!r}; there are {', '.join(values)}")
    return values[name]
