"""What a model's own step returns, by name, as figures over all ranks. Does not know which step it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from horovod_train.distributed.group import WorkerGroup, as_tf_variable
from horovod_train.distributed.sync_batch_norm import layers_inside, parts_in


class Source(NamedTuple):
    """Where a figure is from: the result of a metric, or a number of the step."""

    metric: keras.metrics.Metric | None
    """None: a number of the step, whose mean over steps and ranks is shown."""
    part: int
    """Of a metric's result, flattened, the part that is shown."""


class Logs:
    """The figures of one split on this rank since the last `result`.

    The states of Keras metrics are summed over ranks, which is exact for every metric whose state adds up. Other
    numbers are averaged over steps and ranks, in float64.
    """

    def __init__(self, sources: Mapping[str, Source], metrics: Sequence[keras.metrics.Metric]) -> None:
        """metrics: all of the model's; they are set back with each `result`."""
        self._sources, self._metrics = sources, list(metrics)
        numbers = [name for name, source in sources.items() if source.metric is None]
        self._sums = {name: tf.Variable(0.0, dtype=tf.float64, trainable=False, name=name) for name in numbers}
        self._steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="steps")
        self._aside: list[np.ndarray] | None = None

    @property
    def names(self) -> list[str]:
        """What `result` returns."""
        return list(self._sources)

    @property
    def variables(self) -> list[tf.Variable]:
        """The states of the model's metrics, which all splits share."""
        by_id = {id(variable): variable for metric in self._metrics for variable in metric.variables}
        return [as_tf_variable(variable) for variable in by_id.values()]

    def add(self, logs: Mapping[str, Any]) -> None:
        """In the compiled step: add what the step returned; its metrics have been updated already."""
        for name, total in self._sums.items():
            total.assign_add(tf.cast(logs[name], tf.float64))
        self._steps.assign_add(1)

    def begin(self) -> bool:
        """Set the model's metrics aside until `result`, so that this split can have them; return whether it had to."""
        if self._aside is not None:
            return False
        self._aside = [variable.numpy() for variable in self.variables]
        self._reset()
        return True

    def result(self, group: WorkerGroup) -> dict[str, float]:
        """Collective: return the figures over the steps of all ranks since the last call; then reset."""
        states, sums = self.variables, list(self._sums.values())
        steps, *totals = group.sum([variable.numpy() for variable in [self._steps, *sums, *states]])
        for variable, total in zip(states, totals[len(sums) :], strict=True):
            variable.assign(tf.cast(total, variable.dtype))
        means = {
            name: float(total) / float(steps) if steps else math.nan
            for name, total in zip(self._sums, totals[: len(sums)], strict=True)
        }
        values = {
            name: means[name] if source.metric is None else _part(source.metric.result(), source.part)
            for name, source in self._sources.items()
        }
        self._reset()
        for variable in [self._steps, *sums]:
            variable.assign(tf.zeros_like(variable))
        for variable, value in zip(states, self._aside or (), strict=self._aside is not None):
            variable.assign(value)
        self._aside = None
        return values

    def _reset(self) -> None:
        for metric in self._metrics:
            metric.reset_state()


def metrics_in(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the metrics of a model: those it lists, and those that it and its layers hold."""
    inside_layers = [part for layer in layers_inside(model) for part in parts_in(vars(layer), keras.metrics.Metric)]
    return list({id(metric): metric for metric in [*model.metrics, *inside_layers]}.values())


@contextmanager
def noting_results(metrics: Sequence[keras.metrics.Metric]) -> Iterator[Callable[[Any], Source]]:
    """Inside the block: note what the metrics' `result` returns. Yields a function (value → its Source)."""
    noted: dict[int, tuple[Any, Source]] = {}

    def noting(metric: keras.metrics.Metric) -> Callable[[], Any]:
        result = metric.result

        def result_and_note() -> Any:
            value = result()
            for part, tensor in enumerate(keras.tree.flatten(value)):
                noted.setdefault(id(tensor), (tensor, Source(metric, part)))  # kept, so that no other has its id
            return value

        return result_and_note

    for metric in metrics:
        metric.result = noting(metric)
    try:
        yield lambda value: noted[id(value)][1] if id(value) in noted else Source(None, 0)
    finally:
        for metric in metrics:
            del metric.result


def _part(result: Any, part: int) -> float:
    """Return a part of a metric's result as one number; for a vector its mean."""
    return float(np.mean(keras.ops.convert_to_numpy(keras.tree.flatten(result)[part])))
