"""More cases for differential.py: every metric, loss and optimizer class of Keras, layers with state, schedules.

`CASES` and `DATA` hold those of differential_cases too. What can share a model shares a case, such as all metrics that
fit the same outputs, so that a launch traces few models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import differential_cases as first
import keras
import numpy as np
import tensorflow as tf
from differential_cases import (
    LABELS,
    ONE_HOT,
    REDUCTIONS,
    ROUNDED,
    ROWS,
    WEIGHTS,
    Case,
    X,
    Y,
    crossentropy,
    dense,
)
from differential_models import Auxiliary, Contrastive, LeavesOut, OwnStep, Penalised, network
from differential_refused import COMBINED, REFUSED
from keras import layers, losses, metrics, ops, optimizers
from keras.optimizers import schedules

_RNG = np.random.default_rng(1)

POSITIVE = np.exp(0.3 * _RNG.normal(size=(ROWS, 3))).astype(np.float32)
SEVERAL_LABELS = (_RNG.uniform(size=(ROWS, 3)) < 0.4).astype(np.float32)
VALUES = _RNG.normal(size=(ROWS, 3)).astype(np.float32)
IDS = _RNG.integers(100, 112, (ROWS, 4))

# ---- metrics

METRICS: dict[str, tuple[str, str, tuple[tuple[str, Mapping[str, Any]], ...]]] = {
    "of values": (
        "values",
        "linear",
        tuple(
            (name, {})
            for name in (
                *("MeanSquaredError", "RootMeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError"),
                *("LogCoshError", "CosineSimilarity", "R2Score", "Hinge", "SquaredHinge"),
                *("ConcordanceCorrelation", "PearsonCorrelation"),
            )
        ),
    ),
    "of positive values": ("positive", "softplus", (("Poisson", {}), ("MeanSquaredLogarithmicError", {}))),
    "of a yes or no": (
        "binary",
        "sigmoid",
        (
            *(
                (name, {})
                for name in ("BinaryAccuracy", "BinaryCrossentropy", "BinaryIoU", "AUC", "Precision", "Recall")
            ),
            *((name, {}) for name in ("TruePositives", "TrueNegatives", "FalsePositives", "FalseNegatives")),
            ("AUC", {"curve": "PR", "num_thresholds": 20}),
            ("Precision", {"thresholds": [0.3, 0.6]}),
            ("SensitivityAtSpecificity", {"specificity": 0.5}),
            ("SpecificityAtSensitivity", {"sensitivity": 0.5}),
            ("PrecisionAtRecall", {"recall": 0.5}),
            ("RecallAtPrecision", {"precision": 0.4}),
        ),
    ),
    "of several labels": (
        "several",
        "sigmoid",
        (
            ("AUC", {"multi_label": True}),
            ("F1Score", {"threshold": 0.5}),
            ("FBetaScore", {"beta": 0.5, "average": "micro", "threshold": 0.5}),
            ("BinaryAccuracy", {"threshold": 0.4}),
        ),
    ),
    "of classes, one-hot": (
        "one_hot",
        "softmax",
        (
            *((name, {}) for name in ("CategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge")),
            *((name, {}) for name in ("KLDivergence", "Accuracy")),
            ("TopKCategoricalAccuracy", {"k": 2}),
            *(("F1Score", {"average": average}) for average in (None, "micro", "macro", "weighted")),
            ("FBetaScore", {"beta": 2.0, "average": "macro"}),
            ("OneHotIoU", {"num_classes": 3, "target_class_ids": [0, 2]}),
            ("OneHotMeanIoU", {"num_classes": 3}),
            ("Precision", {"top_k": 1, "class_id": 1}),
        ),
    ),
    "of classes, numbered": (
        "labels",
        "softmax",
        (
            *((name, {}) for name in ("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy")),
            ("SparseTopKCategoricalAccuracy", {"k": 2}),
            ("IoU", {"num_classes": 3, "target_class_ids": [1], "sparse_y_pred": False}),
            ("MeanIoU", {"num_classes": 3, "sparse_y_pred": False}),
        ),
    ),
}
"""Title: data, activation of the output, and the classes with their options."""

WITHOUT_TARGETS = {"Mean", "Sum", "MeanMetricWrapper", "Metric"}
"""Metrics that compile cannot take: base classes, and trackers, which "layer with trackers" has."""


def with_metrics(title: str) -> Callable[[], keras.Model]:
    """Each metric of the title twice: as it is, and weighted."""
    data, activation, classes = METRICS[title]

    def all_of(words: str) -> list[Any]:
        return [
            getattr(metrics, name)(name=f"{words}{name.lower()}_{number}", **options)
            for number, (name, options) in enumerate(classes)
        ]

    loss = {"one_hot": "categorical_crossentropy", "labels": "sparse_categorical_crossentropy"}.get(data, "mse")
    outputs = 1 if data == "binary" else 3
    return dense(loss, outputs, activation, metrics=lambda: all_of(""), weighted_metrics=lambda: all_of("with_"))


class Largest(keras.metrics.Metric):
    """The largest error; a state that is no sum."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.largest = self.add_variable((), keras.initializers.Constant(-np.inf), name="largest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(ops.cast(y_true, "float32") - y_pred))))

    def result(self) -> Any:
        return self.largest


