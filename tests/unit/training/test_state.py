"""The state of a run, all in variables; averages of weights take their place, and leave it, bit for bit."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import PROJECT, run_process
from keras import layers

from horovod_train.config.rules import broken_rules
from horovod_train.config.settings import Config, OptimizerSpec, TrainConfig
from horovod_train.distributed.group import WorkerGroup, as_tf_variable, check_have_gradients, check_sendable
from horovod_train.errors import UserError
from horovod_train.keras_seams import averages_of
from horovod_train.training.nonfinite import nonfinite_names
from horovod_train.training.state import (
    LOSS_AVERAGE_BY_RANK,
    Averages,
    Copies,
    TrainState,
    find_seeds,
    moving_averages,
)
from horovod_train.training.steps.optimizers import Optimizers
from horovod_train.training.steps.step import DRAWS_PER_STEP, Seeds
from horovod_train.training.sync import Stale


def build_model() -> keras.Model:
    image = keras.Input((8, 8, 3))
    x = layers.BatchNormalization(name="norm")(layers.Conv2D(4, 3, name="conv")(image))
    inner = keras.Sequential([keras.Input((6, 6, 4)), layers.Flatten(), layers.Dense(5, name="dense")], name="inner")
    return keras.Model(image, layers.Dense(2, name="head")(layers.Dropout(0.5)(inner(x))))


def freeze_layers(model: keras.Model) -> None:
    model.get_layer("conv").trainable = model.get_layer("inner").trainable = False


def freeze_norm(model: keras.Model) -> None:
    model.get_layer("norm").trainable = False


def freeze_all_but_the_head(model: keras.Model) -> None:
    model.trainable = False
    model.get_layer("head").trainable = True


def train_beside(model: keras.Model) -> None:
    """Low-rank adaption: Keras freezes a kernel and leaves its layer trainable."""
    model.get_layer("inner").get_layer("dense").enable_lora(2)


def applied(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Optimizers:
    """What a state has where the step applies one optimizer, which is built."""
    optimizer.build(model.trainable_variables)
    optimizers = Optimizers({"optimizer": optimizer})
    optimizers.by_path["optimizer"] = optimizer
    return optimizers


FREEZES = [lambda model: None, freeze_layers, freeze_norm, freeze_all_but_the_head, train_beside]


@pytest.mark.parametrize("freeze", FREEZES)
def test_all_weights_are_compared_whatever_is_frozen(freeze: object) -> None:
    model = build_model()
    freeze(model)  # type: ignore[operator]
    state = TrainState(model, applied(model, keras.optimizers.SGD(momentum=0.9)))
    assert any(name.startswith("optimizer/") for name in state.variables())
    assert state.digests().keys() == state.variables().keys() - {"progress/loss_averages"}


def test_layers_of_one_name_are_all_kept() -> None:
    class Twins(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="twins")
            self.parts = [layers.Dense(2, name="fc") for _ in range(3)]

        def call(self, x: object) -> object:
            for part in self.parts:
                x = part(x)
            return x

    model, optimizer = Twins(), keras.optimizers.SGD(momentum=0.9)
    model(keras.Input((2,)))
    optimizers = applied(model, optimizer)
    stale = Stale(model, list)
    assert len(stale.variables) == len(model.trainable_variables) + 1
    kept = TrainState(model, optimizers, synchronization=stale).variables()
    wanted = [*stale.pending, *(slot.value for slot in optimizer.variables)]
    assert {id(variable) for variable in wanted} <= {id(variable) for variable in kept.values()}


def test_each_random_generator_of_a_model_has_a_seed() -> None:
    class Noisy(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.made = {"more": [keras.random.SeedGenerator(name="noise"), layers.Dropout(0.1)]}

        def call(self, x: object) -> object:
            return self.made["more"][1](x)

    inner = keras.Sequential([keras.Input((4,)), layers.GaussianNoise(0.1), layers.Dropout(0.1)])
    model = keras.Sequential([keras.Input((4,)), inner, Noisy(), layers.Dense(2)])
    assert len(find_seeds(model)) == 4
    assert find_seeds(keras.Sequential([keras.Input((4,)), layers.Dense(2)])) == []


def test_draws_differ_by_rank_layer_step_and_within_a_step() -> None:
    """As those of two passes of a step, or of a layer that draws twice."""
    generators = [keras.random.SeedGenerator(0) for _ in range(2)]
    drawn = []
    for rank in range(2):
        seeds = Seeds([as_tf_variable(each.state) for each in generators], seed=1, rank=rank)
        for step in range(3):
            seeds.set(tf.constant(step, tf.int64))
            drawn += [float(keras.random.uniform((), seed=each)) for each in generators for _ in range(2)]
    assert len(set(drawn)) == len(drawn) == 24


@pytest.mark.parametrize("by_xla", [False, True])
def test_draws_do_not_repeat_however_long_a_run_is(by_xla: bool) -> None:
    """Steps times DRAWS_PER_STEP fill 32 bits after 2^22 steps."""
    generator = keras.random.SeedGenerator(0)
    seeds = Seeds([as_tf_variable(generator.state)], seed=1, rank=0)
    set_seeds = tf.function(seeds.set, autograph=False, jit_compile=by_xla)
    states = {}
    for step in (0, 5, (1 << 22) - 1, 1 << 22, (1 << 22) + 5, 1 << 23, (1 << 24) + 5, 1 << 32, 1 << 40):
        set_seeds(tf.constant(step, tf.int64))
        states[step] = tuple(generator.state.numpy().tolist())
    assert len(set(states.values())) == len(states)
    early = {step: state for step, state in states.items() if step < 1 << 22}
    assert early == {step: (seeds.keys[0], step * DRAWS_PER_STEP) for step in early}


def test_variables_that_cannot_be_exchanged_are_named() -> None:
    layer = layers.Dense(2, dtype="bfloat16", name="narrow")
    model = keras.Sequential([keras.Input((4,)), layer], name="model")
    with pytest.raises(UserError, match=r"variable \S*narrow/kernel is bfloat16, which Horovod cannot exchange"):
        check_sendable(model.weights)
    mixed = keras.Sequential([keras.Input((4,)), layers.Dense(2, dtype="mixed_bfloat16"), layers.Dense(2)])
    check_sendable(mixed.weights)


def test_variables_that_become_their_gradients_are_refused() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="narrow")])
    check_have_gradients(model.trainable_weights)
    model.quantize("float8")
    with pytest.raises(
        UserError, match=r"narrow/inputs_scale is overwritten with its gradient \(float8 quantization\)"
    ):
        check_have_gradients(model.trainable_weights)


class Alone:
    """A group of one rank."""

    size, rank = 1, 0

    is_root = True

    def average(self, arrays: list[Any]) -> list[Any]:
        return arrays

    def to_root(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def broadcast_object(self, value: Any) -> Any:
        return value


def test_a_rank_gets_its_own_averages_of_losses_back() -> None:
    def built() -> TrainState:
        return TrainState(keras.Sequential([keras.Input((4,)), layers.Dense(2)]), Optimizers({}))

    saved, other, group = built(), built(), cast(WorkerGroup, Alone())
    saved.loss_average.assign([3.0])
    other.restore_loss_average(group, saved.snapshot(group, Copies())[LOSS_AVERAGE_BY_RANK])
    assert other.loss_average.numpy().tolist() == [3.0]


def test_averages_of_losses_of_more_ranks_are_not_taken_by_fewer() -> None:
    state = TrainState(keras.Sequential([keras.Input((4,)), layers.Dense(2)]), Optimizers({}))
    group = cast(WorkerGroup, SimpleNamespace(size=2, rank=1, broadcast_object=lambda value: value))
    state.loss_average.assign([2.0])  # the mean, which the checkpoint has too
    state.restore_loss_average(group, np.array([[1.0], [3.0], [2.0]], np.float32))
    assert state.loss_average.numpy().tolist() == [2.0]
    state.restore_loss_average(group, np.array([[1.0], [3.0]], np.float32))
    assert state.loss_average.numpy().tolist() == [3.0]


def test_a_step_that_is_not_finite_is_left_out_of_the_moving_average_where_training_continues() -> None:
    state = TrainState(keras.Sequential([keras.Input((4,)), layers.Dense(2)]), Optimizers({}))
    for step, loss in enumerate([3.0, 2.0, np.nan, 1.0], 1):
        state.note_loss(tf.constant(loss, tf.float32), tf.constant(not math.isfinite(loss)))
        state.step.assign(step)
    expected = 0.1 * (0.81 * 3.0 + 0.9 * 2.0 + 1.0) / (1 - 0.9**4)
    found = state.average_loss(Alone())  # type: ignore[arg-type]
    assert np.isclose(found["loss_average"], expected, rtol=1e-5)


def test_what_is_not_finite_by_design_does_not_count_and_what_becomes_so_does() -> None:
    x = keras.Input((4,))
    model = keras.Model(x, layers.BatchNormalization(name="norm")(layers.Dense(2, name="dense")(Masked()(x))))
    state = TrainState(model, Optimizers({}))
    shown = {name: state.variables()[name] for name in state._must_stay_finite}
    assert not nonfinite_names(shown)
    assert not any("mask" in name for name in shown)
    assert {"model/dense/kernel", "model/norm/moving_mean"} <= shown.keys()
    model.get_layer("dense").kernel.assign(tf.fill((4, 2), math.inf))
    assert nonfinite_names(shown) == ["model/dense/kernel"]


class Masked(layers.Layer):
    def build(self, shape: Any) -> None:
        self.mask = self.add_weight(
            (4,), initializer=keras.initializers.Constant(-math.inf), trainable=False, name="mask"
        )

    def call(self, x: Any) -> Any:
        return x


def test_a_mask_does_not_have_the_statistics_taken_back() -> None:
    """A weight that is not finite by design is judged by nothing."""
    x = keras.Input((3,))
    masked = Masked(name="masked")
    state = TrainState(keras.Model(x, layers.BatchNormalization()(masked(x))), Optimizers({}))
    weights = [weight.value for weight in state.model.weights]
    left_out = {variable.name for variable in weights} - {variable.name for variable in state.finite(weights)}
    assert len(left_out) == 1
    assert "mask" in next(iter(left_out))


ON_DEVICE = """
import keras
import tensorflow as tf
from conftest import PROJECT, run_process
from horovod_train.training.state import TrainState
from horovod_train.training.steps.optimizers import Optimizers

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
with tf.device("CPU:1"):
    state = TrainState(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]), Optimizers({}))
