"""Models, losses and optimizers as a user would keep them in a package of their own, named `user_models:function`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def small(hidden: int = 16) -> keras.Model:
    """Grey 28×28 images → 10 logits, without any randomness but the initial weights."""
    image = keras.Input((28, 28, 1))
    x = layers.Dense(hidden, activation="relu")(layers.Flatten()(image))
    return keras.Model(image, layers.Dense(10)(x))


class Scaled(layers.Layer):
    """Multiplies by a constant that is no weight, and was drawn without a seed."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.factors = np.random.default_rng().uniform(0.5, 1.5, shape[-1]).astype(np.float32)

    def call(self, inputs: Any) -> Any:
        return inputs * self.factors


def with_a_constant() -> keras.Model:
    image = keras.Input((28, 28, 1))
    return keras.Model(image, layers.Dense(10)(Scaled(name="scaled")(layers.Flatten()(image))))


def in_the_order_of_a_set() -> keras.Model:
    image = keras.Input((28, 28, 1))
    x = layers.Flatten()(image)
    for name in {"a", "b", "c", "d", "e", "f", "g", "h"}:
        x = layers.Dense(4, name=name)(x)
    return keras.Model(image, layers.Dense(10)(x))


def with_a_vocabulary() -> keras.Model:
    """Pixels as tokens; their vocabulary is in the folder of the process."""
    image = keras.Input((28, 28, 1))
    lookup = layers.IntegerLookup(max_tokens=9, name="lookup")
    lookup.set_vocabulary([int(line) for line in Path("vocabulary.txt").read_text().split()])
    tokens = lookup(keras.ops.cast(layers.Flatten()(image), "int64"))
    return keras.Model(image, layers.Dense(10)(layers.GlobalAveragePooling1D()(layers.Embedding(9, 4)(tokens))))


def of_lists(hidden: int = 16) -> keras.Model:
    """Grey 28×28 images `image`, and lists of 11 tokens `words` → 10 logits."""
    image, words = keras.Input((28, 28, 1), name="image"), keras.Input((11,), dtype="int64", name="words")
    tokens = layers.Flatten()(layers.Embedding(11, 2)(words))
    x = layers.Concatenate()([layers.Dense(hidden, activation="relu")(layers.Flatten()(image)), tokens])
    return keras.Model({"image": image, "words": words}, layers.Dense(10)(x))


def of_zones() -> keras.Model:
    """Of a text and a number."""
    zone, size = keras.Input((), dtype="string", name="zone"), keras.Input((), name="size")
    found = layers.StringLookup(vocabulary=["1", "2", "3b"], output_mode="one_hot")(zone)
    x = layers.Concatenate()([found, layers.Reshape((1,))(size)])
    return keras.Model({"zone": zone, "size": size}, layers.Dense(3, name="logits")(x))


