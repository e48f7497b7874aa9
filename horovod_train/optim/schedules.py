"""The learning rate as a function of the step: scaling, warm-up and decay. Formulas only, without TensorFlow.

Each formula is written once for any array library: Keras' operations inside a compiled step (see optimizers), NumPy to
show the rates of a whole run before it starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_train.config.registry import call, choose
from horovod_train.config.settings import LrScheduleConfig, Spec, TrainConfig
from horovod_train.errors import UserError

DEFAULT_BASE_LR = 0.001
"""Of lr_schedule, where neither the config nor a compiled optimizer has a rate."""


@dataclass(frozen=True)
class Horizon:
    """Converts epochs to steps."""

    global_batch_size: int
    steps_per_epoch: int
    total_steps: int

    def steps(self, epochs: float) -> int:
        return max(1, round(epochs * self.steps_per_epoch))


Formula = Callable[[Any, Any], Any]
"""(step, ops) → rate. step: floating-point array of any shape. ops: numpy or keras.ops, which share function names."""


def build_horizon(config: TrainConfig, global_batch_size: int, steps_per_epoch: int) -> Horizon:
    """Return how long a run is: train.epochs or train.max_steps, whichever ends first."""
    in_epochs = (config.epochs or math.inf) * steps_per_epoch
    return Horizon(global_batch_size, steps_per_epoch, int(min(in_epochs, config.max_steps or math.inf)))


def constant(lr: float, horizon: Horizon) -> Formula:
    return lambda step, ops: lr + 0.0 * step


def piecewise(lr: float, horizon: Horizon, boundaries_epochs: list[float], factors: list[float]) -> Formula:
    """Return lr before the first boundary; after boundary i, lr · factors[i]."""
    if len(boundaries_epochs) != len(factors):
        lengths = f"{len(boundaries_epochs)} and {len(factors)}"
        raise ValueError(f"boundaries_epochs and factors must be of one length; received {lengths}")
    steps = [horizon.steps(epochs) for epochs in boundaries_epochs]
    if steps != sorted(steps):
        raise ValueError(f"boundaries_epochs must rise; received {boundaries_epochs}")

    def formula(step: Any, ops: Any) -> Any:
        rates = lr + 0.0 * step
        for boundary, factor in zip(steps, factors, strict=True):
            rates = ops.where(step >= boundary, lr * factor + 0.0 * step, rates)
        return rates

    return formula


def exponential(lr: float, horizon: Horizon, rate: float, every_epochs: float = 1.0, staircase: bool = True) -> Formula:
    """Return lr · rate^(epochs / every_epochs); with staircase, use the whole part of the exponent."""
    steps = horizon.steps(every_epochs)

    def formula(step: Any, ops: Any) -> Any:
        # In a compiled step a division is one ulp wrong, and its whole part one step late; see allreduce.over_ranks.
        exponent = ops.floor_divide(step, float(steps)) if staircase else step / steps
        return lr * ops.power(rate, exponent)

    return formula


def cosine(lr: float, horizon: Horizon, epochs: float | None = None, final_factor: float = 0.0) -> Formula:
    """Return half a cosine, lr to lr · final_factor (Loshchilov & Hutter 2017), over `epochs`; default: whole run."""
    steps = horizon.steps(epochs) if epochs else horizon.total_steps

    def formula(step: Any, ops: Any) -> Any:
        fraction = 0.5 * (1.0 + ops.cos(math.pi * ops.minimum(step / steps, 1.0)))
        return lr * ((1.0 - final_factor) * fraction + final_factor)

    return formula


def polynomial(
    lr: float, horizon: Horizon, epochs: float | None = None, power: float = 1.0, final_factor: float = 0.0
) -> Formula:
    """Return a decay from lr to lr · final_factor as (1 − t)^power, over `epochs`, default the whole run."""
    steps = horizon.steps(epochs) if epochs else horizon.total_steps
    final = lr * final_factor
    return lambda step, ops: (lr - final) * ops.power(1.0 - ops.minimum(step / steps, 1.0), power) + final


DECAYS: dict[str, Callable[..., Formula]] = {
    "constant": constant,
    "piecewise": piecewise,
    "exponential": exponential,
    "cosine": cosine,
    "polynomial": polynomial,
}


def warm_up(rate: Any, step: Any, warmup_steps: int, ops: Any) -> Any:
    """Return rate · min(1, (step + 1) / warmup_steps): from 0, per step (gradual warm-up, Goyal et al. 2017, 2.2)."""
    return rate * ops.minimum((step + 1.0) / warmup_steps, 1.0)


def scaled_lr(config: LrScheduleConfig, global_batch_size: int) -> float:
    """Scale base_lr to the global batch: · k (linear, Goyal et al. 2017) or · √k (Krizhevsky 2014), k = batch/base."""
    base = DEFAULT_BASE_LR if config.base_lr is None else config.base_lr
    if config.scaling == "none":
        return base
    assert config.base_batch_size is not None
    ratio = global_batch_size / config.base_batch_size
    return base * (ratio if config.scaling == "linear" else math.sqrt(ratio))


def build_formula(config: LrScheduleConfig, horizon: Horizon) -> Formula:
    """Build scaling, warm-up and decay as one formula, for our decays. Raises UserError for a wrong name or option."""
    lr = scaled_lr(config, horizon.global_batch_size)
    where = "lr_schedule.decay"
    for name, value in config.decay.options.items():
        if name.endswith("epochs") and isinstance(value, int | float) and value <= 0:
            raise UserError(f"{where}.options.{name}: must be above 0; received {value}.")
    decay: Formula = call(
        choose(DECAYS, config.decay.name, f"{where}.name"), config.decay, where, lr=lr, horizon=horizon
    )
    _check_rates(decay, config.decay, horizon.total_steps, where)
    if not config.warmup_epochs:
        return decay
    warmup_steps = horizon.steps(config.warmup_epochs)
    return lambda step, ops: warm_up(decay(step, ops), step, warmup_steps, ops)


def _check_rates(formula: Formula, decay: Spec, total_steps: int, where: str) -> None:
    """Raise UserError for options that make no rates of 0 or more."""
    steps = np.array([0, 1, total_steps // 2, max(total_steps - 1, 0)], np.float64)
    try:
        with np.errstate(all="ignore"):
            rates = np.asarray(formula(steps, np), np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}.options: {decay.name} cannot use {dict(decay.options)}: {error}.") from error
    for step, rate in zip(steps.tolist(), rates.tolist(), strict=True):
        if not (math.isfinite(rate) and rate >= 0):
            raise UserError(
                f"{where}.options: {decay.name} with {dict(decay.options)} gives the learning rate {rate:g} at step "
                f"{step:g}; expected 0 or more."
            )
