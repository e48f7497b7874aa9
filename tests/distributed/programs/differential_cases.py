"""Small compiled models that `fit` trains, for the test that the trainer ends where `fit` does. No ranks, no trainer.

100 records, global batches of 16 in the order of the file: six full steps and one of four records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from differential_models import (
    Byol,
    Codebook,
    Contrastive,
    Counting,
    CountingRows,
    Distilled,
    Endpoint,
    Following,
    Gan,
    Normaliser,
    OfLosses,
    OverridesApply,
    OverridesApplyGradients,
    OverridesUpdateStep,
    OwnEvaluation,
    OwnMetric,
    OwnMetrics,
    OwnStep,
    Penalised,
    PrivateLoss,
    Scaling,
    Vae,
    WrapsAnother,
)
from keras import layers, losses, ops, optimizers
from keras.optimizers import schedules

ROWS, BATCH = 100, 16
_RNG = np.random.default_rng(0)


def _numbers(*shape: int) -> np.ndarray:
    return _RNG.normal(size=(ROWS, *shape)).astype(np.float32)


X, Y, LABELS = _numbers(5), _numbers(1), _RNG.integers(0, 3, ROWS)
BINARY, ONE_HOT = (_RNG.uniform(size=(ROWS, 1)) < 0.4).astype(np.float32), np.eye(3, dtype=np.float32)[LABELS]
WEIGHTS = _RNG.uniform(0.1, 3, ROWS).astype(np.float32)
TOKENS, TAGS = _RNG.integers(0, 6, (ROWS, 7)), _RNG.integers(0, 3, (ROWS, 7))
TOKENS[:, 0] = 1
TOKENS[::3, 2:] = 0  # a third of the records is short
HOLES = np.where(_RNG.uniform(size=TAGS.shape) < 0.4, -1, TAGS)
HOLES[:, 0] = 1
IMAGES = _numbers(4, 4, 1)

DATA: dict[str, tuple[dict[str, np.ndarray], tuple[str, ...], tuple[str, ...]]] = {
    "regression": ({"x": X, "y": Y, "w": WEIGHTS}, ("x",), ("y",)),
    "labels": ({"x": X, "y": LABELS, "w": WEIGHTS}, ("x",), ("y",)),
    "binary": ({"x": X, "y": BINARY, "w": WEIGHTS}, ("x",), ("y",)),
    "one_hot": ({"x": X, "y": ONE_HOT, "w": WEIGHTS}, ("x",), ("y",)),
    "tags": ({"x": TOKENS, "y": TAGS, "w": WEIGHTS}, ("x",), ("y",)),
    "holes": ({"x": TOKENS, "y": HOLES, "w": WEIGHTS}, ("x",), ("y",)),
    "two": ({"x": TOKENS, "tags": TAGS, "score": Y, "w": WEIGHTS}, ("x",), ("tags", "score")),
    "pair": ({"x": X, "a": Y, "b": _numbers(1), "w": WEIGHTS}, ("x",), ("a", "b")),
    "inputs": ({"z": X, "a": _numbers(5), "y": Y, "w": WEIGHTS}, ("z", "a"), ("y",)),
    "alone": ({"x": X}, ("x",), ()),
    "images": ({"x": IMAGES, "y": (IMAGES > 0.3).astype(np.float32)}, ("x",), ("y",)),
}
"""By name: the features, the inputs, the targets."""


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    build: Callable[[], keras.Model]
    data: str = "regression"
    weighted: bool = False
    """Whether the records have weights."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """More settings of the trainer."""
    fit: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `fit`."""
    weights_within: float = 2e-6
    """At 2 and 3 ranks, relative to the largest entry of each weight."""
    alone_within: float = 0.0
    """The same on one rank; more than 0 where `fit`, whose batches have no static size, runs other operations."""
    figures_within: float = 1e-5
    equal_on: tuple[int, ...] = (1, 2, 3)
    """The numbers of ranks on which it must end where `fit` does; on others ranks are equal to each other only."""
    refused: str = ""
    """Words of the message, if it is refused."""


