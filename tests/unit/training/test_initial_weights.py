"""What a model begins with: the file of a backbone in it, frozen but for the head; and slots that follow weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from horovod_train.checkpoint.layout import Facts
from horovod_train.checkpoint.tensors import write
from horovod_train.config.settings import ModelSpec, Spec
from horovod_train.distributed.layer_contents import contents
from horovod_train.errors import UserError
from horovod_train.models import build_model
from horovod_train.training.fine_tuning import Freezing, assign, enable_lora, match, slots_like_weights
from horovod_train.training.state import weights_by_name


def backbone() -> keras.Model:
    image = keras.Input((8, 8, 3))
    x = layers.BatchNormalization(name="norm")(layers.Conv2D(4, 3, name="conv")(image))
    return keras.Model(image, layers.Conv2D(2, 3, name="last")(x), name="backbone")


def with_head() -> keras.Model:
    image = keras.Input((8, 8, 3))
    x = layers.GlobalAveragePooling2D()(backbone()(layers.Rescaling(2.0)(image)))
    return keras.Model(image, layers.Dense(3, name="head")(x))


@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_the_file_of_a_backbone_fits_the_model_around_it(ending: str, tmp_path: Path) -> None:
    source, model, path = backbone(), with_head(), str(tmp_path / f"base{ending}")
    source.save(path) if ending == ".keras" else source.save_weights(path)
    found = match(model, ModelSpec("any", init_from=path))
    assert sorted(found.new) == ["head/bias", "head/kernel"]
    assert found.left == []
    assign(model, found.taken)
    for ours, theirs in zip(model.get_layer("backbone").weights, source.weights, strict=True):
        assert np.array_equal(ours.numpy(), theirs.numpy())


class Many(layers.Layer):
    """More weights than have one digit."""

    def build(self, shape: Any) -> None:
        self.each = [self.add_weight(shape=(2,), name=f"w{number}") for number in range(12)]

    def call(self, x: Any) -> Any:
        return sum(x * weight for weight in self.each)


def of_many(factor: float) -> keras.Model:
    """Weight n is n times the factor."""
    inputs = keras.Input((2,))
    model = keras.Model(inputs, Many(name="many")(inputs))
    for number, weight in enumerate(model.weights):
        weight.assign([factor * number] * 2)
    return model


def test_weights_of_a_layer_of_many_come_in_their_order(tmp_path: Path) -> None:
    path = str(tmp_path / "a.weights.h5")
    of_many(1.0).save_weights(path)
    found = match(of_many(0.0), ModelSpec("any", init_from=path))
    assert [float(value[0]) for value in found.taken.values()] == list(range(12))


class OfTheSharedOne(layers.Layer):
    """Holds a layer that the model holds as well, under a name that Keras saves first."""

    def __init__(self, shared: layers.Layer, **options: Any) -> None:
        super().__init__(**options)
        self.shared = shared

    def build(self, shape: Any) -> None:
        self.bias = self.add_weight(shape=(2,), name="bias")

    def call(self, x: Any) -> Any:
        return self.shared(x) + self.bias


class Shares(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="shares")
        self.first = layers.Dense(2, name="first")
        self.also = OfTheSharedOne(self.first, name="also")
        self.norm = layers.SpectralNormalization(layers.Dense(2, name="inner"), name="norm")
        self.quantised = layers.Dense(3, name="quantised")

    def call(self, x: Any) -> Any:
        return self.quantised(self.norm(self.also(self.first(x))))


def sharing() -> keras.Model:
    model = Shares()
    model(np.ones((1, 2), np.float32))
    model.quantised.quantize("int8")
    return model


def test_a_file_fits_the_model_that_saved_it_as_keras_itself_reads_it(tmp_path: Path) -> None:
    """With a layer that two hold, weights that a layer keeps of another, and weights saved in an order of their own."""
    source, model, path = sharing(), sharing(), str(tmp_path / "a.weights.h5")
    for number, weight in enumerate(source.weights):
        weight.assign(weight + number if weight.dtype == "float32" else weight)
    source.save_weights(path)
    found = match(model, ModelSpec("any", init_from=path))
    assert found.left == found.new == []
    assign(model, found.taken)
    for ours, theirs in zip(model.weights, source.weights, strict=True):
        assert np.array_equal(ours.numpy(), theirs.numpy()), ours.path


def unnamed() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), layers.Dense(2), layers.Dense(1)])


def of_objects() -> dict[str, Any]:
    return {weight.path: np.full(weight.shape, None) for weight in unnamed().weights}


def test_the_model_of_a_function_has_the_names_of_one_that_was_built_first() -> None:
    model = build_model(Spec("test_initial_weights:unnamed"))
    found = match(model, ModelSpec("any", init_from="test_initial_weights:unnamed"))
    assert len(found.taken) == 4
    assert found.left == found.new == []


def test_arrays_of_a_function_that_hold_no_numbers_are_told() -> None:
    model = build_model(Spec("test_initial_weights:unnamed"))
    with pytest.raises(UserError, match=r"of_objects: .*kernel is object there; expected numbers"):
        match(model, ModelSpec("any", init_from="test_initial_weights:of_objects"))


class Twins(keras.Model):
    """Two layers of one name."""

    def __init__(self) -> None:
        super().__init__(name="twins")
        self.first, self.second = (layers.Dense(2, use_bias=False, name="twin") for _ in range(2))

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


def twins() -> keras.Model:
    model = Twins()
    model(np.zeros((1, 2), np.float32))
    return model


def test_layers_with_one_name_get_their_own_weights(tmp_path: Path) -> None:
    source, model = twins(), twins()
    facts = Facts(step=1, epoch=0, records=0, ranks=1, config={}, versions={})
    saved = {name: value.numpy() for name, value in weights_by_name(source.weights, "model").items()}
    write(tmp_path / "saved", saved, facts)
    found = match(model, ModelSpec("any", init_from=str(tmp_path / "saved")))
    assert found.left == found.new == []
    assign(model, found.taken)
    for ours, theirs in zip(model.weights, source.weights, strict=True):
        assert np.array_equal(ours, theirs)
    of_function = match(model, ModelSpec("any", init_from="test_initial_weights:twins"))
    assert len(of_function.taken) == 2
    assert of_function.left == of_function.new == []


@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_a_file_with_layers_of_one_name_is_refused(ending: str, tmp_path: Path) -> None:
    path = str(tmp_path / f"twins{ending}")
    source = twins()
    source.save(path) if ending == ".keras" else source.save_weights(path)
    with pytest.raises(UserError, match="several layers are called twin; a file of Keras tells layers apart by name"):
        match(twins(), ModelSpec("any", init_from=path))
    with pytest.raises(UserError, match="no weight of it is one of the model's"):
        match(twins(), ModelSpec("any", init_from=path, init_exclude=("twin",)))


def test_layers_of_one_name_in_two_functional_models_get_their_own_weights_from_a_file(tmp_path: Path) -> None:
    """Their weights have one path, dense/kernel."""

    def built() -> keras.Model:
        x = inputs = keras.Input((2,))
        for name in "ab":
            part = keras.Input((2,))
            x = keras.Model(part, layers.Dense(2, use_bias=False, name="dense")(part), name=name)(x)
        return keras.Model(inputs, x)

    source, model, path = built(), built(), str(tmp_path / "parts.weights.h5")
    source.save_weights(path)
    found = match(model, ModelSpec("any", init_from=path))
    assert found.left == found.new == []
    assign(model, found.taken)
    for ours, theirs in zip(model.weights, source.weights, strict=True):
        assert np.array_equal(ours, theirs)


def test_what_lora_learned_in_layers_with_one_name_is_in_the_weights_of_each(tmp_path: Path) -> None:
    adapted, model, x = twins(), twins(), np.ones((1, 2), np.float32)
    enable_lora(adapted, {".": 1})
    for number, weight in enumerate(adapted.weights):
        weight.assign(np.random.default_rng(number).normal(size=weight.shape))
    arrays = {name: value.numpy() for name, value in weights_by_name(adapted.weights, "model").items()}
    write(tmp_path / "run", arrays, Facts(1, 1, 0, 1, {"model": {"lora": {".": 1}}}, {}))
    found = match(model, ModelSpec("any", init_from=str(tmp_path / "run")))
    assert found.left == found.new == []
    assign(model, found.taken)
    assert np.asarray(model(x)) == pytest.approx(np.asarray(adapted(x)), rel=1e-5)


def test_a_run_that_kept_averages_of_its_weights_gives_those(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="dense")], name="net")
    arrays = {
        f"{kind}/{weight.path}": np.full(weight.shape, value, np.float32)
        for kind, value in (("model", 1), ("ema", 2))
        for weight in model.weights
    }
    write(tmp_path / "saved", arrays, Facts(step=0, epoch=0, records=0, ranks=1, config={}, versions={}))
    taken = match(model, ModelSpec("any", init_from=str(tmp_path / "saved"))).taken
    assert [float(np.mean(value)) for value in taken.values()] == [2.0, 2.0]


def test_what_lora_learned_is_in_the_weights_of_a_model_without(tmp_path: Path) -> None:
    """Keras' `save` merges it, so a run does for a model that has no place for it; one that has gets it as it is."""

    def built(is_adapted: bool) -> keras.Model:
        keras.utils.clear_session()
        words = keras.Input((3,), dtype="int32")
        x = layers.Dense(2, name="last")(layers.Conv1D(4, 2, name="conv")(layers.Embedding(5, 4, name="embed")(words)))
        model = keras.Model(words, x)
        if is_adapted:
            enable_lora(model, {".": 2})
        return model

    adapted = built(True)
    for number, weight in enumerate(adapted.weights):
        weight.assign(np.random.default_rng(number).normal(size=weight.shape))
    words = np.array([[0, 1, 2], [3, 4, 0]])
    expected = np.asarray(adapted(words))
    arrays = {f"model/{weight.path}": weight.numpy() for weight in adapted.weights}
    write(tmp_path / "run", arrays, Facts(1, 1, 0, 1, {"model": {"lora": {".": 2}}}, {}))
    for is_adapted in (False, True):
        model = built(is_adapted)
        found = match(model, ModelSpec("any", init_from=str(tmp_path / "run")))
        assert (found.left, found.new, found.warnings) == ([], [], [])
        assign(model, found.taken)
        assert np.asarray(model(words)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("settings", [{"init_exclude": ("lora_",)}, {}])
def test_what_lora_learned_is_not_lost_where_the_model_has_another(settings: dict[str, Any], tmp_path: Path) -> None:
    """The run's model called enable_lora itself, and kept no alpha."""

    def built(rank: int) -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="dense")], name="net")
        model.layers[0].enable_lora(rank)
        return model

    adapted, model, x = built(1), built(2), np.ones((1, 4), np.float32)
    for number, weight in enumerate(adapted.weights):
        weight.assign(np.random.default_rng(number).normal(size=weight.shape))
    save_run(tmp_path, adapted)
    found = match(model, ModelSpec("any", init_from=str(tmp_path / "run"), **settings))
    assert found.left == []
    assert len(found.warnings) == 1
    assert "is added to net/dense/kernel as if enable_lora had been given no lora_alpha" in found.warnings[0]
    assign(model, found.taken)
    assert np.asarray(model(x)) == pytest.approx(np.asarray(adapted(x)), rel=1e-5)


