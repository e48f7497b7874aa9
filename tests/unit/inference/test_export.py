"""Files of our own models need no code of ours to load; and a file that computes something else is not kept."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_train.checkpoint.layout import Checkpoint, Facts
from horovod_train.commands.cli import check_out
from horovod_train.commands.export import KERAS_FILE, SAVED_MODEL
from horovod_train.config.settings import DataConfig, Spec
from horovod_train.data.model_inputs import Input, ModelInputs
from horovod_train.errors import RunError, UserError
from horovod_train.inference.run import known_inputs, write_model
from horovod_train.models import MODELS, build_model

OPTIONS: dict[str, dict[str, Any]] = {
    "convnet": {"dropout": 0.5},
    "mlp": {"weight_name": "weight"},
    "resnet50": {"image_size": 32, "classes": 3},
    "transformer": {"vocabulary": 20, "max_length": 8, "width": 8, "blocks": 1},
}
"""Where a model's own are not what shows most in the least time."""

CLEAN = """
import pathlib, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("horovod", "horovod_train"):
            raise ImportError(f"{name} is not to be had here")

sys.meta_path.insert(0, Block())
import keras, numpy as np, tensorflow as tf
for file in sorted(pathlib.Path.cwd().glob("*.keras")):
    inputs, expected = np.load(file.stem + ".in.npy"), np.load(file.stem + ".out.npy")
    loaded = keras.saving.load_model(file)(inputs, training=False)
    saved = tf.saved_model.load(file.stem) if pathlib.Path(file.stem).exists() else None
    assert np.allclose(loaded, expected, rtol=1e-5, atol=1e-5), file
    if saved:  # bfloat16 rounds otherwise in a graph
        bound = 1e-1 if file.stem == "transformer" else 1e-5
        assert np.allclose(saved.serve(inputs), expected, rtol=bound, atol=bound), file
    print(file.stem)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "names", [set(MODELS) - {"resnet50"}, pytest.param({"resnet50"}, marks=pytest.mark.exhaustive)]
)
def test_our_models_load_where_there_is_tensorflow_alone(tmp_path: Path, names: set[str]) -> None:
    rng = np.random.default_rng(0)
    for name in sorted(names):
        keras.mixed_precision.set_dtype_policy("mixed_bfloat16" if name == "transformer" else "float32")
        try:
            model = build_model(Spec(name, OPTIONS.get(name, {})))
            for weight in model.trainable_weights:  # so that nothing is zero at the start
                weight.assign(weight.numpy() + 0.01 * rng.normal(size=weight.shape))
            shape = [2, *(size or 6 for size in model.inputs[0].shape[1:])]
            inputs = rng.integers(0, 20, shape) if name == "transformer" else rng.normal(size=shape).astype(np.float32)
            np.save(tmp_path / f"{name}.in.npy", inputs)
            np.save(tmp_path / f"{name}.out.npy", model(inputs, training=False))
            write_model(model, tmp_path / f"{name}.keras")
            if name != "resnet50":  # 94 MB, once is enough
                write_model(model, tmp_path / name)
        finally:
            keras.mixed_precision.set_dtype_policy("float32")
    command = [sys.executable, "-I", "-c", CLEAN]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == sorted(names)


def test_a_model_in_half_precision_is_its_saved_model(tmp_path: Path) -> None:
    """With these weights a call of the model and a graph of it are 3 % apart."""
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        model = build_model(Spec("transformer", {"vocabulary": 20, "max_length": 32, "width": 8, "blocks": 2}))
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    write_model(model, tmp_path / "model")
    assert (tmp_path / "model" / "saved_model.pb").is_file()


def test_a_model_may_fix_the_number_of_records(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input(batch_shape=(3, 4)), keras.layers.Dense(2)])
    for name in ("a.keras", "a"):
        write_model(model, tmp_path / name)
    assert keras.saving.load_model(tmp_path / "a.keras").input_shape == (3, 4)


@keras.saving.register_keras_serializable("test_exporting")
class Forgetful(keras.layers.Layer):
    """Has something that its config does not say."""

    gain = 1.0

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x * self.gain


class Unsaid(keras.layers.Layer):
    """Takes an argument that its config does not say."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x * self.gain


