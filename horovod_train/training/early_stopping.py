"""Tracks the best value of an evaluation metric, in variables. Does not save and does not stop."""

from __future__ import annotations

import math
from collections.abc import Mapping

import tensorflow as tf

from horovod_train.config.settings import EarlyStoppingConfig, Watched
from horovod_train.training.stopping import StopReason


class BestTracker:
    """The best value, its step, and the number of evaluations since: variables, so that a checkpoint contains them."""

    def __init__(self, name: str, watched: Watched, min_delta: float = 0.0) -> None:
        self.metric, self.sign, self.min_delta = watched.metric, 1 if watched.mode == "max" else -1, min_delta
        self.value = tf.Variable(math.nan, dtype=tf.float64, trainable=False, name=f"{name}_value")
        self.step = tf.Variable(-1, dtype=tf.int64, trainable=False, name=f"{name}_step")
        self.evaluations_since = tf.Variable(0, dtype=tf.int64, trainable=False, name=f"{name}_evaluations_since")
        variables = (self.value, self.step, self.evaluations_since)
        self.variables = {variable.name.removesuffix(":0"): variable for variable in variables}

    def forget(self) -> None:
        """Reset, as for another metric."""
        self.value.assign(math.nan)
        self.step.assign(-1)
        self.evaluations_since.assign(0)

    def update(self, step: int, values: Mapping[str, float], *, min_delta: float | None = None) -> None:
        """Take the values of an evaluation, the same on all ranks. NaN, or no such value, never counts as best."""
        new, old = values.get(self.metric, math.nan), float(self.value)
        is_better = math.isnan(old) or self.sign * (new - old) > (self.min_delta if min_delta is None else min_delta)
        if math.isnan(new) or not is_better:
            self.evaluations_since.assign_add(1)
        else:
            self.value.assign(new)
            self.step.assign(step)
            self.evaluations_since.assign(0)


class EarlyStopping:
    """Decides after an evaluation whether to stop: the target is reached, or patience has run out."""

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self.config = config
        self.best = BestTracker("early_stopping", config, config.min_delta)

    def update(self, step: int, values: Mapping[str, float]) -> StopReason | None:
        """Take the values of an evaluation, the same on all ranks; return the stop reason or None."""
        reached = self.reached(values.get(self.config.metric, math.nan))
        # A value that reaches the target is kept however little better it is, so that a later start knows of it.
        self.best.update(step, values, min_delta=0 if reached else None)
        return reached or self.ended()

    def reached(self, value: float) -> StopReason | None:
        """Return a stop reason if `value` reaches the target, else None."""
        name, target = self.config.metric, self.config.target
        if target is not None and self.best.sign * (value - target) >= 0:
            return StopReason(f"target reached: {name} {value:.6g}")
        return None

    def ended(self) -> StopReason | None:
        """Return the stop reason that the evaluations so far give, also after a restart; else None."""
        if reached := self.reached(float(self.best.value)):
            return reached
        name, evaluations = self.config.metric, int(self.best.evaluations_since)
        if self.config.patience is not None and evaluations >= self.config.patience:
            best = f"{float(self.best.value):.6g} at step {int(self.best.step)}"
            return StopReason(f"early stopping: {name} has not been better than {best} for {evaluations} evaluations")
        return None
