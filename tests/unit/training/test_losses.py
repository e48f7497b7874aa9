"""The losses of a config, and which of them take logits or probabilities."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_train.config.settings import AUTO, Config, LossSpec, LossTerm, MetricSpec, ModelSpec, Spec
from horovod_train.data.batch_source import Batch
from horovod_train.data.schema import Feature, Schema
from horovod_train.errors import UserError
from horovod_train.training.compiled import compile_model
from horovod_train.training.losses import (
    LOSSES_OF_LABELS,
    LossOfFunction,
    build_loss,
    refuse_logits,
    refuse_probabilities,
    takes_labels,
    takes_logits,
    takes_one_class,
)

ROWS = 8
RNG = np.random.default_rng(0)
LOGITS = tf.constant(RNG.normal(size=(6, 5)), tf.float32)
LABELS = tf.constant([0, 1, 2, 3, 4, 0], tf.int64)
ENTROPY: dict[str, Any] = {"name": "sparse_categorical_crossentropy", "options": {"from_logits": True}}


def test_smoothing_is_that_of_keras_on_one_hot_labels() -> None:
    ours = build_loss(Spec("smoothed_sparse_categorical_crossentropy", {"label_smoothing": 0.2})).loss(LABELS, LOGITS)
    keras_loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2)
    assert float(ours) == pytest.approx(float(keras_loss(tf.one_hot(LABELS, 5), LOGITS)), abs=1e-6)
    assert abs(float(ours) - float(build_loss(Spec(**ENTROPY)).loss(LABELS, LOGITS))) > 1e-2
    documented = build_loss(Spec("smoothed_sparse_categorical_crossentropy", {"label_smoothing": 0.1})).loss
    default = build_loss(Spec("smoothed_sparse_categorical_crossentropy")).loss
    assert float(default(LABELS, LOGITS)) == float(documented(LABELS, LOGITS))


@pytest.mark.parametrize("shape", [(6,), (3, 2)], ids=str)
def test_labels_with_a_last_axis_of_length_1_are_the_same_labels(shape: tuple[int, ...]) -> None:
    """As for Keras' own loss: [rows, 1] with logits [rows, classes]."""
    logits, labels = tf.reshape(LOGITS, (*shape, 5)), tf.reshape(LABELS, shape)
    for spec in (Spec("smoothed_sparse_categorical_crossentropy"), Spec(**ENTROPY)):
        loss = build_loss(spec).loss
        assert float(loss(labels[..., None], logits)) == pytest.approx(float(loss(labels, logits)), abs=1e-6)


def test_a_loss_for_each_output_has_its_weight_and_its_target() -> None:
    terms = {"one": {**ENTROPY, "weight": 0.25}, "other": {**ENTROPY, "target": "one"}}
    chosen = build_loss(Spec("per_output", terms))
    assert {output: type(loss) for output, loss in chosen.loss.items()} == dict.fromkeys(
        terms, keras.losses.SparseCategoricalCrossentropy
    )
    assert all(loss.from_logits for loss in chosen.loss.values())
    assert chosen.factors == {"one": 0.25, "other": 1.0}
    assert chosen.targets == {"one": "one", "other": "one"}


def test_reductions_and_losses_over_a_batch_are_keras_own() -> None:
    assert build_loss(Spec("mean_squared_error", {"reduction": "sum"})).loss.reduction == "sum"
    assert isinstance(build_loss(Spec("circle")).loss, keras.losses.Circle)
    assert build_loss(Spec("dice", {"axis": 0})).loss.axis == 0


shapes: list[tuple[Any, ...]] = []
"""What `squared` was called with."""


def squared(targets: Any, outputs: Any) -> Any:
    shapes.append((tuple(targets.shape), tuple(outputs.shape)))
    return (targets - outputs) ** 2


SHAPES = [((ROWS,), (ROWS, 1)), ((ROWS, 1), (ROWS,)), ((ROWS, 4), (ROWS, 4, 1)), ((ROWS, 3), (ROWS, 3))]


