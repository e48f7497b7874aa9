"""What becomes of a trained model: evaluate, predict and export, with the weights of one real run."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import tensorflow as tf
from conftest import Finished, metrics_of, run_process, split_records, summary_of, train
from made_digits import images_of

from horovod_train.data.subsets import parts_of_records
from horovod_train.errors import UserError
from horovod_train.inference.run import _flat
from horovod_train.tfrecord_framing import frame

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
"""Of the classes, in the dataset.json of the records."""
CONFIG = """
data: {{train: {data}/train, eval: {data}/eval, global_batch_size: 96}}
precision: mixed_bfloat16
model: {{name: user_models:served, freeze: [dense], unfreeze: {{1: [dense]}}}}
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
metrics: [{{name: sparse_categorical_accuracy, options: {{name: accuracy}}}}]
optimizer: adam
lr_schedule: {{base_lr: 0.01}}
train: {{epochs: 2, ema_decay: 0.8, l2: 0.01}}
checkpoint: {{keep: 9, best: {{metric: accuracy, mode: max}}}}
log: {{tensorboard: false}}
"""

OF_A_TABLE = """
data:
  {{train: "{table}", eval: "{table}", fold: 1/5, global_batch_size: 8,
    targets: [kind], features: {{size: {{scale: 0.02}}, kind: {{classes: 3}}}}}}
model: user_models:of_zones
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
optimizer: adam
train: {{epochs: 1}}
log: {{tensorboard: false}}
"""

CLEAN = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("horovod", "horovod_train", "user_models"):
            raise ImportError(f"{name} is not to be had here")

sys.meta_path.insert(0, Block())
import numpy as np, keras, tensorflow as tf
kind, path, inputs, out = sys.argv[1:]
images = np.load(inputs)
if kind == "keras":
    model = keras.saving.load_model(path)
    outputs = model(images, training=False)
    assert getattr(model, "optimizer", None) is None
else:
    saved = tf.saved_model.load(path)
    outputs = saved.serve(images)
np.save(out, np.asarray(outputs))
assert not [name for name in sys.modules if name.startswith("horovod")]
"""


