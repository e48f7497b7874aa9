"""A metric that compares each record with all others, because of a missing axis, is refused, as such a loss is."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

from horovod_train.errors import UserError
from horovod_train.training.steps.trial import try_step

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