class ByColumn(keras.metrics.Metric):
    """Errors of each output, a vector; counts rows in an integer."""

    def __init__(self, name: str = "by_column") -> None:
        super().__init__(name=name)
        self.total = self.add_variable((3,), "zeros", name="total")
        self.rows = self.add_variable((), "zeros", dtype="int32", name="rows")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.sum(ops.abs(y_true - y_pred), axis=0))
        self.rows.assign_add(ops.shape(y_pred)[0])

    def result(self) -> Any:
        return self.total / ops.cast(self.rows, "float32")


# ---- losses

LOSSES: dict[str, tuple[np.ndarray, str, Callable[..., Any]]] = {
    **{
        name: (VALUES, "linear", getattr(losses, name))
        for name in (
            *("MeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError", "Huber", "LogCosh"),
            *("CosineSimilarity", "Hinge", "SquaredHinge"),
        )
    },
    "MeanSquaredLogarithmicError": (POSITIVE, "softplus", losses.MeanSquaredLogarithmicError),
    "Poisson": (POSITIVE, "softplus", losses.Poisson),
    "BinaryCrossentropy": (SEVERAL_LABELS, "sigmoid", losses.BinaryCrossentropy),
    "BinaryFocalCrossentropy": (SEVERAL_LABELS, "sigmoid", losses.BinaryFocalCrossentropy),
    **{
        name: (ONE_HOT, "softmax", getattr(losses, name))
        for name in (*("CategoricalCrossentropy", "CategoricalFocalCrossentropy", "CategoricalHinge", "KLDivergence"),)
    },
    "SparseCategoricalCrossentropy": (LABELS, "softmax", losses.SparseCategoricalCrossentropy),
    "CategoricalGeneralizedCrossEntropy": (LABELS, "softmax", losses.CategoricalGeneralizedCrossEntropy),
}
"""By class: targets, activation of the output, and the class. Those over a whole batch have cases of their own."""

OVER_A_BATCH = {"Dice", "Tversky", "Circle"}
ELSEWHERE = {"CTC", "Loss"}


def with_losses(reduction: str = "sum_over_batch_size") -> Callable[[], keras.Model]:
    """An output for each loss class."""

    def build() -> keras.Model:
        x = keras.Input((5,))
        hidden = layers.Dense(8, "tanh")(x)
        outputs = {name: layers.Dense(3, activation, name=name)(hidden) for name, (_, activation, _) in LOSSES.items()}
        model = keras.Model(x, outputs)
        each = {name: make(reduction=reduction) for name, (_, _, make) in LOSSES.items()}
        # Errors in percent of targets near 0 would leave nothing to the others.
        scale = 1.0 / ROWS if reduction == "sum" else 1.0
        weights = {name: scale * (1e-3 if name == "MeanAbsolutePercentageError" else 1.0) for name in LOSSES}
        model.compile(optimizers.SGD(0.05), each, loss_weights=weights)
        return model

    return build


