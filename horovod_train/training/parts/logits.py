"""Refuses losses and metrics that certainly take the logits of a model for probabilities, or the reverse."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from horovod_train.config.registry import fold, keras_classes
from horovod_train.config.settings import AUTO, Config
from horovod_train.errors import UserError
from horovod_train.models import MODELS

_OF_PROBABILITIES = (keras.losses.KLDivergence, keras.losses.CategoricalGeneralizedCrossEntropy)
"""Losses without an option for logits; a metric with thresholds from 0 to 1 has none either."""


def refuse_probabilities(config: Config) -> None:
    """Raise UserError for a loss or metric of probabilities with a built-in model, as all of those return logits."""
    if config.model.name not in MODELS:
        return
    losses = keras_classes(keras.losses, keras.losses.Loss)
    metrics = keras_classes(keras.metrics, keras.metrics.Metric)
    of_metrics = [(part, metrics, spec) for part in ("metrics", "weighted_metrics") for spec in getattr(config, part)]
    for part, classes, spec in [("loss", losses, config.loss), *of_metrics]:
        name = "sparse_categorical_crossentropy" if spec.name == AUTO else spec.name
        kind = classes.get(name) or classes.get(fold(name))
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
