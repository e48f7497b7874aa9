"""What layers hold besides weights: compared by content, and computed anew from weights that were loaded."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import WARNINGS_FAIL
from keras import layers

from horovod_train.checkpoint.layout import Checkpoint, Facts, verify
from horovod_train.checkpoint.tensors import write
from horovod_train.config.loader import as_dict, load
from horovod_train.config.registry import load_function
from horovod_train.config.settings import (
    CheckpointConfig,
    Config,
    LossSpec,
    MetricSpec,
    ModelSpec,
    OptimizerSpec,
    TrainConfig,
    Watched,
)
from horovod_train.data.schema import Feature
from horovod_train.distributed import consistency
from horovod_train.distributed.layer_contents import contents, finalize, how_built, structure
from horovod_train.errors import UserError
from horovod_train.training import initial_state
from horovod_train.training.state import TrainState, moving_averages
from horovod_train.training.steps.figures import FIGURES_BY_RANK, Figures
from horovod_train.training.steps.optimizers import Optimizers
from horovod_train.training.stopping import BestTracker, EarlyStopping

ROWS = np.array([[1.0, 2.0], [3.0, 6.0]], np.float32)


def normalized(rows: np.ndarray) -> keras.Model:
    keras.utils.clear_session()
    norm = layers.Normalization(name="norm")
    norm.adapt(rows)
    return keras.Sequential([keras.Input((2,)), norm, layers.Dropout(0.5, seed=int(rows.sum())), layers.Dense(1)])


def test_the_structure_of_a_model_is_the_same_whatever_its_values_and_seeds() -> None:
    assert structure(normalized(ROWS)) == structure(normalized(2 * ROWS))


def test_another_option_of_a_layer_is_another_structure() -> None:
    def built(name: str) -> keras.Model:
        keras.utils.clear_session()
        return keras.Sequential([keras.Input((2,)), layers.Dense(1, activation=name)])

    one, other = (structure(built(name)) for name in ("relu", "gelu"))
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == ["options of layer 2"]


class Doubled:
    """An activation that Keras cannot save."""

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return 2 * x


@WARNINGS_FAIL
@pytest.mark.parametrize(
    "activation", [Doubled(), functools.partial(keras.activations.relu, negative_slope=0.1), lambda x: 2 * x]
)
def test_options_that_keras_cannot_save_are_not_compared(activation: Any) -> None:
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1, activation=activation)])
    facts = structure(model)
    assert facts["weight 0 of the model"].endswith("/kernel (2, 1) float32")
    assert "0x" not in str(facts)


def test_the_code_of_a_lambda_is_not_compared_because_it_names_its_file() -> None:
    def built(folder: str) -> dict[str, str]:
        keras.utils.clear_session()
        double = eval(compile("lambda x: 2 * x", f"{folder}/nets.py", "eval"))
        return structure(keras.Sequential([keras.Input((2,)), layers.Lambda(double)]))

    assert built("/home/one") == built("/home/other")


def test_what_is_computed_from_weights_is_computed_anew() -> None:
    model, other = normalized(ROWS), normalized(2 * ROWS)
    other.set_weights(model.get_weights())
    assert contents(other) != contents(model)
    finalize(other)
    assert contents(other) == contents(model)
    assert np.array_equal(other(ROWS), model(ROWS))


def test_boundaries_that_were_counted_stay_where_nothing_derives_from_weights(tmp_path: Path) -> None:
    """A file holds the boundaries, and not what they were counted from."""
    bins = layers.Discretization(num_bins=4, name="bins")
    bins.adapt(np.arange(100.0))
    model = keras.Sequential([keras.Input((1,)), bins, layers.Dense(1)])
    model.save(tmp_path / "a.keras")
    loaded = keras.saving.load_model(tmp_path / "a.keras")
    finalize(loaded)
    x = np.array([[1.0], [30.0], [60.0], [90.0]])
    assert np.array_equal(loaded.get_layer("bins")(x), bins(x))
    assert len(set(np.ravel(bins(x)))) == 4


@pytest.mark.parametrize("words", [["a", "b"], ["b", "a"], ["a", "c"]])
def test_tables_are_compared_by_what_they_hold(words: list[str]) -> None:
    class Looking(layers.Layer):
        def __init__(self, words: list[str]) -> None:
            super().__init__(name="looking")
            keys = tf.constant(sorted(words))
            initializer = tf.lookup.KeyValueTensorInitializer(keys, tf.range(2, dtype=tf.int64))
            self.table = tf.lookup.StaticHashTable(initializer, -1)

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return self.table.lookup(inputs)

    def held(words: list[str]) -> dict[str, str]:
        text = keras.Input((), dtype="string")
        return contents(keras.Model(text, Looking(words)(text)))

    assert list(held(words)) == ["table table of layer looking"]
    assert (held(words) == held(["a", "b"])) == (set(words) == {"a", "b"})


def test_words_of_a_text_layer_are_compared() -> None:
    """It keeps, besides its table, a constant that is a single text."""

    def built(words: list[str]) -> dict[str, str]:
        keras.utils.clear_session()
        text = keras.Input((1,), dtype="string")
        vectors = layers.TextVectorization(vocabulary=words, output_sequence_length=4)(text)
        return contents(keras.Model(text, layers.Embedding(8, 2)(vectors)))

    assert built(["good", "bad"]) == built(["good", "bad"])
    assert built(["good", "bad"]) != built(["bad", "good"])


def checkpoint_with(held: dict[str, str]) -> Checkpoint:
    return Checkpoint(Path("step-5"), Facts(5, 1, 0, 1, config={}, versions={}, contents=held), {})


def test_another_vocabulary_than_in_the_checkpoint_is_refused() -> None:
    def held(words: list[str]) -> dict[str, str]:
        keras.utils.clear_session()
        text = keras.Input((1,), dtype="string")
        return contents(keras.Model(text, layers.StringLookup(vocabulary=words, name="words")(text)))

    saved = checkpoint_with(held(["good", "bad"]))
    initial_state.check_contents(held(["good", "bad"]), saved)
    line = "step-5: changed since it was saved: table .* of layer words; so weights would stand"
    with pytest.raises(UserError, match=line):
        initial_state.check_contents(held(["bad", "good"]), saved)
    initial_state.check_contents(held(["bad", "good"]), checkpoint_with({}))  # of an earlier version


def test_each_of_several_text_layers_is_compared() -> None:
    """The lookup inside each has no path."""

    def held(first: list[str], second: list[str]) -> dict[str, str]:
        keras.utils.clear_session()
        text = keras.Input((1,), dtype="string")
        both = [
            layers.TextVectorization(vocabulary=words, output_sequence_length=4, name=name)(text)
            for words, name in ((first, "a"), (second, "b"))
        ]
        return contents(keras.Model(text, layers.Concatenate()(both)))

    words, other = ["good", "bad"], ["bad", "good"]
    saved = checkpoint_with(held(words, words))
    initial_state.check_contents(held(words, words), saved)
    for changed, name in ((held(other, words), "a"), (held(words, other), "b")):
        with pytest.raises(UserError, match=f"since it was saved: table lookup_table of layer {name}; so weights"):
            initial_state.check_contents(changed, saved)


def test_layers_of_one_path_are_compared() -> None:
    class Pair(layers.Layer):
        def __init__(self, *vocabularies: list[str]) -> None:
            super().__init__(name="pair")
            self.both = [layers.StringLookup(vocabulary=words, name="words") for words in vocabularies]

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return tf.stack([lookup(inputs) for lookup in self.both])

    def held(*vocabularies: list[str]) -> dict[str, str]:
        text = keras.Input((1,), dtype="string")
        return contents(keras.Model(text, Pair(*vocabularies)(text)))

    words, other = ["good", "bad"], ["bad", "good"]
    names = [name for name in held(words, words) if name.startswith("table")]
    assert names == ["table lookup_table of layer pair/words", "table lookup_table of layer pair/words#2"]
    for changed in (held(other, words), held(words, other)):
        with pytest.raises(UserError, match="so weights would stand for other words"):
            initial_state.check_contents(changed, checkpoint_with(held(words, words)))


PREPROCESS = """
import pathlib
import keras
import tensorflow as tf

