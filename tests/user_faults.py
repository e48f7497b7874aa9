"""Models and other parts with a mistake in them, as a user would make it, named `user_faults:name`."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from horovod_train.distributed.launch import launcher

UNITS: dict[str, int] = {}


def missing_key() -> keras.Model:
    return with_layer(layers.Dense(UNITS["hidden"]))


def missing_on_the_last_rank() -> keras.Model:
    launch = launcher.detect()
    if launch.rank == launch.size - 1:
        importlib.import_module("no_such_module")
    return with_layer(layers.Dense(8))


def no_network() -> keras.Model:
    """As keras.applications does with weights="imagenet" where there is no network."""
    raise Exception("URL fetch failure on https://storage.example/w.h5: None -- [Errno -2] Name or service not known")


class Unfinished(layers.Layer):
    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if training:
            raise NotImplementedError("mixing comes later")
        return x


def unfinished() -> keras.Model:
    return with_layer(Unfinished())


class ByText(layers.Layer):
    """Computes by an operation that XLA does not have."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        numbers = tf.strings.to_number(tf.strings.as_string(tf.stop_gradient(x)))
        return x + tf.reshape(numbers, tf.shape(x))


def by_text() -> keras.Model:
    return with_layer(ByText())


def with_layer(layer: layers.Layer) -> keras.Model:
    image = keras.Input((28, 28, 1))
    return keras.Model(image, layers.Dense(10)(layer(layers.Flatten()(image))))


def loss(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return outputs.no_such_attribute


def metric() -> keras.metrics.Metric:
    raise RuntimeError("no metric today")


class Callback(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        raise RuntimeError("nothing to call back")


class Source:
    def __init__(self, path: str) -> None:
        self.records = UNITS.records  # type: ignore[attr-defined]


def fails_later() -> keras.Model:
    return with_layer(Later())


class Later(layers.Layer):
    """Fails in its third training step, in a function of Python that TensorFlow calls."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if training:
            self.calls.assign_add(1)
            shape = x.shape
            x = tf.numpy_function(self._look, [self.calls.value, x], tf.float32)
            x.set_shape(shape)
        return x

    @staticmethod
    def _look(calls: Any, x: Any) -> Any:
        return x if calls < 3 else UNITS["in the third step"]


def downloads(file: str, fails: bool = False) -> keras.Model:
    """As a model function that gets pretrained weights: finds the file, or writes it slowly, or fails."""
    from user_models import rank

    if fails and rank() == 0:
        raise OSError("no network here")
    time.sleep(rank())  # rank 1 comes while rank 0 writes
    path = Path(file)
    if path.exists() and path.stat().st_size < 2000:
        raise OSError("truncated file")
    if not path.exists():
        with path.open("wb", buffering=0) as target:
            for _ in range(2):
                target.write(bytes(1000))
                time.sleep(1.5)
    return with_layer(layers.Dense(4))