def dice_of_records() -> keras.Model:
    return first.maps(losses.Dice(axis=(1, 2, 3)))()


def constant_behind_dropout() -> keras.Model:
    """Its loss is log 3 whatever time steps dropout leaves out, if it is divided by those that remain."""
    tokens = keras.Input((7,), dtype="int32")
    values = layers.Dropout(0.5, noise_shape=(None, 7, 1))(layers.Embedding(6, 4)(tokens))
    model = keras.Model(tokens, layers.Dense(3, kernel_initializer="zeros")(layers.Masking()(values)))
    model.compile(optimizers.SGD(0.0), losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def ctc() -> keras.Model:
    tokens = keras.Input((7,), dtype="int32")
    model = keras.Model(tokens, layers.Dense(4, "softmax")(layers.Embedding(6, 4)(tokens)))
    model.compile(optimizers.SGD(0.1), losses.CTC())
    return model


# ---- optimizers


def of_each(name: str) -> Callable[[], Any]:
    return lambda: getattr(optimizers, name)(learning_rate=0.01)


def two_optimizers() -> Any:
    chosen = {2: optimizers.Adam(0.01), 1: optimizers.SGD(0.1)}
    found = optimizers.MultiOptimizer(lambda variable: chosen[len(variable.shape)])
    found._inner_optimizers.extend(chosen.values())  # as it does where it is given a map
    return found


SCHEDULES: dict[str, Callable[[], Any]] = {
    "CosineDecay": lambda: schedules.CosineDecay(0.02, 7, warmup_target=0.1, warmup_steps=3),
    "CosineDecayRestarts": lambda: schedules.CosineDecayRestarts(0.1, 3),
    "ExponentialDecay": lambda: schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True),
    "InverseTimeDecay": lambda: schedules.InverseTimeDecay(0.1, 2, 0.5),
    "PolynomialDecay": lambda: schedules.PolynomialDecay(0.1, 5, power=2.0),
}