def test_a_model_that_changes_images_at_random_in_training_is_exported(tmp_path: Path) -> None:
    """Keras' layers for that do so in each call, unless told that it is none of training."""
    image = keras.Input((8, 8, 1))
    x = keras.layers.Flatten()(keras.layers.RandomTranslation(0.9, 0.9)(image))
    write_model(keras.Model(image, keras.layers.Dense(3)(x)), tmp_path / "a.keras")
    assert (tmp_path / "a.keras").exists()


def test_a_file_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    layer = Forgetful()
    layer.gain = 3.0
    with pytest.raises(RunError, match="output 0 of the file is not that of the model"):
        write_model(keras.Sequential([keras.Input((3,)), layer]), tmp_path / "model.keras")


def test_a_model_of_short_texts_is_compared_too(tmp_path: Path) -> None:
    layer = Forgetful()
    layer.gain = 3.0
    tokens = keras.Input((None,), dtype="int32")
    places = keras.layers.Embedding(8, 4)(keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1)
    with pytest.raises(RunError, match="output 0 of the file is not that of the model"):
        write_model(keras.Model(tokens, layer(places)), tmp_path / "model.keras")


def test_a_layer_without_its_config_is_named_and_a_saved_model_needs_none(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,)), Unsaid(2.0)])
    with pytest.raises(UserError, match=r"cannot be made a Keras file: .* A SavedModel, --out DIR, needs no code"):
        write_model(model, tmp_path / "model.keras")
    write_model(model, tmp_path / "model")
    saved = tf.saved_model.load(str(tmp_path / "model"))
    assert saved.serve(tf.ones((1, 3))).numpy().tolist() == [[2.0] * 3]


def test_a_saved_model_that_the_disk_refuses_is_an_os_error(tmp_path: Path) -> None:
    """TensorFlow's own errors are none of those that the command shows in one line."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file is not a directory"):
        write_model(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), tmp_path / "file" / "model")


def test_exported_models_are_known_for_what_they_are_and_other_things_stay(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    kinds = {"a.keras": KERAS_FILE, "a": SAVED_MODEL}
    for name, made in kinds.items():
        write_model(model, tmp_path / name)
        check_out("--out", str(tmp_path / name), made)
    (tmp_path / "a" / "other-model").mkdir()
    (tmp_path / "b.keras").write_text("a script")
    (tmp_path / "models/one").mkdir(parents=True)
    for name, made in {"a": SAVED_MODEL, "b.keras": KERAS_FILE, "models": SAVED_MODEL, "a.keras": SAVED_MODEL}.items():
        with pytest.raises(UserError, match=rf"^--out .*{name}: (holds|is) .*, and stays as it is"):
            check_out("--out", str(tmp_path / name), made)


@keras.saving.register_keras_serializable("test_exporting")
class Undeclared(keras.Model):
    """A subclassed model without inputs: numbers by the remainder of a token, which float32 would change."""

    gain = 1.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embedding = keras.layers.Embedding(7, 3)

    def call(self, inputs: Any) -> tf.Tensor:
        if isinstance(inputs, dict):
            price, inputs = inputs["price (€)"], inputs["tokens"]
            return self(inputs) * price
        if inputs.dtype == tf.string:
            inputs = tf.strings.length(inputs)
        return self.embedding(inputs % 7) * self.gain


TOKENS = Input("tokens", "int64", (None, 4))
FORMS: dict[str, tuple[ModelInputs, Any, set[tuple[str, str]]]] = {
    "one": (ModelInputs((TOKENS,), is_dict=False), tf.fill((2, 4), np.int64(2**24 + 1)), {("tokens", "int64")}),
    "text": (
        ModelInputs((Input("", "string", (None, 4)),), is_dict=False),
        tf.fill((2, 4), "four"),
        {("inputs", "string")},
    ),
    "a dict": (
        ModelInputs((TOKENS, Input("price (€)", "float32", (None, 1, 1))), is_dict=True),
        {"tokens": tf.fill((2, 4), np.int64(2**24 + 1)), "price (€)": tf.fill((2, 1, 1), 2.5)},
        {("tokens", "int64"), ("price____", "float32")},
    ),
}
"""What a run gave the model, such inputs, and the signature for them."""


def signature(path: Path) -> dict[str, tf.TensorSpec]:
    return tf.saved_model.load(str(path)).signatures["serving_default"].structured_input_signature[1]


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_declares_no_inputs_takes_those_of_its_run(tmp_path: Path, form: str) -> None:
    inputs, values, expected = FORMS[form]
    model = Undeclared()
    model(values)
    for name in ("model", "model.keras"):
        assert [*write_model(model, tmp_path / name, inputs=inputs)] == [*inputs.inputs]
    found = signature(tmp_path / "model")
    assert {(name, spec.dtype.name) for name, spec in found.items()} == expected
    assert {tuple(spec.shape) for spec in found.values()} == {one.shape for one in inputs.inputs}
    saved = tf.saved_model.load(str(tmp_path / "model"))
    outputs = saved.serve(values)
    assert np.array_equal(outputs, model(values))


ODD_NAMES = ["a b", "a_b", "1", "class", "self", "_", "größe", "m²", "A_B", "a-b", "input_1"]
"""Names of columns: TensorFlow makes one of some, and takes no word of Python's and no digit in front."""


