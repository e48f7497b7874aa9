"""Cuts that a model does not allow are refused in one line; what stages do is tried on real devices elsewhere."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from horovod_train.config.rules import broken_rules
from horovod_train.config.settings import Config, DeviceConfig, TrainConfig
from horovod_train.errors import UserError
from horovod_train.keras_seams import compile_arguments
from horovod_train.models.model_parallel import cut_into_stages
from horovod_train.training import build


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="own")
        self.dense = keras.layers.Dense(2)

    def call(self, x: object) -> object:
        return self.dense(x)


class Configless(keras.layers.Layer):
    def __init__(self, units: int) -> None:
        super().__init__(name="plain")
        self.units = units

    def call(self, x: object) -> object:
        return x


@keras.saving.register_keras_serializable("users_layers")
class Registered(keras.layers.Dense):
    pass


def with_configless() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), Configless(3), keras.layers.Dense(2, name="out")])


def sequential() -> keras.Model:
    layers = [keras.layers.Dense(3, name=name) for name in ("one", "two", "three")]
    return keras.Sequential([keras.Input((4,)), *layers])


def test_a_model_that_is_not_cut_stays_the_same_object() -> None:
    model = sequential()
    assert cut_into_stages(model, [], ["CPU:0"]) is model


def test_a_registered_layer_in_a_stage_is_saved_by_its_registered_name() -> None:
    model = keras.Sequential([keras.Input((4,)), Registered(3), keras.layers.Dense(2, name="out")])
    cut = cut_into_stages(model, ["out"], ["CPU:0", "CPU:0"])
    saved = keras.saving.serialize_keras_object(cut)
    assert saved["config"]["layers"][1]["registered_name"] == "users_layers>Registered"
    assert type(keras.saving.deserialize_keras_object(saved).layers[0]) is Registered


def test_a_cut_keeps_what_a_config_does_not_hold() -> None:
    def loss(targets: Any, outputs: Any) -> Any:  # Keras could not find it by its name
        return keras.ops.mean(keras.ops.abs(targets - outputs))

    words = keras.layers.StringLookup(name="words")
    words.adapt(["red", "green"])
    embed, out = keras.layers.Embedding(3, 4, name="embed"), keras.layers.Dense(2, name="out")
    model = keras.Sequential([keras.Input((1,), dtype="string"), words, embed, keras.layers.Flatten(name="flat"), out])
    model.get_layer("out").bias.trainable = False
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(optimizer, loss)
    cut = cut_into_stages(model, ["out"], ["CPU:0", "CPU:0"])
    assert cut.get_layer("words").get_vocabulary() == words.get_vocabulary()
    assert [weight.trainable for weight in cut.weights] == [weight.trainable for weight in model.weights]
    assert (cut.optimizer, compile_arguments(cut)["loss"]) == (optimizer, loss)
    assert model.compiled
    x = np.array([["red"], ["blue"]])
    assert np.array_equal(cut(x), model(x))


@pytest.mark.parametrize(
    ("make", "cut_before", "message"),
    [
        (sequential, ["four"], "device.cut_before: the model has no layer 'four'; it has one, two, three."),
        (sequential, ["three", "two"], "three, two must be in the model's order, none twice nor first"),
        (sequential, ["two", "two"], "two, two must be in the model's order, none twice nor first"),
        (sequential, ["one"], "one must be in the model's order, none twice nor first; it is one, two, three."),
        (
            with_configless,
            ["out"],
            "layer plain cannot be made again from its config, which a cut needs; give Configless",
        ),
        (Subclassed, ["dense"], "can cut a functional or sequential model; own is a Subclassed."),
    ],
)
def test_impossible_cuts_are_refused(make: type, cut_before: list[str], message: str) -> None:
    with pytest.raises(UserError) as found:
        cut_into_stages(make(), cut_before, ["CPU:0"] * (len(cut_before) + 1))
    assert message in str(found.value)


def test_a_cut_into_another_number_of_stages_than_devices_is_named() -> None:
    found = dict(broken_rules(Config(device=DeviceConfig(per_rank=3, cut_before=("out",)))))
    assert found["device.cut_before"] == "cuts the model into 2 stages; device.per_rank must be 2 too."


def test_settings_that_do_not_go_with_each_other_are_named() -> None:
    cut = DeviceConfig(per_rank=2, cut_before=("out",))
    synchronised = TrainConfig(epochs=1, sync_batch_norm=True, synchronization="local", average_every_steps=2)
    found = dict(broken_rules(Config(train=synchronised, device=cut)))
    assert "ranks do not meet in a step" in found["train.sync_batch_norm"]
    found = dict(broken_rules(Config(train=TrainConfig(sync_batch_norm=True), device=cut, jit_compile=True)))
    assert "XLA cannot compile the exchange" in found["train.sync_batch_norm"]
    assert "XLA compiles for one device" in found["device.per_rank"]
    assert "device.cut_before" not in found


class Stepping(keras.Sequential):
    """Trains by its own step, which Keras' copy of a Sequential model has not."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return {}


def test_a_copy_without_the_models_own_step_is_refused() -> None:
    layers = [keras.Input((3,)), keras.layers.Dense(2, name="one"), keras.layers.Dense(1, name="two")]
    with pytest.raises(UserError, match=r"device\.cut_before: .* copy of a Stepping has no train_step of its own"):
        build._cut(Stepping(layers), ["two"], ["CPU:0"] * 2)
    plain = keras.Sequential(layers)
    assert type(build._cut(plain, ["two"], ["CPU:0"] * 2)) is keras.Sequential
    assert type(build._cut(Stepping(layers), [], ["CPU:0"])) is Stepping
