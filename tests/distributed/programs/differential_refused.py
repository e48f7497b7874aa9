"""Cases for differential.py: what the trainer refuses, and settings and losses taken together.

What a case is, and the data that it trains on, is in differential_cases; classes of Keras are in differential_more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import differential_cases
import keras
import numpy as np
import tensorflow as tf
from differential_cases import REDUCTIONS, Case, crossentropy, dense, one_number, pair, sequence, squared
from differential_models import Gan, OwnStep, Vae

layers, losses, optimizers, ops = keras.layers, keras.losses, keras.optimizers, keras.ops


class LargestError(keras.metrics.Metric):
    """A maximum, which is the same however the records are split. start: of its state, also after a reset."""

    def __init__(self, start: float = -np.inf) -> None:
        super().__init__(name="largest_error")
        self.start = start
        self.largest = self.add_variable((), lambda shape, dtype: ops.full(shape, start, dtype), name="largest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y_true - y_pred))))

    def result(self) -> Any:
        return ops.convert_to_tensor(self.largest)

    def reset_state(self) -> None:
        self.largest.assign(self.start)


class MeanOfBatches(keras.metrics.Mean):
    """The mean over batches of their root mean square error; N ranks have N times as many batches."""

    def __init__(self) -> None:
        super().__init__(name="mean_of_batches")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(ops.sqrt(ops.mean(ops.square(y_true - y_pred))))


class Recentred(keras.layers.Layer):
    """Subtracts a moving average of its inputs, which is a mean over rows."""

    def build(self, input_shape: Any) -> None:
        self.mean = self.add_weight(shape=input_shape[1:], initializer="zeros", trainable=False, name="mean")

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = inputs - self.mean
        if training:
            self.mean.assign(0.8 * self.mean + 0.2 * ops.mean(inputs, axis=0))
        return outputs


def embedding() -> keras.Model:
    """Tokens that repeat within records: gradients by row, which Keras' SGD adds up."""
    model = keras.Sequential([keras.Input((7,), dtype="int32"), layers.Embedding(6, 4), layers.Dense(3)])
    model.compile(optimizers.SGD(0.1), losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class StepWithout(OwnStep):
    """A step of its own that does one thing that the trainer refuses. does: which."""

    does = ""

    def train_step(self, data: Any) -> Any:
        if self.does == "applies nothing":
            return self._figures(data, True)[1]
        if self.does == "draws":
            data = (data[0] + tf.random.normal(tf.shape(data[0])), data[1])
        figures = super().train_step(data)
        return {"no dict": [*figures.values()], "taken name": {"step": figures["own_loss"]}}.get(self.does, figures)


def step_that(does: str) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        made_class: Any = type(StepWithout.__name__, (StepWithout,), {"does": does})
        return made_class.made()

    return build


class OnlyTrains(Vae):
    """Has no test_step, and no loss by which its outputs could be evaluated."""

    test_step = keras.Model.test_step


def refused(words: str, build: Callable[[], keras.Model], data: str = "regression", **config: Any) -> Case:
    return Case(build, data, config=config, refused=words)


BY_ROW: dict[str, Any] = {"alone_within": 5e-6, "weights_within": 5e-6}
"""For gradients of rows that repeat, which are added up in another order than by `fit`."""
COMBINED: dict[str, Case] = {
    **{
        f"ignore_class, {name}, weights": Case(
            sequence(crossentropy(ignore_class=-1, reduction=name)),
            "holes",
            True,
            alone_within=1e-5,
            weights_within=5e-6,
        )
        for name in REDUCTIONS
    },
    "Masking, weights": Case(sequence(crossentropy(), "masking"), "tags", True, alone_within=1e-5),
    "function as loss, weights": Case(dense(squared), weighted=True),
    "loss of one number, metrics": Case(dense(one_number, metrics=lambda: ["mae"])),
    "list of losses": Case(
        pair("list", loss=["mse", "mae"], loss_weights=[1.0, 0.5], metrics=[["mae"], ["mse"]]), "pair"
    ),
    "sums of two outputs": Case(
        pair(loss={"a": losses.MeanSquaredError(reduction="sum"), "b": "mse"}), "pair", weights_within=5e-6
    ),
    "Embedding": Case(embedding, "tags", **BY_ROW),
    "layer with an average of records": Case(dense(extra=(Recentred,))),
    "accumulated, metrics": Case(
        dense(metrics=lambda: ["mae"], hidden={"activity_regularizer": "l2"}),
        config={"train": {"accumulate_steps": 2}},
        alone_within=2e-6,
    ),
    # The generator is trained against the critic of the step before, as the passes of a step apply nothing.
    "accumulated, GAN": Case(lambda: Gan.made(), "alone", config={"train": {"accumulate_steps": 2}}, equal_on=()),
    "XLA, activity_regularizer": Case(
        dense(hidden={"activity_regularizer": "l2"}),
        weighted=True,
        config={"jit_compile": True},
        alone_within=2e-6,
    ),
    "XLA, two outputs": Case(differential_cases.two_outputs(), "two", config={"jit_compile": True}, alone_within=2e-6),
    "XLA, accumulated": Case(
        dense(),
        weighted=True,
        config={"jit_compile": True, "train": {"accumulate_steps": 2}},
        alone_within=2e-6,
    ),
    "mixed_bfloat16, weights": Case(
        dense(),
        weighted=True,
        config={"precision": "mixed_bfloat16"},
        weights_within=2e-2,
        figures_within=5e-2,
    ),
    "metric of a user, a maximum": Case(dense(metrics=lambda: [LargestError()])),
    "metric of a user, a maximum from 0": Case(dense(metrics=lambda: [LargestError(0.0)])),
    "metric of a user, over batches": Case(dense(metrics=lambda: [MeanOfBatches()]), equal_on=(1,)),
}
REFUSED: dict[str, Case] = {
    "class weights of two losses": refused(
        "loss.class_weight: is for one loss",
        pair(loss={"a": "mse", "b": "mse"}),
        "pair",
        loss={"class_weight": {"0": 2}},
    ),
    "options of a compiled loss": refused("give loss.name too", dense(), loss={"options": {"reduction": "sum"}}),
    "options of a compiled optimizer": refused(
        "give optimizer.name too", dense(), optimizer={"options": {"momentum": 0.9}}
    ),
    "averages kept twice": refused(
        "keeps averages itself", dense(optimizer=lambda: optimizers.SGD(0.1, use_ema=True)), train={"ema_decay": 0.9}
    ),
    "clipped twice": refused(
        "it clips gradients itself",
        dense(optimizer=lambda: optimizers.SGD(0.1, clipnorm=1.0)),
        train={"clip_norm": 1.0},
    ),
    "loss without a reduction": refused("which fit adds up", dense(differential_cases.reduced("none"))),
    "loss of the config without a reduction": refused(
        "mean_squared_error has no reduction",
        dense(),
        loss={"name": "mean_squared_error", "options": {"reduction": "none"}},
    ),
    "clipping of a MultiOptimizer": refused(
        "train.clip_norm: has no effect on a MultiOptimizer",
        dense(optimizer=lambda: optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(0.1)))),
        train={"clip_norm": 1.0},
    ),
    "schedule upon a schedule": refused(
        "lr_schedule.base_lr",
        dense(optimizer=lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))),
        lr_schedule={"decay": {"name": "cosine"}},
    ),
    "clipping of a model's own optimizers": refused(
        "train.clip_norm: has no effect", lambda: Gan.made(), "alone", train={"clip_norm": 1.0}
    ),
    "own train_step, loss not known": refused("no test_step", lambda: OnlyTrains.made(), "alone"),
    "own train_step that applies nothing": refused("applies none of the optimizers", step_that("applies nothing")),
    "own train_step that draws": refused("draws by TensorFlow's", step_that("draws")),
    "own train_step that returns a list": refused("must return a dict of figures", step_that("no dict")),
    "own train_step with a name that is taken": refused("which is taken", step_that("taken name")),
    "scaled loss without exchange": refused(
        "train.synchronization",
        dense(optimizer=lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1))),
        train={"synchronization": "local", "average_every_steps": 2},
    ),
}
