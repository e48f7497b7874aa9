"""Learning rates step by step, against their formulas written out."""

from __future__ import annotations

import math
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_train.config.settings import Config, LrScheduleConfig, OptimizerSpec, Spec, TrainConfig
from horovod_train.errors import UserError
from horovod_train.optim.optimizers import build_optimizer, build_schedule
from horovod_train.optim.schedules import Horizon, build_formula, build_horizon

HORIZON = Horizon(global_batch_size=64, steps_per_epoch=10, total_steps=100)


def rate(config: LrScheduleConfig, step: int) -> float:
    schedule = build_schedule(config, HORIZON)
    return schedule if isinstance(schedule, float) else float(schedule(step))


@pytest.mark.parametrize(
    ("epochs", "max_steps", "total_steps"), [(3, 5, 5), (3, 50, 30), (3, None, 30), (None, 50, 50)]
)
def test_a_run_ends_by_epochs_or_steps_whichever_is_first(
    epochs: int | None, max_steps: int | None, total_steps: int
) -> None:
    horizon = build_horizon(TrainConfig(epochs=epochs, max_steps=max_steps), 64, 10)
    assert horizon.total_steps == total_steps


@pytest.mark.parametrize(
    ("scaling", "expected"), [("none", 0.1), ("linear", 0.1 * 64 / 16), ("sqrt", 0.1 * math.sqrt(64 / 16))]
)
def test_rate_scales_with_the_global_batch(scaling: str, expected: float) -> None:
    config = LrScheduleConfig(base_lr=0.1, scaling=scaling, base_batch_size=16)  # type: ignore[arg-type]
    assert rate(config, 0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("decay", "by_step"),
    [
        (Spec("constant"), {0: 0.1, 99: 0.1}),
        (
            Spec("piecewise", {"boundaries_epochs": [3, 6], "factors": [0.1, 0.01]}),
            {0: 0.1, 29: 0.1, 30: 0.01, 59: 0.01, 60: 0.001},
        ),
        (Spec("exponential", {"rate": 0.5}), {0: 0.1, 9: 0.1, 10: 0.05, 25: 0.025}),
        (Spec("exponential", {"rate": 0.5, "staircase": False}), {5: 0.1 * 0.5**0.5, 20: 0.025}),
        (Spec("cosine"), {0: 0.1, 50: 0.05, 100: 0.0}),
        (Spec("cosine", {"final_factor": 0.1, "epochs": 5}), {25: 0.055, 50: 0.01, 99: 0.01}),
        (Spec("polynomial", {"power": 2.0}), {0: 0.1, 50: 0.025, 100: 0.0}),
    ],
)
def test_decay_in_epochs(decay: Spec, by_step: dict[int, float]) -> None:
    config = LrScheduleConfig(base_lr=0.1, decay=decay)
    assert {step: rate(config, step) for step in by_step} == pytest.approx(by_step, rel=1e-5, abs=1e-9)


def test_warm_up_rises_by_step_to_the_decayed_rate() -> None:
    config = LrScheduleConfig(base_lr=0.1, warmup_epochs=2, decay=Spec("exponential", {"rate": 0.5}))
    expected = {0: 0.1 / 20, 9: 0.1 * 10 / 20, 10: 0.05 * 11 / 20, 19: 0.05, 20: 0.025}
    assert {step: rate(config, step) for step in expected} == pytest.approx(expected, rel=1e-5)


def own_decay(lr: float, horizon: Horizon) -> float:
    return lr


def test_warm_up_before_a_users_decay_is_in_epochs() -> None:
    config = LrScheduleConfig(base_lr=0.1, warmup_epochs=2, decay=Spec(f"{__name__}:own_decay"))
    expected = {0: 0.1 / 20, 9: 0.05, 19: 0.1, 50: 0.1}
    assert {step: rate(config, step) for step in expected} == pytest.approx(expected)


def test_a_staircase_falls_at_the_planned_step_also_in_a_compiled_step() -> None:
    """There a division by a constant is a product with its reciprocal: 47 / 47 is less than 1."""
    config = LrScheduleConfig(base_lr=1.0, decay=Spec("exponential", {"rate": 0.5}))
    for steps_per_epoch in (41, 47, 55, 61, 82, 97, 100, 1563):
        horizon = Horizon(64, steps_per_epoch, 10 * steps_per_epoch)
        schedule = build_schedule(config, horizon)
        assert callable(schedule)
        compiled = tf.function(lambda step, schedule=schedule: schedule(step))
        for step in (steps_per_epoch - 1, steps_per_epoch, 2 * steps_per_epoch):
            planned = build_formula(config, horizon)(float(step), np)
            assert float(compiled(tf.constant(step, tf.int64))) == planned, (steps_per_epoch, step)


DECAYS = [
    Spec("constant"),
    Spec("piecewise", {"boundaries_epochs": [3, 6.5], "factors": [0.1, 0.01]}),
    Spec("exponential", {"rate": 0.97, "every_epochs": 0.5}),
    Spec("exponential", {"rate": 0.5, "staircase": False}),
    Spec("cosine", {"final_factor": 0.01, "epochs": 8}),
    Spec("polynomial", {"power": 2.0, "final_factor": 0.1}),
]


