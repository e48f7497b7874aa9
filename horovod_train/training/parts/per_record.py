"""Calls a loss so that it gives one value for each record, and refuses losses that cannot.

Does not weigh records; see losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from horovod_train.errors import UserError
from horovod_train.training.parts.logits import refuse_logits

_MASK = "_keras_mask"
"""The attribute of a tensor with its mask, as in Keras' guide to masking."""


def check_is_per_record(loss: Any, name: str, where: str) -> None:
    """Raise UserError for a loss of Keras that compares records, or ignores a part of them. where: the config key."""
    if isinstance(loss, keras.losses.Circle) or loss is keras.losses.circle:
        raise UserError(
            f"{where}: {name} compares the records of a whole batch, which is on several ranks. It needs a model "
            "with a train_step that gathers them, see docs/models.md."
        )
    if getattr(loss, "ignore_class", None) is not None:
        raise UserError(
            f"{where}: {name} with ignore_class takes the mean over what is not ignored, which the trainer does not. "
            f"Where a record has one class, write loss.class_weight: {{{loss.ignore_class}: 0}} instead."
        )


def per_record(function: Callable[[Any, Any], Any], targets: Any, outputs: Any, name: str) -> tf.Tensor:
    """Return the losses [batch, ...] of a function averaged over all axes but the first, float32 [batch].

    Raises ValueError for a loss that does not give one value a record, that compares each record with all others, or
    that takes logits after a softmax; and for masks, which `fit` has a loss follow.
    """
    if getattr(function, "from_logits", False):
        refuse_logits(outputs, name)
    values = function(targets, outputs)
    if any(getattr(tensor, _MASK, None) is not None for tensor in keras.tree.flatten((outputs, values))):
        raise ValueError(
            f"loss {name}: outputs or losses have a Keras mask, which the trainer does not follow; leave out mask_zero "
            "and Masking, or end with a layer that drops masks, such as Reshape, and weigh positions in a loss of yours"
        )
    values = tf.cast(values, tf.float32)
    rows = keras.tree.flatten(outputs)[0].shape[:1]
    if not values.shape.rank or not values.shape[:1].is_compatible_with(rows):
        raise ValueError(f"loss {name} must give one value a record, [batch]; it gave {_describe(values.shape)}")
    shapes = [list(getattr(tensor, "shape", ())) for tensor in (targets, outputs)]
    if sorted(map(len, shapes)) == [1, 2] and {1} == {*shapes[0][1:], *shapes[1][1:]} and _is_square(values.shape):
        raise ValueError(
            f"loss {name} compares each record with all others: it gave {values.shape} for targets {shapes[0]} and "
            f"outputs {shapes[1]}; reshape one of them to the shape of the other"
        )
    return tf.reduce_mean(tf.reshape(values, [tf.shape(values)[0], -1]), axis=1)


def _describe(shape: tf.TensorShape) -> str:
    return f"{shape}" if len(shape) else "a single number"


def _is_square(shape: tf.TensorShape) -> bool:
    return len(shape) == 2 and shape[0] == shape[1] != 1
