"""Properties of our models that training alone would not show."""

from __future__ import annotations

import inspect
from pathlib import Path

import keras
import numpy as np
import pytest
from conftest import PROJECT

from horovod_train.config.settings import Spec
from horovod_train.errors import UserError
from horovod_train.models import (
    MODELS,
    NEVER_CALLED,
    OWN_STEPS,
    build_model,
    convnet,
    mlp,
    overridden,
    resnet,
    transformer,
)
from horovod_train.training.refusals import check_precision

TOKENS = np.array([[5, 3, 9, 0, 0, 0], [7, 0, 0, 0, 0, 0]])


def outputs(model: keras.Model, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(model(tokens, training=False))


def test_the_transformer_does_not_look_at_padding() -> None:
    rng = np.random.default_rng(0)
    model = transformer.build(vocabulary=10, max_length=8, width=16, blocks=2)
    full = outputs(model, TOKENS)
    assert np.allclose(outputs(model, TOKENS[:, :3]), full, atol=1e-6)
    embeddings = model.get_layer("token_embedding").embeddings
    changed = embeddings.numpy()
    changed[0] = 7 * rng.normal(size=16)
    embeddings.assign(changed)
    assert np.allclose(outputs(model, TOKENS), full, atol=1e-6)
    changed[7] = 7 * rng.normal(size=16)  # the negative: a token that is there counts, for the sentence that it is in
    embeddings.assign(changed)
    assert np.allclose(outputs(model, TOKENS)[0], full[0], atol=1e-6)
    assert not np.allclose(outputs(model, TOKENS)[1], full[1], atol=1e-2)


def test_the_transformer_looks_at_the_order_of_tokens() -> None:
    model = transformer.build(vocabulary=10, max_length=8, width=16)
    assert not np.allclose(outputs(model, np.array([[1, 2, 3]])), outputs(model, np.array([[3, 2, 1]])), atol=1e-3)


def test_an_empty_sentence_has_finite_outputs() -> None:
    model = transformer.build(vocabulary=10, max_length=8, width=16)
    assert np.isfinite(outputs(model, np.zeros((1, 4), np.int64))).all()


def test_resnet_blocks_start_as_the_identity() -> None:
    model = resnet.build(classes=10, image_size=32)
    lasts = [layer for layer in model.layers if layer.name.endswith("_3_bn")]
    assert len(lasts) == 16
    assert all(not np.any(layer.gamma) for layer in lasts)
    assert model.count_params() == 23_608_202  # 23,587,712 of keras.applications without its top, and 2048 × 10 + 10


def test_s1_starts_from_standard_normal_numbers_that_its_seed_decides() -> None:
    model = mlp.build(hidden=2000)
    for weight in model.weights[:3]:  # 10 000, 2000 and 2000 of them; biases too
        values = weight.numpy()
        assert abs(np.mean(values)) < 0.1
        assert np.std(values) == pytest.approx(1.0, abs=0.1)
        assert np.max(np.abs(values)) > 2.5  # not cut off
    same, other = mlp.build(hidden=2000), mlp.build(hidden=2000, seed=1)
    assert all(np.array_equal(*pair) for pair in zip(model.get_weights(), same.get_weights(), strict=True))
    assert not any(np.array_equal(*pair) for pair in zip(model.get_weights(), other.get_weights(), strict=True))


def test_s6_starts_from_truncated_normal_weights_and_its_own_biases() -> None:
    model = convnet.build()
    kernels = {"conv1": 0.05, "conv2": 0.05, "dense1": 0.04, "dense2": 0.04, "logits": 1 / 192}
    biases = {"conv1": 0.0, "conv2": 0.1, "dense1": 0.1, "dense2": 0.1, "logits": 0.0}
    for name, stddev in kernels.items():
        kernel, bias = model.get_layer(name).get_weights()
        assert np.max(np.abs(kernel)) <= 2 * stddev
        # A normal distribution cut off at two deviations has 0.8796 of its deviation left.
        assert np.std(kernel) == pytest.approx(0.8796 * stddev, rel=0.2 if kernel.size < 1000 else 0.05)
        assert np.array_equal(bias, np.full_like(bias, biases[name]))
    shapes = {name: model.get_layer(name).kernel.shape for name in kernels}
    assert shapes == {
        "conv1": (5, 5, 1, 32),
        "conv2": (5, 5, 32, 64),
        "dense1": (7 * 7 * 64, 1024),
        "dense2": (1024, 10),
        "logits": (10, 10),
    }


class Own(keras.Model):
    """A model with a class of its own, and a layer that keeps a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean()

    def call(self, x: object) -> object:
        return self.dense(x)


def own(method: str = "", compiled: bool = False) -> keras.Model:
    """A model of the user's, as `package.module:function` names it; with a method of its own if one is named."""
    model = (type("Own", (Own,), {method: lambda self, *_, **__: {}}) if method else Own)()
    model(keras.Input((4,)))
    if compiled:
        model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("method", NEVER_CALLED)
def test_a_method_that_the_trainer_would_not_call_is_refused(method: str) -> None:
    with pytest.raises(UserError, match=rf"^model.name: \S+:own returns a Own that overrides {method}, which"):
        build_model(Spec(f"{__name__}:own", {"method": method}))


@pytest.mark.parametrize("method", OWN_STEPS)
def test_a_step_of_its_own_is_taken(method: str) -> None:
    assert overridden(build_model(Spec(f"{__name__}:own", {"method": method})), [method]) == [method]


def test_a_compiled_model_is_taken() -> None:
    assert build_model(Spec(f"{__name__}:own", {"compiled": True})).compiled


def own_compile(method: str) -> keras.Model:
    """A model whose compile() takes another argument, and which has one more method of its own."""

    def compile_by_rate(model: keras.Model, rate: float) -> None:
        keras.Model.compile(model, keras.optimizers.Adam(rate), "mse")

    model = type("Own", (Own,), {method: lambda self, *_, **__: {}, "compile": compile_by_rate})()
    model(keras.Input((4,)))
    model.compile(0.01)
    return model


@pytest.mark.parametrize("method", sorted({*OWN_STEPS} - {"train_step"}))
def test_a_compile_of_its_own_without_a_train_step_is_refused(method: str) -> None:
    """Its optimizer is not known, so that another would train the model."""
    with pytest.raises(UserError, match=r"returns a Own compiled by a compile\(\) of its own, whose arguments are not"):
        build_model(Spec(f"{__name__}:own_compile", {"method": method}))
    assert build_model(Spec(f"{__name__}:own_compile", {"method": "train_step"})).compiled


def test_a_model_that_only_computes_its_outputs_is_taken() -> None:
    assert build_model(Spec(f"{__name__}:own")).built


def test_a_folder_in_the_way_does_not_hide_a_model_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlp").mkdir()
    assert build_model(Spec("mlp")).count_params()
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match=r"model\.name: other is no preset of a keras_hub task: it has no task\.json\."):
        build_model(Spec("other"))