@pytest.fixture(scope="module")
def run_dir(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving")
    schema = json.loads((digits / "dataset.json").read_text())
    for name, names in (("data", NAMES), ("reversed", NAMES[::-1])):
        shutil.copytree(digits, folder / name)
        schema["features"]["label"]["class_names"] = names
        (folder / name / "dataset.json").write_text(json.dumps(schema))
    (folder / "config.yaml").write_text(CONFIG.format(data=folder / "data"))
    words = ["--config", folder / "config.yaml", "--output-dir", folder / "run"]
    finished = train(words, launcher="mpirun", np=2)
    assert finished.returncode == 0, finished.text
    return folder / "run"


@pytest.fixture(scope="module")
def predicted(run_dir: Path) -> np.ndarray:
    """The outputs of one process."""
    out = run_dir.parent / "one.npz"
    done(train(["predict", run_dir, "--out", out]))
    with np.load(out) as found:
        assert found["record"].tolist() == list(range(360))
        return np.asarray(found["output"])


def done(finished: Finished) -> Finished:
    assert finished.returncode == 0, finished.text
    return finished


def evaluate(out: Path, words: list[Any], **ranks: Any) -> dict[str, Any]:
    done(train(["evaluate", *words, "--out", out], **ranks))
    return json.loads(out.read_text())


@pytest.mark.parametrize(("launcher", "np_"), [("srun", 2), pytest.param("mpirun", 3, marks=pytest.mark.long)])
def test_evaluation_gives_what_the_run_had_seen(run_dir: Path, tmp_path: Path, launcher: str, np_: int) -> None:
    *_, last = metrics_of(run_dir, "eval")
    words = [run_dir, "eval.batch_size_per_rank=7"]
    figures = evaluate(tmp_path / "figures.json", words, launcher=launcher, np=np_)
    assert figures["loss"] == pytest.approx(last["loss"], rel=1e-3)  # bfloat16, in other batches
    assert figures["accuracy"] == pytest.approx(last["accuracy"], abs=1.5 / 360)
    assert (figures["records"], figures["ranks"], figures["step"]) == (360, np_, last["step"])
    assert figures["weights"] == "ema"


@pytest.mark.long
def test_other_weights_give_other_figures(run_dir: Path, tmp_path: Path) -> None:
    """The negative of the above; and `best` and a path name the checkpoints that they should."""
    rows = metrics_of(run_dir, "eval")
    trained = evaluate(tmp_path / "trained.json", [run_dir, "--weights", "trained"])
    assert trained["weights"] == "trained"
    assert abs(trained["loss"] - rows[-1]["loss"]) > 0.01 * rows[-1]["loss"]
    best = max(rows, key=lambda row: row["accuracy"])
    assert evaluate(tmp_path / "best.json", [run_dir, "--checkpoint", "best"])["step"] == best["step"]
    words = [run_dir, "--checkpoint", run_dir / "checkpoints" / "step-000000015"]
    first = evaluate(tmp_path / "first.json", words)
    assert first["loss"] == pytest.approx(rows[0]["loss"], rel=1e-3)
    assert abs(first["loss"] - rows[-1]["loss"]) > 0.01 * rows[-1]["loss"]


@pytest.mark.long
def test_a_table_is_read_as_the_one_that_trained_and_its_records_have_their_numbers_in_the_file(tmp_path: Path) -> None:
    """Of the new table all texts read as numbers, and the numbers are scaled already, which is said."""
    for name, zones, sizes in (("old", ["1", "2", "3b"], range(60)), ("new", ["1", "2"], np.linspace(0, 1, 6))):
        lines = [f"{zones[row % len(zones)]},{size},{row % 3}" for row, size in enumerate(sizes)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["zone,size,kind", *lines]))
    (tmp_path / "config.yaml").write_text(OF_A_TABLE.format(table=tmp_path / "old.csv"))
    done(train(["--config", tmp_path / "config.yaml", "--output-dir", tmp_path / "run"]))

    def predict(*words: Any) -> tuple[np.ndarray, np.ndarray, str]:
        finished = done(train(["predict", tmp_path / "run", *words, "--out", tmp_path / "out.npz"]))
        with np.load(tmp_path / "out.npz") as found:
            return found["record"], found["output"], finished.text

    held_out, outputs, said = predict()
    assert held_out.tolist() == np.flatnonzero(parts_of_records(60, 5) == 0).tolist()
    assert "in the training records" not in said
    record, whole, _ = predict("--data", tmp_path / "old.csv")
    assert record.tolist() == list(range(60))
    assert np.allclose(outputs, whole[held_out], atol=1e-6)
    (tmp_path / "text.csv").write_text("zone,size,kind\n1,large,0\n")
    refused = train(["predict", tmp_path / "run", "--data", tmp_path / "text.csv", "--out", tmp_path / "out.npz"])
    assert refused.returncode == 2, refused.text
    assert "size" in refused.stderr.splitlines()[-1]
    lacking = pyarrow.table({"zone": ["1", "1", "2"], "size": [2, None, 3], "kind": [0, 0, 0]})
    pyarrow.parquet.write_table(lacking, tmp_path / "lacking.parquet")
    record, _, said = predict("data.on_bad_record=skip", "--data", tmp_path / "lacking.parquet")
    assert record.tolist() == [0, 2]
    assert "data.eval: data.on_bad_record: skip leaves 1 of its records out of" in said
    record, _, said = predict("--checkpoint", "6", "--data", tmp_path / "new.csv")
    assert record.tolist() == list(range(6))
    assert "data.eval: size is float32, and int64 in the training records; its scale and offset are the same" in said


def test_outputs_in_outputs_are_named_by_their_places() -> None:
    flat = dict(_flat("state", {"main": tf.constant(1), "more": [tf.constant(2), (tf.constant(3),)]}))
    assert {name: int(value) for name, value in flat.items()} == {
        "state.main": 1,
        "state.more[0]": 2,
        "state.more[1][0]": 3,
    }
    with pytest.raises(UserError, match=r"expected output state\[1\] to be a tensor; it is NoneType"):
        dict(_flat("state", [tf.constant(1), None]))