@pytest.mark.parametrize("warmup_epochs", [0, 1.5])
@pytest.mark.parametrize("decay", DECAYS, ids=lambda decay: decay.name)
def test_rates_without_tensorflow_are_those_of_training_at_every_step(decay: Spec, warmup_epochs: float) -> None:
    config = LrScheduleConfig(0.4, "linear", 32, warmup_epochs, decay)
    steps = np.arange(HORIZON.total_steps + 5, dtype=np.float64)
    planned = build_formula(config, HORIZON)(steps, np)
    trained = [rate(config, int(step)) for step in steps]
    np.testing.assert_allclose(planned, trained, rtol=2e-6, atol=1e-8)
    # One step off would be seen, wherever the rate changes at all.
    if decay.name != "constant" or warmup_epochs:
        assert not np.allclose(planned[1:], trained[:-1], rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("decay", "theirs"),
    [
        (DECAYS[3], keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)),
        (DECAYS[4], keras.optimizers.schedules.CosineDecay(0.1, 80, alpha=0.01)),
        (DECAYS[5], keras.optimizers.schedules.PolynomialDecay(0.1, 100, 0.01, power=2.0)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_decays_are_those_that_keras_has_under_the_same_names(decay: Spec, theirs: keras.optimizers.Optimizer) -> None:
    steps = np.arange(HORIZON.total_steps + 5, dtype=np.float64)
    ours = build_formula(LrScheduleConfig(base_lr=0.1, decay=decay), HORIZON)(steps, np)
    np.testing.assert_allclose(ours, [float(theirs(int(step))) for step in steps], rtol=1e-5, atol=1e-8)


def test_a_decay_that_falls_back_is_refused() -> None:
    decay = Spec("piecewise", {"boundaries_epochs": [6, 3], "factors": [0.1, 0.01]})
    with pytest.raises(UserError, match=r"boundaries_epochs must rise; received \[6, 3\]"):
        rate(LrScheduleConfig(base_lr=0.1, decay=decay), 0)


def test_warm_up_survives_saving() -> None:
    schedule = build_schedule(LrScheduleConfig(base_lr=0.1, warmup_epochs=1, decay=Spec("cosine")), HORIZON)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(schedule))
    assert [float(again(step)) for step in range(20)] == [float(schedule(step)) for step in range(20)]


@pytest.mark.parametrize("name", ["SGD", "sgd", "adam_w", "AdamW", "RMSprop", "lamb", "Lion", "adafactor"])
def test_any_keras_optimizer_by_name(name: str) -> None:
    optimizer = build_optimizer(Config(optimizer=OptimizerSpec(name)), HORIZON)
    assert type(optimizer).__name__.lower() == name.replace("_", "").lower()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epsilon": "1e-7"}, "epsilon: expected a number; received '1e-7'. YAML reads 1e-7 as text: write 1.0e-7."),
        ({"weight_decay": "1.5E3"}, "received '1.5E3'. YAML reads 1.5E3 as text: write 1.5e+3."),
        ({"beta_1": [0.9, "-9e-1"]}, "received '-9e-1'. YAML reads -9e-1 as text: write -9.0e-1."),
    ],
)
def test_a_number_that_yaml_reads_as_text_is_refused_with_how_to_write_it(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=r"optimizer\.options\.") as error:
        build_optimizer(Config(optimizer=OptimizerSpec("adam", options)), HORIZON)
    assert str(error.value).endswith(said)


def test_clip_norm_reaches_the_optimizer_and_is_refused_twice() -> None:
    config = Config(train=TrainConfig(clip_norm=0.5))
    assert build_optimizer(config, HORIZON).global_clipnorm == 0.5
    twice = Config(train=TrainConfig(clip_norm=0.5), optimizer=OptimizerSpec("sgd", {"global_clipnorm": 1.0}))
    with pytest.raises(UserError, match="global_clipnorm"):
        build_optimizer(twice, HORIZON)


def test_mixed_float16_scales_the_loss() -> None:
    optimizer = build_optimizer(Config(precision="mixed_float16"), HORIZON)
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def scaled(learning_rate: float, scales: int = 1, **options: object) -> keras.optimizers.Optimizer:
    """A user's own."""
    optimizer = keras.optimizers.SGD(learning_rate, **options)
    for _ in range(scales):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    return optimizer


@pytest.mark.parametrize("precision", ["mixed_float16", "float32"])
def test_a_loss_scale_of_the_users_own_is_the_only_one(precision: str) -> None:
    config = Config(precision=precision, optimizer=OptimizerSpec(f"{__name__}:scaled"))  # type: ignore[arg-type]
    optimizer = build_optimizer(config, HORIZON)
    assert isinstance(optimizer.inner_optimizer, keras.optimizers.SGD)
    assert optimizer.initial_scale == 8.0


def test_two_loss_scales_are_refused() -> None:
    config = Config(precision="mixed_float16", optimizer=OptimizerSpec(f"{__name__}:scaled", {"scales": 2}))
    with pytest.raises(UserError, match=r"^optimizer.name: .*:scaled scales the loss twice; expected one loss scale"):
        build_optimizer(config, HORIZON)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("cosine", {"final_factor": "1e-3"}, "options.final_factor: expected a number; received '1e-3'"),
        ("cosine", {"epochs": -3}, "options.epochs: must be above 0; received -3"),
        ("exponential", {"rate": -1}, "gives the learning rate -0.1 at step"),
        ("polynomial", {"power": -1, "epochs": 2}, "gives the learning rate inf at step"),
        ("piecewise", {"boundaries_epochs": [1], "factors": ["a"]}, "piecewise cannot use"),
    ],
)
def test_a_decay_that_gives_no_rates_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        build_formula(LrScheduleConfig(base_lr=0.1, decay=Spec(name, options)), HORIZON)
