"""Keras callbacks as a user would keep them in a package of their own, named `user_callbacks:Class`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np

import horovod_train.keras as hvd
from horovod_train.distributed.launch import launcher

told: list[list[Any]] = []
"""What Recorder was told on this rank: method, number, and the figures that it got."""


class Recorder(keras.callbacks.Callback):
    """Notes what it is told, and counts epochs in a state that survives a resume."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def on_train_begin(self, logs: Any = None) -> None:
        told.append(["begin", self.params["epochs"], self.params["steps"]])

    def on_train_end(self, logs: Any = None) -> None:
        told.append(["end", self.epochs, dict(logs)])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        told.append(["epoch begins", epoch, dict(logs)])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1
        told.append(["epoch ends", epoch, dict(logs)])

    def on_test_end(self, logs: Any = None) -> None:
        told.append(["evaluated", None, dict(logs)])

    def get_state(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def set_state(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


class NotesWeights(keras.callbacks.Callback):
    """Notes the weights and the validation loss that it sees where epochs begin and end, and at the end."""

    def note(self, when: str, number: int | None, logs: Any = None) -> None:
        weights = [value for weight in self.model.trainable_weights for value in weight.numpy().ravel().tolist()]
        told.append([when, number, [*weights, (logs or {}).get("val_loss", 0.0)]])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.note("epoch begins", epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note("epoch ends", epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        self.note("end", None)


class StopsRank1(keras.callbacks.Callback):
    """Stops from inside an epoch, on one rank."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.batches = after, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        told.append(["batch ends", batch, None])
        if self.batches == self.after and hvd.rank() == 1:
            self.model.stop_training = True


class Batches(keras.callbacks.Callback):
    """Notes where batches end."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        told.append(["batch ends", batch, None])


class Halves(keras.callbacks.Callback):
    """Changes the weights when training ends."""

    def on_train_end(self, logs: Any = None) -> None:
        for weight in self.model.trainable_weights:
            weight.assign(weight / 2)


def half(epoch: int, rate: float) -> float:
    """A schedule: half the rate when an epoch begins, but not the first."""
    return rate / 2 if epoch else rate


class HalvesTheRate(keras.callbacks.LearningRateScheduler):
    """Halves the rate when an epoch begins, but not the first."""

    def __init__(self, schedule: Any = half) -> None:
        super().__init__(schedule)


class StopsAfter(keras.callbacks.Callback):
    """Ends the run after an epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = epoch == self.epoch


class Evaluates(keras.callbacks.Callback):
    """Evaluates records of its own when an epoch ends."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.evaluate(np.ones((8, 6), "float32"), np.zeros(8, "int64"), verbose=0)


class Adds(keras.callbacks.Callback):
    """Adds a figure for the callbacks after it, which falls from epoch to epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["falling"] = -epoch


class Meddles(keras.callbacks.Callback):
    """Changes weights and the rate wherever something begins, and counts in a state what it is told.

    interrupt_test: the evaluation in which it asks the run to stop, once in a process.
    """

    has_interrupted = False

    def __init__(self, interrupt_test: int | None = None) -> None:
        super().__init__()
        self.interrupt_test = interrupt_test
        self.told = {"epochs": 0, "batches": 0, "tests": 0}

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.25
        self.scale(1.5)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.told["epochs"] += 1
        self.epoch = epoch
        self.scale(0.75)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert self.epoch == epoch
        self.model.optimizer.learning_rate = self.model.optimizer.learning_rate.numpy() / 2

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.told["batches"] += 1

    def on_test_begin(self, logs: Any = None) -> None:
        self.told["tests"] += 1
        self.scale(0.5)
        if self.told["tests"] == self.interrupt_test and not Meddles.has_interrupted:
            Meddles.has_interrupted = True
            os.kill(os.getpid(), signal.SIGTERM)

    def on_test_end(self, logs: Any = None) -> None:
        self.scale(2)

    def on_train_end(self, logs: Any = None) -> None:
        told.append(["end", None, dict(self.told)])

    def scale(self, factor: float) -> None:
        for weight in self.model.weights:
            weight.assign(factor * weight)

    def get_state(self) -> dict[str, int]:
        return self.told

    def set_state(self, state: dict[str, int]) -> None:
        self.told = dict(state)


class StopsIn(keras.callbacks.Callback):
    """Sets stop_training in one method, if there is a number when that is at least `first`."""

    def __init__(self, method: str, first: int = 0) -> None:
        super().__init__()

        def stop(number: Any = None, logs: Any = None) -> None:
            self.model.stop_training = not isinstance(number, int) or number >= first

        setattr(self, method, stop)


class Freezes(keras.callbacks.Callback):
    """Freezes a layer in one method."""

    def __init__(self, method: str = "on_epoch_end") -> None:
        super().__init__()
        setattr(self, method, self.freeze)

    def freeze(self, *arguments: Any, **options: Any) -> None:
        self.model.layers[-1].trainable = False


class KnowsItsRank(keras.callbacks.Callback):
    """Has a state of its own on each rank."""

    def get_state(self) -> int:
        return hvd.rank()

    def set_state(self, state: int) -> None: ...


class Predicts(keras.callbacks.Callback):
    def on_predict_end(self, logs: Any = None) -> None: ...


class HalfAState(keras.callbacks.Callback):
    def get_state(self) -> None: ...


class NoJson(keras.callbacks.Callback):
    def get_state(self) -> Any:
        return {"a": self}

    def set_state(self, state: Any) -> None: ...


class OwnCheckpoint(keras.callbacks.ModelCheckpoint):
    """A writer of Keras with another name."""


class OwnSwap(keras.callbacks.SwapEMAWeights):
    """A swap of Keras with another name."""


def no_callback() -> int:
    return 3


class KeepsTheBest(keras.callbacks.EarlyStopping):
    def __init__(self) -> None:
        super().__init__(restore_best_weights=True)


def _wait_for_kill(is_deaf: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    is_deaf.set()
    while True:
        signal.pause()


class LeavesThreads(keras.callbacks.Callback):
    """Leaves a thread that never ends on rank 1, and processes on root; and on both what ends in time."""

    def __init__(self, notes: str) -> None:
        super().__init__()
        self.notes = notes

    def on_train_begin(self, logs: Any = None) -> None:
        launcher.THREADS_END_WITHIN_S = 3.0
        ThreadPoolExecutor(1).submit(int)  # its thread waits for more work, and ends when Python does
        threading.Thread(target=self.note_end, args=(hvd.rank(),)).start()
        if hvd.rank() == 1:
            threading.Thread(target=threading.Event().wait, name="uploader").start()
        else:
            multiprocessing.get_context("spawn").Process(target=signal.pause, name="converter").start()
            forks = multiprocessing.get_context("fork")
            is_deaf = forks.Event()
            forks.Process(target=_wait_for_kill, args=(is_deaf,), name="cache", daemon=True).start()
            is_deaf.wait()

    def note_end(self, rank: int) -> None:
        threading.main_thread().join()
        Path(self.notes, str(rank)).touch()