def save_run(folder: Path, model: keras.Model, **facts: Any) -> None:
    arrays = {f"model/{weight.path}": weight.numpy() for weight in model.weights}
    write(folder / "run", arrays, Facts(1, 1, 0, 1, config={}, versions={}, **facts))


def of_words(words: list[str]) -> keras.Model:
    keras.utils.clear_session()
    text = keras.Input((1,), dtype="string")
    numbers = layers.StringLookup(vocabulary=words, name="words")(text)
    return keras.Model(text, layers.Dense(1, name="score")(layers.Flatten()(layers.Embedding(4, 2)(numbers))))


def test_another_vocabulary_than_that_of_the_run_is_said(tmp_path: Path) -> None:
    source = of_words(["good", "bad"])
    of_preprocess = {"table of data.preprocess a:b": "then"}
    save_run(tmp_path, source, contents=contents(source) | of_preprocess)
    spec = ModelSpec("any", init_from=str(tmp_path / "run"))
    assert match(of_words(["good", "bad"]), spec, {}, of_preprocess).warnings == []
    (warning,) = match(of_words(["bad", "good"]), spec).warnings
    assert "there is another table lookup_table of layer words than in that run, so weights taken" in warning
    (warning,) = match(of_words(["good", "bad"]), spec, {}, dict.fromkeys(of_preprocess, "now")).warnings
    assert "there is another table of data.preprocess a:b than in that run" in warning


