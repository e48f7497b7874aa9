"""A model with the weights of a checkpoint, and nothing of how it was trained. Does not know ranks: root reads."""

from __future__ import annotations

from typing import Literal

import keras

from horovod_train.checkpoint.tensors import Checkpoint, load
from horovod_train.config.settings import Config
from horovod_train.errors import UserError
from horovod_train.models import build_model
from horovod_train.training.state import weights_by_name

Weights = Literal["auto", "trained", "ema"]
"""Those of the last update, or their moving averages. auto: the averages where there are any, as a run evaluates."""


def build_bare_model(config: Config) -> keras.Model:
    """The config's model under its precision, with initial weights and no optimizer. Raises UserError."""
    keras.utils.set_random_seed(config.seed)
    keras.mixed_precision.set_dtype_policy(config.precision)
    return build_model(config.model)


def load_weights(model: keras.Model, found: Checkpoint, weights: Weights) -> Weights:
    """Gives a model the weights of a checkpoint, trained ones or their moving averages; returns which.

    Statistics such as BatchNorm's are the mean over ranks, which the checkpoint holds. Raises UserError where it is
    another model's, or has no moving averages.
    """
    has_averages = any(name.startswith("ema/") for name in found.names())
    if weights == "ema" and not has_averages:
        raise UserError(
            f"--weights ema: {found.folder} holds no moving averages. Take --weights trained, or train with "
            "train.ema_decay."
        )
    wanted = weights_by_name(model.weights, "model")
    if weights == "trained" or not has_averages:
        load(wanted, found)
        return "trained"
    averages = weights_by_name(model.trainable_weights, "ema")
    averaged = {variable.ref() for variable in averages.values()}
    load({name: variable for name, variable in wanted.items() if variable.ref() not in averaged} | averages, found)
    return "ema"