@pytest.mark.parametrize("form", ["undeclared", "dict", "list"])
def test_names_that_no_signature_can_hold_stay_apart(tmp_path: Path, form: str) -> None:
    class Sum(keras.Model):
        def call(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
            return tf.concat([inputs[name] for name in ODD_NAMES], axis=1)

    values: Any = {name: tf.fill((2, 1), float(number)) for number, name in enumerate(ODD_NAMES)}
    inputs, model = None, Sum()
    if form == "undeclared":
        model(values)
        inputs = ModelInputs(tuple(Input(name, "float32", (None, 1)) for name in ODD_NAMES), is_dict=True)
    else:
        declared = {name: keras.Input((1,), name=name) for name in ODD_NAMES}
        output = keras.layers.Concatenate()([*declared.values()])
        model = keras.Model(declared if form == "dict" else [*declared.values()], output)
    write_model(model, tmp_path / "model", inputs=inputs)
    saved = tf.saved_model.load(str(tmp_path / "model"))
    by_column = values if form != "list" else [*values.values()]
    expected = [[*map(float, range(len(ODD_NAMES)))]] * 2
    assert saved.serve(by_column).numpy().tolist() == expected
    arguments = ["a_b_0", "a_b", "input_1_2", "input_class", "input_self", "input__", "gr__e", "m_", "A_B_8", "a_b_9"]
    served = saved.signatures["serving_default"]
    (output,) = served(**dict(zip([*arguments, "input_1"], values.values(), strict=True))).values()
    assert output.numpy().tolist() == expected


@pytest.mark.parametrize("name", ["class", "self", "a b", "m²", "1", "_"])
def test_a_single_declared_input_may_have_any_name(tmp_path: Path, name: str) -> None:
    x = keras.Input((4,), name=name)
    (taken,) = write_model(keras.Model(x, keras.layers.Dense(2)(x)), tmp_path / "model")
    assert taken.name == name
    assert len(signature(tmp_path / "model")) == 1


def test_declared_inputs_stay_what_the_model_says(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,), name="numbers"), keras.layers.Dense(2)])
    (taken,) = write_model(model, tmp_path / "model", inputs=ModelInputs((TOKENS,), is_dict=False))
    assert taken == Input("numbers", "float32", (None, 4))
    assert {name: spec.dtype for name, spec in signature(tmp_path / "model").items()} == {"numbers": tf.float32}


