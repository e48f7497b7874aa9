"""A model's call in training uses no numbers and changes no variables that a resumed run would not have."""

from __future__ import annotations

import re
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

from horovod_train.config.settings import Spec
from horovod_train.data.pipeline.batch import Batch
from horovod_train.errors import UserError
from horovod_train.training.parts.losses import build_loss
from horovod_train.training.parts.metrics import Accumulator, build_metrics
from horovod_train.training.steps.objective import check_fits

COUNTER = tf.Variable(0.0, trainable=False, name="foreign_counter")
TABLE = tf.Variable([1.0, 2.0, 3.0, 4.0], trainable=False, name="foreign_table")
GENERATOR = tf.random.Generator.from_seed(1)
keras.random.normal(())  # makes Keras' own generator outside the layer that draws from it, which would name it


class Does(layers.Layer):
    """Adds to its inputs, in training, what a function of it and of them returns."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what, self.dropout = what, layers.Dropout(0.5)

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(name="calls", trainable=False, initializer="zeros", shape=())

    def call(self, x: Any, training: bool = False) -> Any:
        return x + self.what(self, x) if training else x


def check(what: Any) -> None:
    model = keras.Sequential([keras.Input((4,)), Does(what), layers.Dense(1)])
    batch: Any = Batch(
        tf.TensorSpec((8, 4)), tf.TensorSpec((8, 1)), tf.TensorSpec((8,)), tf.TensorSpec((8,), tf.int64), ()
    )
    loss = build_loss(Spec("mean_squared_error"))
    seen = Accumulator(loss, build_metrics([Spec("mean_absolute_error")]))
    check_fits(model, loss, seen, batch, "data.train", training=True)


def count_in_a_branch(layer: Any, x: Any) -> Any:
    def branch() -> Any:
        return tf.while_loop(lambda i: i < 3, lambda i: (i + COUNTER.assign_add(1.0),), [0.0])[0]

    return tf.cond(tf.reduce_sum(x) > 0, branch, lambda: 0.0)


NOT_KEPT = {
    "a draw": (lambda layer, x: tf.random.normal([4]), "the model draws by TensorFlow's RandomStandardNormal, which a"),
    "a draw in a branch": (
        lambda layer, x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.random.uniform([]), lambda: 0.0),
        "the model draws by TensorFlow's RandomUniform, which a resumed run would not draw again.",
    ),
    "a count": (
        lambda layer, x: COUNTER.assign_add(1.0),
        "the model changes variables that are not the model's: foreign_counter:0. Make them with add_weight",
    ),
    "a count in a branch": (count_in_a_branch, "the model changes variables that are not the model's: foreign_counter"),
    "a generator": (lambda layer, x: GENERATOR.normal([4]), "the model changes variables that are not the model's: "),
    "the generator of Keras": (
        lambda layer, x: keras.random.normal((4,)),
        "the model changes variables that are not the model's: ",
    ),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_a_resumed_run_would_not_have_is_refused(name: str) -> None:
    what, expected = NOT_KEPT[name]
    with pytest.raises(UserError, match=re.escape(f"model.name: {expected}")):
        check(what)


KEPT = {
    "a weight": lambda layer, x: layer.calls.assign_add(1.0),
    "a table": lambda layer, x: TABLE,
    "a table in a branch": lambda layer, x: tf.cond(tf.reduce_sum(x) > 0, lambda: TABLE * layer.calls, lambda: x[0]),
    "dropout": lambda layer, x: layer.dropout(x, training=True),
    "stateless": lambda layer, x: tf.random.stateless_normal([4], (1, 2)),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_a_resumed_run_has_too_is_taken(name: str) -> None:
    check(KEPT[name])