words = pathlib.Path(__file__).with_name("words.txt").read_text().split()
_table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(words, tf.range(2)), -1)
lookups = {"text": keras.layers.StringLookup(vocabulary=words)}
of_something_else = keras.layers.StringLookup(vocabulary=words)


def looked_up(text):
    return lookups["text"](text), _table.lookup(text)


def made():
    inside = keras.layers.StringLookup(vocabulary=words)
    return lambda text: [inside(text), *looked_up(text)]


numbers = made()
"""


def test_what_a_function_of_data_preprocess_looks_up_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "making_numbers.py").write_text(PREPROCESS)

    def held(words: str) -> dict[str, str]:
        monkeypatch.delitem(sys.modules, "making_numbers", raising=False)
        (tmp_path / "words.txt").write_text(words)
        return initial_state.contents_of_preprocess("making_numbers:numbers")

    then, now = held("good bad"), held("bad good")
    assert then == held("good bad")
    tables = {"table of _table", "table lookup_table of lookups", "table lookup_table of inside"}
    for name in (f"{table} in data.preprocess making_numbers:numbers" for table in tables):
        with pytest.raises(UserError, match=f"since it was saved: {name}; so weights would stand for other words"):
            initial_state.check_contents({name: now[name]}, checkpoint_with(then))
    of_another = {name.replace("numbers:numbers", "numbers:others"): value for name, value in now.items()}
    initial_state.check_contents(of_another, checkpoint_with(then))


def test_the_vocabulary_and_options_of_a_preset_are_compared(tmp_path: Path, said: list[str]) -> None:
    models = pytest.importorskip("keras_hub").models

    def held(*words: str, length: int = 8) -> dict[str, str]:
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
        sizes = {"num_layers": 1, "num_heads": 1, "hidden_dim": 2, "intermediate_dim": 2, "max_sequence_length": 8}
        models.BertBackbone(vocabulary_size=len(vocabulary), **sizes).save_to_preset(str(tmp_path))
        tokenizer = models.BertTokenizer(vocabulary=vocabulary, lowercase=True)
        models.BertTextClassifierPreprocessor(tokenizer, sequence_length=length).save_to_preset(str(tmp_path))
        return initial_state.contents_of_preprocess(str(tmp_path))

    saved = checkpoint_with(held("good", "bad"))
    initial_state.check_contents(held("good", "bad"), saved)
    with pytest.raises(UserError, match=f"vocabulary or other assets of data.preprocess {tmp_path}; so weights"):
        initial_state.check_contents(held("bad", "good"), saved)
    assert said == []
    initial_state.check_contents(held("good", "bad", length=4), saved)
    assert said == [f"warning: step-5: changed since it was saved: options of data.preprocess {tmp_path}"]


def test_another_constant_than_in_the_checkpoint_is_said(said: list[str]) -> None:
    saved = checkpoint_with(contents(normalized(ROWS)))
    initial_state.check_contents(contents(normalized(ROWS)), saved)
    assert said == []
    initial_state.check_contents(contents(normalized(2 * ROWS)), saved)
    (line,) = said
    assert "warning: step-5: changed since it was saved: constant mean of layer norm" in line


def compiled(rate: float, *, momentum: float = 0.0, decay: float | None = None) -> TrainState:
    """The state of a run with SGD. decay: of its averages."""
    keras.utils.clear_session()
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    optimizer, optimizers = keras.optimizers.SGD(rate, momentum=momentum), Optimizers({})
    optimizer.build(model.trainable_variables)
    optimizers.by_path["optimizer"] = optimizer
    return TrainState(model, optimizers, averages=moving_averages(model, decay) if decay else None)


def restored(
    state: TrainState, before: TrainState, folder: Path, now: Config | None = None, arrays: Any = None, **facts: Any
) -> Any:
    """Save what a run is before, and restore it into the state of a run whose best values are of step 3; return it."""
    config = now or Config()
    fresh = Facts(step=0, epoch=0, records=0, ranks=1, config=as_dict(config), versions={})
    arrays = arrays or {name: variable.numpy() for name, variable in before.variables().items()}
    write(folder, arrays, dataclasses.replace(fresh, **facts))
    parts = SimpleNamespace(
        best=BestTracker("best", config.checkpoint.best or Watched()),
        early_stopping=EarlyStopping(config.early_stopping),
        train=SimpleNamespace(
            files="", fingerprint="", steps_per_epoch=1, class_names={}, features={"x": Feature("float", scale=0.5)}
        ),
        eval=SimpleNamespace(content="records of now"),
        train_step=SimpleNamespace(figures=Figures({}, []), skipped=tf.Variable(0), skipped_in_a_row=tf.Variable(0)),
    )
    for tracker in (parts.best, parts.early_stopping.best):
        tracker.update(3, dict.fromkeys(("loss", "accuracy", "b_loss", "top_k", "mine"), 0.5))
    group = SimpleNamespace(raise_together=nullcontext)
    sought_anew: list[str] = []
    store = SimpleNamespace(seek_best_anew=lambda: sought_anew.append("best"), sought_anew=sought_anew)
    run: Any = SimpleNamespace(
        checkpoint=verify(folder), config=config, group=group, parts=parts, state=state, store=store
    )
    run.of_ranks = initial_state.restore(run)
    return run


@pytest.mark.parametrize("is_of_earlier_version", [False, True])
@pytest.mark.parametrize("built", [0.1, 0.001])
def test_a_rate_that_a_callback_has_set_returns_unless_the_model_has_another_now(
    tmp_path: Path, built: float, is_of_earlier_version: bool
) -> None:
    before = compiled(0.1)
    noted = {} if is_of_earlier_version else before.built_rates
    for rate in before.rates.values():
        rate.assign(0.05)
    state = compiled(built)
    restored(state, before, tmp_path / "saved", built_rates=noted)
    expected = 0.05 if is_of_earlier_version or built == 0.1 else built
    assert float(state.optimizer.learning_rates["learning_rate"]) == pytest.approx(expected)


def test_a_state_that_a_run_has_no_use_for_any_more_is_named(tmp_path: Path, said: list[str]) -> None:
    restored(compiled(0.1, momentum=0.9, decay=0.9), compiled(0.1, momentum=0.9, decay=0.9), tmp_path / "same")
    assert not [line for line in said if line.startswith("warning")]
    restored(compiled(0.1), compiled(0.1, momentum=0.9, decay=0.9), tmp_path / "saved")
    assert [line for line in said if line.startswith("warning")] == [
        f"warning: {tmp_path / 'saved'}: this run drops what it has no use for: ema/sequential/dense/bias, "
        "ema/sequential/dense/kernel, optimizer/sgd/sequential_dense_bias_momentum, "
        "optimizer/sgd/sequential_dense_kernel_momentum"
    ]


@pytest.mark.parametrize("is_here", [True, False])
def test_a_best_of_another_folder_is_forgotten(tmp_path: Path, said: list[str], is_here: bool) -> None:
    """As after a resume from the path of another run: nothing here could be called the best."""
    config = Config(output_dir=str(tmp_path), checkpoint=CheckpointConfig(best=Watched()))
    if is_here:
        (tmp_path / "checkpoints" / "step-000000003").mkdir(parents=True)
    run = restored(compiled(0.1), compiled(0.1), tmp_path / "saved", config)
    assert int(run.parts.best.step) == (3 if is_here else -1)
    assert int(run.parts.early_stopping.best.step) == 3
    line = f"checkpoint.best: {tmp_path / 'checkpoints'} does not have step-000000003, the best so far"
    assert any(shown.startswith(line) for shown in said) == (not is_here)


def test_a_resume_says_what_has_changed_since_the_checkpoint(tmp_path: Path, said: list[str]) -> None:
    then = Config(train=TrainConfig(epochs=5), model=ModelSpec("mlp"))
    now = Config(train=TrainConfig(epochs=10), model=ModelSpec("mlp", init_from="other"), output_dir="elsewhere")
    versions = consistency.versions()
    before = {"config": as_dict(then), "versions": versions}
    restored(compiled(0.1), compiled(0.1), tmp_path / "same", then, **before)
    assert not [line for line in said if line.startswith("changed")]
    before["versions"] = {**versions, "keras": "3.0"}
    restored(compiled(0.1), compiled(0.1), tmp_path / "saved", now, **before)
    assert [line for line in said if line.startswith("changed")] == [
        "changed since this checkpoint: model.init_from null → other; train.epochs 5 → 10; "
        f"keras 3.0 → {keras.__version__}; model.init_from has no effect on a run that resumes"
    ]


def test_a_run_warns_of_other_classes_than_those_of_its_initial_weights(tmp_path: Path, said: list[str]) -> None:
    source, state = compiled(0.1), compiled(0.1, decay=0.9)
    arrays = {name: variable.numpy() for name, variable in source.variables().items()}
    write(tmp_path / "saved", arrays, Facts(5, 1, 0, 1, config={}, versions={}, class_names={"y": ["no", "yes"]}))
    group = SimpleNamespace(raise_together=nullcontext, is_root=True)
    config = Config(model=ModelSpec("mlp", init_from=str(tmp_path / "saved")))
    parts = SimpleNamespace(train=SimpleNamespace(class_names={"y": ("yes", "no")}))
    run: Any = SimpleNamespace(checkpoint=None, config=config, group=group, parts=parts, state=state)
    initial_state.take_initial_weights(run)
    assert np.array_equal(state.model.weights[0], source.model.weights[0])
    where = f"warning: model.init_from: {tmp_path / 'saved'}: data.train: y 0 is yes; in that run it is no"
    assert any(line.startswith(where) for line in said)


def test_the_counts_of_updates_that_were_left_out_are_resumed(tmp_path: Path) -> None:
    step = restored(compiled(0.1), compiled(0.1), tmp_path / "saved", skipped=3, skipped_in_a_row=1).parts.train_step
    assert (int(step.skipped), int(step.skipped_in_a_row)) == (3, 1)


WEIGHTED = Config(weighted_metrics=(MetricSpec("mae"),))


@pytest.mark.parametrize(
    ("names", "then"), [([], Config()), (["mae"], Config()), ([], Config(loss=LossSpec("mae"))), ([], WEIGHTED)]
)
def test_figures_of_training_are_resumed_if_they_are_and_mean_the_same(
    tmp_path: Path, names: list[str], then: Config
) -> None:
    saved, table = compiled(0.1), np.zeros((1, 1))
    arrays = {name: variable.numpy() for name, variable in saved.variables().items()} | {FIGURES_BY_RANK: table}
    facts: Any = {"config": as_dict(then), "figures": {"names": names, "kinds": [], "shapes": []}}
    kept = restored(compiled(0.1), saved, tmp_path / "saved", arrays=arrays, **facts)
    assert (FIGURES_BY_RANK in kept.of_ranks) == (not names and then == Config())


def test_a_resume_says_what_has_changed_of_the_features_wherever_it_is_said(tmp_path: Path, said: list[str]) -> None:
    """As by a dataset.json that was made anew: the records are the same, the numbers that the model gets are not."""
    features: dict[str, Any] = {"x": {"type": "float", "scale": 0.25, "shape": []}, "gone": {"type": "int64"}}
    run = restored(compiled(0.1), compiled(0.1), tmp_path / "saved", features=features, versions=consistency.versions())
    assert [line for line in said if line.startswith("changed")] == [
        "changed since this checkpoint: data.features.x.scale 0.25 → 0.5"
    ]
    assert int(run.parts.early_stopping.best.step) == -1
    features["x"]["scale"] = 0.5
    run = restored(compiled(0.1), compiled(0.1), tmp_path / "same", features=features, versions=consistency.versions())
    assert int(run.parts.early_stopping.best.step) == 3


def of_two(*names: str, **options: Any) -> keras.Model:
    keras.utils.clear_session()
    middle = [layers.Dense(2, name=name, **options) for name in names]
    return keras.Sequential([keras.Input((2,)), *middle, layers.Dropout(0.1, name="drop")])


@pytest.mark.long
def test_a_model_that_computes_something_else_with_the_same_weights_is_said(said: list[str]) -> None:
    """Names and shapes of weights fit, so nothing else tells."""

    def check(model: keras.Model, versions: dict[str, str] | None = None) -> list[str]:
        said.clear()
        saved = checkpoint_with(how_built(of_two("a", "b", activation="relu")))
        facts = dataclasses.replace(saved.facts, versions=versions or {})
        initial_state.check_contents(how_built(model), dataclasses.replace(saved, facts=facts))
        return list(said)

    assert check(of_two("a", "b", activation="relu")) == []
    assert check(of_two("a", "b", activation="relu", dtype="bfloat16", trainable=False)) == []  # of the config
    (line,) = check(of_two("a", "b", activation="tanh"))
    assert "step-5: changed since it was saved: options of layer sequential/a, options of layer sequential/b" in line
    (line,) = check(of_two("b", "a", activation="relu"))
    assert ": order of layers" in line
    assert check(of_two("a", "b", activation="tanh"), {"keras": "3.0"}) == []  # which may have other options


def test_code_of_the_user_that_has_changed_is_said(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "changing_nets.py"
    file.write_text("def build(): ...\n")
    load_function("changing_nets:build", "model")
    settings = {"model": {"name": "changing_nets:build"}}
    saved = checkpoint_with(initial_state.users_code(settings))
    initial_state.check_contents(initial_state.users_code(settings), saved)
    assert said == []
    file.write_text("def build(): return 1\n")
    initial_state.check_contents(initial_state.users_code(settings), saved)
    assert said == []  # this process has that of before
    importlib.reload(sys.modules["changing_nets"])
    initial_state.check_contents(initial_state.users_code(settings), saved)
    assert "changed since it was saved: code of changing_nets" in said[0]


EVALUATED_OTHERWISE: dict[str, tuple[str, str, str]] = {
    "nothing": ("loss", "log.every_steps=7", ""),
    "loss": ("loss", "loss=mean_squared_error", "loss.name"),
    "penalty": ("loss", "train.l2=0.1", "train.l2"),
    "another path": ("accuracy", "data.eval=other", ""),
    "averages": ("accuracy", "train.ema_decay=0.9", "train.ema_decay"),
    "a metric beside": ("loss", "metrics=[accuracy, sparse_top_k_categorical_accuracy]", ""),
    "metrics": ("accuracy", "metrics=[binary_accuracy]", "metrics"),
    "another metric beside": ("accuracy", "metrics=[accuracy, mean_squared_error]", ""),
    "loss beside": ("accuracy", "loss=mean_squared_error", ""),
    "another stream": ("loss", "data={dataset: {name: parts:other}, train: [], eval: []}", "data.dataset.name"),
    "averages of Keras": ("loss", "callbacks=[SwapEMAWeights]", "SwapEMAWeights"),
    "another target": ("accuracy", "data.targets=[z]", "data.targets"),
    "weights": ("loss", "data.weight=w", "data.weight"),
    "loss of an output": ("b_loss", "loss=mean_squared_error", "loss.name"),
    "options of a class": ("top_k", "metrics=[accuracy, {name: TopK, options: {k: 1}}]", "metrics"),
    "a user's class beside": ("top_k", "metrics=[accuracy, {name: TopK, options: {k: 3}}, parts:Mine]", ""),
    "a user's class": ("mine", "metrics=[accuracy, {name: parts:Other, options: {a: 2}}]", "metrics"),
    "a user's class beside the loss": ("loss", "metrics=[accuracy, parts:Mine]", ""),
    "options of another class": ("top_k", "metrics=[accuracy, {name: TopK, options: {k: 3}}, Mean]", ""),
}


@pytest.mark.parametrize(
    ("metric", "word", "changed"),
    [
        pytest.param(
            *case,
            id=name,
            marks=[] if name in ("nothing", "penalty", "metrics", "options of a class") else pytest.mark.long,
        )
        for name, case in EVALUATED_OTHERWISE.items()
    ],
)
def test_best_values_that_mean_something_else_now_are_forgotten(
    tmp_path: Path, said: list[str], metric: str, word: str, changed: str
) -> None:
    watched = f"{{metric: {metric}, mode: min}}"
    words = ["data={train: a, eval: b, global_batch_size: 8}", f"checkpoint.best={watched}"]
    words += ["metrics=[accuracy, {name: TopK, options: {k: 3}}]" if metric == "top_k" else "metrics=[accuracy]"]
    words += [f"early_stopping={watched}", "early_stopping.patience=3", f"output_dir={tmp_path}", "train.epochs=9"]
    (tmp_path / "checkpoints" / "step-000000003").mkdir(parents=True)
    then, now = load([], words)[0], load([], [*words, word])[0]
    run = restored(compiled(0.1), compiled(0.1), tmp_path / "saved", now, config=as_dict(then))
    assert [int(run.parts.best.step), int(run.parts.early_stopping.best.step)] == ([-1, -1] if changed else [3, 3])
    lines = [
        f"{name}: the best {metric} so far, 0.5 at step 3, is forgotten, because another {changed} gives other values"
        + more
        for name, more in (("checkpoint.best", "; its checkpoint stays"), ("early_stopping", ""))
    ]
    assert [line for line in said if "is forgotten" in line] == (lines if changed else [])


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_best_of_before_is_kept_aside_only_where_another_is_sought(tmp_path: Path, is_kept: bool) -> None:
    """Without checkpoint.best nothing replaces the link to it."""
    watched = CheckpointConfig(best=Watched("accuracy", "max") if is_kept else None)
    then = as_dict(Config(checkpoint=CheckpointConfig(best=Watched("loss", "min"))))
    now = Config(output_dir=str(tmp_path), checkpoint=watched)
    run = restored(compiled(0.1), compiled(0.1), tmp_path / "saved", now, config=then)
    assert run.store.sought_anew == ["best"] * is_kept


@pytest.mark.parametrize("then", ["records of now", "records of then", ""])
def test_best_values_of_other_records_are_forgotten_wherever_these_lie(
    tmp_path: Path, said: list[str], then: str
) -> None:
    """Data that are staged for each job lie at another path, and patience must not begin anew each time."""
    (tmp_path / "checkpoints" / "step-000000003").mkdir(parents=True)
    config = Config(output_dir=str(tmp_path), checkpoint=CheckpointConfig(best=Watched()))
    run = restored(compiled(0.1), compiled(0.1), tmp_path / "saved", config, eval_data=then)
    is_forgotten = then == "records of then"
    assert int(run.parts.best.step) == int(run.parts.early_stopping.best.step) == (-1 if is_forgotten else 3)
    assert any("because another data.eval gives other values" in line for line in said) == is_forgotten


def test_a_checkpoint_that_does_not_fit_is_refused_with_what_has_changed(tmp_path: Path) -> None:
    """Here a momentum, which has slots that were not saved."""
    options = {"momentum": 0.9}
    then, now = Config(train=TrainConfig(epochs=5)), Config(optimizer=OptimizerSpec("sgd", options))
    line = r"has no optimizer/sgd/sequential_dense_kernel_momentum; it was saved with other settings: "
    changes = r"optimizer\.name auto → sgd; optimizer\.options\.momentum unset → 0\.9"
    with pytest.raises(UserError, match=f"{line}{changes}\\.$"):
        restored(compiled(0.1, momentum=0.9), compiled(0.1), tmp_path / "saved", now, config=as_dict(then))