@pytest.mark.parametrize(
    ("names", "excluded", "warned"),
    [(["no", "yes"], (), 0), (["yes", "no"], (), 1), (["yes", "no"], ("^head/",), 0)],
)
def test_a_head_of_other_classes_than_those_of_the_run_is_said(
    tmp_path: Path, names: list[str], excluded: tuple[str, ...], warned: int
) -> None:
    save_run(tmp_path, with_head(), class_names={"label": ["no", "yes"]})
    spec = ModelSpec("any", init_from=str(tmp_path / "run"), init_exclude=excluded)
    warnings = match(with_head(), spec, {"label": names}).warnings
    assert len(warnings) == warned
    assert all("data.train: label 0 is yes; in that run it is no" in warning for warning in warnings)


def test_a_file_of_other_layers_is_still_refused(tmp_path: Path) -> None:
    other = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="other"), layers.Dense(2, name="conv")])
    other.save(tmp_path / "other.keras")
    with pytest.raises(UserError, match="no weight of it is one of the model's"):
        match(with_head(), ModelSpec("any", init_from=str(tmp_path / "other.keras")))


def test_all_but_the_head_is_frozen_and_trained_later() -> None:
    model = with_head()
    freezing = Freezing(model, ModelSpec("any", freeze=("all but head",), unfreeze={"2": "last/"}))
    freezing.apply(0)
    assert [weight.path for weight in model.trainable_weights] == ["head/kernel", "head/bias"]
    freezing.apply(2)
    assert len(model.trainable_weights) == 4
    assert not model.get_layer("backbone").get_layer("norm").trainable


