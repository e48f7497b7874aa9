"""Optimizers by name and learning-rate schedules in epochs. Does not exchange gradients; see distributed.optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras.optimizers import schedules

from horovod_train.config import Config, LrScheduleConfig, TrainConfig
from horovod_train.errors import UserError
from horovod_train.lars import LARS
from horovod_train.lookup import call, choose, choose_keras


@dataclass(frozen=True)
class Horizon:
    """What turns epochs into steps."""

    global_batch_size: int
    steps_per_epoch: int
    total_steps: int

    def steps(self, epochs: float) -> int:
        return max(1, round(epochs * self.steps_per_epoch))


Schedule = Any
"""A keras LearningRateSchedule, step → learning rate; or a float, the same rate at every step."""


@keras.saving.register_keras_serializable("horovod_train")
class WarmUp(schedules.LearningRateSchedule):
    """Rises linearly to another schedule: rate(step) = after(step) · min(1, (step + 1) / warmup_steps).

    Gradual warm-up of Goyal et al. 2017 (arXiv:1706.02677, 2.2), per step and from zero.
    """

    def __init__(self, after: Schedule, warmup_steps: int) -> None:
        super().__init__()
        self.after, self.warmup_steps = after, warmup_steps

    def __call__(self, step: Any) -> Any:
        rate = self.after if isinstance(self.after, float) else self.after(step)
        done = (keras.ops.cast(step, "float32") + 1.0) / self.warmup_steps
        return rate * keras.ops.minimum(1.0, done)

    def get_config(self) -> dict[str, Any]:
        return {"after": keras.saving.serialize_keras_object(self.after), "warmup_steps": self.warmup_steps}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WarmUp:
        return cls(keras.saving.deserialize_keras_object(config["after"]), config["warmup_steps"])


def constant(lr: float, horizon: Horizon) -> Schedule:
    return lr


def piecewise(lr: float, horizon: Horizon, boundaries_epochs: list[float], factors: list[float]) -> Schedule:
    """Before the first boundary lr; after boundary i, lr · factors[i]."""
    if len(boundaries_epochs) != len(factors):
        lengths = f"{len(boundaries_epochs)} and {len(factors)}"
        raise ValueError(f"boundaries_epochs and factors must be of one length; received {lengths}")
    steps = [horizon.steps(epochs) for epochs in boundaries_epochs]
    # Keras holds a value up to and including its boundary; the epoch after it starts one step earlier.
    return schedules.PiecewiseConstantDecay([step - 1 for step in steps], [lr, *(lr * factor for factor in factors)])


def exponential(
    lr: float, horizon: Horizon, rate: float, every_epochs: float = 1.0, staircase: bool = True
) -> Schedule:
    """lr · rate^(epochs / every_epochs); with staircase, of the whole part of the exponent."""
    return schedules.ExponentialDecay(lr, horizon.steps(every_epochs), rate, staircase=staircase)


def cosine(lr: float, horizon: Horizon, epochs: float | None = None, final_factor: float = 0.0) -> Schedule:
    """Half a cosine from lr to lr · final_factor (Loshchilov & Hutter 2017), over `epochs`, default the whole run."""
    return schedules.CosineDecay(lr, horizon.steps(epochs) if epochs else horizon.total_steps, alpha=final_factor)


def polynomial(
    lr: float, horizon: Horizon, epochs: float | None = None, power: float = 1.0, final_factor: float = 0.0
) -> Schedule:
    """From lr to lr · final_factor as (1 − t)^power, over `epochs`, default the whole run."""
    steps = horizon.steps(epochs) if epochs else horizon.total_steps
    return schedules.PolynomialDecay(lr, steps, end_learning_rate=lr * final_factor, power=power)


DECAYS: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "piecewise": piecewise,
    "exponential": exponential,
    "cosine": cosine,
    "polynomial": polynomial,
}


OPTIMIZERS: dict[str, Callable[..., keras.optimizers.Optimizer]] = {"lars": LARS}
"""Those that a config can name besides Keras' own."""


def scaled_lr(config: LrScheduleConfig, global_batch_size: int) -> float:
    """base_lr for the global batch: times k (linear, Goyal et al. 2017) or √k (Krizhevsky 2014), k = batch / base."""
    if config.scaling == "none":
        return config.base_lr
    assert config.base_batch_size is not None
    ratio = global_batch_size / config.base_batch_size
    return config.base_lr * (ratio if config.scaling == "linear" else math.sqrt(ratio))


def build_schedule(config: LrScheduleConfig, horizon: Horizon) -> Schedule:
    """step → learning rate: scaling, decay and warm-up in one. Raises UserError for a wrong name or option."""
    lr = scaled_lr(config, horizon.global_batch_size)
    where = "lr_schedule.decay"
    schedule = call(choose(DECAYS, config.decay.name, f"{where}.name"), config.decay, where, lr=lr, horizon=horizon)
    return WarmUp(schedule, horizon.steps(config.warmup_epochs)) if config.warmup_epochs else schedule


def build_optimizer(config: Config, horizon: Horizon) -> keras.optimizers.Optimizer:
    """The optimizer that the config names, on its schedule; under mixed_float16 inside a LossScaleOptimizer."""
    spec = config.optimizer
    given: dict[str, Any] = {"learning_rate": build_schedule(config.lr_schedule, horizon)}
    if "learning_rate" in spec.options:
        raise UserError("optimizer.options.learning_rate: the rate is set by lr_schedule.base_lr; leave it out here.")
    if config.train.clip_norm is not None:
        given["global_clipnorm"] = config.train.clip_norm
    factory = OPTIMIZERS.get(spec.name.lower()) or choose_keras(
        keras.optimizers, keras.optimizers.Optimizer, spec.name, "optimizer.name"
    )
    optimizer = call(factory, spec, "optimizer", **given)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UserError(f"optimizer.name: {spec.name} must make a Keras optimizer; it made {type(optimizer).__name__}.")
    if config.precision == "mixed_float16":
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def limit_weight_decay(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable], config: TrainConfig
) -> None:
    """Keeps weight decay from what it is not meant for: by default from variables of one axis or none.

    Those are biases and the scales and offsets of norms, which decay does not regularise (Goyal et al. 2017, 5.1;
    Jia et al. 2018). LARS leaves them out of its scaling too. Before the optimizer is built. Raises UserError for
    a pattern that is none or matches nothing, and where there is no weight decay that it could keep away.
    """
    decaying = getattr(optimizer, "inner_optimizer", optimizer)
    excluded = [variable for variable in variables if len(variable.shape) < 2 and not config.weight_decay_1d]
    for number, pattern in enumerate(config.weight_decay_exclude):
        where = f"train.weight_decay_exclude[{number}]"
        try:
            found = [variable for variable in variables if re.search(pattern, variable.path)]
        except re.error as error:
            raise UserError(f"{where}: {pattern!r} is no regular expression: {error}.") from error
        if not found:
            raise UserError(f"{where}: {pattern!r} is in none of {', '.join(variable.path for variable in variables)}.")
        excluded += found
    decays = decaying.weight_decay is not None or isinstance(decaying, LARS)
    if decays and not decaying.built:
        decaying.exclude_from_weight_decay(var_list=excluded)
        return
    missing = "there is no weight decay; give optimizer.options.weight_decay"
    why = "the optimizer is built already" if decays else missing
    for key, default in (("weight_decay_exclude", ()), ("weight_decay_1d", False)):
        if getattr(config, key) != default:
            raise UserError(f"train.{key}: {why}.")