for variable in (state.model.weights[0].value, state.step, state.epoch, state.records):
    print(variable.device.rpartition("/")[2])
"""


@pytest.mark.long
def test_what_the_watchdog_reads_is_on_the_host() -> None:
    """A second CPU device stands for a GPU, which could not be read while it is stuck."""
    finished = run_process([sys.executable, "-c", ON_DEVICE], cwd=PROJECT)
    assert finished.stdout.split() == ["device:CPU:1", *["device:CPU:0"] * 3], finished.text


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_constraint="non_neg")])


def steps(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
    """Five updates by gradients that are the same each time."""
    rng = np.random.default_rng(1)
    for _ in range(5):
        own = model.trainable_weights
        optimizer.apply([tf.constant(rng.normal(size=weight.shape), tf.float32) for weight in own], own)


@pytest.mark.parametrize(
    "build",
    [
        lambda: keras.optimizers.SGD(0.3, momentum=0.9, use_ema=True, ema_momentum=0.7),
        lambda: keras.optimizers.Adam(0.1, use_ema=True, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.7)),
    ],
    ids=["sgd", "adam, accumulating", "in a loss scale"],
)
def test_the_slots_of_an_optimizer_are_what_keras_ends_with(build: Callable[[], keras.optimizers.Optimizer]) -> None:
    keras.utils.set_random_seed(1)
    model, optimizer = dense(), build()
    optimizer.build(model.trainable_variables)
    steps(optimizer, model)
    trained = model.get_weights()
    averages = Averages(averages_of(optimizer), are_of_optimizer=True)
    averages.put_in()
    averages.put_in()  # does nothing
    shown = model.get_weights()
    averages.put_back()
    assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), trained, strict=True))
    optimizer.finalize_variable_values(model.trainable_variables)
    assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), shown, strict=True))
    assert not np.array_equal(shown[0], trained[0])
    assert list(averages.variables) == [weight.path for weight in model.weights]


def test_weights_return_bit_for_bit_however_large_their_averages() -> None:
    """Where a sum and a difference would round."""
    model = dense()
    model.set_weights([np.full((3, 2), 0.1, np.float32), np.zeros(2, np.float32)])
    averages = moving_averages(model, 0.9)
    for average in averages.variables.values():
        average.assign(tf.fill(average.shape, 1e8))
    with averages.in_place():
        assert model.get_weights()[0].max() == 1e8
    assert np.array_equal(model.get_weights()[0], np.full((3, 2), 0.1, np.float32))
    averages.put_back()  # does nothing
    assert np.array_equal(model.get_weights()[1], np.zeros(2))


OPTIONS: dict[str, tuple[dict[str, Any], float | None, tuple[str, str]]] = {
    "two kinds": ({"use_ema": True}, 0.9, ("train.ema_decay", "optimizer.options.use_ema keeps averages too; give")),
    "a momentum of none": ({"ema_momentum": 0.9}, None, ("optimizer.options.ema_momentum", "has no effect without")),
    "a frequency of none": (
        {"use_ema": False, "ema_overwrite_frequency": 2},
        None,
        ("optimizer.options.ema_overwrite_frequency", "has no effect without use_ema: true."),
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_settings_of_averages_that_have_no_effect_are_one_line(name: str) -> None:
    options, decay, (key, expected) = OPTIONS[name]
    config = Config(optimizer=OptimizerSpec("sgd", options), train=TrainConfig(epochs=1, ema_decay=decay))
    assert expected in dict(broken_rules(config))[key]
    right = OptimizerSpec("sgd", options | {"use_ema": True})
    found = dict(broken_rules(Config(optimizer=right, train=TrainConfig(epochs=1))))
    assert not [key for key in found if "ema" in key]