def test_several_layers_may_be_left_out_and_a_wrong_name_is_told() -> None:
    model = with_head()
    Freezing(model, ModelSpec("any", freeze=("all but head, last",))).apply(0)
    assert len(model.trainable_weights) == 4
    with pytest.raises(UserError, match=r"model.freeze: all but heat: there is no layer 'heat'; did you mean head"):
        Freezing(with_head(), ModelSpec("any", freeze=("all but heat",)))


# Slots that begin as copies of weights, so that they can follow weights that are given later.


def slots_of(optimizer: keras.optimizers.Optimizer) -> list[str]:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="dense"), layers.Dense(3, name="dense_1")])
    optimizer.build(model.trainable_variables)
    found = slots_like_weights(optimizer.variables, model.trainable_variables)
    assert [weight.path for _, weight in found] == [weight.path for weight in model.trainable_variables][: len(found)]
    return [slot.name.rpartition("_")[2] for slot, _ in found]


@pytest.mark.parametrize("scaled", [False, True])
def test_slots_that_copy_weights_are_found(scaled: bool) -> None:
    if not hasattr(keras.optimizers, "ScheduleFreeAdamW"):
        pytest.skip("this Keras has none")
    optimizer = keras.optimizers.ScheduleFreeAdamW()
    assert slots_of(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer) == ["momentum"] * 4


@pytest.mark.parametrize("optimizer", [keras.optimizers.Adam, keras.optimizers.Ftrl, keras.optimizers.Adagrad])
def test_slots_of_zeros_are_no_copies_of_a_bias_of_zeros(optimizer: type[keras.optimizers.Optimizer]) -> None:
    assert slots_of(optimizer(0.1)) == []
