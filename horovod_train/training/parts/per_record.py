"""Calls a loss so that it gives one value for each record, and refuses losses that cannot.

Keras marks what does not count in a loss by masks: of outputs, from `mask_zero` and Masking, and of the values of a
loss, from `ignore_class`. Does not weigh records; see losses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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


class RecordLosses(NamedTuple):
    """The losses of a batch, unweighted."""

    values: tf.Tensor
    """float32 [batch]; with a mask [batch, ...], the loss of each position."""
    mask: tf.Tensor | None
    """bool, of the shape of `values`: which of them count. None: all."""


def mask_of(value: Any) -> tf.Tensor | None:
    """Return the mask that Keras keeps with a tensor; None if it has none, as structures of tensors."""
    return getattr(value, _MASK, None)


def per_record(function: Callable[[Any, Any], Any], targets: Any, outputs: Any, name: str) -> RecordLosses:
    """Return the losses [batch, ...] of a function: averaged over all axes but the first, unless there is a mask.

    Raises ValueError for a loss that does not give one value a record, that compares each record with all others, or
    that takes logits after a softmax; and for a mask of another shape than the values.
    """
    if getattr(function, "from_logits", False):
        refuse_logits(outputs, name)
    values = _call(function, targets, outputs)
    mask = _mask(values, outputs, name)
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
    if mask is not None:
        return RecordLosses(values, mask)
    return RecordLosses(tf.reduce_mean(tf.reshape(values, [tf.shape(values)[0], -1]), axis=1), None)


def _call(function: Callable[[Any, Any], Any], targets: Any, outputs: Any) -> Any:
    """Return what a loss gives before its reduction, with its mask."""
    if not isinstance(function, keras.losses.Loss) or type(function).__call__ is not keras.losses.Loss.__call__:
        return function(targets, outputs)
    # Keras' __call__ would return the values without their mask.
    convert = functools.partial(keras.ops.convert_to_tensor, dtype=function.dtype)
    return function.call(*(keras.tree.map_structure(convert, tensors) for tensors in (targets, outputs)))


def _mask(values: Any, outputs: Any, name: str) -> tf.Tensor | None:
    """Return which values count: those that the masks of outputs and values keep, as in Keras' losses."""
    if keras.tree.is_nested(outputs) and any(mask_of(output) is not None for output in keras.tree.flatten(outputs)):
        raise ValueError(f"loss {name}: takes several outputs with Keras masks; use per_output, with a loss for each")
    masks = [tf.cast(mask, tf.bool) for mask in map(mask_of, (outputs, values)) if mask is not None]
    for mask in masks:
        if not mask.shape.is_compatible_with(values.shape):
            raise ValueError(
                f"loss {name}: gives values of shape {values.shape}, but the mask of its outputs has {mask.shape}; it "
                "must give a value for each position"
            )
    return functools.reduce(tf.logical_and, masks) if masks else None


def _describe(shape: tf.TensorShape) -> str:
    return f"{shape}" if len(shape) else "a single number"


def _is_square(shape: tf.TensorShape) -> bool:
    return len(shape) == 2 and shape[0] == shape[1] != 1
