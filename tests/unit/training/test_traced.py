"""A model's step in training uses no numbers and changes no variables that a resumed run would not have."""

from __future__ import annotations

import re
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

from horovod_train.errors import UserError
from horovod_train.training.steps.figures import metrics_in
from horovod_train.training.steps.trial import Tried, check_variables, try_outputs, try_step

COUNTER = tf.Variable(0.0, trainable=False, name="foreign_counter")
TABLE = tf.Variable([1.0, 2.0, 3.0, 4.0], trainable=False, name="foreign_table")
GENERATOR = tf.random.Generator.from_seed(1)
keras.random.normal(())  # makes Keras' own generator outside the layer that draws from it, which would name it
SPEC = tf.TensorSpec((8, 4)), tf.TensorSpec((8, 1))


class Does(layers.Layer):
    """Adds to its inputs, in training, what a function of it and of them returns."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what, self.dropout = what, layers.Dropout(0.5)

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(name="calls", trainable=False, initializer="zeros", shape=())

    def call(self, x: Any, training: bool = False) -> Any:
        return x + self.what(self, x) if training else x


def compiled(what: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), Does(what), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def check(what: Any) -> Tried:
    model = compiled(what)
    tried = try_step(model, "train_step", SPEC, lambda records: records, "data.train")
    metrics = [variable for metric in metrics_in(model) for variable in metric.variables]
    known = [*model.variables, *model.optimizer.variables, *metrics]
    check_variables(tried.assigns, known, "train_step changes", "model.name")
    return tried


def count_in_a_branch(layer: Any, x: Any) -> Any:
    def branch() -> Any:
        return tf.while_loop(lambda i: i < 3, lambda i: (i + COUNTER.assign_add(1.0),), [0.0])[0]

    return tf.cond(tf.reduce_sum(x) > 0, branch, lambda: 0.0)


DRAWS = "data.train: train_step draws by TensorFlow's"
CHANGES = "model.name: train_step changes variables that are not the model's: "
NOT_KEPT = {
    "a draw": (lambda layer, x: tf.random.normal([4]), f"{DRAWS} RandomStandardNormal, which a"),
    "a draw in a branch": (
        lambda layer, x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.random.uniform([]), lambda: 0.0),
        f"{DRAWS} RandomUniform, which a resumed run would not draw again.",
    ),
    "a count": (
        lambda layer, x: COUNTER.assign_add(1.0),
        f"{CHANGES}foreign_counter:0. Make them with add_weight",
    ),
    "a count in a branch": (count_in_a_branch, f"{CHANGES}foreign_counter"),
    "a generator": (lambda layer, x: GENERATOR.normal([4]), CHANGES),
    "the generator of Keras": (lambda layer, x: keras.random.normal((4,)), CHANGES),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_a_resumed_run_would_not_have_is_refused(name: str) -> None:
    what, expected = NOT_KEPT[name]
    with pytest.raises(UserError, match=re.escape(expected)):
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


def test_a_trial_computes_nothing_and_leaves_the_model_as_it_was() -> None:
    model = compiled(lambda layer, x: layer.calls.assign_add(1.0))
    before = [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]
    tried = try_step(model, "train_step", SPEC, lambda records: records, "data.train")
    after = [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]
    assert all((one == other).all() for one, other in zip(before, after, strict=True))
    assert not {"compute_loss", "train_step"} & {*vars(model)}
    assert not any("result" in vars(metric) for metric in metrics_in(model))
    assert tried.calls_compute_loss
    assert list(tried.sources) == ["loss", "mae"]
    assert all(source.metric is not None for source in tried.sources.values())
    assert any("calls" in variable.name for variable in tried.assigns)
    assert len(tried.reads) > len(tried.assigns)


def test_records_that_do_not_fit_are_one_line() -> None:
    model = compiled(lambda layer, x: 0.0)
    wrong = tf.TensorSpec((8, 5)), tf.TensorSpec((8, 1))
    for attempt in (
        lambda: try_step(model, "train_step", wrong, lambda records: records, "data.train"),
        lambda: try_outputs(model, wrong[0], "data.train"),
    ):
        with pytest.raises(UserError) as error:
            attempt()
        assert re.match(r"data.train: the model's (train_step|call) does not fit records of ", str(error.value))
        assert "float32(8, 5)" in str(error.value)
        assert "\n" not in str(error.value)