def scheduled(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: optimizers.SGD(make())


# ---- layers


class Tracking(layers.Layer):
    """Keeps the mean and the sum of what passes, in metrics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.sum = metrics.Mean("passed_mean"), metrics.Sum("passed_sum")

    def call(self, inputs: Any) -> Any:
        self.mean.update_state(inputs)
        self.sum.update_state(inputs)
        return inputs


def looked_up(lookup: Callable[[], Any]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        ids = keras.Input((4,), dtype="int64")
        states = layers.Flatten()(layers.Embedding(16, 3)(lookup()(ids)))
        model = keras.Model(ids, layers.Dense(1)(states))
        model.compile(optimizers.SGD(0.1), "mse")
        return model

    return build


def over_tokens(
    middle: Callable[[Any], Any], optimizer: Callable[[], Any] = lambda: optimizers.SGD(0.1)
) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        tokens = keras.Input((7,), dtype="int32")
        states = middle(layers.Embedding(6, 4, mask_zero=True)(tokens))
        model = keras.Model(tokens, layers.Dense(3)(states))
        model.compile(optimizer(), crossentropy()(), metrics=["accuracy"], weighted_metrics=["accuracy"])
        return model

    return build


def discretized() -> keras.Model:
    x = keras.Input((5,))
    bins = layers.Discretization(bin_boundaries=[-1.0, 0.0, 1.0])(x)
    codes = layers.CategoryEncoding(4, "multi_hot")(bins)
    model = keras.Model(x, layers.Dense(1)(layers.LayerNormalization()(layers.Dense(6)(codes))))
    model.compile(optimizers.Adam(0.01), "mse")
    return model


def frozen_and_shared() -> keras.Model:
    first_input, second_input = keras.Input((5,), name="z"), keras.Input((5,), name="a")
    shared, frozen = layers.Dense(8, "tanh", kernel_regularizer="l2"), layers.Dense(8, "relu")
    frozen.trainable = False
    outputs = layers.Dense(1)(layers.Concatenate()([shared(first_input), shared(second_input), frozen(first_input)]))
    model = keras.Model([first_input, second_input], outputs)
    model.compile(optimizers.Adam(0.01), "mse")
    return model


class DenseEmbedding(layers.Embedding):
    """Whose gradient is dense: Keras' Adam squares the rows of a sparse one before it adds those of one token up."""

    def call(self, inputs: Any) -> Any:
        return ops.matmul(ops.one_hot(inputs, self.input_dim), self.embeddings)


def embedded_in_adam(embedding: type[layers.Embedding] = DenseEmbedding) -> keras.Model:
    ids = keras.Input((7,), dtype="int32")
    model = keras.Model(ids, layers.Dense(3)(embedding(6, 4)(ids)))
    model.compile(optimizers.Adam(0.01), crossentropy()())
    return model


# ---- models with methods of their own


class Siamese(keras.Model):
    """Two records of the same kind lie near each other; the loss function returns one number (keras.io's siamese)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = keras.Sequential([keras.Input((5,)), layers.Dense(8, "tanh"), layers.Dense(3)])

    @classmethod
    def made(cls) -> keras.Model:
        model = cls()
        model({"z": np.zeros((1, 5), np.float32), "a": np.zeros((1, 5), np.float32)})
        model.compile(optimizers.Adam(0.01), contrast, metrics=[within_margin])
        return model

    def call(self, inputs: Any) -> Any:
        apart = ops.square(self.encode(inputs["z"]) - self.encode(inputs["a"]))
        return ops.sqrt(ops.sum(apart, axis=-1, keepdims=True) + 1e-6)


def contrast(y_true: Any, y_pred: Any) -> Any:
    alike = ops.cast(y_true > 0, "float32")
    return ops.mean(alike * ops.square(y_pred) + (1 - alike) * ops.square(ops.maximum(1 - y_pred, 0)))


def within_margin(y_true: Any, y_pred: Any) -> Any:
    return ops.cast(ops.equal(y_true > 0, y_pred < 0.5), "float32")


class PenalisedOwnLoss(keras.Model):
    """compute_loss of its own, over that of compile, and a loss that a layer adds."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.penalised = network(), Penalised()

    @classmethod
    def made(cls) -> keras.Model:
        model = cls()
        model(np.zeros((1, 5), np.float32))
        model.compile(optimizers.Adam(0.01), "mae", metrics=["mse"])
        return model

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.penalised(self.network(inputs, training=training))

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        smooth = ops.mean(ops.square(y_pred - ops.mean(x, axis=-1, keepdims=True)))
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.1 * smooth


class AsksForTraining(PenalisedOwnLoss):
    """compute_loss of its own that is another in training, and has shape [1]."""

    def compute_loss(  # type: ignore[override]
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = False
    ) -> Any:
        loss = keras.Model.compute_loss(self, x, y, y_pred, sample_weight, training=training)
        return ops.reshape(loss + ops.mean(ops.square(y_pred)) if training else loss, (1,))


class GatheredContrastive(Contrastive):
    """In-batch negatives of all ranks; even shares are needed, see docs/models.md."""

    gathers = False

    def _figures(self, data: Any, training: bool) -> tuple[Any, dict[str, Any]]:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        encoded = [self(x, training=training), self(x + 0.1 * ops.sin(37.0 * x), training=training)]
        size = 1
        if self.gathers:
            import horovod_train.keras as hvd

            encoded, size = [hvd.allgather(each) for each in encoded], hvd.size()
        likeness = ops.matmul(encoded[0], ops.transpose(encoded[1]))
        own = losses.sparse_categorical_crossentropy(ops.arange(ops.shape(likeness)[0]), likeness, from_logits=True)
        loss = ops.mean(own)
        self.loss_tracker.update_state(loss)
        return (size if training else 1) * loss, {"own_loss": self.loss_tracker.result()}


class ClipsByHand(OwnStep):
    """A train_step that clips gradients by their norm before the optimizer has them: by that of each rank."""

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss, figures = self._figures(data, True)
        gradients = tape.gradient(loss, self.trainable_variables)
        clipped, _ = tf.clip_by_global_norm(gradients, 0.05)
        self.optimizer.apply_gradients(zip(clipped, self.trainable_variables, strict=True))
        return figures


DATA: dict[str, tuple[dict[str, np.ndarray], tuple[str, ...], tuple[str, ...]]] = {
    **first.DATA,
    "values": ({"x": X, "y": VALUES, "w": WEIGHTS}, ("x",), ("y",)),
    "positive": ({"x": X, "y": POSITIVE, "w": WEIGHTS}, ("x",), ("y",)),
    "several": ({"x": X, "y": SEVERAL_LABELS, "w": WEIGHTS}, ("x",), ("y",)),
    "ids": ({"x": IDS, "y": Y}, ("x",), ("y",)),
    "strings": ({"x": np.array([f"id {number}" for number in IDS[:, 0]])[:, None], "y": Y}, ("x",), ("y",)),
    "sounds": ({"x": first.TOKENS, "y": _RNG.integers(1, 4, (ROWS, 2))}, ("x",), ("y",)),
    "losses": (
        {"x": X, "w": WEIGHTS, **{name: targets for name, (targets, _, _) in LOSSES.items()}},
        ("x",),
        tuple(LOSSES),
    ),
}

_ACCUMULATED: Mapping[str, Any] = {"config": {"train": {"accumulate_steps": 2}}, **ROUNDED}

MORE: dict[str, Case] = {
    **{f"metrics {title}": Case(with_metrics(title), data, True, **ROUNDED) for title, (data, _, _) in METRICS.items()},
    "metrics of states that are no sums": Case(
        dense(outputs=3, metrics=lambda: [Largest(), ByColumn()]), "values", True, **ROUNDED
    ),
    "metric over an output of a list": Case(
        first.pair("list", loss=["mse", "mae"], metrics=[["mae"], ["mse"]], loss_weights=[1.0, 0.5]), "pair"
    ),
    "loss of one output only": Case(first.pair(loss={"a": "mse", "b": None}), "pair"),
    "a metric of one output only": Case(
        first.pair(loss="mse", metrics={"b": ["mae"]}, weighted_metrics={"a": ["mae"]}), "pair", True
    ),
    **{
        f"losses, {name}": Case(with_losses(name), "losses", True, **ROUNDED, weights_within=5e-6)
        for name in REDUCTIONS
    },
    "losses without weights": Case(with_losses(), "losses", **ROUNDED),
    "CTC": Case(ctc, "sounds", **ROUNDED),
    "Dice of each record": Case(dice_of_records, "images"),
    "accumulated, add_loss": Case(first.penalised_by_add_loss, **_ACCUMULATED),
    "accumulated, activity_regularizer": Case(dense(hidden={"activity_regularizer": "l2"}), **_ACCUMULATED),
    "accumulated, global_clipnorm": Case(
        dense(optimizer=lambda: optimizers.SGD(0.1, global_clipnorm=0.1)), weighted=True, **_ACCUMULATED
    ),
    "accumulated, a mask of training": Case(
        first.sequence(first.crossentropy(), extra=LeavesOut), "tags", True, **_ACCUMULATED
    ),
    "accumulated, a mask of dropout": Case(constant_behind_dropout, "tags", **_ACCUMULATED),
    "accumulated, outputs of training": Case(Auxiliary.made, "labels", True, **_ACCUMULATED),
    "accumulated, two outputs": Case(first.two_outputs(), "two", True, **_ACCUMULATED),
    "class weights, one-hot": Case(
        dense("categorical_crossentropy", 3, "softmax", metrics=lambda: ["accuracy"]),
        "one_hot",
        config={"loss": {"class_weight": {"1": 4.0}}},
        fit={"class_weight": {0: 1.0, 1: 4.0, 2: 1.0}},
    ),
    "optimizer Adam": Case(dense()),
    "optimizer Muon": Case(dense(optimizer=of_each("Muon")), weights_within=1e-5),
    "optimizer MultiOptimizer": Case(dense(optimizer=two_optimizers)),
    "optimizer with a loss scale": Case(dense(optimizer=lambda: optimizers.SGD(0.1, loss_scale_factor=128.0))),
    "optimizer with weight decay": Case(dense(optimizer=lambda: optimizers.SGD(0.1, weight_decay=0.1))),
    **{f"schedule {name}": Case(dense(optimizer=scheduled(make))) for name, make in SCHEDULES.items()},
    "several steps in a call": Case(dense(steps_per_execution=3, metrics=["mae"])),
    "layer with trackers": Case(dense(extra=(Tracking,))),
    "Hashing": Case(looked_up(lambda: layers.Hashing(16)), "ids", **ROUNDED),
    "IntegerLookup": Case(looked_up(lambda: layers.IntegerLookup(vocabulary=[*range(100, 110)])), "ids", **ROUNDED),
    "Discretization, CategoryEncoding": Case(discretized, **ROUNDED),
    "frozen and shared layers": Case(frozen_and_shared, "inputs", **ROUNDED),
    "Embedding, Adam": Case(
        # Adam divides its first small gradients by their own size.
        embedded_in_adam,
        "tags",
        True,
        **ROUNDED,
        weights_within=5e-6,
    ),
    "mask, GRU both ways": Case(
        over_tokens(lambda states: layers.Bidirectional(layers.GRU(3, return_sequences=True))(states)),
        "tags",
        True,
        **ROUNDED,
    ),
    "mask, attention": Case(
        over_tokens(lambda states: layers.MultiHeadAttention(2, 4, use_bias=False)(states, states)),
        "tags",
        True,
        **ROUNDED,
    ),
    "siamese": Case(Siamese.made, "inputs"),
    "own compute_loss over add_loss": Case(PenalisedOwnLoss.made),
    "own compute_loss, weights": Case(PenalisedOwnLoss.made, weighted=True),
    "XLA, own compute_loss that asks for training": Case(AsksForTraining.made, config={"jit_compile": True}, **ROUNDED),
    "contrastive, gathered": Case(GatheredContrastive.made, "alone", **ROUNDED, equal_on=(1, 2)),
    "own train_step that clips": Case(ClipsByHand.made, equal_on=(1,)),
}

CASES: dict[str, Case] = {**first.CASES, **MORE, **COMBINED, **REFUSED}


def uncovered() -> dict[str, Sequence[str]]:
    """The classes of Keras that no case has, by their module."""
    with_a_case = {
        "metrics": {name for _, _, classes in METRICS.values() for name, _ in classes} | WITHOUT_TARGETS,
        "losses": {*LOSSES} | OVER_A_BATCH | ELSEWHERE,
        "optimizers": {name.removeprefix("optimizer ") for name in CASES} | {"LossScaleOptimizer", "Optimizer"},
        "schedules": {*SCHEDULES, "PiecewiseConstantDecay", "LearningRateSchedule"},
    }
    modules = {"metrics": metrics, "losses": losses, "optimizers": optimizers, "schedules": schedules}
    bases = {
        "metrics": metrics.Metric,
        "losses": losses.Loss,
        "optimizers": optimizers.Optimizer,
        "schedules": schedules.LearningRateSchedule,
    }
    return {
        kind: sorted(
            name
            for name, found in vars(module).items()
            if inspect.isclass(found) and issubclass(found, bases[kind]) and name not in with_a_case[kind]
        )
        for kind, module in modules.items()
    }
