"""Traces a model's own step on the shapes of a batch, before training: does it fit, and what does it use?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from horovod_train.config.registry import raised_at
from horovod_train.data.pipeline.batch import Batch
from horovod_train.errors import RunError, UserError, one_line
from horovod_train.output.metrics import ABOUT
from horovod_train.training.steps.own.logs import Source, metrics_in, noting_results
from horovod_train.training.steps.traced import check_draws

Data = tuple[Any, Any, tf.Tensor]
"""What a step gets: inputs, targets (None if there are none), sample_weight float32 [rows]."""


@dataclass(frozen=True)
class Tried:
    """What a step turned out to be."""

    sources: dict[str, Source]
    """Of what it returns, by name."""
    uses_weights: bool
    """Whether sample_weight has a part in anything."""
    variables: list[tf.Variable]
    """Those that it reads."""


def data_of(batch: Batch, scale: tf.Tensor) -> Data:
    """Return what a step gets: sample_weight is the records' weights, 0 for padding, times `scale`."""
    has_targets = not isinstance(batch.targets, dict) or bool(batch.targets)
    return batch.inputs, batch.targets if has_targets else None, batch.weights * scale


def try_step(
    model: keras.Model,
    method: str,
    batch: Batch,
    where: str,
    applied: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tried:
    """Trace model.METHOD on a batch of tf.TensorSpecs, without computing. Raises UserError.

    where: begins the message. applied: the context in which optimizers only note that they are applied.
    """
    trials: list[Tried] = []

    def trace(records: Batch) -> None:
        with applied(), noting_results(metrics_in(model)) as source_of:
            data = data_of(records, tf.constant(1.0))
            logs = getattr(model, method)(data)
            _check_logs(logs, method, where)
            sources = {name: source_of(value) for name, value in logs.items()}
            trials[:] = [Tried(sources, bool(data[2].consumers()), [])]

    def traced() -> Any:
        return tf.function(trace, autograph=False).get_concrete_function(batch)

    metrics = metrics_in(model)
    try:
        function = traced()
        if {id(metric) for metric in metrics_in(model)} != {id(metric) for metric in metrics}:
            function = traced()  # the first trace has made metrics, whose results it has not noted
    except RunError:
        raise
    except Exception as error:  # a user's step may raise anything
        raise UserError(_unfit(batch, method, where, error)) from error
    check_draws(function, method, where)
    return Tried(trials[0].sources, trials[0].uses_weights, list(function.variables))


def _check_logs(logs: Any, method: str, where: str) -> None:
    if not isinstance(logs, dict) or not all(isinstance(name, str) for name in logs):
        raise UserError(f"{where}: {method} must return a dict of figures by name; it returned {type(logs).__name__}.")
    for name, value in logs.items():
        if name in ABOUT:
            raise UserError(f"{where}: {method} returns a figure named {name!r}, which is taken; give it another name.")
        if not hasattr(value, "shape") and not isinstance(value, int | float):
            raise UserError(f"{where}: {method} must return numbers; {name} is {type(value).__name__}.")
        if len(getattr(value, "shape", ())):
            raise UserError(f"{where}: {method} must return single numbers; {name} has shape {tuple(value.shape)}.")


def _unfit(batch: Batch, method: str, where: str, error: Exception) -> str:
    shapes = tf.nest.map_structure(lambda spec: f"{spec.dtype.name}{spec.shape}", (batch.inputs, batch.targets))
    reason = one_line(error)[-400:] + raised_at(error)
    return (
        f"{where}: {method} does not fit records of {shapes}, which it gets as (x, y, sample_weight), see "
        f"keras.utils.unpack_x_y_sample_weight: {type(error).__name__}: {reason}"
    )
