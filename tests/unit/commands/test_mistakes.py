"""The mistakes of a first hour: each is one line that says where, what was expected, and what to type. Exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import PROJECT

from horovod_train.checkpoint.layout import step_name
from horovod_train.main import main

PLAIN = str(PROJECT / "configs" / "digits_convnet_plain.yaml")
NETS = """
import keras
def build():
    return keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
def sized(classes):
    return build()
def none():
    build()
def unbuilt():
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
def downloads():
    raise Exception("URL fetch failure on https://example.org/weights.h5: None -- Name or service not known")
"""
LOGITS = "options: {from_logits: true}"

OF_ARGUMENTS: dict[str, tuple[list[str], str]] = {
    "wrong data path": (["data.train=data/digit/train"], "data.train: data/digit/train does not exist. Did you mean"),
    "another data path beside a fold": (
        ["data.eval=data/digits/train", "data.fold=1/5", "data.train=data/digit/train"],
        "left out (data.eval=[]); received data.train data/digit/train and data.eval data/digits/train. To evaluate",
    ),
    "a fraction as a fold": (
        ["data.fold=0.2"],
        "data.fold: expected k/K, like 1/5, or data.eval_fraction for a fraction; received 0.2.",
    ),
    "wrong config path": (
        ["--config", "confi.yaml"],
        "--config confi.yaml: cannot be read: No such file",
    ),
    "no data yet": (
        ["--config", "mnist_mlp"],
        "data.train: data/mnist/train does not exist. Make it by: python -m horovod_train.main prepare idx --images",
    ),
    "batch below ranks": (["data.global_batch_size=0"], "data.global_batch_size: must be at least 1; received 0."),
    "misspelt key": (["optimiser=sgd"], "optimiser: unknown key; did you mean optimizer?"),
    "another section": (["train.batch_size=3"], "train.batch_size: unknown key; did you mean data.global_batch_size?"),
    "no section": (["learning_rate=0.1"], "learning_rate: unknown key; did you mean lr_schedule.base_lr?"),
    "another tool's name": (["optimizer.lr=0.1"], "optimizer.lr: unknown key; did you mean lr_schedule.base_lr?"),
    "a blank for =": (["train.epochs", "5"], "argument 'train.epochs': expected section.key=value, without blanks"),
    "dashes": (["--epochs", "5"], "--epochs: settings are written without dashes, with =: train.epochs=VALUE"),
    "dashes and =": (["--batch-size=5"], "settings are written without dashes, with =: data.global_batch_size=VALUE"),
    "no epochs": (["train.epochs=null"], "train.epochs: is required (or train.max_steps)."),
}

OF_PARTS: dict[str, tuple[list[str], str]] = {
    "wrong feature": (["data.inputs=image"], "inputs: there is no feature image; there are image_raw, label."),
    "wrong shape": (["model.options.image_size=32"], "expected shape=(None, 32, 32, 1), found shape=(32, 28, 28"),
    "labels out of range": (
        ["model.options.classes=5"],
        "Build the model with 10 outputs, or correct classes",
    ),
    "no such module": (["model=nots:build"], "cannot import 'nots:build': No module named 'nots'. Is its folder on"),
    "a dot for :": (["model=mistaken_nets.build"], "Your own is package.module:function."),
    "returns nothing": (["model=mistaken_nets:none"], "must return a keras.Model; it returned NoneType."),
    "not built": (["model=mistaken_nets:unbuilt"], "call it once, or build it."),
    "probabilities": (["loss=categorical_crossentropy"], "takes probabilities, but the model convnet returns logits"),
    "one-hot loss": (
        [f"loss={{name: categorical_crossentropy, {LOGITS}}}"],
        f"If it is a class, write loss: {{name: sparse_categorical_crossentropy, {LOGITS}}}",
    ),
    "misspelt metric": (["metrics=[acuracy]"], "metrics: Keras has no 'acuracy'; did you mean accuracy"),
    "fit's name of a figure": (
        ["checkpoint.best.metric=val_accuracy", "eval.every_epochs=1"],
        "checkpoint.best.metric: the evaluation has no 'val_accuracy'; write accuracy: its figures have no val_.",
    ),
    "a metric of one-hot targets": (
        ["metrics=[{name: F1Score}]"],
        "Leave it out, or store one-hot targets, with loss: categorical_crossentropy",
    ),
    "a metric of numbers of classes": (
        ["metrics=[{name: MeanIoU, options: {num_classes: 10}}]"],
        "For labels there is MeanIoU, with its option sparse_y_pred: false",
    ),
    "a metric that takes labels for targets": (
        ["metrics=[categorical_accuracy]"],
        "For labels there is SparseCategoricalAccuracy",
    ),
    "a class of labels": (
        ["metrics=[{name: Precision, options: {class_id: 1, thresholds: 0.0}}]"],
        "metric precision takes targets of the shape of the outputs; it gets targets",
    ),
    "a metric with another for labels": (
        ["metrics=[{name: TopKCategoricalAccuracy, options: {k: 2}}]"],
        "top_k_categorical_accuracy takes targets of the shape of the outputs; it gets targets",
    ),
    "a quantity's loss": (["loss=mean_squared_error"], "mean_squared_error needs as many targets; label is one whole"),
    "the rate twice": (
        ["optimizer={name: sgd, options: {learning_rate: 0.1}}"],
        "the rate is set by lr_schedule.base_lr; leave it out here.",
    ),
    "no internet": (
        ["model=mistaken_nets:downloads"],
        "run `plan` with this config where there is some",
    ),
}


@pytest.fixture
def folder(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mistaken_nets.py").write_text(NETS)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(digits)
    (tmp_path / "config.yaml").write_text(Path(PLAIN).read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", OF_ARGUMENTS)
def test_a_wrong_command_line_is_one_line(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, said = OF_ARGUMENTS[name]
    config = [] if "--config" in words else ["--config", "config.yaml"]
    assert main([*config, *words, "--output-dir", "runs/a"]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) == 1
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("name", OF_PARTS)
def test_parts_that_do_not_fit_are_one_fault(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, said = OF_PARTS[name]
    is_own = words[0].startswith("model=")
    bare = ["model.options=null"] if is_own else []
    assert main(["plan", "--config", "config.yaml", *bare, *words, "--np", "2"]) == 2
    (fault,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fault: ")]
    assert said in fault


def test_a_name_that_leaves_out_options_of_the_file_is_noted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another name's are of no use to it, and it may need some."""
    said = 'loss=sparse_categorical_crossentropy, which leaves out the file\'s {"from_logits": true}. If they are meant'
    bare = ["loss=sparse_categorical_crossentropy", "model=mistaken_nets:build"]
    for words, is_said in (bare, True), ([*bare, "loss.options.from_logits=true"], False):
        assert main(["plan", "--config", "config.yaml", *words]) == 0
        assert (said in capsys.readouterr().out.replace("\n", " ")) == is_said
    Path("sized.yaml").write_text("model: {name: convnet, options: {dropout: 0.1}}")
    named = ["sized.yaml", "model.name=mistaken_nets:build"]
    assert main(["plan", "--config", "config.yaml", *named]) == 0
    assert 'model=mistaken_nets:build, which leaves out the file\'s {"dropout": 0.1}' in capsys.readouterr().out
    assert main(["plan", "--config", "config.yaml", "model=mistaken_nets:sized"]) == 2
    out = capsys.readouterr().out
    assert "missing a required argument: 'classes'; it takes: classes. Options that a file gives to another" in out


