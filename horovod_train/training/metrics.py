"""Means over records, exact over ranks: sums and weights are added up before dividing."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from horovod_train.config.registry import call, choose_keras
from horovod_train.config.settings import MetricSpec, Spec
from horovod_train.distributed.group import WorkerGroup, as_tf_variable
from horovod_train.errors import UserError
from horovod_train.training.losses import pick


class Accumulator:
    """Loss and metrics of one split on this rank, since the last `result`.

    Sums are float64, so that each of 10^9 records still counts. The variables of a Keras metric are summed over ranks,
    which is exact for every metric whose state adds up, such as all of Keras' own.
    """

    def __init__(self, losses: Sequence[str], metrics: Sequence[Metric]) -> None:
        """losses: the names of the sums passed to `add`. Raises UserError if two names are equal."""
        names = [metric.name for metric in metrics]
        if len({*losses, *names}) != len(losses) + len(names):
            also = ", ".join(losses)
            raise UserError(f"metrics: names must differ, also from {also}; received {names}. Give a name in options.")
        self.metrics = list(metrics)
        self.weight = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="weight")
        self.sums = {name: tf.Variable(0.0, dtype=tf.float64, trainable=False, name=name) for name in losses}

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables that `add` changes."""
        states = [as_tf_variable(variable) for metric in self.metrics for variable in metric.variables]
        return [self.weight, *self.sums.values(), *states]

    def add(self, loss_sums: dict[str, tf.Tensor], targets: Any, outputs: Any, weights: tf.Tensor) -> None:
        """In the compiled step: add one batch. loss_sums: weighted sums over the batch; weights: float32 [batch]."""
        self.weight.assign_add(tf.reduce_sum(tf.cast(weights, tf.float64)))
        for name, value in loss_sums.items():
            self.sums[name].assign_add(tf.cast(value, tf.float64))
        for metric in self.metrics:
            metric.update_state(targets, outputs, sample_weight=weights)

    def result(self, group: WorkerGroup) -> dict[str, float]:
        """Collective: return the means over the records that all ranks have added; then reset."""
        own = [self.weight, *self.sums.values()]
        states = self.variables[len(own) :]
        totals = group.sum([variable.numpy() for variable in [*own, *states]])
        weight, loss_totals, state_totals = float(totals[0]), totals[1 : len(own)], totals[len(own) :]
        # The weight is 0 if every step was skipped.
        means = [float(total) / weight if weight else math.nan for total in loss_totals]
        values = dict(zip(self.sums, means, strict=True))
        for variable, total in zip(states, state_totals, strict=True):
            variable.assign(tf.cast(total, variable.dtype))
        values |= {metric.name: _number(metric.result()) for metric in self.metrics}
        for variable in own:
            variable.assign(0.0)
        for metric in self.metrics:
            metric.reset_state()
        return values


class OfOutput:
    """A metric on one of several outputs; same interface as a Keras metric."""

    def __init__(self, metric: keras.metrics.Metric, output: str, target: str) -> None:
        self.metric, self.output, self.target = metric, output, target
        self.name, self.variables = metric.name, metric.variables
        self.result, self.reset_state = metric.result, metric.reset_state

    def update_state(self, targets: Any, outputs: Any, sample_weight: Any = None) -> None:
        of = pick(targets, self.target, "target"), pick(outputs, self.output, "output")
        self.metric.update_state(*of, sample_weight=sample_weight)


Metric: TypeAlias = "keras.metrics.Metric | OfOutput"


def build_metrics(specs: Sequence[Spec]) -> list[Metric]:
    """Build Keras metrics by name or a user's by package.module:function. Raises UserError for bad names or options."""
    metrics: list[Metric] = []
    for spec in specs:
        factory = choose_keras(keras.metrics, keras.metrics.Metric, spec.name, "metrics")
        takes_dtype = inspect.isclass(factory) and "dtype" in inspect.signature(factory).parameters
        given = {"dtype": "float64"} if takes_dtype and "dtype" not in spec.options else {}
        metric = call(factory, spec, "metrics", **given)
        if not isinstance(metric, keras.metrics.Metric):
            raise UserError(f"metrics: {spec.name} must make a keras.metrics.Metric; it made {type(metric).__name__}.")
        output = spec.output if isinstance(spec, MetricSpec) else None
        target = spec.target if isinstance(spec, MetricSpec) else None
        if target is not None and output is None:
            raise UserError(f"metrics: {spec.name}: target {target!r} needs an output to be compared with.")
        metrics.append(metric if output is None else OfOutput(metric, output, target or output))
    return metrics


def _number(value: Any) -> float:
    """Return a metric's result as one number; for a vector, such as per-class F1, its mean."""
    return float(np.mean(keras.ops.convert_to_numpy(value)))