@pytest.mark.parametrize(
    ("launcher", "np_", "suffix"), [("srun", 2, "npz"), pytest.param("mpirun", 3, "csv", marks=pytest.mark.exhaustive)]
)
def test_predictions_are_in_record_order_at_any_number_of_ranks(
    run_dir: Path, predicted: np.ndarray, tmp_path: Path, launcher: str, np_: int, suffix: str
) -> None:
    out = tmp_path / f"found.{suffix}"
    done(train(["predict", run_dir, "--out", out, "eval.batch_size_per_rank=7"], launcher=launcher, np=np_))
    if suffix == "npz":
        record, output = np.load(out)["record"], np.load(out)["output"]
    else:
        head, *_ = out.read_text().splitlines()
        assert head.split(",")[:2] == ["record", "output[0]"]
        table = np.loadtxt(out, delimiter=",", skiprows=1, usecols=range(11))
        record, output = table[:, 0], table[:, 1:]
    assert record.tolist() == list(range(360))
    assert np.allclose(output, predicted, atol=2e-2 * np.abs(predicted).max())
    assert {path.name for path in tmp_path.iterdir()} == {out.name}


def test_names_of_classes_are_those_of_the_training_records(run_dir: Path, predicted: np.ndarray) -> None:
    with np.load(run_dir.parent / "one.npz") as found:
        assert found["class"].tolist() == [NAMES[number] for number in predicted.argmax(axis=1)]
    assert summary_of(run_dir)["class_names"] == NAMES


def test_predictions_are_those_of_the_records(digits: Path, run_dir: Path, predicted: np.ndarray) -> None:
    """In another order they would not be: the records' own labels tell."""
    labels = images_of(digits / "eval")[1]
    *_, last = metrics_of(run_dir, "eval")
    right = predicted.argmax(axis=1) == labels
    assert right.mean() == pytest.approx(last["accuracy"], abs=1.5 / 360)
    assert (np.roll(predicted, 1, axis=0).argmax(axis=1) == labels).mean() < right.mean() - 0.2


