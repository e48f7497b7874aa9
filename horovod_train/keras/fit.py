"""What a callback finds out about the `model.fit` that runs it, and what it changes there: where an epoch ends, XLA."""

from __future__ import annotations

import inspect
import logging
import traceback
import warnings
from contextlib import ExitStack
from typing import Any

import horovod.tensorflow as hvd
import keras

log = logging.getLogger(__name__)


def callbacks_of_fit() -> list[keras.callbacks.Callback]:
    """Return the list of callbacks that `model.fit` runs, itself; only for a callback's on_train_begin.

    Keras does not tell a callback of the others, so this looks for its caller, a CallbackList. Empty if there is none.
    """
    callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(inspect.currentframe()))
    return next((each.callbacks for each in callers if isinstance(each, keras.callbacks.CallbackList)), [])


def steps_of_epoch(callback: keras.callbacks.Callback) -> int | None:
    """Return how many batches Keras plans for an epoch; None if it does not know, or in a loop of the user's own."""
    return (callback.params or {}).get("steps")


def optimizer_of(model: keras.Model) -> Any:
    """Return the optimizer that `compile` was given; None for a model that was not compiled."""
    return getattr(model, "optimizer", None)


def batches_of_epoch(steps: int | None, callbacks: list[keras.callbacks.Callback]) -> int | None:
    """Return how many batches this epoch has. steps: as Keras plans, None if it does not know.

    Fewer in the first epoch of a `fit` that resumes inside it; see elastic.UpdateBatchStateCallback.
    """
    return None if steps is None else min([max(1, steps - batches_before(callbacks)), *early_ends(callbacks)])


def batches_before(callbacks: list[keras.callbacks.Callback]) -> int:
    """Return how many batches of this epoch an earlier `fit` has done."""
    return sum(getattr(callback, "batches_before", 0) for callback in callbacks)


def early_ends(callbacks: list[keras.callbacks.Callback]) -> list[int]:
    """Return the number of batches after which all ranks end this epoch, in a list; empty if as `fit` planned."""
    return [callback.batches for callback in callbacks if isinstance(callback, EndEpoch) and callback.batches]


class EndEpoch(keras.callbacks.Callback):
    """Ends an epoch after so many batches, as if its data ended there; the callback that makes it sets `batches`.

    It puts itself at the end of the list, so that all callbacks have seen the last batch. Not `model.stop_training`,
    after which Keras cannot begin another epoch of a PyDataset. At the end of training it gives the list back as it
    was: a CallbackList of the user's may be given to another `fit`.
    """

    batches: int | None = None
    """Of this epoch; None: all."""

    def __init__(self, callbacks: list[keras.callbacks.Callback]) -> None:
        super().__init__()
        self._callbacks, self._given = callbacks, list(callbacks)
        callbacks.append(self)
        self._filters = ExitStack()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.batches is not None and batch + 1 >= self.batches:
            self._filters.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Your input ran out of data")
            raise StopIteration  # Keras takes it for the end of the data

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._filters.close()
        self.batches = None

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Make the list what it was when this callback was made."""
        self._callbacks[:] = self._given


def switch_off_xla(model: keras.Model, root_rank: int = 0) -> None:
    """Let `fit` train without XLA, for which `compile` may ask by default; for on_train_begin. root_rank reports it."""
    if model.jit_compile:
        model.jit_compile = False
        model.make_train_function(force=True)
        if hvd.rank() == root_rank:
            log.warning("jit_compile: XLA cannot compile the exchange between ranks; model.fit trains without XLA.")
