"""Metrics that a config names: Keras', or a user's. They become arguments of `compile`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from horovod_train.config.registry import call, choose_keras
from horovod_train.config.settings import MetricSpec, Spec
from horovod_train.errors import UserError

SHORT = ("accuracy", "acc", "crossentropy", "ce")
"""Names that stand for another metric by the shapes of targets and outputs, as in `compile`."""


def build_metrics(specs: Sequence[Spec]) -> Any:
    """Return metrics as `compile` takes them: a list, or a dict of lists by output. Raises UserError."""
    metrics = [(spec.output if isinstance(spec, MetricSpec) else None, _build(spec)) for spec in specs]
    if all(output is None for output, _ in metrics):
        return [metric for _, metric in metrics]
    by_output: dict[str, list[Any]] = {}
    for output, metric in metrics:
        if output is None:
            raise UserError("metrics: give each metric its output, or none of them.")
        by_output.setdefault(output, []).append(metric)
    return by_output


def targets_of(specs: Sequence[Spec]) -> Mapping[str, str]:
    """Return the targets that metrics are compared with, by output. Raises UserError."""
    targets: dict[str, str] = {}
    for spec in specs:
        if not isinstance(spec, MetricSpec) or (spec.output is None and spec.target is None):
            continue
        if spec.output is None:
            raise UserError(f"metrics: {spec.name}: target {spec.target!r} needs an output to be compared with.")
        target = spec.target or spec.output
        if targets.setdefault(spec.output, target) != target:
            raise UserError(f"metrics: {spec.output} has two targets, {targets[spec.output]} and {target}.")
    return targets


def _build(spec: Spec) -> Any:
    if spec.name in SHORT and not spec.options:
        return spec.name
    metric = call(choose_keras(keras.metrics, keras.metrics.Metric, spec.name, "metrics"), spec, "metrics")
    if not isinstance(metric, keras.metrics.Metric):
        raise UserError(f"metrics: {spec.name} must make a keras.metrics.Metric; it made {type(metric).__name__}.")
    return metric
