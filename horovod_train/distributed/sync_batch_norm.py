"""BatchNormalization over the batch of all ranks: computes what one process would compute on all their records.

Keras' own `synchronized=True` works only with tf.distribute and does nothing here. Does not change evaluation and
inference.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

from horovod_train.distributed.allreduce import exchange_name, in_turn, sum_over_ranks
from horovod_train.distributed.layer_contents import layers_inside
from horovod_train.errors import UserError
from horovod_train.keras_seams import take_class

_layer_numbers = itertools.count()
"""Layers are numbered over all models, in the order of their first call in training: the same order on all ranks."""
_rows: ContextVar[tuple[tf.Tensor | None, tf.Tensor | None]] = ContextVar("rows", default=(None, None))
"""weights and share of rows_that_count."""


class _Synchronised:
    """Marks the subclasses that synchronise_batch_norm makes."""

    moving_mean: Any
    moving_variance: Any


def synchronise_batch_norm(
    model: keras.Model, *, deterministic: bool = False, owner: str = "hvd.synchronise_batch_norm"
) -> keras.Model:
    """Make the BatchNormalization layers of a built model normalise over the batch of all ranks in training.

    Returns the same model with the same weights. The class of each such layer becomes a subclass with the same name, so
    the model is saved as a plain one and loads without Horovod. The moving statistics are equal on all ranks. Every
    rank must call the model in training equally often, and without jit_compile: XLA cannot compile the exchange, and
    tracing it raises UserError. deterministic: as in GradientExchange. owner: what messages call it.

    Raises UserError if there is no such layer, or one that cannot be synchronised.
    """
    layers = [layer for layer in layers_inside(model) if isinstance(layer, keras.layers.BatchNormalization)]
    if not layers:
        raise UserError(f"{owner}: the model has no BatchNormalization layer. Leave it out.")
    for layer in layers:
        _synchronise(layer, deterministic=deterministic, owner=owner)
    return model


def synchronised_statistics(model: keras.Model) -> list[Any]:
    """Return the moving statistics of the synchronised layers: equal on all ranks after each call in training."""
    layers = [layer for layer in layers_inside(model) if isinstance(layer, _Synchronised)]
    return [average for layer in layers for average in (layer.moving_mean, layer.moving_variance)]


@contextmanager
def rows_that_count(weights: tf.Tensor, share: tf.Tensor | None = None) -> Iterator[None]:
    """Let only rows of a batch with weight 1 enter synchronised statistics, inside this block.

    weights: float32 [rows], 0 or 1. Rows with weight 0 fill up a rank's last batch; they are normalised like the
    others. share: what this rank's gradients are multiplied by before they are averaged, float32 scalar; None: 1.
    """
    token = _rows.set((weights, share))
    try:
        yield
    finally:
        _rows.reset(token)


def _synchronise(layer: keras.layers.BatchNormalization, *, deterministic: bool, owner: str) -> None:
    base = type(layer)
    if issubclass(base, _Synchronised):
        return
    renorm = getattr(layer, "renorm", False)  # Keras 3.12, the last for Python 3.10, has no renorm
    if base.call is not keras.layers.BatchNormalization.call or renorm:
        reason = "renorm=True" if renorm else f"its own call() ({base.__name__})"
        raise UserError(f"{owner}: cannot synchronise layer {layer.path}: it has {reason}.")

    number_of_layer = functools.cache(lambda: next(_layer_numbers))

    class Synchronised(base, _Synchronised):  # type: ignore[misc, valid-type]
        def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
            if not (training and self.trainable):
                return super().call(inputs, training=training, mask=mask)
            x = tf.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
            axis = self.axis % len(x.shape)
            normalised, mean, variance, positions = _normalise(
                x,
                _position_weights(x, axis, mask, layer.path),
                axis,
                self.epsilon,
                f"sync_batch_norm.{number_of_layer()}",
                deterministic=deterministic,
            )
            for average, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
                decayed = tf.cast(average, x.dtype) * self.momentum
                moved = decayed + tf.reshape(value, average.shape) * (1.0 - self.momentum)
                # Statistics of nothing are zeros: of a pass for which no rank has a record left.
                average.assign(tf.where(positions > 0, moved, tf.cast(average, x.dtype)))
            if self.scale:
                normalised *= tf.reshape(tf.cast(self.gamma, x.dtype), mean.shape)
            if self.center:
                normalised += tf.reshape(tf.cast(self.beta, x.dtype), mean.shape)
            return tf.cast(normalised, self.compute_dtype)

    take_class(layer, Synchronised)


def _position_weights(x: tf.Tensor, axis: int, mask: Any, path: str) -> tf.Tensor:
    """Return 1 for the positions of x that enter the statistics and 0 for the others; broadcasts against x."""
    weights = tf.ones([1] * len(x.shape), x.dtype)
    rows, _ = _rows.get()
    if rows is not None:
        if axis == 0 or x.shape[0] != rows.shape[0]:
            raise UserError(
                f"train.sync_batch_norm: layer {path} must see the {rows.shape[0]} records of the batch along its "
                f"first axis; it sees {x.shape} and normalises axis {axis}."
            )
        weights *= tf.reshape(tf.cast(rows, x.dtype), [-1] + [1] * (len(x.shape) - 1))
    if mask is not None:
        weights *= tf.expand_dims(tf.cast(mask, x.dtype), axis)
    return weights


def _normalise(
    x: tf.Tensor, weights: tf.Tensor, axis: int, epsilon: float, name: str, *, deterministic: bool
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return (x − mean) / √(variance + epsilon), mean and variance (biased) over all ranks' positions with weight 1.

    And the number of those positions. x: float [...]; weights broadcast against it; the statistics are
    [1, …, channels, …, 1]. There is one exchange forward and one backward (Ioffe & Szegedy 2015, section 3, with sums
    over all ranks). Sums of squares cancel, so the forward exchange is in float64.
    """
    axes = [other for other in range(len(x.shape)) if other != axis]
    (_, share), turn, name = _rows.get(), name, exchange_name(name)

    def sum_over_axes(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(values, axes, keepdims=True)

    @tf.custom_gradient
    def normalise(x: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor], Callable[..., tf.Tensor]]:
        channels = x.shape[axis]
        positions_per_weight = tf.size(x) // (channels * tf.size(weights))  # positions that share a weight
        local_count = tf.reduce_sum(weights) * tf.cast(positions_per_weight, x.dtype)
        local_mean = tf.math.divide_no_nan(sum_over_axes(weights * x), local_count)
        local_squares = tf.cast(sum_over_axes(weights * tf.square(x - local_mean)), tf.float64)
        wide_count, wide_mean = tf.cast(local_count, tf.float64), tf.cast(local_mean, tf.float64)
        sums = [wide_count, wide_count * wide_mean, local_squares + wide_count * wide_mean**2]
        packed = tf.concat([tf.reshape(values, [-1]) for values in sums], axis=0)
        packed = sum_over_ranks(packed, f"{name}.forward", deterministic=deterministic)
        count, value_sums, square_sums = tf.split(packed, [1, channels, channels])
        positions = tf.cast(count[0], x.dtype)
        count = tf.maximum(count[0], 1.0)  # a mask may exclude every position
        wide_mean = value_sums / count
        wide_variance = tf.maximum(square_sums / count - wide_mean**2, 0.0)
        mean, variance = (tf.reshape(tf.cast(wide, x.dtype), local_mean.shape) for wide in (wide_mean, wide_variance))
        count = tf.cast(count, x.dtype)
        inverse = tf.math.rsqrt(variance + epsilon)
        normalised = (x - mean) * inverse

        def backward(upstream: tf.Tensor, *_: Any) -> tf.Tensor:
            """Ignore gradients of the statistics, because they only feed moving averages."""
            sums = tf.stack([sum_over_axes(upstream), sum_over_axes(upstream * normalised)])
            if share is not None:
                sums = tf.math.multiply_no_nan(sums, tf.cast(share, sums.dtype))
            # Forward exchanges are in turn already: each call assigns what they give to the moving statistics.
            sums = in_turn(
                turn, sums, lambda sums: sum_over_ranks(sums, f"{name}.backward", deterministic=deterministic)
            )
            if share is not None:  # by which all gradients of this rank are multiplied later
                sums = tf.math.divide_no_nan(sums, tf.cast(share, sums.dtype))
            mean_sums, variance_sums = tf.unstack(sums)
            return inverse * (upstream - weights / count * (mean_sums + normalised * variance_sums))

        return (normalised, mean, variance, positions), backward

    return normalise(x)
