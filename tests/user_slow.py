"""What takes its time, on one rank or on all, named `user_slow:…`: a model, parsers, a source, a hook, a callback."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_train.distributed.launch import launcher
from horovod_train.training.hooks import every

FEATURES = {"x": tf.io.FixedLenFeature([6], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}


class Delay(keras.layers.Layer):
    """Passes its input on, after some seconds in training. works: they are of a core's time, not only of the clock."""

    def __init__(self, seconds: float, works: bool) -> None:
        super().__init__()
        self.seconds, self.works = seconds, works

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        # Waits for x; what does not may run before the step has its batch.
        return x + tf.ensure_shape(tf.numpy_function(self._delay, [x], tf.float32), ()) if training else x

    def _delay(self, x: Any) -> Any:
        if not self.works:
            time.sleep(self.seconds)
        end, values = time.thread_time() + self.seconds, np.arange(10_000.0)
        while self.works and time.thread_time() < end:
            np.sort(values[::-1])  # without Python's lock
        return np.float32(0.0)


def model(seconds: float = 0.0, on_rank: int | None = None, hidden: int = 8, works: bool = False) -> keras.Model:
    """seconds: that each step takes longer, on one rank or (None) on all. hidden: units, for the size of gradients."""
    x = keras.Input((6,))
    logits = keras.layers.Dense(2)(keras.layers.Dense(hidden)(keras.layers.Dense(hidden)(x)))
    return keras.Model(x, Delay(seconds if on_rank in (None, launcher.detect().rank) else 0.0, works)(logits))


def digits(seconds: float) -> keras.Model:
    """For the handwritten digits; its gradients have 100 kB. seconds: that each step takes longer."""
    image = keras.Input((28, 28, 1))
    hidden = keras.layers.Dense(32, "relu")(keras.layers.Flatten()(image))
    return keras.Model(image, Delay(seconds, works=False)(keras.layers.Dense(10)(hidden)))


class LateToTrace(keras.layers.Layer):
    """Passes its input on. Takes its time whenever a step is traced, as large models do."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        if isinstance(x, tf.Tensor) and not tf.executing_eagerly():
            time.sleep(TRACED_IN_S)
        return x


TRACED_IN_S = 5.0


def to_trace() -> keras.Model:
    image = keras.Input((28, 28, 1))
    return keras.Model(image, LateToTrace()(keras.layers.Dense(10)(keras.layers.Flatten()(image))))


class DelayInEvaluation(Delay):
    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        return super().call(x, training=not training)


def in_evaluation() -> keras.Model:
    """Takes a second for each batch of an evaluation on rank 1."""
    image = keras.Input((28, 28, 1))
    seconds = float(launcher.detect().rank == 1)
    return keras.Model(image, DelayInEvaluation(seconds, False)(keras.layers.Dense(10)(keras.layers.Flatten()(image))))


class Late(keras.callbacks.Callback):
    """Takes its time after each step on rank 1."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if launcher.detect().rank == 1:
            time.sleep(0.2)


wait = every(2, lambda run, step: time.sleep(0.1))
"""A hook that takes its time on all ranks."""


class LateSource:
    """Records as a slow disk gives them to rank 0."""

    def __init__(self, path: str) -> None:
        self._seconds = 0.1 if launcher.detect().rank == 0 else 0.0

    def __len__(self) -> int:
        return 48

    def __getitem__(self, record: int) -> dict[str, Any]:
        time.sleep(self._seconds)
        return {"x": np.full(6, record, np.float32), "y": record % 2}


def parse(records: Any) -> dict[str, Any]:
    return tf.io.parse_example(records, FEATURES)


def parse_slowly(records: Any) -> dict[str, Any]:
    return parse(tf.ensure_shape(tf.numpy_function(_after_a_while, [records], tf.string), records.shape))


def parse_slowly_on_rank_2(records: Any) -> dict[str, Any]:
    return parse_slowly(records) if launcher.detect().rank == 2 else parse(records)


def _after_a_while(records: Any) -> Any:
    time.sleep(0.05 * len(records))
    return records
