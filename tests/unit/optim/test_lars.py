"""LARS against its paper's formulas in numpy, and what weight decay leaves alone, for it and for Keras' optimizers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import run_process

from horovod_train.config.settings import Config, OptimizerSpec, TrainConfig
from horovod_train.errors import UserError
from horovod_train.keras_seams import take_class
from horovod_train.optim.lars import LARS
from horovod_train.optim.optimizers import build_optimizer, limit_weight_decay
from horovod_train.optim.schedules import Horizon

HORIZON = Horizon(global_batch_size=64, steps_per_epoch=10, total_steps=100)


def draws(seed: int) -> list[np.ndarray]:
    """A kernel, a bias and a kernel that is all zeros; or gradients for them."""
    rng = np.random.default_rng(seed)
    kernel, bias, zeros = rng.normal(size=(4, 3)), rng.normal(size=3), rng.normal(size=(3, 2)) * (seed > 0)
    return [kernel.astype(np.float32), bias.astype(np.float32), zeros.astype(np.float32)]


def lars_in_numpy(steps: int, rate: float, momentum: float, decay: float, trust: float) -> list[np.ndarray]:
    weights = [weight.astype(np.float64) for weight in draws(0)]
    velocities = [np.zeros_like(weight) for weight in weights]
    for step in range(steps):
        for i, gradient in enumerate(draws(step + 1)):
            local: Any = 1.0
            decayed = gradient.astype(np.float64)
            if weights[i].ndim > 1:
                norm = np.linalg.norm(weights[i])
                local = trust * norm / (np.linalg.norm(gradient) + decay * norm) or 1.0
                decayed = decayed + decay * weights[i]
            velocities[i] = momentum * velocities[i] + rate * local * decayed
            weights[i] = weights[i] - velocities[i]
    return weights


def trained(optimizer: keras.optimizers.Optimizer, steps: int) -> list[np.ndarray]:
    variables = [keras.Variable(value, name=name) for value, name in zip(draws(0), "kbz", strict=True)]
    optimizer.build(variables)
    apply = tf.function(lambda gradients: optimizer.apply(gradients, variables))
    for step in range(steps):
        apply([tf.constant(gradient) for gradient in draws(step + 1)])
    return [variable.numpy() for variable in variables]


def test_lars_is_the_papers_update() -> None:
    given: dict[str, Any] = {"momentum": 0.8, "weight_decay": 0.1, "trust_coefficient": 0.02}
    found = trained(LARS(learning_rate=0.5, **given), 5)
    for ours, expected in zip(found, lars_in_numpy(5, 0.5, *given.values()), strict=True):
        assert np.allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_lars_is_not_momentum_sgd() -> None:
    """The negative of the above: what it compares does depend on the ratio of norms."""
    found = trained(keras.optimizers.SGD(0.5, momentum=0.8), 5)
    expected = lars_in_numpy(5, 0.5, 0.8, 0.1, 0.02)
    assert not np.allclose(found[0], expected[0], rtol=1e-2)
    assert np.allclose(found[1], expected[1], rtol=1e-5)  # the bias is what it leaves to momentum


@pytest.mark.parametrize("options", [{"momentum": 1.0}, {"weight_decay": -1.0}, {"trust_coefficient": 0.0}])
def test_lars_refuses_what_has_no_meaning(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"optimizer: lars with options .*{next(iter(options))} must be"):
        build_optimizer(Config(optimizer=OptimizerSpec("lars", options)), HORIZON)


@pytest.mark.long
def test_a_model_saved_with_lars_goes_on_where_there_is_no_horovod(tmp_path: Path) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    optimizer = build_optimizer(Config(optimizer=OptimizerSpec("lars", {"trust_coefficient": 0.5})), HORIZON)
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    model.fit(x, x[:, :2], verbose=0)
    model.save(tmp_path / "model.keras")
    expected = model.evaluate(x, x[:, :2], verbose=0)
    script = f"""