@pytest.mark.parametrize("name", MODELS)
def test_the_page_has_each_option_of_our_models_with_its_default(name: str) -> None:
    defaults = [f"{key} {option.default}" for key, option in inspect.signature(MODELS[name]).parameters.items()]
    rows = [line.split(" | ") for line in (PROJECT / "docs/models.md").read_text().splitlines()]
    (options,) = (row[2] for row in rows if row[0] == f"| `{name}`" and len(row) == 4)
    assert options == ", ".join(defaults).replace("True", "true")


@pytest.mark.parametrize(
    ("saved_in", "precision"),
    [("float32", "mixed_bfloat16"), ("mixed_bfloat16", "float32"), ("mixed_float16", "mixed_bfloat16")],
)
def test_a_model_saved_in_another_precision_is_refused(tmp_path: Path, saved_in: str, precision: str) -> None:
    """Its layers keep the policy that they were saved with, whatever the config says."""
    file = str(tmp_path / "saved.keras")
    try:
        keras.mixed_precision.set_dtype_policy(saved_in)
        convnet.build().save(file)  # the last layer is float32
        keras.mixed_precision.set_dtype_policy(precision)
        model = build_model(Spec(file))
        check_precision(convnet.build(), precision)
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    check_precision(model, saved_in)
    with pytest.raises(
        UserError, match=f"precision: {precision}, but the model is made of layers in {saved_in}; write"
    ):
        check_precision(model, precision)


def test_the_optimizer_of_a_file_begins_without_state(tmp_path: Path) -> None:
    """Else its schedule would go on where it was saved."""
    model, file = mlp.build(), str(tmp_path / "trained.keras")
    model.compile(keras.optimizers.Adam(keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.01, 1e-6])), "mse")
    model.fit(np.ones((8, 5)), np.ones((8, 1)), batch_size=2, verbose=0)
    model.save(file)
    loaded = build_model(Spec(file))
    loaded.optimizer.build(loaded.trainable_variables)
    assert int(loaded.optimizer.iterations) == 0
    assert float(loaded.optimizer.learning_rate) == pytest.approx(0.01)
    assert not any(np.any(slot) for slot in loaded.optimizer.variables if "momentum" in slot.path)
    assert np.array_equal(loaded.weights[0], model.weights[0])


def test_a_damaged_file_of_a_model_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "a.keras"
    mlp.build().save(file)
    stored = bytearray(file.read_bytes())
    stored[len(stored) // 2] ^= 0xFF
    file.write_bytes(stored)
    with pytest.raises(UserError, match=r"^model.name: .*a\.keras: cannot be loaded: "):
        build_model(Spec(str(file)))


# An MLP whose matrices are called weight is otherwise an ordinary model.


@pytest.mark.parametrize("name", ["kernel", "weight"])
def test_variables_are_under_their_layers(name: str) -> None:
    paths = [weight.path for weight in mlp.build(weight_name=name).weights]
    assert paths == [f"hidden1/{name}", "hidden1/bias", f"out_layer/{name}", "out_layer/bias"]


def test_a_name_changes_no_number() -> None:
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    assert np.array_equal(mlp.build()(x), mlp.build(weight_name="weight")(x))


def test_a_task_of_keras_hub_is_refused_with_what_to_return_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles itself."""
    hub = pytest.importorskip("keras_hub").models
    sizes = {"vocabulary_size": 8, "num_layers": 1, "num_heads": 1, "hidden_dim": 4, "intermediate_dim": 4}
    task = hub.GPT2CausalLM(hub.GPT2Backbone(**sizes, max_sequence_length=4))
    monkeypatch.setitem(MODELS, "task", lambda: task)
    with pytest.raises(UserError, match=r"Return keras\.Model\(task\.input, task\.output\), with loss"):
        build_model(Spec("task"))
    monkeypatch.setitem(MODELS, "task", lambda: keras.Model(task.input, task.output))
    assert build_model(Spec("task")).output_shape == (None, None, 8)
