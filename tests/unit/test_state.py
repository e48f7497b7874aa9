"""Which variables of a model each rank gathers for itself, and which all ranks must hold alike."""

from __future__ import annotations

import keras
import pytest
from keras import layers

from horovod_train.distributed.group import check_sendable
from horovod_train.errors import UserError
from horovod_train.state import Settled, TrainState, find_seeds
from horovod_train.synchronization import Stale


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


FREEZES = [lambda model: None, freeze_layers, freeze_norm, freeze_all_but_the_head, train_beside]


@pytest.mark.parametrize("freeze", FREEZES)
def test_statistics_are_what_a_pass_moves_whatever_is_frozen(freeze: object) -> None:
    model = build_model()
    freeze(model)  # type: ignore[operator]
    state = TrainState(model, keras.optimizers.SGD())
    kept = state.variables()
    own = {variable.ref() for variable in state.statistics}
    found = {name for name, variable in kept.items() if variable.ref() in own}
    assert found == {"model/norm/moving_mean", "model/norm/moving_variance", "progress/loss_averages"}
    assert Settled(state).digests().keys() == kept.keys() - found


def test_a_layer_made_frozen_has_no_statistics() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, trainable=False), layers.Dense(2)])
    state = TrainState(model, keras.optimizers.SGD())
    assert [variable.name for variable in state.statistics] == ["loss_averages:0"]


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
    optimizer.build(model.trainable_variables)
    stale = Stale(model, optimizer)
    assert len(stale.variables) == len(model.trainable_variables) + 1
    kept = TrainState(model, optimizer, synchronization=stale).variables()
    assert {id(variable) for variable in stale.pending} <= {id(variable) for variable in kept.values()}


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


def test_variables_that_cannot_be_exchanged_are_named() -> None:
    layer = layers.Dense(2, dtype="bfloat16", name="narrow")
    model = keras.Sequential([keras.Input((4,)), layer], name="model")
    with pytest.raises(UserError, match=r"variable \S*narrow/kernel is bfloat16, which Horovod cannot exchange"):
        check_sendable(model.weights)
    mixed = keras.Sequential([keras.Input((4,)), layers.Dense(2, dtype="mixed_bfloat16"), layers.Dense(2)])
    check_sendable(mixed.weights)
