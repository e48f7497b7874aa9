"""Text that is taken for numbers, and labels for which a model has no output, are refused before training."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

from horovod_train.config.settings import Config, LossSpec, ModelSpec
from horovod_train.data.pipeline.batch_source import Batch
from horovod_train.data.schema import Feature, Schema
from horovod_train.errors import UserError
from horovod_train.training.compiled import compile_model
from horovod_train.training.steps.trial import try_step

ROWS = 6


@pytest.mark.parametrize(("inputs", "targets"), [(tf.float32, tf.string), (tf.string, tf.float32)])
def test_text_that_a_step_takes_for_numbers_is_refused(inputs: tf.DType, targets: tf.DType) -> None:
    model = keras.Sequential([keras.Input((3,)), layers.Lambda(lambda x: tf.cast(x, tf.float32)), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    spec = Batch(
        tf.TensorSpec((ROWS, 3), inputs),
        {"kind": tf.TensorSpec((ROWS, 1), targets), "size": tf.TensorSpec((ROWS, 1))},
        tf.TensorSpec((ROWS,)),
        tf.TensorSpec((ROWS,), tf.int64),
        tf.TensorSpec((), tf.int64),
    )
    said = (
        r"data\.targets: kind must be numbers" if targets == tf.string else r"data\.inputs: the values must be numbers"
    )
    with pytest.raises(UserError, match=f"{said}, because the model's train_step computes with them; the records hold"):
        try_step(model, "train_step", spec, lambda batch: (batch.inputs, batch.targets["kind"]), "data.train")


def test_text_that_a_model_looks_up_is_taken() -> None:
    words = keras.Input((), dtype="string")
    model = keras.Model(words, layers.Dense(1)(layers.StringLookup(vocabulary=["a"], output_mode="one_hot")(words)))
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    text, numbers, ids = (tf.TensorSpec((ROWS,), kind) for kind in (tf.string, tf.float32, tf.int64))
    spec = Batch(text, numbers, numbers, ids, tf.TensorSpec((), tf.int64))
    try_step(model, "train_step", spec, lambda batch: (batch.inputs, batch.targets), "data.train")


ENTROPY = "sparse_categorical_crossentropy"
SCHEMA = Schema({"x": Feature("float"), "y": Feature("int64", classes=10)}, ("x",), ("y",), where="dataset.json")


def check(loss: LossSpec, outputs: int, schema: Schema = SCHEMA, *, two: bool = False) -> dict[str, int]:
    x = keras.Input((3,))
    model = keras.Model(x, layers.Dense(outputs)(x))
    if two:
        model = keras.Model(x, {"y": layers.Dense(outputs)(x), "z": layers.Dense(1)(x)})
    compiled = compile_model(Config(model=ModelSpec(name="m"), loss=loss), model, None)
    compiled.check_classes(schema)
    return compiled.label_counts(schema.targets)


LOGITS: dict[str, Any] = {"from_logits": True}


@pytest.mark.parametrize("name", [ENTROPY, "smoothed_sparse_categorical_crossentropy"])
def test_classes_without_an_output_are_refused(name: str) -> None:
    loss = LossSpec(name, LOGITS if name == ENTROPY else {})
    assert check(loss, 10) == check(loss, 10) == {"y": 10}
    said = (
        r"loss: y has classes from 0 to 9, as dataset\.json says; the model's output has 5 values, .* with 10 outputs"
    )
    with pytest.raises(UserError, match=said):
        check(loss, 5)


def test_classes_of_one_of_two_outputs_are_checked() -> None:
    schema = Schema({**SCHEMA.features, "z": Feature("float")}, ("x",), ("y", "z"), where="dataset.json")
    terms = {"y": {"name": ENTROPY, "options": LOGITS}, "z": {"name": "mean_squared_error"}}
    assert check(LossSpec("per_output", terms), 10, schema, two=True) == {"y": 10}
    with pytest.raises(UserError, match="y has classes from 0 to 9"):
        check(LossSpec("per_output", terms), 5, schema, two=True)


def test_targets_that_are_no_labels_and_ignored_classes_are_not_checked() -> None:
    assert check(LossSpec("mean_squared_error"), 5) == {}
    assert check(LossSpec(ENTROPY, {**LOGITS, "ignore_class": 9}), 9) == {}
