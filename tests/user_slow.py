"""A model and parsers that take their time, on one rank or on all, named `user_slow:function`."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_train.distributed.launch import launcher

FEATURES = {"x": tf.io.FixedLenFeature([6], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}


class Sleep(keras.layers.Layer):
    """Passes its input on, after some seconds in training."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        # Waits for x; what does not may run before the step has its batch.
        return x + tf.ensure_shape(tf.numpy_function(self._sleep, [x], tf.float32), ()) if training else x

    def _sleep(self, x: Any) -> Any:
        time.sleep(self.seconds)
        return np.float32(0.0)


def model(seconds: float = 0.0, on_rank: int | None = None, hidden: int = 8) -> keras.Model:
    """seconds: that each step takes longer, on one rank or (None) on all. hidden: units, for the size of gradients."""
    x = keras.Input((6,))
    logits = keras.layers.Dense(2)(keras.layers.Dense(hidden)(keras.layers.Dense(hidden)(x)))
    return keras.Model(x, Sleep(seconds if on_rank in (None, launcher.detect().rank) else 0.0)(logits))


def parse(records: Any) -> dict[str, Any]:
    return tf.io.parse_example(records, FEATURES)


def parse_slowly(records: Any) -> dict[str, Any]:
    return parse(tf.ensure_shape(tf.numpy_function(_after_a_while, [records], tf.string), records.shape))


def parse_slowly_on_rank_2(records: Any) -> dict[str, Any]:
    return parse_slowly(records) if launcher.detect().rank == 2 else parse(records)


def _after_a_while(records: Any) -> Any:
    time.sleep(0.05 * len(records))
    return records
