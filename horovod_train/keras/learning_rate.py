"""Horovod's callbacks that set the learning rate of `model.fit`: a schedule by epochs, and the warmup."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras

from horovod_train.errors import UserError
from horovod_train.keras.fit import batches_before, callbacks_of_fit, early_ends, optimizer_of, steps_of_epoch
from horovod_train.optim.lars import LARS

_VELOCITY_SLOTS = {keras.optimizers.SGD: "momentum", keras.optimizers.RMSprop: "momentum", LARS: "velocity"}
"""Names of the slots in which optimizers accumulate updates that contain the learning rate."""

log = logging.getLogger(__name__)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to initial_lr * multiplier(epoch), in epochs start_epoch to end_epoch - 1.

    multiplier: a function of the epoch, or a number m for m ** (epoch - start_epoch). staircase: change at the start of
    an epoch, else at each batch, with epoch + batch / steps_per_epoch. end_epoch: None for no end. steps_per_epoch:
    default what `fit` says, or the fewest that a rank has. Epochs are those that `fit` counts, from initial_epoch on:
    a script that calls it again, such as an elastic one, gives it initial_epoch=state.epoch.

    momentum_correction: when the rate changes, multiply an optimizer's momentum by new rate / old rate for that step
    (Goyal et al. 2017, arXiv:1706.02677, section 3). Done on the accumulated updates, which is the same number: Keras 3
    compiles the momentum itself into the step. For SGD, RMSprop and LARS with momentum, whose accumulated updates
    contain the rate; those of other optimizers do not, and stay.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise UserError(f"{type(self).__name__}: initial_lr is needed; received None.")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self._power_to_tell = None if callable(multiplier) or multiplier == 1 else multiplier
        self._epoch, self._has_fixed_steps = 0, bool(steps_per_epoch)
        self._callbacks: list[keras.callbacks.Callback] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._callbacks = callbacks_of_fit()
        optimizer = optimizer_of(self.model)
        try:
            optimizer.learning_rate = float(optimizer.learning_rate)
        except (AttributeError, TypeError):  # a LearningRateSchedule; a MultiOptimizer; a model that is not compiled
            kind = "no optimizer" if optimizer is None else f"{type(optimizer).__name__}, whose rate cannot be set"
            raise UserError(
                f"{type(self).__name__}: it sets the rate of the optimizer that model.compile was given; received "
                f"{kind}. Give compile one whose learning_rate is a number, or leave this callback out."
            ) from None
        if not self.staircase and not self._has_fixed_steps and not steps_of_epoch(self):
            raise UserError(f"{type(self).__name__}: give steps_per_epoch; model.fit does not know it.")
        self._tell_of_power()

    def _tell_of_power(self) -> None:
        """Say on rank 0, once, which rates a number gives: some scripts mean a constant factor by it."""
        number, self._power_to_tell = self._power_to_tell, None
        first, last = self.start_epoch, math.inf if self.end_epoch is None else self.end_epoch
        epochs = [epoch for epoch in range(first, first + 3) if epoch < last]
        if number is None or len(epochs) < 2 or hvd.rank() != 0:
            return
        rates = ", ".join(f"{self.initial_lr * self.multiplier(epoch):g} in epoch {epoch}" for epoch in epochs)
        log.warning(
            f"{type(self).__name__}: multiplier={number:g} is raised to the power epoch - {first}: rate {rates}. For a "
            f"constant factor: multiplier=lambda epoch: {number:g}."
        )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self.staircase:
            done = batches_before(self._callbacks)
            if not self._has_fixed_steps and (batch == 0 or not self.steps_per_epoch):
                # Where ranks have different numbers of batches, the same rate on all of them.
                steps = steps_of_epoch(self)
                assert steps
                self.steps_per_epoch = min([steps, *(done + batches for batches in early_ends(self._callbacks))])
            assert self.steps_per_epoch
            self._set_rate(self._epoch + (done + batch) / self.steps_per_epoch)
        elif batch == 0:
            self._set_rate(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
        slot = next((slot for kind, slot in _VELOCITY_SLOTS.items() if isinstance(inner, kind)), None)
        if self.momentum_correction and old and slot:
            for variable in optimizer.variables:
                if variable.path.endswith(f"_{slot}"):
                    variable.assign(variable * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from initial_lr / size to initial_lr over warmup_epochs, a little at each batch.

    At batch b of epoch e: initial_lr / size * ((size - 1) * (e + (b + 1) / steps_per_epoch) / warmup_epochs + 1), from
    Goyal et al. 2017 (arXiv:1706.02677), with Horovod's one batch ahead; with steps_per_execution the rate of the last
    batch of a compiled call is that of all. verbose: 1 prints the end of it, on rank 0.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch
            # At the last batch of the compiled call that begins here: nothing sets the rate after the last one.
            ahead = self.model.steps_per_execution / self.steps_per_epoch
            position = min(epoch + ahead, self._epoch + 1)
            return (position * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and hvd.rank() == 0 and epoch + 1 == self.end_epoch:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")