@keras.saving.register_keras_serializable("user_models")
class Undeclared(keras.Model):
    """`tokens`, whole numbers, and `price`, a number → 3 logits. Declares no inputs; no float32 holds its tokens."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embedding, self.dense = layers.Embedding(7, 4), layers.Dense(3)

    def call(self, inputs: dict[str, Any]) -> Any:
        tokens = layers.Flatten()(self.embedding(inputs["tokens"] % 7))
        return self.dense(keras.ops.concatenate([tokens, inputs["price"]], axis=1))


def undeclared() -> keras.Model:
    model = Undeclared()
    model({"tokens": tf.zeros([1, 2], tf.int64), "price": tf.zeros([1, 1])})
    return model


def vector(hidden: int = 8) -> keras.Model:
    """Six numbers → 3 logits."""
    x = keras.Input((6,))
    return keras.Model(x, layers.Dense(3)(layers.Dense(hidden, activation="relu")(x)))


def compiled_vector(schedule: bool = False, use_ema: bool = False) -> keras.Model:
    """What `vector` is, compiled."""
    model = vector()
    rate = keras.optimizers.schedules.ExponentialDecay(0.3, 100, 0.9) if schedule else 0.3
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(rate, momentum=0.5, use_ema=use_ema)
    model.compile(optimizer, loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


def compiled_pair() -> keras.Model:
    """Two outputs of six numbers, compiled with a loss and a weight for each."""
    x = keras.Input((6,))
    model = keras.Model(x, {"y": layers.Dense(3, name="y")(x), "importance": layers.Dense(1, name="importance")(x)})
    losses = {"y": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "importance": "mean_squared_error"}
    metrics = {"y": "accuracy", "importance": ["mean_absolute_error"]}
    model.compile("adam", losses, loss_weights={"y": 1.0, "importance": 0.25}, metrics=metrics)
    return model


class CompiledItsWay(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x)

    def compile(self, rate: float) -> None:
        super().compile(keras.optimizers.SGD(rate), "mse")


def compiled_its_way() -> keras.Model:
    model = CompiledItsWay()
    model(keras.Input((6,)))
    model.compile(0.1)
    return model


def small_digits(head: str = "head", classes: int = 5) -> keras.Model:
    """64 pixels → logits, with a BatchNormalization and a Dropout between two layers."""
    image = keras.Input((64,))
    x = layers.BatchNormalization(momentum=0.9, name="norm")(layers.Dense(16, activation="relu", name="first")(image))
    x = layers.Dense(8, activation="relu", name="second")(layers.Dropout(0.1, name="drop")(x))
    return keras.Model(image, layers.Dense(classes, name=head)(x))


def foreign_digits() -> keras.Model:
    """As small_digits takes and gives, with no layer of its names."""
    image = keras.Input((64,))
    return keras.Model(image, layers.Dense(5, name="alien")(image))


def loaded_digits() -> keras.Model:
    """What USERS_FILE holds, for model.init_from."""
    return keras.saving.load_model(os.environ["USERS_FILE"])


def arrays_of_digits() -> dict[str, np.ndarray]:
    return {weight.path: weight.numpy() for weight in loaded_digits().weights}


def mixed(dropout: float = 0.5, batch_norm: bool = True) -> keras.Model:
    """Embedding, BatchNorm and Dropout on images whose pixels are taken for 16 kinds of tokens."""
    image = keras.Input((28, 28, 1))
    tokens = keras.ops.cast((keras.ops.reshape(image, (-1, 784)) + 0.5) * 15.0, "int32")
    x = layers.Embedding(16, 2)(tokens)
    x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
    if batch_norm:
        x = layers.BatchNormalization()(x)
    x = layers.Dropout(dropout)(x)
    return keras.Model(image, layers.Dense(10)(x))


def not_a_model() -> int:
    return 3


def huber_per_record(targets: Any, outputs: Any, delta: float = 1.0) -> tf.Tensor:
    return keras.losses.huber(tf.one_hot(tf.cast(tf.reshape(targets, [-1]), tf.int32), 10), outputs, delta)


def rank() -> int:
    return int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


class At(layers.Layer):
    """Passes its input on; at its n-th call in training on one rank it does something to it or to its weight."""

    def __init__(self, step: int, on_rank: int, what: str) -> None:
        super().__init__()
        self.step, self.is_victim, self.what = step, rank() == on_rank, what

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")
        self.gain = self.add_weight(shape=(), initializer="ones", name="gain")

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if training:
            self.calls.assign_add(1)
            is_now = tf.logical_and(self.calls.value == self.step, self.is_victim)
            if self.what == "nan":
                x = x + tf.cast(tf.where(is_now, float("nan"), 0.0), x.dtype)
            if self.what == "tamper":
                self.gain.assign_add(tf.where(is_now, 1e-3, 0.0))
            if self.what == "raise":
                x = tf.numpy_function(self._fail_if, [is_now, x], tf.float32)
                x.set_shape((None, 784))
        return x * self.gain

    @staticmethod
    def _fail_if(is_now: Any, x: Any) -> Any:
        if is_now:
            raise ArithmeticError("the reactor is on fire")
        return x


def troubled(step: int = 7, on_rank: int = 1, what: str = "nan") -> keras.Model:
    image = keras.Input((28, 28, 1))
    x = At(step, on_rank, what)(layers.Flatten()(image))
    return keras.Model(image, layers.Dense(10)(x))


class Slow(layers.Layer):
    """Takes its time in evaluation, and leaves a file to say that it has begun."""

    def __init__(self, marker: str, seconds: float) -> None:
        super().__init__()
        self.marker, self.seconds = marker, seconds

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if training:  # so that a run does not come to its evaluation between two votes
            return x + tf.ensure_shape(tf.numpy_function(self._pause, [], tf.float32, stateful=True), ())
        return tf.ensure_shape(tf.numpy_function(self._wait, [x], tf.float32), x.shape)

    @staticmethod
    def _pause() -> Any:
        time.sleep(0.02)
        return np.float32(0.0)

    def _wait(self, x: Any) -> Any:
        Path(self.marker).touch()
        time.sleep(self.seconds)
        return x


def long_run(marker: str = "", seconds: float = 0.0) -> keras.Model:
    """Dropout and an Embedding, and an evaluation that can be made slow: for runs that are stopped and resumed."""
    image = keras.Input((28, 28, 1))
    tokens = keras.ops.cast((keras.ops.reshape(image, (-1, 784)) + 0.5) * 15.0, "int32")
    x = layers.Flatten()(layers.Embedding(16, 2)(tokens))
    x = layers.Dropout(0.5)(layers.BatchNormalization()(layers.Dense(16, activation="relu")(x)))
    if marker:
        x = Slow(marker, seconds)(x)
    return keras.Model(image, layers.Dense(10)(x))


def tiny() -> keras.Model:
    """Six numbers → 2 logits, with Dropout and BatchNorm."""
    x = keras.Input((6,))
    hidden = layers.BatchNormalization()(layers.Dense(8, activation="relu")(x))
    return keras.Model(x, layers.Dense(2)(layers.Dropout(0.5)(hidden)))


def served(batch_norm: bool = True, dropout: float = 0.5) -> keras.Model:
    """Layers that behave otherwise in training; all of them Keras' own, so that a Keras file needs no code to load."""
    image = keras.Input((28, 28, 1))
    x = layers.Conv2D(4, 5, strides=3)(image)
    if batch_norm:
        x = layers.BatchNormalization(momentum=0.5)(x)
    x = layers.Dropout(dropout)(layers.Flatten()(layers.ReLU()(x)))
    return keras.Model(image, layers.Dense(10, dtype="float32")(x))


class SumOfFeatures(keras.Model):
    """Adds up whatever features it gets: a target among them changes what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, features: dict[str, Any]) -> Any:
        total = sum(keras.ops.cast(value, "float32") for value in features.values())
        return self.dense(keras.ops.expand_dims(total, -1))


def sum_of_features() -> keras.Model:
    model = SumOfFeatures()
    model({name: keras.ops.zeros((2,)) for name in ("a", "b")})
    return model