@pytest.mark.long
def test_records_without_targets_can_be_predicted(
    digits: Path, run_dir: Path, predicted: np.ndarray, tmp_path: Path
) -> None:
    first, *_ = sorted((digits / "eval").glob("*.tfrecord"))
    records = [tf.train.Example.FromString(record[12:-4]) for record in split_records(first.read_bytes())][:50]
    for record in records:
        del record.features.feature["label"]
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "0.tfrecord").write_bytes(b"".join(frame(record.SerializeToString()) for record in records))
    schema = json.loads((digits / "dataset.json").read_text())
    (tmp_path / "dataset.json").write_text(json.dumps({**schema, "counts": {}}))
    done(train(["predict", run_dir, "--data", tmp_path / "new", "--out", tmp_path / "new.npz"]))
    assert set(np.load(tmp_path / "new.npz")["class"]) <= {*NAMES}  # which these records do not have
    assert np.allclose(np.load(tmp_path / "new.npz")["output"], predicted[:50], atol=2e-2 * np.abs(predicted).max())


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["keras", pytest.param("savedmodel", marks=pytest.mark.exhaustive)]
)  # see unit/test_export
def test_an_export_gives_the_same_outputs_where_there_is_tensorflow_alone(
    digits: Path, run_dir: Path, predicted: np.ndarray, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / ("model.keras" if kind == "keras" else "model")
    done(train(["export", run_dir, "--out", out]))
    if kind == "keras":
        assert json.loads(zipfile.ZipFile(out).read("class_names.json")) == NAMES
    np.save(tmp_path / "images.npy", images_of(digits / "eval")[0])
    (tmp_path / "elsewhere").mkdir()
    words = [kind, str(out), str(tmp_path / "images.npy"), str(tmp_path / "outputs.npy")]
    done(run_process([sys.executable, "-I", "-c", CLEAN, *words], cwd=tmp_path / "elsewhere"))
    outputs = np.load(tmp_path / "outputs.npy")
    assert np.allclose(outputs, predicted, atol=2e-2 * np.abs(predicted).max())


OF_TAGS = """
data: {{train: "{here}/tags.npz", targets: tags, global_batch_size: 8,
  features: {{tags: {{class_names: [ant, bee, cat]}}}}}}
model: {{name: mlp, options: {{inputs: 1, outputs: 3}}}}
loss: {{name: {loss}, options: {{from_logits: true}}}}
train: {{epochs: 1}}
log: {{tensorboard: false}}
"""


@pytest.mark.long
@pytest.mark.parametrize(("loss", "has_class"), [("binary_crossentropy", False), ("categorical_crossentropy", True)])
def test_a_record_that_may_have_several_classes_is_given_none(loss: str, has_class: bool, tmp_path: Path) -> None:
    """Where the target has a number for each class, the loss tells whether only one of them is 1."""
    x = np.random.default_rng(0).normal(size=(24, 1)).astype(np.float32)
    np.savez(tmp_path / "tags.npz", x=x, tags=np.tile([[1, 0, 0], [0, 1, 0]], (12, 1)))
    (tmp_path / "config.yaml").write_text(OF_TAGS.format(here=tmp_path, loss=loss))
    done(train(["--config", tmp_path / "config.yaml", "--output-dir", tmp_path / "run"]))
    done(train(["predict", tmp_path / "run", "--data", tmp_path / "tags.npz", "--out", tmp_path / "out.csv"]))
    head, *_ = (tmp_path / "out.csv").read_text().splitlines()
    assert head == "record,output[0],output[1],output[2]" + ",class,probability" * has_class


OF_PHOTOS = """
data: {{train: "{here}/records/train", global_batch_size: 8}}
model: {{name: image_mlp, options: {{image_size: 16, hidden: 8, classes: 2}}}}
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
train: {{epochs: 1}}
log: {{tensorboard: false}}
"""


@pytest.mark.long
def test_image_files_are_predicted_with_what_was_learned_from_records_of_images(tmp_path: Path) -> None:
    """The dataset.json beside those has said how they are decoded, and what the classes are called."""
    for number in range(16):
        path = tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(np.full((20, 16 + number, 1), 15 * number, np.uint8)).numpy())
    words = ["--images", tmp_path / "photos", "--size", "16", "--channels", "1", "--out", tmp_path / "records"]
    done(train(["prepare", "images", *words]))
    (tmp_path / "config.yaml").write_text(OF_PHOTOS.format(here=tmp_path))
    done(train(["--config", tmp_path / "config.yaml", "--output-dir", tmp_path / "run"]))
    (tmp_path / "photos" / "top.png").write_bytes((tmp_path / "photos" / "cat" / "00.png").read_bytes())
    found = {}
    for name, path in (("files", tmp_path / "photos"), ("records", tmp_path / "records" / "train")):
        done(train(["predict", tmp_path / "run", "--data", path, "--out", tmp_path / f"{name}.npz"]))
        with np.load(tmp_path / f"{name}.npz") as arrays:
            found[name] = dict(arrays)
    assert {*found["files"]["class"]} <= {"cat", "dog"}
    assert len(found["files"]["file"]) == 17
    by_file = dict(zip(found["files"]["file"], found["files"]["output"].tolist(), strict=True))
    assert by_file.pop(f"{tmp_path}/photos/top.png") == by_file[f"{tmp_path}/photos/cat/00.png"]
    assert np.allclose(sorted(by_file.values()), sorted(found["records"]["output"].tolist()), atol=1e-6)


SUBCLASSED = """
data:
  {{train: {folder}/flats.npz, inputs: [tokens, price], targets: label, global_batch_size: 24, features: {features}}}
model: user_models:undeclared
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
lr_schedule: {{base_lr: 0.01}}
train: {{epochs: 1}}
log: {{tensorboard: false}}
"""


