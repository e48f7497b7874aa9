"""Moving averages of the weights: keeps them, and puts them into the model. Does not know when; see hooks.evaluate.

Two kinds: those of `train.ema_decay`, and those that a Keras optimizer with `use_ema` keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from horovod_train.distributed.group import as_tf_variable
from horovod_train.errors import UserError
from horovod_train.keras_seams import take_class
from horovod_train.models.model_parallel import variable_beside
from horovod_train.training.sync import by_unique_name

SLOT = "average"
"""The name by which a Keras optimizer with use_ema asks for the variables of its averages."""


class Averages:
    """Moving averages of weights, which can take the place of the weights in the model.

    variables: the averages, by the paths of their weights.
    """

    are_of_optimizer = False
    """Whether a Keras optimizer updates them; such averages are evaluated only if a callback asks for it."""

    def __init__(self, averaged: Sequence[tuple[Any, tf.Variable]]) -> None:
        """averaged: weights, Keras' or TensorFlow's, each with its average."""
        self._weights = [as_tf_variable(weight) for weight, _ in averaged]
        self.variables = by_unique_name((weight.path, average) for weight, average in averaged)
        self._trained: list[tf.Tensor] = []

    def update(self, step: tf.Tensor) -> None:
        """In the compiled step, after an update. step: int64 scalar, updates so far."""

    def restart(self) -> None:
        """Set the averages to the weights, as at the start."""
        for weight, average in zip(self._weights, self.variables.values(), strict=True):
            average.assign(weight)

    def put_in(self) -> None:
        """Give the model the averages, unless it has them."""
        if not self._trained:
            self._trained = [tf.identity(weight) for weight in self._weights]
            for weight, average in zip(self._weights, self.variables.values(), strict=True):
                weight.assign(average)

    def put_back(self) -> None:
        """Give the model its own weights again, bit for bit, if it has the averages."""
        for weight, value in zip(self._weights, self._trained, strict=False):
            weight.assign(value)
        self._trained = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averages inside the block."""
        self.put_in()
        try:
            yield
        finally:
            self.put_back()


class MovingAverages(Averages):
    """Exponential moving averages of the trainable weights, used instead of the weights in evaluation.

    average ← d · average + (1 − d) · weight, d = min(decay, (1 + step) / (10 + step)): young averages follow quickly
    (num_updates of tf.train.ExponentialMovingAverage). decay None: no averages, all methods do nothing.
    """

    def __init__(self, model: keras.Model, decay: float | None) -> None:
        self.decay = decay
        weights = [] if decay is None else model.trainable_variables
        super().__init__([(weight, variable_beside(weight, as_tf_variable(weight))) for weight in weights])

    def update(self, step: tf.Tensor) -> None:
        if self.decay is None:
            return
        with tf.name_scope("moving_average"):
            updates = tf.cast(step, tf.float32)
            decay = tf.minimum(self.decay, (1 + updates) / (10 + updates))
            for weight, average in zip(self._weights, self.variables.values(), strict=True):
                average.assign_sub(tf.cast(1 - decay, average.dtype) * (average - weight))


class OptimizerAverages(Averages):
    """The averages that a Keras optimizer with `use_ema` keeps in slots and updates when it is applied."""

    are_of_optimizer = True


class AverageSlots:
    """Notes the averages of an optimizer when it makes its slots; none without `use_ema`."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Call it before the optimizer is built. Raises UserError if it has been."""
        self._pairs: list[tuple[Any, tf.Variable]] = []
        averaging = getattr(optimizer, "inner_optimizer", optimizer)
        self.are_kept = bool(averaging.use_ema)
        if self.are_kept and averaging.built:
            raise UserError("optimizer: keeps averages (use_ema) and is built already; leave out its build().")
        if self.are_kept:
            take_class(averaging, _noting_slots(type(averaging), self._pairs))

    def averages(self) -> OptimizerAverages | None:
        """Return the averages of a built optimizer; None without `use_ema`."""
        if not self.are_kept:
            return None
        # A later version of Keras may name them otherwise.
        assert self._pairs, f"the optimizer has made no slots by the name {SLOT}"
        return OptimizerAverages(self._pairs)


def _noting_slots(base: type, pairs: list[tuple[Any, tf.Variable]]) -> type:
    class NotingSlots(base):
        def add_optimizer_variables(self, trainable_variables: Sequence[Any], name: Any, *args: Any, **kw: Any) -> Any:
            slots = super().add_optimizer_variables(trainable_variables, name, *args, **kw)
            if name == SLOT:
                new = zip(trainable_variables, slots, strict=True)
                pairs.extend((weight, as_tf_variable(slot)) for weight, slot in new if slot is not None)
            return slots

    return NotingSlots
