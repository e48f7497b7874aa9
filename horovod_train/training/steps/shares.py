"""How much of a step is this rank's: what makes the mean over ranks equal to the loss of all their records together.

Every gradient is multiplied by share = N · rows here / rows of all N ranks, and then averaged. That is the gradient of
a mean over rows. A loss that is divided by something else (by what a mask keeps, by Σ weight, by nothing) is multiplied
by N · divisor here / divisor of all / share first, which its gradient then has too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from horovod_train.distributed.allreduce import exchange_name
from horovod_train.distributed.group import WorkerGroup
from horovod_train.keras_seams import mask_of, take_class
from horovod_train.training.losses import refuse_logits


class Shares:
    """The share of this rank in the pass that is being traced, and what its losses are divided by.

    share: float32 scalar; None: 1, because all ranks have equally many rows.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.share: tf.Tensor | None = None
        self.are_equal = False
        """Whether all shares count as 1, for a test that shows what they are for."""
        self._in_step = False
        self._noted: list[tf.Tensor] | None = None
        self._totals: list[tf.Tensor] | None = None
        self._values: dict[int, Any] = {}
        """What the losses gave before their reduction, by loss."""

    @property
    def totals(self) -> list[tf.Tensor] | None:
        """The divisors of all ranks that are left for the losses to come; None: they are not known."""
        return self._totals

    @contextmanager
    def of_pass(self, share: tf.Tensor | None, totals: Sequence[tf.Tensor] | None = None) -> Iterator[None]:
        """Inside the block, in a compiled step: the share of the pass, and the divisors of all ranks if they are known.

        totals: in the order in which the losses are called; None: the losses exchange theirs.
        """
        before = self.share, self._in_step, self._totals
        self.share = None if self.are_equal else share
        self._in_step, self._totals = True, None if totals is None else list(totals)
        try:
            yield
        finally:
            self.share, self._in_step, self._totals = before

    @contextmanager
    def noting_divisors(self) -> Iterator[list[tf.Tensor]]:
        """Inside the block: note what each loss is divided by here, float32 scalars; the losses give zeros."""
        self._noted, self._in_step = [], True
        try:
            yield self._noted
        finally:
            self._noted, self._in_step = None, False

    def scaled(self, gradient: Any) -> Any:
        """Return a gradient times the share; 0 if that is 0, whatever the rows are that were computed instead."""
        if self.share is None or gradient is None:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._times_share(gradient.values), gradient.indices, gradient.dense_shape)
        return self._times_share(gradient)

    def _times_share(self, values: tf.Tensor) -> tf.Tensor:
        assert self.share is not None
        return tf.math.multiply_no_nan(values, tf.cast(self.share, values.dtype))

    def take_on(self, loss: keras.losses.Loss) -> Shares:
        """Make a loss that of all ranks inside a step; elsewhere, and saved, it is what it was.

        Returns the shares that it follows: these, or those by which it was taken on before.
        """
        if not isinstance(loss, _OfAllRanks):
            take_class(loss, _of_all_ranks(type(loss)))
            loss.__dict__["_shares"] = self
        shares: Shares = loss.__dict__["_shares"]
        return shares

    def note_values(self, loss: keras.losses.Loss, values: Any) -> None:
        self._values[id(loss)] = values

    def of_all_ranks(self, loss: keras.losses.Loss, value: Any, outputs: Any, weights: Any) -> Any:
        """Return the value of a loss times N · divisor here / divisor of all / share, if it is not divided by rows."""
        values = self._values.pop(id(loss), None)
        if not self._in_step or values is None or loss.reduction in (None, "none") or not len(values.shape):
            return value
        if self.group.size == 1 and self.share is None and self._noted is None:
            return value  # bit for bit what Keras computes
        share = tf.constant(1.0) if self.share is None else self.share
        if loss.reduction == "sum":
            factor = tf.math.divide_no_nan(float(self.group.size), share)
            return value if self._noted is not None else value * tf.cast(factor, value.dtype)
        divisor = _divisor(loss, values, outputs, weights)
        if divisor is None:
            return value
        divisor = tf.cast(divisor, tf.float32)
        if self._noted is not None:
            self._noted.append(divisor)
            return tf.zeros_like(value)
        divisor *= tf.cast(share > 0, tf.float32)
        if self._totals is None:
            total = self.group.sum_in_step(divisor, exchange_name("loss.divisor"))
        else:
            total = self._totals.pop(0)
        factor = tf.math.divide_no_nan(self.group.size * divisor, total * share)
        return value * tf.cast(factor, value.dtype)


class _OfAllRanks:
    """Marks the subclasses that take_on makes."""


def _of_all_ranks(base: type) -> type:
    class OfAllRanks(base, _OfAllRanks):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            if getattr(self, "from_logits", False):
                refuse_logits(y_pred, self.name)
            values = super().call(y_true, y_pred)
            _check_is_of_rows(self.name, values, y_true, y_pred)
            self._shares.note_values(self, values)
            return values

        def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            value = super().__call__(y_true, y_pred, sample_weight=sample_weight)
            return self._shares.of_all_ranks(self, value, y_pred, sample_weight)

    return OfAllRanks


def _divisor(loss: keras.losses.Loss, values: Any, outputs: Any, weights: Any) -> tf.Tensor | None:
    """Return what Keras divides the sum of the values by, as in keras.losses.Loss; None: by rows alone."""
    # Masks count in the dtype of the loss, as there.
    nested = keras.tree.is_nested(outputs)
    masks = [mask for mask in (None if nested else mask_of(outputs), mask_of(values)) if mask is not None]
    mask = None
    for each in masks:
        each = tf.cast(each, tf.bool)
        mask = each if mask is None else tf.logical_and(mask, each)
    counted = None if mask is None else tf.cast(mask, tf.float32)
    if loss.reduction != "mean_with_sample_weight" or weights is None:
        return None if counted is None else tf.reduce_sum(counted)
    weights = tf.cast(weights, tf.float32)
    if counted is None:
        return tf.reduce_sum(weights)
    if len(weights.shape) == len(counted.shape) + 1:
        weights = tf.squeeze(weights, -1)
    elif len(counted.shape) == len(weights.shape) + 1 and counted.shape[-1] == 1:
        weights = weights[..., tf.newaxis]
    return tf.reduce_sum(weights * counted)


def _check_is_of_rows(name: str, values: Any, targets: Any, outputs: Any) -> None:
    """Raise ValueError for a loss that compares each record with all others, because of a missing axis."""
    shapes = [list(getattr(tensor, "shape", ())) for tensor in (targets, outputs)]
    is_square = len(values.shape) == 2 and values.shape[0] == values.shape[1] != 1
    if is_square and sorted(map(len, shapes)) == [1, 2] and {1} == {*shapes[0][1:], *shapes[1][1:]}:
        raise ValueError(
            f"loss {name} compares each record with all others: it gave {values.shape} for targets {shapes[0]} and "
            f"outputs {shapes[1]}; reshape one of them to the shape of the other"
        )
