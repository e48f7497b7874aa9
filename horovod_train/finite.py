"""Gradients and losses that are not finite any more: seeing it, telling the other ranks, remembering where it began."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf


class Failure(NamedTuple):
    """Where a rank's numbers stopped being finite for good."""

    step: tf.Variable
    """int64; 0 where they have not."""
    is_cause: tf.Variable
    """bool: by its own gradients, not by those of others."""
    loss: tf.Variable
    """float32."""


def present(gradients: Sequence[Any]) -> list[tf.Tensor]:
    """The values of those gradients that there are; of sparse ones, of the rows that they hold."""
    values = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in gradients]
    return [value for value in values if value is not None]


def are_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Whether none of them holds a NaN or an infinity; by their squares, which read each number once.

    A number past 1.8e19, whose square float32 cannot hold, counts as infinite.
    """
    squares = [tf.nn.l2_loss(tf.cast(values, tf.float32)) for values in present(gradients)]
    return tf.math.is_finite(tf.add_n(squares))


def spoilt_by(loss: tf.Tensor, own: Sequence[Any]) -> list[Any]:
    """The gradients; not finite where the loss is not, so that all ranks learn of it by the exchange that there is.

    loss: float32 scalar. Zero times the loss is added to the smallest gradient, which costs least.
    """
    spoilt = list(own)
    present = [index for index, gradient in enumerate(own) if gradient is not None]
    if present:
        least = min(present, key=lambda index: own[index].shape.num_elements() or math.inf)
        gradient = own[least]
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values + tf.cast(0.0 * loss, gradient.values.dtype)
            spoilt[least] = tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        else:
            spoilt[least] = gradient + tf.cast(0.0 * loss, gradient.dtype)
    return spoilt