def dense(
    loss: Any = "mse",
    outputs: int = 1,
    activation: str | None = None,
    optimizer: Callable[[], Any] = lambda: optimizers.Adam(0.01),
    extra: tuple[Callable[[], Any], ...] = (),
    hidden: Mapping[str, Any] | None = None,
    **compiled: Any,
) -> Callable[[], keras.Model]:
    """A small network. extra: layers after the first."""

    def build() -> keras.Model:
        first = layers.Dense(8, "tanh", **(hidden or {}))
        model = keras.Sequential(
            [keras.Input((5,)), first, *(make() for make in extra), layers.Dense(outputs, activation)]
        )
        arguments = {name: value() if callable(value) else value for name, value in compiled.items()}
        model.compile(
            optimizer(), loss() if isinstance(loss, type) or getattr(loss, "is_made", False) else loss, **arguments
        )
        return model

    return build


def made(make: Callable[[], Any]) -> Callable[[], Any]:
    """Mark a function that makes a loss, as against a loss that is a function."""
    make.is_made = True  # type: ignore[attr-defined]
    return make


def sequence(
    loss: Callable[[], Any],
    masking: str = "embedding",
    rate: float = 0.1,
    extra: Callable[[], Any] = layers.Identity,
    **compiled: Any,
) -> Callable[[], keras.Model]:
    """A recurrent network. extra: a layer before it, of tokens."""

    def build() -> keras.Model:
        given = keras.Input((7,), dtype="int32")
        tokens = extra()(given)
        if masking == "masking":
            values = layers.Embedding(6, 4)(tokens) * ops.cast(tokens[..., None] > 0, "float32")
            states = layers.Masking()(values)
        else:
            states = layers.Embedding(6, 4, mask_zero=masking == "embedding")(tokens)
        model = keras.Model(given, layers.Dense(3)(layers.LSTM(5, return_sequences=True)(states)))
        arguments = {name: value() for name, value in compiled.items()}
        model.compile(optimizers.SGD(rate), loss(), **arguments)
        return model

    return build


def two_outputs(form: str = "dict", loss: Any = None, **compiled: Any) -> Callable[[], keras.Model]:
    """One output masked, the other with a penalty of activities. form: of the outputs, "dict" or "list"."""

    def build() -> keras.Model:
        tokens = keras.Input((7,), dtype="int32")
        states = layers.LSTM(5, return_sequences=True)(layers.Embedding(6, 4, mask_zero=True)(tokens))
        tags = layers.Dense(3, name="tags")(states)
        pooled = layers.GlobalAveragePooling1D()(states)
        score = layers.Dense(1, name="score", activity_regularizer="l2", kernel_regularizer="l1")(pooled)
        outputs = {"tags": tags, "score": score} if form == "dict" else [tags, score]
        model = keras.Model(tokens, outputs)
        each = {"tags": losses.SparseCategoricalCrossentropy(from_logits=True), "score": "mse"}
        model.compile(optimizers.SGD(0.1), each, **compiled)
        return model

    return build


