"""The other callbacks of a `model.fit`: file writers run on one rank, those that decide see equal values."""

from __future__ import annotations

import inspect
import logging
import warnings
from contextlib import ExitStack
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from horovod_train.errors import UserError
from horovod_train.keras.callbacks.averages import MetricAverageCallback
from horovod_train.tensorflow import watch

FILE_WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
)
DECIDERS = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)

log = logging.getLogger(__name__)


def callbacks_of_fit() -> list[keras.callbacks.Callback]:
    """Return the list of callbacks that `model.fit` runs, itself; only for a callback's on_train_begin.

    Keras does not tell a callback of the others, so this looks for its caller, a CallbackList. Empty if there is none.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList):
            return caller.callbacks
        frame = frame.f_back
    return []


class EndEpoch(keras.callbacks.Callback):
    """Ends an epoch after so many batches, as if its data ended there; the callback that adds it sets `batches`.

    It stands at the end of the list, so that all callbacks have seen the last batch. Not `model.stop_training`, after
    which Keras cannot begin another epoch of a PyDataset.
    """

    batches: int | None = None
    """Of this epoch; None: all."""

    def __init__(self) -> None:
        super().__init__()
        self._filters = ExitStack()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.batches is not None and batch + 1 >= self.batches:
            self._filters.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Your input ran out of data")
            raise StopIteration  # Keras takes it for the end of the data

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._filters.close()
        self.batches = None


def batches_of_epoch(steps: int | None, callbacks: list[keras.callbacks.Callback]) -> int | None:
    """Return how many batches this epoch has. steps: as Keras plans, None if it does not know.

    Fewer in the first epoch of a `fit` that resumes inside it; see elastic.UpdateBatchStateCallback.
    """
    batches_before = sum(getattr(callback, "batches_before", 0) for callback in callbacks)
    return None if steps is None else min([max(1, steps - batches_before), *early_ends(callbacks)])


def early_ends(callbacks: list[keras.callbacks.Callback]) -> list[int]:
    """Return the number of batches after which all ranks end this epoch, in a list; empty if as `fit` planned."""
    return [callback.batches for callback in callbacks if isinstance(callback, EndEpoch) and callback.batches]


def keep_to_root(callbacks: list[keras.callbacks.Callback], root_rank: int) -> None:
    """Replace callbacks that write files or show progress by one that does nothing, on all ranks except root_rank."""
    if hvd.rank() == root_rank:
        return
    names = []
    for index, callback in enumerate(callbacks):
        if isinstance(callback, FILE_WRITERS):
            callbacks[index] = keras.callbacks.Callback()  # in its place, because Keras may be going through the list
            if not isinstance(callback, keras.callbacks.ProgbarLogger):
                names.append(type(callback).__name__)
    if names and hvd.rank() == (1 if root_rank == 0 else 0):
        verb = "runs" if len(names) == 1 else "run"
        log.warning(
            f"{', '.join(names)} {verb} on rank {root_rank} only, so that no file is written by several ranks; "
            "hvd.init(files_on_root_only=False) lets all ranks write."
        )


class Needs(NamedTuple):
    """What the broadcasting callback does for others of the same `fit`, on all ranks alike."""

    averages: bool
    """Average the logs of an epoch, because callbacks would decide differently."""
    losses: bool
    """Compare after each batch whether losses are finite, because TerminateOnNaN would stop one rank first."""


def find_needs(
    callbacks: list[keras.callbacks.Callback], broadcaster: keras.callbacks.Callback, *, shares_backup: bool
) -> Needs:
    """Collective: return what `broadcaster` must do for the other callbacks.

    True on all ranks if on any: a script may give such a callback to one rank only. shares_backup: whether root's
    BackupAndRestore is for all ranks. Raises UserError on all ranks if on one of them a callback comes before
    `broadcaster` that needs it.
    """
    deciding = [callback for callback in callbacks if isinstance(callback, DECIDERS)]
    earlier = callbacks[: callbacks.index(deciding[0])] if deciding else []
    needs_averages = bool(deciding) and not any(isinstance(callback, MetricAverageCallback) for callback in earlier)
    dependent = (*(DECIDERS if needs_averages else ()), *((keras.callbacks.BackupAndRestore,) if shares_backup else ()))
    before = callbacks[: callbacks.index(broadcaster)] if broadcaster in callbacks else []
    too_early = [type(callback).__name__ for callback in before if isinstance(callback, dependent)]
    needs_losses = any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in callbacks)
    flags = tf.constant([float(needs_averages), float(needs_losses), float(bool(too_early))])
    with watch.exchanging("the start of model.fit"):
        any_averages, any_losses, any_early = hvd.allreduce(flags, op=hvd.Sum, name="fit.needs").numpy()
    if any_early:
        raise UserError(
            f"model.fit: {', '.join(too_early) or 'EarlyStopping'} must come after {type(broadcaster).__name__} in "
            "callbacks, so that all ranks decide on the same means and restore what root has saved."
        )
    return Needs(bool(any_averages), bool(any_losses))


def take_out(callbacks: list[keras.callbacks.Callback], kind: type) -> list[Any]:
    """Replace the callbacks of a kind by one that does nothing; return them."""
    taken = []
    for index, callback in enumerate(callbacks):
        if isinstance(callback, kind):
            callbacks[index] = keras.callbacks.Callback()  # in its place, because Keras may be going through the list
            taken.append(callback)
    return taken