@pytest.mark.parametrize(("targets", "outputs"), SHAPES, ids=str)
def test_a_function_of_the_config_gets_what_it_gets_in_fit(targets: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    """A last axis of length 1 that only one of them has."""
    y, x = (RNG.normal(size=shape).astype("float32") for shape in (targets, outputs))
    of_config = build_loss(Spec("test_losses:squared")).loss
    assert isinstance(of_config, LossOfFunction)
    assert of_config.name == "squared"
    model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Identity()])
    model.compile("sgd", squared)
    shapes.clear()
    expected = model.compute_loss(x, tf.constant(y), tf.constant(x), None)
    assert float(of_config(tf.constant(y), tf.constant(x))) == pytest.approx(float(expected), rel=1e-6)
    in_fit, here = shapes
    assert here == in_fit


WRONG = {
    "no outputs": (Spec("per_output"), "per_output needs a loss for each output"),
    "unknown key": (
        Spec("per_output", {"one": {"nam": "x"}}),
        "loss.options.one: nam: unknown key; did you mean",
    ),
    "no mapping": (
        Spec("per_output", {"one": 3}),
        "loss.options.one: expected a mapping of name, options, class_weight, target, ",
    ),
    "weight": (
        Spec("per_output", {"one": {**ENTROPY, "weight": "half"}}),
        "loss.options.one: weight: expected a number; received 'half'.",
    ),
    "unknown loss": (Spec("per_output", {"one": "crossentropy"}), "loss.options.one.name: Keras has no 'crossentropy'"),
    "option": (
        Spec("smoothed_sparse_categorical_crossentropy", {"smoothing": 1}),
        "got an unexpected keyword argument 'smoothing'; it takes: label_smoothing",
    ),
    "option of a class": (Spec("huber", {"delt": 1}), "loss.options: huber: got an unexpected keyword argument 'delt'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_one_line(name: str) -> None:
    spec, expected = WRONG[name]
    with pytest.raises(UserError) as found:
        build_loss(spec)
    assert expected in str(found.value)
    assert "\n" not in str(found.value)


TARGETS = {
    "numbers": LABELS,
    "a column of floats": tf.cast(LABELS[:, None], tf.float32),
    "floats that were computed": tf.cast(LABELS, tf.float32) - 1e-6,
    "one-hot": tf.one_hot(LABELS, 5),
}


def weights_by_class(by_class: dict[str, Any], targets: Any) -> list[float]:
    weights = build_loss(LossSpec("mean_squared_error", {}, by_class)).class_weights[None]
    return list(tf.function(lambda: weights(targets))().numpy().tolist())  # a graph converts fewer dtypes by itself


@pytest.mark.parametrize("name", TARGETS)
def test_a_record_has_the_weight_of_its_class(name: str) -> None:
    assert weights_by_class({"0": 2.5, "3": 0}, TARGETS[name]) == [2.5, 1.0, 1.0, 0.0, 1.0, 2.5]  # classes 0 1 2 3 4 0
    assert not build_loss(LossSpec("mean_squared_error")).class_weights


def test_a_label_below_0_has_no_class() -> None:
    assert weights_by_class({"0": 2.5, "1": 3}, tf.constant([-1, 0, 2])) == [1.0, 2.5, 1.0]


def test_each_output_has_classes_of_its_own() -> None:
    term = LossTerm("mean_squared_error", {}, {"0": 3})
    chosen = build_loss(Spec("per_output", {"one": vars(term) | {"target": "label"}, "other": ENTROPY}))
    (output,) = chosen.class_weights
    assert output == "one"
    assert chosen.class_weights["one"]({"label": LABELS}).numpy().tolist() == [3.0, 1.0, 1.0, 1.0, 1.0, 3.0]


UNFIT = {
    "a class for each pixel": (tf.zeros((6, 4, 4)), r"loss.class_weight needs a class for each record; .* \(4, 4\)"),
    "a class that one-hot has not": (tf.zeros((6, 5)), "there is no class 5; the target has 5 entries"),
    "several targets": ({"a": LABELS, "b": LABELS}, "loss.class_weight needs one target; there are a, b"),
    "no target": ({}, "loss.class_weight needs one target; there are none"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_targets_without_classes_are_refused(name: str) -> None:
    targets, expected = UNFIT[name]
    with pytest.raises(ValueError, match=expected):
        weights_by_class({"5": 2}, targets)


def test_a_label_for_each_of_several_places_is_no_class_of_the_record() -> None:
    weights = build_loss(LossSpec("mean_squared_error", {}, {"1": 3})).class_weights[None]
    assert weights(tf.constant([[0, 1], [1, 0]]), 2).numpy().tolist() == [3.0, 1.0]  # one-hot
    with pytest.raises(
        ValueError, match=r"loss.class_weight needs a class for each record; the target has shape \(2,\)"
    ):
        weights(tf.constant([[1, 1], [0, 2]]), 3)


def test_a_class_that_the_schema_excludes_is_refused() -> None:
    schema = Schema({"label": Feature("int64", classes=5)}, ("image",), ("label",), where="dataset.json")
    build_loss(LossSpec("mean_squared_error", {}, {"4": 2})).class_weights[None].check(schema)
    expected = "loss.class_weight: there is no class 5; dataset.json says that label has 5, from 0."
    with pytest.raises(UserError, match=re.escape(expected)):
        build_loss(LossSpec("mean_squared_error", {}, {"5": 2})).class_weights[None].check(schema)
    two = dataclasses.replace(schema, features={**schema.features, "kind": Feature("int64")}, targets=("label", "kind"))
    of_output: dict[str, Any] = {
        target: build_loss(Spec("per_output", {"one": {"name": "mse", "target": target, "class_weight": {"5": 2}}}))
        for target in two.targets
    }
    of_output["kind"].class_weights["one"].check(two)  # nothing is said of its classes
    with pytest.raises(UserError, match=r"^loss\.options\.one\.class_weight: there is no class 5; "):
        of_output["label"].class_weights["one"].check(two)


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def compiled(loss: Any, outputs: tuple[str, ...] = (), kind: type[keras.Model] = keras.Model) -> keras.Model:
    x = keras.Input((6,))
    named = {name: keras.layers.Dense(1, name=name)(x) for name in outputs}
    model = kind(x, named or keras.layers.Dense(1)(x))
    model.compile("sgd", loss)
    return model


@pytest.mark.parametrize(
    ("model", "spec", "expected"),
    [
        (
            lambda: compiled("mse"),
            LossSpec(AUTO, {"from_logits": True}),
            "loss.options: the model is compiled with a loss; give loss.name too.",
        ),
        (
            lambda: compiled({"a": "mse", "b": "mse"}, ("a", "b")),
            LossSpec(AUTO, class_weight={"0": 2}),
            "loss.class_weight: is for one loss; the model is compiled with one for each output.",
        ),
        (
            lambda: compiled("mse", ("a", "b"), OwnStep),
            LossSpec("per_output", {"a": {"name": "mse"}, "b": {"name": "mse", "class_weight": {"0": 2}}}),
            "loss.options.b.class_weight: has no effect, because the model's own train_step gets one weight for each "
            "record. Leave it out, or have the step weigh classes.",
        ),
    ],
)
def test_settings_that_a_loss_does_not_follow_are_one_line(
    model: Callable[[], keras.Model], spec: LossSpec, expected: str
) -> None:
    with pytest.raises(UserError) as error:
        compile_model(Config(model=ModelSpec("users:model"), loss=spec), model(), None)
    assert str(error.value) == expected


@pytest.mark.parametrize("in_list", [False, True])
def test_one_loss_compares_each_output_with_its_own_target_beside_a_metric_of_one(in_list: bool) -> None:
    x = keras.Input((5,))
    outputs = {name: keras.layers.Dense(1, name=name)(x) for name in "ab"}
    model = keras.Model(x, [*outputs.values()] if in_list else outputs)
    specs: Any = {name: tf.TensorSpec((None, 1)) for name in "ab"}
    of_a = MetricSpec("mean_absolute_error", output="a")
    config = Config(model=ModelSpec("users:model"), loss=LossSpec("mse"), metrics=(of_a,))
    compiled = compile_model(config, model, None)
    data_of = compiled.data_of([*specs.values()] if in_list else specs, has_weights=False, training=True)
    targets = {name: tf.fill((6, 1), value) for name, value in (("a", 1.0), ("b", 10.0))}
    (_, y) = data_of(Batch(LOGITS, targets, tf.ones(6), LABELS, tf.constant(6, tf.int64)))
    assert {name: float(target[0, 0]) for name, target in y.items()} == {"a": 1.0, "b": 10.0}


@pytest.mark.parametrize("from_logits", [True, False])
def test_one_hot_targets_are_no_labels(from_logits: bool) -> None:
    x = keras.Input((5,))
    model = keras.Model(x, keras.layers.Dense(3)(x))
    loss = LossSpec("sparse_categorical_crossentropy", {"from_logits": from_logits})
    compiled = compile_model(Config(model=ModelSpec("users:model"), loss=loss), model, None)
    options = ", options: {from_logits: true}" if from_logits else ""
    said = "y holds 3 values, as many as there are outputs. If it is one-hot, write loss: {name: categorical_crossen"
    with pytest.raises(UserError, match=re.escape(said + f"tropy{options}}}.")):
        compiled.check_loss(Schema({"y": Feature("float", (3,))}, ("x",), ("y",)))
    for shape in ((), (1,)):
        compiled.check_loss(Schema({"y": Feature("int64", shape)}, ("x",), ("y",)))


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", keras.losses.sparse_categorical_crossentropy])
def test_one_hot_targets_are_no_labels_of_a_compiled_loss_without_a_name(loss: Any) -> None:
    x = keras.Input((5,))
    model = keras.Model(x, keras.layers.Dense(3, "softmax")(x))
    model.compile("sgd", loss)
    compiled = compile_model(Config(model=ModelSpec("users:model")), model, None)
    said = "loss: sparse_categorical_crossentropy compares each record with the number of its class; y holds 3 values"
    with pytest.raises(UserError, match=said):
        compiled.check_loss(Schema({"y": Feature("float", (3,))}, ("x",), ("y",)))


@pytest.mark.parametrize("kind", LOSSES_OF_LABELS)
def test_every_loss_of_keras_that_takes_labels_is_trained_with_them(kind: type[keras.losses.Loss]) -> None:
    x = keras.Input((5,))
    model = keras.Model(x, keras.layers.Dense(3, "softmax")(x))
    is_sparse = kind is keras.losses.SparseCategoricalCrossentropy  # ignore_class: some are left out
    model.compile("sgd", kind(ignore_class=2) if is_sparse else kind())
    compiled = compile_model(Config(model=ModelSpec("users:model")), model, None)
    compiled.check_loss(Schema({"y": Feature("int64", ())}, ("x",), ("y",)))
    model.fit(LOGITS, tf.minimum(LABELS, 2), verbose=0)


def data_of(
    model: keras.Model, outputs: Any, targets: Any, loss: LossSpec, weights: Any = None, *, training: bool = True
) -> Any:
    compiled = compile_model(Config(model=ModelSpec("users:model"), loss=loss), model, None)
    given = compiled.data_of(outputs, has_weights=weights is not None, training=training)
    real = tf.ones(6)
    return given(Batch(LOGITS, targets, real if weights is None else weights, LABELS, tf.constant(6, tf.int64)))


@pytest.mark.parametrize("dtype", [tf.int64, tf.float32])
def test_one_target_is_the_labels_of_a_model_whose_one_output_has_a_name(dtype: tf.DType) -> None:
    x = keras.Input((5,))
    model = keras.Model(x, {"kind": keras.layers.Dense(3)(x)})
    labels = tf.cast(LABELS, dtype)
    (_, y) = data_of(model, {"kind": tf.TensorSpec((None, 3))}, labels, OF_LOGITS)
    assert y.numpy().tolist() == LABELS.numpy().tolist()
    if dtype.is_floating:
        with pytest.raises(tf.errors.InvalidArgumentError, match="a label that is no whole number"):
            data_of(model, {"kind": tf.TensorSpec((None, 3))}, labels + 0.5, OF_LOGITS)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("own", "shapes"), [((), ((6, 1), (6, 1))), (("train_step",), ((6,), (6, 1)))])
def test_steps_of_keras_get_the_weight_of_each_position_and_own_ones_that_of_each_record(
    own: tuple[str, ...], shapes: tuple[tuple[int, ...], tuple[int, ...]], training: bool
) -> None:
    """As `fit` hands over; a train_step of one's own leaves the test_step to Keras."""
    x = keras.Input((7, 2))
    kind = OwnStep if own else keras.Model
    model, weights = kind(x, keras.layers.Dense(2)(x)), tf.range(6.0)
    sequences = tf.TensorSpec((None, 7, 2))
    (_, _, given) = data_of(model, sequences, tf.zeros(6), LossSpec("mse"), weights, training=training)
    assert given.shape == shapes[0 if training else 1]
    assert tf.reshape(given, [-1]).numpy().tolist() == weights.numpy().tolist()


def test_classes_have_weights_in_training_only() -> None:
    """As in `fit`, whose validation has none."""
    by_class = LossSpec("mse", class_weight={"0": 3})
    for training in (True, False):
        outputs = tf.TensorSpec((None, 1))
        (_, _, *weights) = data_of(compiled("mse"), outputs, LABELS, by_class, training=training)
        assert [each.numpy().ravel().tolist() for each in weights] == [[3.0, 1.0, 1.0, 1.0, 1.0, 3.0]] * training


class InList(keras.Model):
    """Two outputs without names."""

    def call(self, x: Any) -> Any:
        return [x[:, :1], x[:, 1:2]]


def arranged(model: keras.Model) -> Any:
    """Return the targets that a model gets for two outputs in a list, of which "b" is compared with target "a"."""
    spec = LossSpec("per_output", {"a": {"name": "mse"}, "b": {"name": "mse", "target": "a"}})
    compiled = compile_model(Config(model=ModelSpec("users:model"), loss=spec), model, None)
    data_of = compiled.data_of([tf.TensorSpec((None, 1))] * 2, has_weights=False, training=True)
    targets = {name: tf.fill((6, 1), value) for name, value in (("a", 1.0), ("b", 10.0))}
    return data_of(Batch(LOGITS, targets, tf.ones(6), LABELS, tf.constant(6, tf.int64)))[1]


def test_an_output_in_a_list_has_the_target_that_the_config_names() -> None:
    x = keras.Input((5,))
    targets = arranged(keras.Model(x, [keras.layers.Dense(1, name=name)(x) for name in "ab"]))
    assert {name: float(target[0, 0]) for name, target in targets.items()} == {"a": 1.0, "b": 1.0}
    with pytest.raises(ValueError, match="target 'a' of 'b' needs outputs with names: return a dict of them"):
        arranged(InList())


def test_a_compiled_loss_is_kept_unless_the_config_names_one() -> None:
    model, huber = compiled("mse"), keras.losses.Huber()
    users = ModelSpec("users:model")
    compile_model(Config(model=users), model, None)
    assert model.loss == "mse"
    kept = compiled(huber)
    compile_model(Config(model=users, loss=LossSpec(AUTO, class_weight={"0": 2})), kept, None)
    assert kept.loss is huber
    compile_model(Config(model=users, loss=LossSpec("mean_absolute_error")), model, None)
    assert isinstance(model.loss, keras.losses.MeanAbsoluteError)


SMOOTHED = "smoothed_sparse_categorical_crossentropy"


@pytest.mark.parametrize(
    ("loss", "logits", "labels"),
    [
        (lambda: build_loss(Spec(SMOOTHED)).loss, True, True),
        (lambda: build_loss(Spec("categorical_focal_crossentropy")).loss, None, False),
        (lambda: build_loss(Spec("test_losses:squared")).loss, None, False),
        (lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True), True, True),
        (lambda: keras.losses.SparseCategoricalCrossentropy(), False, True),
        (lambda: keras.losses.SparseCategoricalCrossentropy(ignore_class=0), False, False),
        (lambda: keras.losses.sparse_categorical_crossentropy, False, True),
        (lambda: "sparse_categorical_crossentropy", False, True),
        (lambda: keras.losses.CategoricalCrossentropy(), False, False),
        (lambda: "BinaryCrossentropy", False, False),
        (lambda: keras.losses.MeanSquaredError(), None, False),
        (lambda: "mse", None, False),
    ],
)
def test_what_a_loss_compares_with_what_is_known(loss: Callable[[], Any], logits: bool | None, labels: bool) -> None:
    """Logits get a softmax where predictions have probabilities; a label is the number of an output."""
    assert (takes_logits(loss()), takes_labels(loss())) == (logits, labels)


def test_which_losses_take_one_class_for_each_record() -> None:
    of_one = (SMOOTHED, "sparse_categorical_crossentropy", "categorical_crossentropy", "categorical_focal_crossentropy")
    others = ("binary_crossentropy", "binary_focal_crossentropy", "mse", "test_losses:squared")
    assert {name: takes_one_class(build_loss(Spec(name)).loss) for name in (*of_one, *others)} == {
        **dict.fromkeys(of_one, True),
        **dict.fromkeys(others, False),
    }
    assert takes_one_class("categorical_crossentropy")


@pytest.mark.parametrize(
    ("last", "made_by"), [(tf.nn.softmax, "softmax"), (tf.nn.sigmoid, "sigmoid"), (tf.nn.relu, "")]
)
def test_probabilities_of_a_compiled_step_are_refused_for_a_loss_of_logits(
    last: Callable[[tf.Tensor], tf.Tensor], made_by: str
) -> None:
    step = tf.function(lambda x: refuse_logits(last(x), "any") or x, autograph=False)
    if made_by:
        with pytest.raises(ValueError, match=f"^loss any takes logits, but the model ends in a {made_by}, which"):
            step(LOGITS)
    else:
        step(LOGITS)


FROM_LOGITS = {"from_logits": True}
OF_LOGITS = LossSpec("sparse_categorical_crossentropy", FROM_LOGITS)
WRITE = "takes probabilities, but the model mlp returns logits; write {name: %s, options: {from_logits: true}}."


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, f"loss: sparse_categorical_crossentropy {WRITE % 'sparse_categorical_crossentropy'}"),
        ({"loss": LossSpec("BinaryCrossentropy")}, f"loss: BinaryCrossentropy {WRITE % 'BinaryCrossentropy'}"),
        ({"loss": OF_LOGITS, "metrics": (MetricSpec("auc"),)}, f"metrics: auc {WRITE % 'auc'}"),
        (
            {"loss": OF_LOGITS, "metrics": (MetricSpec("binary_accuracy"),)},
            "metrics: binary_accuracy takes probabilities, but the model mlp returns logits; write "
            "{name: binary_accuracy, options: {threshold: 0.0}}.",
        ),
        ({"loss": OF_LOGITS, "weighted_metrics": (MetricSpec("recall"),)}, "options: {thresholds: 0.0}}."),
        (
            {"loss": OF_LOGITS, "metrics": (MetricSpec("PrecisionAtRecall", {"recall": 0.5}),)},
            "mlp returns logits.",
        ),
        ({"loss": LossSpec("kl_divergence")}, "loss: kl_divergence takes probabilities, but the model mlp returns"),
    ],
)
def test_probabilities_of_a_built_in_model_are_refused(parts: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        refuse_probabilities(Config(model=ModelSpec("mlp"), **parts))
    refuse_probabilities(Config(model=ModelSpec("users:model"), **parts))


def test_logits_of_a_built_in_model_and_losses_of_numbers_are_taken() -> None:
    accepted = (OF_LOGITS, LossSpec("mean_squared_error"), LossSpec("users:loss"), LossSpec("per_output"))
    metrics = (
        MetricSpec("auc", FROM_LOGITS),
        MetricSpec("binary_accuracy", {"threshold": 0.0}),
        MetricSpec("precision", {"top_k": 2}),
        MetricSpec("sparse_categorical_accuracy"),
        MetricSpec("f1_score"),
    )
    for loss in accepted:
        refuse_probabilities(Config(model=ModelSpec("mlp"), loss=loss, metrics=metrics))
