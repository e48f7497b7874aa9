"""load_model: a saved model, with its optimizer distributed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras

from horovod_train.errors import UserError
from horovod_train.tensorflow import DistributedOptimizer


def load_model(
    filepath: str | Path,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model and make its optimizer distributed; its state is that of the file.

    filepath: of model.save, with or without DistributedOptimizer. A model saved without an optimizer is returned as it
    is. custom_optimizers: classes of optimizers that are not Keras'. compression: of gradients.

    Raises UserError for legacy_opts=True: Keras 3 has none of the optimizers of Keras 2.
    """
    if legacy_opts:
        raise UserError("hvd.load_model: Keras 3 has no legacy optimizers. Leave legacy_opts out.")
    optimizer_classes = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**optimizer_classes, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        distributed: Any = DistributedOptimizer(model.optimizer, compression=compression)
        if distributed is not model.optimizer:  # under mixed_float16, of a model compiled without a loss scale
            model.optimizer = distributed
    return model