@pytest.mark.long
def test_a_subclassed_model_is_exported_with_the_inputs_of_its_run(tmp_path: Path) -> None:
    """The records are gone by then: the checkpoint knows them."""
    rng = np.random.default_rng(0)
    tokens = 2**24 + rng.integers(0, 100, (48, 2))
    arrays: dict[str, Any] = {"tokens": tokens, "price": rng.normal(size=(48, 1)), "label": tokens[:, 0] % 3}
    np.savez(tmp_path / "flats.npz", **arrays)
    features = "{price: {scale: 0.5, cast: float32}}"
    (tmp_path / "config.yaml").write_text(SUBCLASSED.format(folder=tmp_path, features=features))
    done(train(["--config", tmp_path / "config.yaml", "--output-dir", tmp_path / "run"]))
    done(train(["predict", tmp_path / "run", "--data", tmp_path / "flats.npz", "--out", tmp_path / "out.npz"]))
    (tmp_path / "flats.npz").unlink()
    for name in ("model", "model.keras"):
        said = done(train(["export", tmp_path / "run", "--out", tmp_path / name])).stdout.splitlines()
        assert {line for line in said if line.startswith("takes ")} == {
            "takes tokens: int64 [None, 2]",
            "takes price: float32 [None, 1], after scale: 0.5",
        }
    (told,) = tmp_path.glob("model/assets.extra/inputs.json")
    scale = json.loads(told.read_text())["features"]["price"]["scale"]
    saved = tf.saved_model.load(str(tmp_path / "model"))
    found = saved.signatures["serving_default"].structured_input_signature[1]
    assert {name: (spec.dtype, spec.shape.as_list()) for name, spec in found.items()} == {
        "price": (tf.float32, [None, 1]),
        "tokens": (tf.int64, [None, 2]),
    }
    outputs = saved.serve({"tokens": tokens, "price": (scale * arrays["price"]).astype(np.float32)})
    with np.load(tmp_path / "out.npz") as predicted:
        assert np.allclose(outputs, predicted["output"], atol=1e-5)


BAD = {
    "no run": (["evaluate", "{here}"], "is no run's directory: it has no config.yaml"),
    "nothing named": (["evaluate"], "expected either the directory of a run or --config; received neither"),
    "no checkpoint": (["evaluate", "{run}", "--checkpoint", "{here}"], "--checkpoint: no checkpoint at {here}"),
    "no records": (["evaluate", "{run}", "data.eval={here}/none"], "data.eval: {here}/none"),
    "nothing to evaluate": (["evaluate", "{run}", "data.eval=[]", "checkpoint.best=null"], "data.eval: is required"),
    "another model": (["evaluate", "{run}", "model=convnet"], "it was saved from another model"),
    "other classes": (
        ["evaluate", "{run}", "data.eval={reversed}"],
        "data.eval: label 0 is nine; in the training records it is zero",
    ),
    "other classes to predict": (
        ["predict", "{run}", "--data", "{reversed}", "--out", "{here}/x.npz"],
        "data.eval: label 0 is nine; in the training records it is zero",
    ),
    "form of predictions": (
        ["predict", "{run}", "--out", "{here}/x.json"],
        "expected a name that ends in .npz or .csv",
    ),
    "no such folder": (["predict", "{run}", "--out", "{here}/no/x.npz"], "{here}/no is not a folder"),
    "exists": (["export", "{run}", "--out", "{saved}"], "exists already. Give another name, or --force"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_one_line(run_dir: Path, tmp_path: Path, name: str) -> None:
    words, expected = BAD[name]
    saved = run_dir.parent / "saved"
    saved.mkdir(exist_ok=True)
    (saved / "saved_model.pb").touch()
    places = {"run": run_dir, "here": tmp_path, "saved": saved, "reversed": run_dir.parent / "reversed" / "eval"}
    finished = train([word.format(**places) for word in words])
    assert finished.returncode == 2, finished.text
    (line,) = finished.stderr.splitlines()
    assert expected.format(**places) in line
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_damaged_checkpoint_is_named_once_by_all_ranks(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir / "checkpoints" / "step-000000015", tmp_path / "step-000000015")
    (victim,) = (tmp_path / "step-000000015").glob("*.data-*")
    content = bytearray(victim.read_bytes())
    content[100] ^= 1
    victim.write_bytes(content)
    words = ["evaluate", run_dir, "--checkpoint", tmp_path / "step-000000015"]
    finished = train(words, launcher="mpirun", np=2)
    assert finished.returncode == 2, finished.text
    assert [line for line in finished.stderr.splitlines() if "is damaged" in line and "SHA-256" in line]
    assert finished.stderr.count("error: ") == 1
