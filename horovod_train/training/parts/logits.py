"""Refuses losses and metrics that certainly take the logits of a model for probabilities, or the reverse."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import tensorflow as tf

from horovod_train.config.registry import fold, keras_classes
from horovod_train.config.settings import AUTO, Config
from horovod_train.errors import UserError
from horovod_train.models import MODELS

_OF_PROBABILITIES = (keras.losses.KLDivergence, keras.losses.CategoricalGeneralizedCrossEntropy)
"""Losses without an option for logits."""


def refuse_probabilities(config: Config) -> None:
    """Raise UserError for a loss or metric of probabilities with a built-in model, as all of those return logits."""
    if config.model.name not in MODELS:
        return
    losses, metrics = (
        keras_classes(keras.losses, keras.losses.Loss),
        keras_classes(keras.metrics, keras.metrics.Metric),
    )
    of_metrics = [(part, metrics, spec) for part in ("metrics", "weighted_metrics") for spec in getattr(config, part)]
    for part, classes, spec in [("loss", losses, config.loss), *of_metrics]:
        name = "sparse_categorical_crossentropy" if spec.name == AUTO else spec.name
        kind = classes.get(name) or classes.get(fold(name))
        if kind in _OF_PROBABILITIES:
            raise UserError(f"{part}: {name} takes probabilities, but the model {config.model.name} returns logits.")
        if kind and "from_logits" in inspect.signature(kind).parameters and not spec.options.get("from_logits"):
            raise UserError(
                f"{part}: {name} takes probabilities, but the model {config.model.name} returns logits; write "
                f"{{name: {name}, options: {{from_logits: true}}}}."
            )


def refuse_logits(outputs: Any, name: str) -> None:
    """In a compiled step: raise ValueError if the outputs for a loss of logits come from a softmax or a sigmoid."""
    made_by = outputs.op.type if isinstance(outputs, tf.Tensor) and tf.is_symbolic_tensor(outputs) else ""
    if made_by in ("Softmax", "Sigmoid"):
        raise ValueError(
            f"loss {name} takes logits, but the model ends in a {made_by.lower()}, which makes probabilities of them; "
            "leave one of the two out"
        )
