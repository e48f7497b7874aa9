"""Builds optimizers by name, with their learning-rate schedule. For gradient exchange see distributed.optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras.optimizers import schedules as keras_schedules

from horovod_train.config.registry import call, choose_keras, find, load_function
from horovod_train.config.rules import refuse_given
from horovod_train.config.settings import AUTO, Config, LrScheduleConfig, Spec, TrainConfig
from horovod_train.errors import UserError
from horovod_train.optim.lars import LARS
from horovod_train.optim.schedules import Horizon, build_formula, scaled_lr, warm_up

Schedule = Any
"""A keras LearningRateSchedule, step → learning rate; or a float, the same rate at every step."""


@keras.saving.register_keras_serializable("horovod_train")
class ByFormula(keras_schedules.LearningRateSchedule):
    """A formula of `schedules` with Keras' operations, in float32. Its settings are plain dicts, for serialisation."""

    def __init__(self, lr_schedule: dict[str, Any], horizon: dict[str, int]) -> None:
        super().__init__()
        self.lr_schedule, self.horizon = lr_schedule, horizon
        settings = LrScheduleConfig(**(lr_schedule | {"decay": Spec(**lr_schedule["decay"])}))
        self._formula = build_formula(settings, Horizon(**horizon))

    def __call__(self, step: Any) -> Any:
        return self._formula(keras.ops.cast(step, "float32"), keras.ops)

    def get_config(self) -> dict[str, Any]:
        return {"lr_schedule": self.lr_schedule, "horizon": self.horizon}


@keras.saving.register_keras_serializable("horovod_train")
class WarmUp(keras_schedules.LearningRateSchedule):
    """Warm-up before a user's schedule."""

    def __init__(self, after: Schedule, warmup_steps: int) -> None:
        super().__init__()
        self.after, self.warmup_steps = after, warmup_steps

    def __call__(self, step: Any) -> Any:
        rate = self.after if isinstance(self.after, float) else self.after(step)
        return warm_up(rate, keras.ops.cast(step, "float32"), self.warmup_steps, keras.ops)

    def get_config(self) -> dict[str, Any]:
        return {"after": keras.saving.serialize_keras_object(self.after), "warmup_steps": self.warmup_steps}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WarmUp:
        return cls(keras.saving.deserialize_keras_object(config["after"]), config["warmup_steps"])


OPTIMIZERS: dict[str, Callable[..., keras.optimizers.Optimizer]] = {"lars": LARS}
"""Optimizers that a config can name besides Keras' own."""


def build_schedule(config: LrScheduleConfig, horizon: Horizon) -> Schedule:
    """Return step → learning rate: scaling, decay and warm-up in one. Raises UserError for a wrong name or option.

    A user's decay is a function (lr, horizon, **options) → Schedule, where lr is the scaled rate.
    """
    decay, where, lr = config.decay, "lr_schedule.decay", scaled_lr(config, horizon.global_batch_size)
    if ":" not in decay.name:
        build_formula(config, horizon)  # checks first, so that errors are not reworded by Keras
        if decay.name == "constant" and not config.warmup_epochs:
            return lr
        return ByFormula(dataclasses.asdict(config), dataclasses.asdict(horizon))
    schedule = call(load_function(decay.name, f"{where}.name"), decay, where, lr=lr, horizon=horizon)
    return WarmUp(schedule, horizon.steps(config.warmup_epochs)) if config.warmup_epochs else schedule


def build_optimizer(config: Config, horizon: Horizon) -> keras.optimizers.Optimizer:
    """Build the config's optimizer with its schedule; under mixed_float16 inside a LossScaleOptimizer.

    A user's LossScaleOptimizer stays as it is.
    """
    spec = config.optimizer
    if spec.name == AUTO:
        spec = dataclasses.replace(spec, name="sgd")
    arguments: dict[str, Any] = {"learning_rate": build_schedule(config.lr_schedule, horizon)}
    if "learning_rate" in spec.options:
        raise UserError("optimizer.options.learning_rate: the rate is set by lr_schedule.base_lr; leave it out here.")
    if config.train.clip_norm is not None:
        arguments["global_clipnorm"] = config.train.clip_norm
    factory = OPTIMIZERS.get(spec.name.lower()) or choose_keras(
        keras.optimizers, keras.optimizers.Optimizer, spec.name, "optimizer.name"
    )
    optimizer = call(factory, spec, "optimizer", **arguments)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UserError(f"optimizer.name: {spec.name} must make a Keras optimizer; it made {type(optimizer).__name__}.")
    return add_loss_scale(optimizer, config)


def add_loss_scale(optimizer: keras.optimizers.Optimizer, config: Config) -> keras.optimizers.Optimizer:
    """Return the optimizer; under mixed_float16 wrapped in a LossScaleOptimizer, unless it is one. Raises UserError."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if isinstance(optimizer.inner_optimizer, keras.optimizers.LossScaleOptimizer):
            # Only the outer one would multiply the loss, but both would divide the gradients.
            raise UserError(f"optimizer.name: {config.optimizer.name} scales the loss twice; expected one loss scale.")
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer) if config.precision == "mixed_float16" else optimizer


def limit_weight_decay(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    config: Config,
    *,
    is_compiled: bool = False,
) -> None:
    """Exclude variables from weight decay: by default those with one axis or none.

    Those are biases and the scales and offsets of norms, which decay does not regularise (Goyal et al. 2017, 5.1; Jia
    et al. 2018). LARS also does not scale them. A user's optimizer stays as it is, and so does that of a compiled
    model, is_compiled. Call it before the optimizer is built. Raises UserError for an invalid pattern, for one that
    matches nothing, if there is no weight decay to exclude from, or if nothing is left of one.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # Excluding again would drop the variables that the user's function has excluded.
    decides_itself = is_compiled or ":" in config.optimizer.name
    decays = inner.weight_decay is not None or isinstance(inner, LARS)
    if decays and not decides_itself:
        excluded = _excluded(variables, config.train)
        if config.optimizer.options.get("weight_decay") and {*map(id, variables)} <= {*map(id, excluded)}:
            raise UserError(
                "optimizer.options.weight_decay: has no effect, because no trained weight is decayed: by default those "
                "with more than one axis are, save those of train.weight_decay_exclude. Leave it out."
            )
        inner.exclude_from_weight_decay(var_list=excluded)
        return
    name = "the compiled optimizer" if is_compiled else config.optimizer.name
    decision = f"{name} decides itself what it excludes from its weight decay"
    reason = decision if decides_itself else "there is no weight decay; give optimizer.options.weight_decay"
    refuse_given(config, ("train.weight_decay_exclude", "train.weight_decay_1d"), f"{reason}.")


def _excluded(variables: Sequence[keras.Variable], config: TrainConfig) -> list[keras.Variable]:
    excluded = [variable for variable in variables if len(variable.shape) < 2 and not config.weight_decay_1d]
    paths = [variable.path for variable in variables]
    for number, pattern in enumerate(config.weight_decay_exclude):
        matches = find(pattern, paths, f"train.weight_decay_exclude[{number}]")
        excluded += [variable for variable in variables if variable.path in matches]
    return excluded
