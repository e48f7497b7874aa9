"""What Horovod's Keras module has besides callbacks: collectives on one value, and load_model.

A value may be of any kind that converts to a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import horovod_train.tensorflow as collectives
from horovod_train.errors import UserError


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = hvd.Compression.none,
) -> tf.Tensor:
    """Collective: return the value combined over all ranks, by default its mean.

    value: the same shape on every rank. average: the older form of op=hvd.Average (True) or hvd.Sum (False).
    """
    if average is not None and op is not None:
        raise UserError("hvd.allreduce: give op or average, not both.")
    op = op if op is not None else hvd.Sum if average is False else hvd.Average
    return collectives.allreduce(
        tf.convert_to_tensor(value),
        op=op,
        name=name,
        compression=compression,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Collective: return all values, by rank, along the first axis, whose length may differ by rank."""
    return collectives.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Collective: return root_rank's value. value: the same shape on every rank."""
    return collectives.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: Any = hvd.Average) -> tf.Tensor:
    """Collective: return this rank's part, along the first axis, of the value combined over all ranks."""
    return collectives.reducescatter(tf.convert_to_tensor(value), op=op, name=name)


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
        distributed: Any = collectives.DistributedOptimizer(model.optimizer, compression=compression)
        if distributed is not model.optimizer:  # under mixed_float16, of a model compiled without a loss scale
            model.optimizer = distributed
    return model
