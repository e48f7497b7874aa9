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
from horovod_train.output.metrics import ABOUT
from horovod_train.training.parts.losses import Loss, Weighed, pick, spread


class Accumulator:
    """Loss and metrics of one split on this rank, since the last `result`.

    Sums are float64, so that each of 10^9 records still counts. The variables of a Keras metric are summed over ranks,
    which is exact for every metric whose state adds up, such as all of Keras' own.
    """

    def __init__(
        self, loss: Loss, metrics: Sequence[Metric], weighted: Sequence[Metric] = (), *, also: Sequence[str] = ()
    ) -> None:
        """weighted: metrics that get the records' weights in the loss. also: other sums passed to `add`.

        Raises UserError if two names are equal, or if it is open which term's weights a metric gets.
        """
        self._loss = loss
        self._weighted = [(metric, _term(metric, loss)) for metric in weighted]
        self.metrics = [*metrics, *weighted]
        self.losses = [*loss.names, *also]
        metric_names = [metric.name for metric in self.metrics]
        if len({*self.losses, *metric_names}) != len(self.losses) + len(metric_names):
            taken = ", ".join(self.losses)
            raise UserError(
                f"metrics: names must differ, also from {taken}; received {metric_names}. Give a name in options."
            )
        if reserved := set(metric_names) & set(ABOUT):
            raise UserError(
                f"metrics: {', '.join(sorted(reserved))} is in each row already. Give another name in options."
            )
        sum_names = [*loss.terms, *also]
        self.sums, self.weights = (
            {name: tf.Variable(0.0, dtype=tf.float64, trainable=False, name=f"{name}{suffix}") for name in sum_names}
            for suffix in ("", "_weight")
        )

    @property
    def names(self) -> list[str]:
        """What `result` returns."""
        return [*self.losses, *(metric.name for metric in self.metrics)]

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables that `add` changes."""
        states = [as_tf_variable(variable) for metric in self.metrics for variable in metric.variables]
        return [*self.weights.values(), *self.sums.values(), *states]

    def add(self, losses: Weighed, targets: Any, outputs: Any, real: tf.Tensor) -> None:
        """In the compiled step: add one batch. real: float32 [batch], 1 for a record and 0 for padding."""
        for name, value in losses.sums.items():
            self.sums[name].assign_add(tf.cast(value, tf.float64))
            self.weights[name].assign_add(tf.cast(losses.totals[name], tf.float64))
        for metric in self.metrics[: len(self.metrics) - len(self._weighted)]:
            counted = spread(real, _mask_of(metric, losses.masks))
            metric.update_state(targets, outputs, sample_weight=counted)
        for metric, term in self._weighted:
            metric.update_state(targets, outputs, sample_weight=losses.weights[term])

    def result(self, group: WorkerGroup) -> dict[str, float]:
        """Collective: return the means over the records that all ranks have added; then reset."""
        accumulated = [*self.weights.values(), *self.sums.values()]
        states = self.variables[len(accumulated) :]
        totals = group.sum([variable.numpy() for variable in [*accumulated, *states]])
        weights, sums, state_totals = (
            totals[: len(accumulated) // 2],
            totals[len(accumulated) // 2 : len(accumulated)],
            totals[len(accumulated) :],
        )
        # A weight is 0 if every step was skipped.
        means = {
            name: float(total) / float(weight) if weight else math.nan
            for name, total, weight in zip(self.sums, sums, weights, strict=True)
        }
        values = {name: self._loss.add_up(means) if name == "loss" else means[name] for name in self.losses}
        for variable, total in zip(states, state_totals, strict=True):
            variable.assign(tf.cast(total, variable.dtype))
        values |= {metric.name: _number(metric.result()) for metric in self.metrics}
        for variable in accumulated:
            variable.assign(0.0)
        for metric in self.metrics:
            metric.reset_state()
        return values


class OfOutput:
    """A metric on one of several outputs; same interface as a Keras metric."""

    def __init__(self, metric: keras.metrics.Metric, output: str, target: str, name: str | None = None) -> None:
        """name: default: the metric's."""
        self.metric, self.output, self.target = metric, output, target
        self.name = name or metric.name
        self.result, self.reset_state = metric.result, metric.reset_state

    @property
    def variables(self) -> list[keras.Variable]:
        """Those that the metric has now: some, such as F1Score, make theirs in their first update."""
        return list(self.metric.variables)

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
        default = {"dtype": "float64"} if takes_dtype and "dtype" not in spec.options else {}
        metric = call(factory, spec, "metrics", **default)
        if not isinstance(metric, keras.metrics.Metric):
            raise UserError(f"metrics: {spec.name} must make a keras.metrics.Metric; it made {type(metric).__name__}.")
        output = spec.output if isinstance(spec, MetricSpec) else None
        target = spec.target if isinstance(spec, MetricSpec) else None
        if target is not None and output is None:
            raise UserError(f"metrics: {spec.name}: target {target!r} needs an output to be compared with.")
        metrics.append(metric if output is None else OfOutput(metric, output, target or output))
    return metrics


def _term(metric: Metric, loss: Loss) -> str:
    """Return the term of the loss whose weights a weighted metric gets: that of its output, or the only one."""
    term = f"{metric.output}_loss" if isinstance(metric, OfOutput) else loss.terms[0]
    if term in loss.terms and (len(loss.terms) == 1 or isinstance(metric, OfOutput)):
        return term
    if loss.terms == ["loss"]:
        return "loss"
    outputs = ", ".join(term.removesuffix("_loss") for term in loss.terms)
    raise UserError(f"weighted_metrics: {metric.name} needs an output that has a loss: {outputs}.")


def _mask_of(metric: Metric, masks: Any) -> tf.Tensor | None:
    """Return the mask that a metric follows in `fit`: means of a function that of their output, all others none."""
    if isinstance(metric, OfOutput):
        masks, metric = pick(masks, metric.output, "output"), metric.metric
    is_mean = isinstance(metric, keras.metrics.MeanMetricWrapper)
    return masks if is_mean and not keras.tree.is_nested(masks) else None


def _number(value: Any) -> float:
    """Return a metric's result as one number; for a vector, such as per-class F1, its mean."""
    return float(np.mean(keras.ops.convert_to_numpy(value)))
