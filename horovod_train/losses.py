"""Losses by name: Keras', ours, a user's function, or a weighted sum of one for each output. Exchanges nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from horovod_train.config import Spec
from horovod_train.errors import UserError
from horovod_train.lookup import call, choose_keras

LossFunction = Callable[[Any, Any], tf.Tensor]

PER_OUTPUT = "per_output"
_TERM_KEYS = ("name", "options", "target", "weight")


def smoothed_sparse_categorical_crossentropy(
    targets: tf.Tensor, outputs: tf.Tensor, label_smoothing: float = 0.1
) -> tf.Tensor:
    """Cross-entropy of logits [..., classes] with labels [...] of which label_smoothing is spread over all classes.

    (1 − ε) · CE(label) + ε · mean over classes k of CE(k). Szegedy et al. 2016 (arXiv:1512.00567), section 7, with
    ε = 0.1 from there. Returns float32 [...].
    """
    log_probabilities = tf.nn.log_softmax(tf.cast(outputs, tf.float32))
    one_hot = tf.one_hot(tf.cast(targets, tf.int32), outputs.shape[-1])
    own = tf.reduce_sum(one_hot * log_probabilities, axis=-1)
    return -(1 - label_smoothing) * own - label_smoothing * tf.reduce_mean(log_probabilities, axis=-1)


OWN: dict[str, Callable[..., tf.Tensor]] = {
    "smoothed_sparse_categorical_crossentropy": smoothed_sparse_categorical_crossentropy,
}
"""Functions (targets, outputs, **options) → [batch, ...], as a user's."""


def build_loss(spec: Spec) -> LossFunction:
    """(targets, outputs) → float32 [batch], the loss of each record.

    A Keras loss by name, one of ours, a user's function by package.module:function, or per_output: then options maps
    outputs to such losses. Values [batch, ...] are averaged over what follows the batch. Raises UserError.
    """
    if spec.name == PER_OUTPUT:
        return _build_sum(spec.options)
    function = _build_function(spec, "loss")

    def loss_per_record(targets: Any, outputs: Any) -> tf.Tensor:
        return _per_record(function(targets, outputs), spec.name)

    return loss_per_record


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


class _Term(NamedTuple):
    output: str
    target: str
    weight: float
    function: Callable[[Any, Any], Any]


def _build_sum(options: Mapping[str, Any]) -> LossFunction:
    """Σ weight · loss(targets[target], outputs[output]) over the outputs named."""
    if not options:
        raise UserError("loss.options: per_output needs a loss for each output, like {digit: {name: …, weight: 1.0}}.")
    terms = [_build_term(output, value) for output, value in options.items()]

    def loss_per_record(targets: Any, outputs: Any) -> tf.Tensor:
        parts = []
        for term in terms:
            given = pick(targets, term.target, "target"), pick(outputs, term.output, "output")
            parts.append(term.weight * _per_record(term.function(*given), term.output))
        return tf.add_n(parts)

    return loss_per_record


def _build_term(output: str, value: Any) -> _Term:
    where = f"loss.options.{output}"
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping) or "name" not in value or not set(value) <= set(_TERM_KEYS):
        raise UserError(
            f"{where}: expected a loss's name, or a mapping of {', '.join(_TERM_KEYS)}; received {value!r}."
        )
    weight, options = value.get("weight", 1.0), value.get("options") or {}
    if not isinstance(weight, int | float) or not isinstance(options, Mapping):
        raise UserError(f"{where}: expected a number as weight and a mapping as options; received {value!r}.")
    spec = Spec(value["name"], dict(options))
    return _Term(output, value.get("target", output), float(weight), _build_function(spec, where))


def pick(values: Any, name: str, kind: str) -> Any:
    """The one of several targets or outputs that has this name. kind: "target" or "output", for the ValueError."""
    if not isinstance(values, Mapping):
        if kind == "target":
            return values  # a single one goes with every output
        raise ValueError(f"there is no output {name!r}: the model must return a dict of its outputs by name")
    if name not in values:
        raise ValueError(f"there is no {kind} {name!r}; there are {', '.join(values)}")
    return values[name]