def test_a_model_that_declares_no_inputs_is_compared_too(tmp_path: Path) -> None:
    model, (inputs, values, _) = Undeclared(), FORMS["one"]
    model(values)
    model.gain = 3.0  # which its config does not say
    with pytest.raises(RunError, match="output 0 of the file is not that of the model"):
        write_model(model, tmp_path / "model.keras", inputs=inputs)
    write_model(model, tmp_path / "model", inputs=inputs)


def test_a_model_that_draws_has_no_outputs_to_compare(tmp_path: Path) -> None:
    class Drawing(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return x + keras.random.normal(tf.shape(x), seed=self.seeds)

    model = Drawing()
    model(tf.ones((2, 3)))
    write_model(model, tmp_path / "model", inputs=ModelInputs((Input("x", "float32", (None, 3)),), is_dict=False))
    assert (tmp_path / "model" / "saved_model.pb").is_file()


@pytest.mark.parametrize("name", ["model", "model.keras"])
def test_the_file_says_what_it_takes_and_of_what_that_is_made(tmp_path: Path, name: str) -> None:
    model = keras.Sequential([keras.Input((4,), name="numbers"), keras.layers.Dense(2)])
    stored = {"image": {"type": "int64", "shape": [4], "scale": 0.5}}
    inputs = ModelInputs((Input("image", "float32", (None, 4)),), is_dict=False, features=stored)
    classes = ["a", "caf\udce9"]  # as Python takes a folder's name that is no UTF-8
    write_model(model, tmp_path / name, classes, inputs)
    check_out("--out", str(tmp_path / name), KERAS_FILE if name.endswith(".keras") else SAVED_MODEL)
    if name.endswith(".keras"):
        texts = {file: zipfile.ZipFile(tmp_path / name).read(file) for file in ("inputs.json", "class_names.json")}
    else:
        texts = {path.name: path.read_bytes() for path in (tmp_path / name / "assets.extra").iterdir()}
    assert {file: json.loads(text) for file, text in texts.items()} == {
        "class_names.json": classes,
        "inputs.json": {
            "inputs": [{"name": "numbers", "dtype": "float32", "shape": [None, 4]}],
            "features": stored,
            "preprocess": None,
        },
    }


def checkpoint_with(inputs: ModelInputs | None) -> Checkpoint:
    facts = Facts(5, 1, 0, 1, config={}, versions={}, inputs=inputs.pack() if inputs else {})
    return Checkpoint(Path("step-5"), facts, {})


def test_the_checkpoint_says_what_the_run_gave_the_model_then_the_config(tmp_path: Path) -> None:
    model = Undeclared()
    features = {"tokens": {"type": "int64", "shape": [4]}, "label": {"type": "int64"}}
    data = DataConfig(features=features, inputs=("tokens",), targets=("label",))
    kept = ModelInputs((Input("tokens", "int32", (None, 9)),), is_dict=False)
    assert known_inputs(model, data, checkpoint_with(kept)) == kept
    found = known_inputs(model, data, checkpoint_with(None))
    assert found is not None
    assert found.inputs == (TOKENS,)


def test_unknown_inputs_are_said_and_several_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Undeclared()
    model(tf.ones((2, 4)))
    assert known_inputs(model, DataConfig(inputs=("tokens",)), checkpoint_with(None)) is None
    (taken,) = write_model(model, tmp_path / "model")
    assert (taken.dtype, taken.shape) == ("float32", (None, 4))
    assert "takes what Keras assumes, args_0: float32 [None, 4]" in caplog.text
    with pytest.raises(UserError, match=r"declares no inputs, and step-5 does not say .* tokens, price had\. Give"):
        known_inputs(model, DataConfig(inputs=("tokens", "price")), checkpoint_with(None))
    declared = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    assert known_inputs(declared, DataConfig(inputs=("tokens", "price")), checkpoint_with(None)) is None