import sys
sys.modules["horovod"] = None  # an import of it would raise
import keras, numpy as np, horovod_train.optim.lars
model = keras.saving.load_model({str(tmp_path / "model.keras")!r})
x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
optimizer = model.optimizer
print(type(optimizer).__name__, int(optimizer.iterations), optimizer.trust_coefficient, optimizer.decay)
print(model.evaluate(x, x[:, :2], verbose=0), any(slot.numpy().any() for slot in optimizer.velocities))
model.fit(x, x[:, :2], verbose=0)
"""
    finished = run_process([sys.executable, "-c", script])
    assert finished.returncode == 0, finished.text
    first, second = finished.stdout.splitlines()
    assert first == "LARS 1 0.5 0.0005"
    loss, has_slots = second.split()
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert has_slots == "True"


def decayed(name: str, options: dict[str, Any], **limits: Any) -> list[float]:
    """How much smaller each of a kernel, a bias and a second kernel is after one step without any gradient."""
    variables = [keras.Variable(np.ones(shape, np.float32), name=n) for shape, n in (((2, 2), "a"), ((2,), "b"))]
    variables.append(keras.Variable(np.ones((2, 2), np.float32), name="second"))
    config = Config(optimizer=OptimizerSpec(name, options), train=TrainConfig(**limits))
    optimizer = build_optimizer(config, HORIZON)
    limit_weight_decay(optimizer, variables, config)
    optimizer.build(variables)
    rate = float(optimizer.learning_rate)
    optimizer.apply([tf.zeros(variable.shape) for variable in variables], variables)
    return [float((1 - variable.numpy().ravel()[0]) / rate) for variable in variables]


DECAY = {"weight_decay": 0.25}


@pytest.mark.parametrize("name", ["sgd", "adam", "adam_w", "lamb", "lion", "rmsprop", "nadam", "adagrad"])
def test_weight_decay_leaves_out_biases_and_norms(name: str) -> None:
    assert decayed(name, DECAY) == pytest.approx([0.25, 0.0, 0.25], rel=1e-3)


def test_weight_decay_reaches_biases_if_asked() -> None:
    assert decayed("sgd", DECAY, weight_decay_1d=True) == pytest.approx([0.25, 0.25, 0.25], rel=1e-3)


def test_weight_decay_leaves_out_what_a_pattern_names() -> None:
    assert decayed("sgd", DECAY, weight_decay_exclude=("^sec",)) == pytest.approx([0.25, 0.0, 0.0], rel=1e-3)


def test_weight_decay_is_limited_inside_a_loss_scale_optimizer() -> None:
    variables = [keras.Variable(np.ones(shape, np.float32)) for shape in ((2, 2), (2,))]
    config = Config(optimizer=OptimizerSpec("sgd", DECAY), precision="mixed_float16")
    optimizer = build_optimizer(config, HORIZON)
    limit_weight_decay(optimizer, variables, config)
    optimizer.build(variables)
    optimizer.apply([tf.zeros(variable.shape) for variable in variables], variables)
    assert [variable.numpy().ravel()[0] < 1 for variable in variables] == [True, False]


def sgd_that_spares(learning_rate: Any, spared: str, **options: Any) -> keras.optimizers.Optimizer:
    """A user's own function, as docs/models.md has one."""
    optimizer = keras.optimizers.SGD(learning_rate, **options)
    optimizer.exclude_from_weight_decay(var_names=[spared])
    return optimizer


def test_what_a_users_own_function_leaves_out_of_weight_decay_stays_left_out() -> None:
    """It decides alone: Keras decays the bias too, unless the function says otherwise."""
    assert decayed("test_lars:sgd_that_spares", DECAY | {"spared": "second"}) == pytest.approx(
        [0.25, 0.25, 0], rel=1e-3
    )
    assert decayed("test_lars:sgd_that_spares", DECAY | {"spared": "b"}) == pytest.approx([0.25, 0, 0.25], rel=1e-3)


def test_lars_scales_and_decays_what_it_is_told_to() -> None:
    given = {"weight_decay": 0.5, "trust_coefficient": 1.0}  # without a gradient local · λ is the trust coefficient
    assert decayed("lars", given) == pytest.approx([1.0, 0.0, 1.0], rel=1e-3)
    assert decayed("LARS", given, weight_decay_1d=True) == pytest.approx([1.0, 1.0, 1.0], rel=1e-3)
    assert decayed("lars", given, weight_decay_exclude=("second",)) == pytest.approx([1.0, 0.0, 0.0], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "limits", "message"),
    [
        (DECAY, {"weight_decay_exclude": ("nowhere",)}, "exclude[0]: 'nowhere' is in none of a, b, second"),
        (DECAY, {"weight_decay_exclude": ("a", "(")}, "exclude[1]: '(' is no regular expression: missing )"),
        ({}, {"weight_decay_exclude": ("a",)}, "train.weight_decay_exclude: there is no weight decay; give optimizer."),
        ({}, {"weight_decay_1d": True}, "train.weight_decay_1d: there is no weight decay; give optimizer.options"),
    ],
)
def test_limits_without_effect_are_refused(options: dict[str, Any], limits: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as found:
        decayed("sgd", options, **limits)
    assert message in str(found.value)


@pytest.mark.parametrize("limits", [{"weight_decay_exclude": ("a",)}, {"weight_decay_1d": True}])
def test_limits_beside_a_users_own_function_are_refused(limits: dict[str, Any]) -> None:
    own = "test_lars:sgd_that_spares"
    with pytest.raises(UserError, match=f"^train.{next(iter(limits))}: {own} decides itself what it excludes"):
        decayed(own, DECAY | {"spared": "b"}, **limits)


def test_an_optimizer_that_took_another_class_is_saved_by_its_registered_name() -> None:
    optimizer = LARS(0.25)
    take_class(optimizer, type("Derived", (LARS,), {}))
    take_class(optimizer, type("Derived", (type(optimizer),), {}))
    saved = keras.saving.serialize_keras_object(optimizer)
    assert saved["registered_name"] == "horovod_train>LARS"
    loaded = keras.saving.deserialize_keras_object(saved)
    assert type(loaded) is LARS
    assert float(loaded.learning_rate) == 0.25
    plain = keras.saving.serialize_keras_object(LARS(0.5))
    assert type(keras.saving.deserialize_keras_object(plain)) is LARS


def test_an_exclusion_that_comes_too_late_is_refused() -> None:
    optimizer = LARS()
    optimizer.build([keras.Variable(np.ones(2, np.float32))])
    with pytest.raises(ValueError, match="before the optimizer is built"):
        optimizer.exclude_from_weight_decay(var_names=["kernel"])
