"""Random cases for differential.py: what a case of differential_cases has one of at a time, drawn together by a seed.

`case_of("random 17")` is the same case on every rank and in every run. Left out is what differs from `fit` for a reason
that docs/training.md gives, what `fit` refuses, and weights whose gradient is zero but for rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from differential_cases import REDUCTIONS, Case, squared
from differential_models import Counting, Following, OwnMetric, Penalised, Scaling
from differential_more import CASES, GatheredContrastive, embedded_in_adam
from keras import layers, losses, metrics, ops, optimizers
from keras.optimizers import schedules

WITHIN = 5e-4
"""Of the largest entry of each weight, and of figures. Small entries may be sums of large ones, which are rounded."""


def case_of(name: str) -> Case:
    return CASES[name] if name in CASES else drawn(int(name.removeprefix("random ")))


def build(case: str) -> keras.Model:
    """What a config names: model: {name: differential_random:build, options: {case: NAME}}."""
    if case == "Embedding, Adam":
        return embedded_in_adam(layers.Embedding)  # rows of a sparse gradient are added up, as if it were dense
    model = case_of(case).build()
    if isinstance(model, GatheredContrastive):
        model.gathers = True  # `fit` runs on one rank, which has none to gather from
    return model


class Whole(keras.Model):
    """A subclass around a functional model."""

    def __init__(self, inner: keras.Model) -> None:
        super().__init__()
        self.inner = inner

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.inner(inputs, training=training)


class AddsLoss(Whole):
    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = super().call(inputs, training=training)
        self.add_loss(0.1 * sum(ops.mean(ops.square(each)) for each in keras.tree.flatten(outputs)))
        return outputs


class OwnLoss(Whole):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight, training=training)
        return loss + 0.1 * sum(ops.mean(ops.abs(each)) for each in keras.tree.flatten(y_pred))


class OwnFigures(Whole):
    def __init__(self, inner: keras.Model) -> None:
        super().__init__(inner)
        self.size = metrics.Mean("size_of_outputs")

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        figures = super().compute_metrics(x, y, y_pred, sample_weight)
        for each in keras.tree.flatten(y_pred):
            self.size.update_state(ops.abs(each))
        return {**figures, "size_of_outputs": self.size.result()}


class OwnTraining(Whole):
    """Its train_step shows what Keras' does."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.optimizer.scale_loss(self.compute_loss(x, y, outputs, weights))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return self.figures(x, y, outputs, weights, loss)

    def figures(self, x: Any, y: Any, outputs: Any, weights: Any, loss: Any) -> dict[str, Any]:
        return self.compute_metrics(x, y, outputs, weights)


class OwnTracker(OwnTraining):
    """Shows a tracker of its own; `fit` wants metrics of compile to be updated in training."""

    def __init__(self, inner: keras.Model) -> None:
        super().__init__(inner)
        self.tracker = metrics.Mean("tracked")

    def figures(self, x: Any, y: Any, outputs: Any, weights: Any, loss: Any) -> dict[str, Any]:
        self.tracker.update_state(loss, sample_weight=ops.shape(keras.tree.flatten(x)[0])[0])
        return {"tracked": self.tracker.result()}


class OwnTesting(Whole):
    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        return self.compute_metrics(x, y, self(x, training=False), weights)


