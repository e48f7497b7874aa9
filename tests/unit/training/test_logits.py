"""What takes probabilities does not get logits, nor the reverse, where it is certain which of them a model gives."""

from __future__ import annotations

import re
from typing import Any, cast

import keras
import pytest
import tensorflow as tf
from keras import layers

from horovod_train.config.settings import Config, LossSpec, MetricSpec, ModelSpec, Spec
from horovod_train.distributed.group import WorkerGroup
from horovod_train.errors import UserError
from horovod_train.training.losses import build_loss, refuse_probabilities
from horovod_train.training.steps.shares import Shares

LOGITS = {"from_logits": True}
ENTROPY = LossSpec("sparse_categorical_crossentropy", LOGITS)
WRITE = "takes probabilities, but the model mlp returns logits; write {name: %s, options: {from_logits: true}}."


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, f"loss: sparse_categorical_crossentropy {WRITE % 'sparse_categorical_crossentropy'}"),
        ({"loss": LossSpec("BinaryCrossentropy")}, f"loss: BinaryCrossentropy {WRITE % 'BinaryCrossentropy'}"),
        ({"loss": ENTROPY, "metrics": (MetricSpec("auc"),)}, f"metrics: auc {WRITE % 'auc'}"),
        (
            {"loss": ENTROPY, "metrics": (MetricSpec("binary_accuracy"),)},
            "metrics: binary_accuracy takes probabilities, but the model mlp returns logits; write "
            "{name: binary_accuracy, options: {threshold: 0.0}}.",
        ),
        ({"loss": ENTROPY, "weighted_metrics": (MetricSpec("recall"),)}, "options: {thresholds: 0.0}}."),
        ({"loss": ENTROPY, "metrics": (MetricSpec("PrecisionAtRecall", {"recall": 0.5}),)}, "mlp returns logits."),
        ({"loss": LossSpec("kl_divergence")}, "loss: kl_divergence takes probabilities, but the model mlp returns"),
    ],
)
def test_probabilities_of_a_built_in_model_are_refused(parts: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        refuse_probabilities(Config(model=ModelSpec("mlp"), **parts))
    refuse_probabilities(Config(model=ModelSpec("users:model"), **parts))


def test_logits_of_a_built_in_model_and_losses_of_numbers_are_taken() -> None:
    accepted = (ENTROPY, LossSpec("mean_squared_error"), LossSpec("users:loss"), LossSpec("per_output"))
    metrics = (
        MetricSpec("auc", LOGITS),
        MetricSpec("binary_accuracy", {"threshold": 0.0}),
        MetricSpec("precision", {"top_k": 2}),
        MetricSpec("sparse_categorical_accuracy"),
        MetricSpec("f1_score"),
    )
    for loss in accepted:
        refuse_probabilities(Config(model=ModelSpec("mlp"), loss=loss, metrics=metrics))


class Group:
    """Of one rank."""

    size = 1


def traced(spec: Spec, last: keras.Layer) -> None:
    """Call a loss in a compiled step, as the trainer does."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), last])
    loss = build_loss(spec).loss
    shares = Shares(cast(WorkerGroup, Group())).take_on(loss)

    def forward(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with shares.of_pass(None):
            return loss(targets, model(inputs, training=True))

    tf.function(forward, autograph=False)(tf.zeros((2, 4)), tf.zeros(2, tf.int64))


@pytest.mark.parametrize(
    "loss", [ENTROPY, Spec("smoothed_sparse_categorical_crossentropy")], ids=lambda spec: spec.name
)
def test_a_loss_of_logits_after_a_softmax_is_refused(loss: Spec) -> None:
    traced(loss, layers.ReLU())
    with pytest.raises(ValueError, match="takes logits, but the model ends in a softmax"):
        traced(loss, layers.Softmax())
