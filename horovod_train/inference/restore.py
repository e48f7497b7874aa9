"""Builds a model with the weights of a checkpoint, without any training state. Does not know ranks: root reads."""

from __future__ import annotations

import math
from typing import Literal

import keras

from horovod_train.checkpoint.tensors import Checkpoint, load
from horovod_train.config.settings import Config
from horovod_train.errors import UserError
from horovod_train.models import build_model
from horovod_train.training.parts import layer_contents
from horovod_train.training.parts.fine_tuning import Freezing, enable_lora
from horovod_train.training.state import weights_by_name

Weights = Literal["auto", "trained", "ema"]
"""Weights of the last update, or their moving averages. auto: the averages if there are any."""


def build_bare_model(config: Config) -> keras.Model:
    """Build the config's model under its precision, with initial weights and no optimizer. Raises UserError."""
    keras.utils.set_random_seed(config.seed)
    keras.mixed_precision.set_dtype_policy(config.precision)
    model = build_model(config.model)
    enable_lora(model, config.model.lora)
    Freezing(model, config.model).apply(math.inf)  # frozen weights have no moving averages
    return model


def load_weights(model: keras.Model, checkpoint: Checkpoint, weights: Weights) -> Weights:
    """Load trained weights or their moving averages from a checkpoint into a model; return which.

    Statistics such as BatchNorm's are the mean over ranks, which the checkpoint contains. Raises UserError if the
    checkpoint is of another model, or has no moving averages.
    """
    loaded = _load_weights(model, checkpoint, weights)
    layer_contents.finalize(model)
    return loaded


def _load_weights(model: keras.Model, checkpoint: Checkpoint, weights: Weights) -> Weights:
    saved = checkpoint.names()
    has_averages = any(name.startswith("ema/") for name in saved)
    if weights == "ema" and not has_averages:
        raise UserError(
            f"--weights ema: {checkpoint.folder} holds no moving averages. Take --weights trained, or train with "
            "train.ema_decay or optimizer.options.use_ema."
        )
    variables = weights_by_name(model.weights, "model")
    if weights == "trained" or not has_averages:
        load(variables, checkpoint)
        return "trained"
    # An optimizer that keeps averages may train a part of the model.
    named = weights_by_name(model.trainable_weights, "ema")
    averages = {name: variable for name, variable in named.items() if name in saved}
    averaged = {variable.ref() for variable in averages.values()}
    not_averaged = {name: variable for name, variable in variables.items() if variable.ref() not in averaged}
    load(not_averaged | averages, checkpoint)
    return "ema"