def test_names_that_are_close_are_proposed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--config", "confg.yaml"])
    assert "Did you mean config.yaml?" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["data.on_bad_record=skip", "seed=3", "model.options.width=2"])
def test_a_setting_after_the_paths_to_predict_is_told_from_them(
    folder: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    command = ["predict", "--config", "config.yaml", "--out", "a.npz", "--data", "data/digits/eval", word]
    assert main(command) == 2
    expected = f"error: --data: {word} is a setting, and no such file exists; give settings before --data.\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("word", ["seed=3", "seed=*", "lr=0.1/nowhere"])
def test_a_path_with_a_sign_of_equality_stays_one(folder: Path, capsys: pytest.CaptureFixture[str], word: str) -> None:
    (folder / "seed=3").mkdir()
    assert main(["predict", "--config", "config.yaml", "--out", "a.npz", "--data", word]) == 2
    assert "is a setting" not in capsys.readouterr().err


@pytest.mark.parametrize("step", ["25", "step-000000025"])
@pytest.mark.parametrize(("steps", "said"), [((69, 92, 115), "115, 92, 69"), ((), "none")])
def test_a_step_without_a_checkpoint_is_answered_with_those_that_have_one(
    step: str, steps: tuple[int, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kept in steps:
        (folder / "checkpoints" / step_name(kept)).mkdir(parents=True)
    assert main(["evaluate", str(folder), "--checkpoint", step]) == 2
    expected = f"error: --checkpoint {step}: {folder} has no checkpoint of this step. It has: {said}.\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--config config.yaml --output-dir scratch/runs/a", "error: output_dir: "),
        ("--config config.yaml --output-dir runs/a data.train=scratch", "error: data.train: "),
        ("--config config.yaml --output-dir runs/a data.eval=scratch/digits", "error: data.eval: "),
        ("plan --config config.yaml --fast --output-dir scratch", "fault: output_dir: "),
        ("explain scratch", "error: "),
        ("watch scratch/runs/a", "error: "),
        ("evaluate scratch/runs/a", "error: "),
        ("check-data scratch", "error: data.train: "),
        (
            "plan --config config.yaml --fast --output-dir runs/a checkpoint.resume=scratch/a",
            "fault: checkpoint.resume: ",
        ),
    ],
)
def test_a_link_to_a_disk_that_is_not_mounted_is_named(
    words: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "scratch").symlink_to("/nowhere/scratch")
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    lines = [line for line in (shown.out + shown.err).splitlines() if "scratch" in line]
    assert lines == [f"{said}scratch is a link to nothing: is its disk mounted?"]


def test_the_run_of_a_stream_has_no_records_to_evaluate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "stream.yaml").write_text(
        "output_dir: runs/s\nmodel: nets:build\ntrain: {epochs: 1}\n"
        "data: {dataset: nets:stream, batch_size_per_rank: 4}\n"
    )
    assert main(["evaluate", "--config", "stream.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: data.dataset: nets:stream is a stream, which only training reads; records are")
    assert said.endswith("predict --data PATH takes records in files.\n")
    assert main(["predict", "--config", "stream.yaml", "--out", "a.npz"]) == 2
    assert capsys.readouterr().err == "error: predict: of which records? Give --data PATH.\n"
