"""Elastic `model.fit`: the state of a compiled model, and callbacks that keep in it how far `fit` is, and commit it."""

from __future__ import annotations

import logging
from typing import Any

import horovod.tensorflow as hvd
import keras
from horovod.common.elastic import State

from horovod_train.errors import UserError
from horovod_train.keras.backup import check_not_elastic
from horovod_train.keras.fit import batches_of_epoch, callbacks_of_fit, steps_of_epoch, switch_off_xla
from horovod_train.keras.learning_rate import LearningRateScheduleCallback
from horovod_train.tensorflow.elastic import TensorFlowKerasState, run

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]

_CUT_SHORT = "this epoch, not the training"
"""A value of `model.stop_training`: true, but not the True of a callback that ends the training.

EndEpoch would not do: for data without a length Keras would keep the batches of this short epoch as the length.
"""
_SCHEDULES = (LearningRateScheduleCallback, keras.callbacks.LearningRateScheduler)

log = logging.getLogger(__name__)


class KerasState(TensorFlowKerasState):
    """TensorFlowKerasState, by the name that it has in Horovod's Keras modules."""


class _Progress(keras.callbacks.Callback):
    """Keeps the progress of `fit` in an attribute of the state. Its methods may be called twice for one event."""

    attribute: str

    def __init__(self, state: State) -> None:
        super().__init__()
        if not hasattr(state, self.attribute):
            kind = type(state).__name__
            raise UserError(f"{type(self).__name__}: give the state {self.attribute}: {kind}(…, {self.attribute}=0).")
        self.state = state


class UpdateBatchStateCallback(_Progress):
    """Keep in `state.batch` how many batches of the epoch are done; 0 between epochs.

    The first epoch of a `fit` that begins with some done is shorter by as many, if the number of batches is known; it
    has at least one. Batches are counted, not records: give `fit` the same steps_per_epoch at any number of ranks.
    """

    attribute = "batch"
    batches_before = 0
    """How many batches of the present epoch an earlier `fit` has done."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.batches_before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = self.batches_before + batch + 1
        steps = steps_of_epoch(self)
        is_last = self.batches_before and steps is not None and self.state.batch >= steps
        if is_last and not self.model.stop_training:
            self.model.stop_training = _CUT_SHORT

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.batches_before = self.state.batch = 0
        if self.model.stop_training is _CUT_SHORT:
            self.model.stop_training = False


class UpdateEpochStateCallback(_Progress):
    """Keep in `state.epoch` how many epochs are done, over all calls of `fit`.

    Callbacks that set the rate by the epoch need fit(epochs=..., initial_epoch=state.epoch): with epochs=... -
    state.epoch `fit` counts from 0 again after each change of ranks, and rank 0 warns that they begin again.
    """

    attribute = "epoch"

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._epochs_before, self._finished_epochs = self.state.epoch, set[int]()
        self._schedules = [callback for callback in callbacks_of_fit() if isinstance(callback, _SCHEDULES)]

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        is_first = not self._finished_epochs
        if is_first and epoch < self._epochs_before and self._schedules and hvd.rank() == 0:
            log.warning(
                f"model.fit: {type(self._schedules[0]).__name__} begins again at epoch {epoch + 1}, though state.epoch "
                f"says that {self._epochs_before} are done. Give fit(epochs=..., initial_epoch=state.epoch), epochs "
                "over all calls of fit."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._finished_epochs.add(epoch)  # numbered from the initial_epoch of this fit
        self.state.epoch = self._epochs_before + len(self._finished_epochs)


class CommitStateCallback(keras.callbacks.Callback):
    """Commit the state after every so many batches of an epoch, and after each epoch.

    What the Update callbacks of the same `fit` keep is committed with it, wherever they stand in the list; callbacks of
    your own that change the state stand before this one. XLA, which cannot compile the exchange, is switched off.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise UserError(
                f"CommitStateCallback: batches_per_commit must be at least 1; received {batches_per_commit}."
            )
        self.state, self.batches_per_commit = state, batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._callbacks = callbacks_of_fit()
        check_not_elastic(self._callbacks)
        switch_off_xla(self.model)
        self._progress = [callback for callback in self._callbacks if isinstance(callback, _Progress)]
        self._committed_batches = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        for callback in self._progress:
            callback.on_train_batch_end(batch, logs)
        batches_done, total_batches = batch + 1, batches_of_epoch(steps_of_epoch(self), self._callbacks)
        # Not after the last batch: to begin again there, `fit` would have to run an epoch of no batch.
        is_last = total_batches is not None and batches_done >= total_batches
        if batches_done - self._committed_batches >= self.batches_per_commit and not is_last:
            self._committed_batches = batches_done
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        for callback in self._progress:
            callback.on_epoch_end(epoch, logs)
        self._committed_batches = 0
        self.state.commit()
