"""What a trial of a model's step refuses: draws, foreign variables, pairs of records, text, labels without outputs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

from horovod_train.config.settings import Config, LossSpec, ModelSpec
from horovod_train.data.batch_source import Batch
from horovod_train.data.schema import Feature, Schema
from horovod_train.errors import UserError
from horovod_train.training.compiled import compile_model
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
        self.classes = self.add_weight(name="classes", trainable=False, shape=(5, 4))

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
    check_variables(tried.assigns, known, "train_step changes")
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
    "drawn classes": (
        lambda layer, x: tf.nn.sampled_softmax_loss(
            layer.classes, layer.classes[:, 0], tf.zeros((8, 1), tf.int64), x, 2, 5
        )[:, None],
        f"{DRAWS} LogUniformCandidateSampler, which a resumed run would not draw again.",
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


ROWS = 6


def within(targets: Any, outputs: Any) -> Any:
    return keras.ops.cast(keras.ops.abs(targets - outputs) < 1, "float32")


class WithinOne(keras.metrics.MeanMetricWrapper):
    def __init__(self, name: str = "within_one") -> None:
        super().__init__(within, name)


class Own(keras.metrics.Metric):
    """Without Keras' wrapper, and with the operation in a function of TensorFlow."""

    def __init__(self, name: str = "own") -> None:
        super().__init__(name=name)
        self.total = self.add_weight(name="total", initializer="zeros", shape=())
        self.function = tf.function(lambda targets, outputs: tf.maximum(targets, outputs), autograph=False)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(self.function(y_true, y_pred)))

    def result(self) -> Any:
        return self.total.value


class Pairs(Own):
    """Compares outputs with each other on purpose, and not with targets."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        column = keras.ops.reshape(y_pred, (-1, 1))
        self.total.assign_add(keras.ops.sum(column - y_pred[:, 0]) + keras.ops.sum(y_true))


def trial(
    metrics: list[Any], target: tuple[int, ...] = (), *, weighted: bool = False, method: str = "train_step"
) -> Any:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse", metrics=None if weighted else metrics, weighted_metrics=metrics if weighted else None)
    model.optimizer.build(model.trainable_variables)
    spec = tf.TensorSpec((ROWS, 3)), tf.TensorSpec((ROWS, *target))
    return try_step(model, method, spec, lambda records: records, "data.train")


@pytest.mark.parametrize("method", ["train_step", "test_step"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("metric", [WithinOne, Own])
def test_a_metric_that_compares_each_record_with_all_others_is_refused(
    metric: Any, weighted: bool, method: str
) -> None:
    said = r"metric \w+ compares each record with all others: it gets targets \[6\] and outputs \[6, 1\]; reshape"
    with pytest.raises(UserError, match=said):
        trial([metric()], weighted=weighted, method=method)
    assert metric().name in trial([metric()], (1,), weighted=weighted, method=method).sources


def test_a_metric_held_by_a_model_is_refused_too() -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.seen = layers.Dense(1), WithinOne()

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def test_step(self, data: Any) -> Any:
            self.seen.update_state(data[1], self(data[0]))
            return {"within_one": self.seen.result()}

    model = Model()
    model.build((None, 3))
    spec = tf.TensorSpec((ROWS, 3)), tf.TensorSpec((ROWS,))
    with pytest.raises(UserError, match="metric within_one compares each record with all others"):
        try_step(model, "test_step", spec, lambda records: records, "data.eval")


def test_metrics_of_keras_and_pairs_on_purpose_are_not_refused() -> None:
    metrics = [
        *("mae", "mse", "accuracy", "mape", "cosine_similarity"),
        *(keras.metrics.AUC(num_thresholds=ROWS), keras.metrics.RootMeanSquaredError(), keras.metrics.BinaryAccuracy()),
        *(keras.metrics.Precision(), Pairs()),
    ]
    assert len(trial(metrics).sources) == 1 + len(metrics)


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


def label_counts_of(loss: LossSpec, outputs: int, schema: Schema = SCHEMA, *, two: bool = False) -> dict[str, int]:
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
    assert label_counts_of(loss, 10) == label_counts_of(loss, 10) == {"y": 10}
    said = (
        r"loss: y has classes from 0 to 9, as dataset\.json says; the model's output has 5 values, .* with 10 outputs"
    )
    with pytest.raises(UserError, match=said):
        label_counts_of(loss, 5)


def test_classes_are_counted_as_the_model_gets_them() -> None:
    """As ImageNet's, which begin at 1 in the records."""
    from_1 = replace(SCHEMA.features["y"], classes=11, offset=-1)
    schema = replace(SCHEMA, features={**SCHEMA.features, "y": from_1})
    assert label_counts_of(LossSpec(ENTROPY, LOGITS), 10, schema) == {"y": 10}
    with pytest.raises(UserError, match="y has classes from 0 to 9"):
        label_counts_of(LossSpec(ENTROPY, LOGITS), 9, schema)


def test_classes_of_one_of_two_outputs_are_checked() -> None:
    schema = Schema({**SCHEMA.features, "z": Feature("float")}, ("x",), ("y", "z"), where="dataset.json")
    terms = {"y": {"name": ENTROPY, "options": LOGITS}, "z": {"name": "mean_squared_error"}}
    assert label_counts_of(LossSpec("per_output", terms), 10, schema, two=True) == {"y": 10}
    with pytest.raises(UserError, match="y has classes from 0 to 9"):
        label_counts_of(LossSpec("per_output", terms), 5, schema, two=True)


def test_targets_that_are_no_labels_and_ignored_classes_are_not_checked() -> None:
    assert label_counts_of(LossSpec("mean_squared_error"), 5) == {}
    assert label_counts_of(LossSpec(ENTROPY, {**LOGITS, "ignore_class": 9}), 9) == {}