WRAPS = (None, None, Whole, AddsLoss, OwnLoss, OwnFigures, OwnTraining, OwnTracker, OwnTesting)
HIDDEN: dict[str, Callable[[], Any]] = {
    "tanh": lambda: layers.Dense(6, "tanh"),
    "relu": lambda: layers.Dense(6, "relu"),
    "regularizers": lambda: layers.Dense(6, "tanh", kernel_regularizer="l2", activity_regularizer="l2"),
    "constraint": lambda: layers.Dense(6, "tanh", kernel_constraint=keras.constraints.MaxNorm(0.5)),
    "frozen": lambda: layers.Dense(6, "tanh", trainable=False),
    "LayerNormalization": lambda: layers.LayerNormalization(center=False),
    "Penalised": Penalised,
}
WITH_STATE: dict[str, Callable[[], Any]] = {"Scaling": Scaling, "Counting": Counting, "Following": Following}
RECURRENT: tuple[Callable[[], Any], ...] = (
    lambda: layers.LSTM(5, return_sequences=True),
    lambda: layers.GRU(5, return_sequences=True),
    lambda: layers.Bidirectional(layers.SimpleRNN(3, return_sequences=True)),
)
OPTIMIZERS: dict[str, Callable[[float], Any]] = {
    "SGD": optimizers.SGD,
    "momentum": lambda rate: optimizers.SGD(rate, momentum=0.9),
    "nesterov": lambda rate: optimizers.SGD(rate, momentum=0.9, nesterov=True),
    "schedule": lambda rate: optimizers.SGD(schedules.ExponentialDecay(rate, 2, 0.5)),
    "decay": lambda rate: optimizers.SGD(rate, weight_decay=0.1),
    "EMA": lambda rate: optimizers.SGD(rate, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
    "accumulated": lambda rate: optimizers.SGD(rate, gradient_accumulation_steps=2),
    "scaled": lambda rate: optimizers.LossScaleOptimizer(optimizers.SGD(rate), initial_scale=64.0),
}
OF_DENSE_GRADIENTS: dict[str, Callable[[float], Any]] = {
    "clipped": lambda rate: optimizers.SGD(rate, global_clipnorm=0.3),
    "by value": lambda rate: optimizers.SGD(rate, clipvalue=0.02),
    "Adam": lambda rate: optimizers.Adam(rate / 5, epsilon=1e-3),
    "RMSprop": lambda rate: optimizers.RMSprop(rate / 5, epsilon=1e-3),
}
KINDS: dict[str, tuple[int, str | None, tuple[Callable[[str], Any], ...], tuple[Callable[[], Any], ...]]] = {
    "regression": (
        1,
        None,
        (lambda _: "mse", lambda _: squared, lambda each: losses.Huber(reduction=each)),
        (lambda: "mae", metrics.RootMeanSquaredError, metrics.R2Score, lambda: OwnMetric("dict", name="own")),
    ),
    "labels": (
        3,
        None,
        (lambda each: losses.SparseCategoricalCrossentropy(from_logits=True, reduction=each),),
        (lambda: "accuracy", lambda: metrics.SparseTopKCategoricalAccuracy(2)),
    ),
    "binary": (
        1,
        "sigmoid",
        (lambda _: "binary_crossentropy", lambda each: losses.BinaryFocalCrossentropy(reduction=each)),
        (lambda: "accuracy", metrics.AUC, metrics.Precision, lambda: metrics.F1Score(threshold=0.5)),
    ),
    "one_hot": (
        3,
        "softmax",
        (lambda each: losses.CategoricalCrossentropy(label_smoothing=0.1, reduction=each),),
        (lambda: "accuracy", metrics.F1Score, lambda: metrics.AUC(multi_label=True)),
    ),
    "tags": (
        3,
        None,
        (lambda each: losses.SparseCategoricalCrossentropy(from_logits=True, reduction=each),),
        (lambda: "accuracy",),
    ),
    "holes": (
        3,
        None,
        (lambda each: losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1, reduction=each),),
        (),
    ),
}
"""By the data: outputs, their activation, makers of losses by their reduction, and makers of metrics."""
SEQUENCES = ("tags", "holes")


def drawn(seed: int) -> Case:
    """Return the case of a seed."""
    draw = random.Random(seed)
    data = draw.choice([*KINDS])
    is_sequence, wrap = data in SEQUENCES, draw.choice(WRAPS)
    outputs, activation, makers, known = KINDS[data]
    known = () if wrap is OwnTracker else known
    own_step = wrap is not None and issubclass(wrap, OwnTraining)
    reduction, make_loss = draw.choice(REDUCTIONS), draw.choice(makers)
    rate = 0.002 if reduction == "sum" else 0.05
    accumulates = draw.random() < 0.25 and not (own_step and reduction == "mean_with_sample_weight")
    hidden = draw.choices([*HIDDEN, *([] if accumulates else WITH_STATE)], k=draw.randint(1, 3))
    recurrent, mask_zero = draw.choice(RECURRENT), draw.random() < 0.6
    optimizer = draw.choice([*OPTIMIZERS, *([] if is_sequence else OF_DENSE_GRADIENTS)])
    chosen = draw.sample(known, draw.randint(0, len(known)))
    weighs = draw.sample(known, draw.randint(0, len(known)))
    name = draw.choice([None, None, "named"])  # of the output, which then is in a dict
    weighted = draw.random() < 0.4 and not (own_step and is_sequence)
    by_class = not weighted and data in ("labels", "binary", "one_hot") and draw.random() < 0.4
    config: dict[str, Any] = {"train": {"accumulate_steps": 2}} if accumulates else {}
    if draw.random() < 0.15:
        config["horovod"] = {"predivide": 2.0}

    def build() -> keras.Model:
        x = keras.Input((7,), dtype="int32") if is_sequence else keras.Input((5,))
        values = recurrent()(layers.Embedding(6, 4, mask_zero=mask_zero)(x)) if is_sequence else x
        for each in hidden:
            values = (HIDDEN | WITH_STATE)[each]()(values)
        last = layers.Dense(outputs, activation, name=name)(values)
        model = keras.Model(x, {name: last} if name else last)
        if wrap is not None:
            model = wrap(model)
            model(np.zeros((1, *x.shape[1:]), x.dtype))
        compiled: Mapping[str, list[Any]] = {
            "metrics": [make() for make in chosen],
            "weighted_metrics": [make() for make in weighs],
        }
        loss = make_loss(reduction)
        model.compile(
            (OPTIMIZERS | OF_DENSE_GRADIENTS)[optimizer](rate),
            {name: loss} if name else loss,
            **{key: {name: given} if name else given for key, given in compiled.items() if given},
        )
        return model

    fit: dict[str, Any] = {}
    if by_class:
        config["loss"] = {"class_weight": {"0": 0.5, "1": 3.0}}
        fit["class_weight"] = {0: 0.5, 1: 3.0, 2: 1.0}
    return Case(build, data, weighted, config, fit, weights_within=WITHIN, alone_within=WITHIN, figures_within=WITHIN)