def pair(form: str = "dict", **compiled: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        x = keras.Input((5,))
        hidden = layers.Dense(8, "tanh")(x)
        a, b = layers.Dense(1, name="a")(hidden), layers.Dense(1, name="b")(hidden)
        model = keras.Model(x, {"a": a, "b": b} if form == "dict" else [a, b])
        model.compile(optimizers.Adam(0.01), **compiled)
        return model

    return build


def named_inputs() -> keras.Model:
    z, a = keras.Input((5,), name="z"), keras.Input((5,), name="a")
    hidden = layers.Dense(8, "tanh")(z) + layers.Dense(8, "relu")(a)
    model = keras.Model({"a": a, "z": z}, layers.Dense(1)(hidden))
    model.compile(optimizers.Adam(0.01), "mse")
    return model


def maps(loss: Any, metrics: list[Any] | None = None) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = keras.Sequential(
            [keras.Input((4, 4, 1)), layers.Conv2D(3, 3, padding="same"), layers.Conv2D(1, 1, activation="sigmoid")]
        )
        model.compile(optimizers.Adam(0.01), loss() if isinstance(loss, type) else loss, metrics=metrics)
        return model

    return build


def penalised_by_add_loss() -> keras.Model:
    x = keras.Input((5,))
    model = keras.Model(x, layers.Dense(1)(Penalised()(layers.Dense(8, "tanh")(x))))
    model.compile(optimizers.Adam(0.01), "mse")
    return model


def normalised() -> keras.Model:
    normalization = layers.Normalization()
    normalization.adapt(X)
    model = keras.Sequential([keras.Input((5,)), normalization, layers.Dense(8, "tanh"), layers.Dense(1)])
    model.compile(optimizers.Adam(0.01), "mse")
    return model


def squared(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


def one_number(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred) + 0.1 * ops.abs(y_pred))


def largest_error(y_true: Any, y_pred: Any) -> Any:
    return ops.max(ops.abs(y_true - y_pred), axis=-1)


def in_steps() -> schedules.LearningRateSchedule:
    return schedules.PiecewiseConstantDecay([2, 4], [0.05, 0.02, 0.01])


def reduced(name: str) -> Callable[[], Any]:
    return made(lambda: losses.MeanSquaredError(reduction=name))


def crossentropy(**options: Any) -> Callable[[], Any]:
    return lambda: losses.SparseCategoricalCrossentropy(from_logits=True, **options)


REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight")
ROUNDED: dict[str, Any] = {"alone_within": 2e-6}
"""Of recurrent layers, XLA and passes that are added up: rounded otherwise than in `fit`."""

BY_BATCH: dict[str, Any] = {"figures_within": 5e-3}
"""Of trackers that count each batch once: 33 and 34 records of a rank count alike, as batches do in `fit`."""


def masked(reduction: str, *, weighted: bool = False) -> Case:
    """A tagger; a sum over a hundred positions needs a smaller rate."""
    rate = 0.002 if reduction == "sum" else 0.1
    return Case(sequence(crossentropy(reduction=reduction), rate=rate), "tags", weighted, **ROUNDED)


CASES: dict[str, Case] = {
    "plain": Case(dense(metrics=["mae"])),
    **{f"reduction {name}": Case(dense(reduced(name))) for name in REDUCTIONS},
    **{f"reduction {name}, weights": Case(dense(reduced(name)), weighted=True) for name in REDUCTIONS},
    **{f"mask, {name}": masked(name) for name in REDUCTIONS},
    **{f"mask, {name}, weights": masked(name, weighted=True) for name in REDUCTIONS},
    "Masking": Case(sequence(crossentropy(), "masking", metrics=lambda: ["accuracy"]), "tags", **ROUNDED),
    "mask, metrics": Case(
        sequence(crossentropy(), metrics=lambda: ["accuracy"], weighted_metrics=lambda: ["accuracy"]),
        "tags",
        True,
        **ROUNDED,
    ),
    "ignore_class": Case(sequence(crossentropy(ignore_class=-1), "none"), "holes", **ROUNDED),
    "ignore_class, mask": Case(sequence(crossentropy(ignore_class=-1)), "holes", **ROUNDED),
    "two outputs, dict": Case(two_outputs(), "two", **ROUNDED),
    "two outputs, weights": Case(two_outputs(loss_weights={"tags": 2.0, "score": 0.5}), "two", True, **ROUNDED),
    "two outputs, list": Case(two_outputs("list"), "two", **ROUNDED),
    "one loss for two outputs": Case(pair(loss="mse"), "pair", weights_within=1e-5),
    "one loss for a list of outputs": Case(pair("list", loss="mse"), "pair", weights_within=1e-5),
    "two losses, metrics by output": Case(
        pair(loss={"a": "mse", "b": "mae"}, metrics={"a": ["mae"], "b": ["mse"]}, loss_weights={"a": 1, "b": 3}), "pair"
    ),
    "add_loss": Case(penalised_by_add_loss),
    "activity_regularizer": Case(dense(hidden={"activity_regularizer": "l2"})),
    "activity_regularizer, weights": Case(dense(hidden={"activity_regularizer": "l2"}), weighted=True),
    "kernel_regularizer": Case(dense(hidden={"kernel_regularizer": "l1", "bias_regularizer": "l2"})),
    "regularizer, sum": Case(dense(reduced("sum"), hidden={"kernel_regularizer": "l2"})),
    "constraint": Case(dense(hidden={"kernel_constraint": keras.constraints.MaxNorm(0.5)})),
    "own compute_loss": Case(lambda: Distilled.made(), "labels"),
    "own compute_loss, private sum": Case(lambda: PrivateLoss.made(), "labels"),
    "loss of losses": Case(sequence(OfLosses), "holes", **ROUNDED),
    "own train_step": Case(lambda: OwnStep.made()),
    "own train_step, weights": Case(lambda: OwnStep.made(), weighted=True),
    "own test_step": Case(lambda: OwnEvaluation.made()),
    "own compute_metrics": Case(lambda: OwnMetrics.made()),
    "function as loss": Case(dense(squared)),
    "loss of one number": Case(dense(one_number)),
    "function as metric": Case(dense(metrics=lambda: [largest_error, squared])),
    "short names": Case(
        dense("ce", 3, "softmax", metrics=lambda: ["accuracy", "sparse_categorical_crossentropy"]), "labels"
    ),
    "acc": Case(dense("binary_crossentropy", 1, "sigmoid", metrics=lambda: ["acc"]), "binary"),
    "weighted_metrics": Case(dense(metrics=lambda: ["mae"], weighted_metrics=lambda: ["mae", "mse"]), weighted=True),
    "metric that ignores weights": Case(dense(metrics=lambda: [OwnMetric(name="own")]), weighted=True),
    "metric that returns a dict": Case(dense(metrics=lambda: [OwnMetric(gives="dict", name="own")])),
    "Dice": Case(maps(losses.Dice), "images", equal_on=(1,)),
    "Tversky": Case(maps(losses.Tversky), "images", equal_on=(1,)),
    "maps": Case(maps("binary_crossentropy", [keras.metrics.AUC(), "accuracy"]), "images"),
    "class weights": Case(
        dense("sparse_categorical_crossentropy", 3, "softmax", weighted_metrics=lambda: ["accuracy"]),
        "labels",
        config={"loss": {"class_weight": {"0": 0.5, "2": 3.0}}},
        fit={"class_weight": {0: 0.5, 1: 1.0, 2: 3.0}},
    ),
    "named inputs": Case(named_inputs, "inputs"),
    "schedule": Case(dense(optimizer=lambda: optimizers.SGD(in_steps()))),
    "clipnorm": Case(dense(optimizer=lambda: optimizers.SGD(0.1, clipnorm=0.1))),
    "global_clipnorm": Case(
        dense(optimizer=lambda: optimizers.SGD(0.1, global_clipnorm=0.1)), **ROUNDED, weights_within=5e-6
    ),
    "clipvalue": Case(dense(optimizer=lambda: optimizers.SGD(0.1, clipvalue=0.05))),
    "use_ema": Case(dense(optimizer=lambda: optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3))),
    "gradient_accumulation_steps": Case(dense(optimizer=lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2))),
    "LossScaleOptimizer": Case(dense(optimizer=lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)))),
    "optimizer with its own update_step": Case(dense(optimizer=lambda: OverridesUpdateStep(0.1))),
    "optimizer with its own apply": Case(dense(optimizer=lambda: OverridesApply(0.1))),
    "optimizer with its own apply_gradients": Case(dense(optimizer=lambda: OverridesApplyGradients(0.1))),
    "optimizer that holds another": Case(dense(optimizer=lambda: WrapsAnother(optimizers.Adam(0.01)))),
    "BatchNormalization": Case(dense(extra=(layers.BatchNormalization,)), equal_on=(1,)),
    "BatchNormalization, synchronised": Case(
        dense(extra=(layers.BatchNormalization,)),
        config={"train": {"sync_batch_norm": True}},
        **ROUNDED,
        weights_within=2e-5,
        figures_within=1e-4,
    ),
    "BatchNormalization, synchronised, accumulated": Case(
        dense(extra=(layers.BatchNormalization,)),
        config={"train": {"sync_batch_norm": True, "accumulate_steps": 2}},
        equal_on=(),
    ),
    "layer that counts rows": Case(dense(extra=(CountingRows,)), config={"train": {"accumulate_steps": 3}}, **ROUNDED),
    "layer with a scale": Case(dense(extra=(Scaling,))),
    "layer with a counter": Case(dense(extra=(Counting,))),
    "layer with a counter, local": Case(
        dense(extra=(Counting,)),
        config={"train": {"synchronization": "local", "average_every_steps": 2}},
        equal_on=(1,),
    ),
    "layer that assigns in evaluations": Case(dense(extra=(Following,))),
    "SpectralNormalization": Case(dense(extra=(lambda: layers.SpectralNormalization(layers.Dense(6)),))),
    "Normalization": Case(normalised),
    "mixed_bfloat16": Case(dense(), config={"precision": "mixed_bfloat16"}, weights_within=2e-2, figures_within=5e-2),
    # A scale at which no gradient overflows: those of fewer records are larger.
    "mixed_float16": Case(
        dense(optimizer=lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=64.0)),
        config={"precision": "mixed_float16"},
        weights_within=5e-3,
        figures_within=2e-2,
    ),
    "XLA": Case(dense(metrics=lambda: ["mae"]), config={"jit_compile": True}, **ROUNDED),
    "XLA, mask": Case(
        sequence(crossentropy(), metrics=lambda: ["accuracy"]), "tags", config={"jit_compile": True}, **ROUNDED
    ),
    "XLA, sum": Case(dense(reduced("sum")), weighted=True, config={"jit_compile": True}, **ROUNDED),
    "XLA, own train_step": Case(lambda: OwnStep.made(), config={"jit_compile": True}, refused="jit_compile"),
    "accumulated": Case(dense(), config={"train": {"accumulate_steps": 2}}, **ROUNDED, weighted=True),
    "accumulated in uneven passes": Case(dense(), config={"train": {"accumulate_steps": 3}}, **ROUNDED, weighted=True),
    "accumulated, uneven, mask": Case(
        sequence(crossentropy()), "tags", True, config={"train": {"accumulate_steps": 3}}, **ROUNDED
    ),
    "accumulated, mask": Case(
        sequence(crossentropy()), "tags", True, config={"train": {"accumulate_steps": 2}}, **ROUNDED
    ),
    "accumulated, sum": Case(dense(reduced("sum")), config={"train": {"accumulate_steps": 2}}, **ROUNDED),
    "accumulated, own train_step": Case(lambda: OwnStep.made(), config={"train": {"accumulate_steps": 2}}, **ROUNDED),
    "VAE": Case(lambda: Vae.made(), "alone", **ROUNDED, **BY_BATCH),
    "GAN": Case(lambda: Gan.made(), "alone", **BY_BATCH),
    "contrastive": Case(lambda: Contrastive.made(), "alone", equal_on=(1,)),
    "VQ-VAE": Case(lambda: Codebook.made(), "alone", equal_on=(1,)),
    "endpoint layer": Case(lambda: Endpoint.made(), "inputs"),
    "BYOL": Case(lambda: Byol.made(), "alone", **BY_BATCH),
    "batch normalised by hand": Case(lambda: Normaliser.made(), equal_on=(1,)),
}


def _optimizer_cases() -> dict[str, Case]:
    names = (
        *("SGD", "RMSprop", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam", "Ftrl", "Lion", "Lamb"),
        "ScheduleFreeAdamW",
    )
    found = [name for name in names if hasattr(optimizers, name)]

    def optimizer(name: str) -> Callable[[], Any]:
        return lambda: getattr(optimizers, name)(learning_rate=0.01)

    # Lion takes the sign of an average, so that a last bit of a gradient near 0 may move a weight by twice the rate.
    return {
        f"optimizer {name}": Case(dense(optimizer=optimizer(name)), weights_within=1e-2 if name == "Lion" else 1e-5)
        for name in found
    }


CASES |= _optimizer_cases()
