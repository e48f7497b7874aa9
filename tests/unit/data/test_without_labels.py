"""A model that predicts gets the same inputs whether or not the records have targets and weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from made_records import batches, example, write_file
from made_stores import WRITERS

from horovod_train.config.settings import DataConfig
from horovod_train.data.dataset import open_records, with_inputs_of
from horovod_train.data.pipeline import Ranks, build_pipeline
from horovod_train.errors import UserError

ROWS = 20
ARRAYS: dict[str, Any] = {
    "a": np.arange(ROWS, dtype=np.float32),
    "b": np.arange(ROWS, dtype=np.float32) * 2,
    "y": np.arange(ROWS) % 3,
    "w": np.ones(ROWS, np.float32),
}
BARE = {name: ARRAYS[name] for name in "ab"}
LABELS: dict[str, Any] = {"targets": ("y",), "weight": "w", "features": {"y": {"classes": 3}}}


def write_csv(folder: Path, arrays: dict[str, Any]) -> Path:
    lines = [",".join(map(str, row)) for row in zip(*(array.tolist() for array in arrays.values()), strict=True)]
    (folder / "t.csv").write_text("\n".join([",".join(arrays), *lines]) + "\n")
    return folder / "t.csv"


def write_tfrecords(folder: Path, arrays: dict[str, Any]) -> Path:
    features = {name: {"type": "int64" if name == "y" else "float"} for name in arrays}
    roles = {"inputs": ["a", "b"], "targets": ["y"] if "y" in arrays else []}
    (folder / "dataset.json").write_text(json.dumps({"features": features, **roles}))
    rows = [{name: array[row].item() for name, array in arrays.items()} for row in range(ROWS)]
    write_file(folder / "r" / "0.tfrecord", [example(**row) for row in rows])
    return folder / "r"


FORMS: dict[str, Callable[[Path, dict[str, Any]], Path]] = {
    **WRITERS,
    "csv": write_csv,
    "tfrecord": write_tfrecords,
}


def inputs(path: Path, labels: dict[str, Any]) -> Any:
    data = DataConfig(eval=(str(path),), **labels)
    records = open_records(data, "eval", needs_labels=False)
    bare = dataclasses.replace(data, targets=(), weight=None)
    made = build_pipeline(records, bare, Ranks(0, 1), seed=1, training=False, global_batch_size=ROWS)
    (batch,) = batches(made)
    assert batch.targets == () or not batch.targets
    return batch.inputs


@pytest.mark.parametrize("form", FORMS)
def test_inputs_are_the_same_with_and_without_labels(form: str, tmp_path: Path) -> None:
    labels = LABELS if form != "tfrecord" else {"targets": ("y",), "weight": "w"}
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    labelled = inputs(FORMS[form](tmp_path / "with", ARRAYS), labels)
    bare = inputs(FORMS[form](tmp_path / "without", BARE), labels)
    assert labelled.keys() == bare.keys() == {"a", "b"}
    for name in "ab":
        assert np.array_equal(labelled[name], bare[name])
        assert np.array_equal(np.sort(labelled[name]), ARRAYS[name])


def test_the_number_of_an_images_folder_is_no_input(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        image = tf.io.encode_png(np.zeros((4, 4, 1), np.uint8)).numpy()
        (tmp_path / name / "0.png").write_bytes(image)
    data = DataConfig(train=(str(tmp_path),), targets=("label",), features={"image": {"shape": [4, 4, 1]}})
    assert open_records(data, "train", needs_labels=False).schema.inputs == ("image",)


def test_a_target_that_is_an_input_too_stays_one(tmp_path: Path) -> None:
    data = DataConfig(eval=(str(write_csv(tmp_path, ARRAYS)),), inputs=("a",), targets=("a",), features={"a": {}})
    schema = open_records(data, "eval", needs_labels=False).schema
    assert (schema.inputs, schema.targets, [*schema.features]) == (("a",), (), ["a"])


def test_records_that_train_need_their_targets(tmp_path: Path) -> None:
    data = DataConfig(eval=(str(write_csv(tmp_path, BARE)),), targets=("y",))
    with pytest.raises(UserError, match=r"data\.targets: the records of .* have no y; they have a, b"):
        open_records(data, "eval")


def test_records_of_another_kind_may_follow_a_table_with_texts(tmp_path: Path) -> None:
    """What is declared of the table does not take the place of what dataset.json says of the rest."""
    (tmp_path / "a.csv").write_text("word,x,y\na,1.5,0\nb,2.5,1\n")
    trained_on = DataConfig(train=(str(tmp_path / "a.csv"),), targets=("y",))
    data = with_inputs_of(trained_on, open_records(trained_on, "train"))
    assert data.features == {"word": {"type": "bytes"}}
    features = {"word": {"type": "bytes"}, "x": {"type": "float"}, "y": {"type": "int64"}}
    write_file(tmp_path / "records" / "0.tfrecord", [example(word=[b"c"], x=[0.5], y=[1])])
    (tmp_path / "dataset.json").write_text(json.dumps({"features": features, "inputs": ["x"], "targets": ["y"]}))
    records = open_records(dataclasses.replace(data, eval=(str(tmp_path / "records"),)), "eval")
    assert records.schema.inputs == ("word", "x")
    changed = dataclasses.replace(trained_on, features={"x": {"scale": 0.5}}, eval=(str(tmp_path / "records"),))
    assert open_records(changed, "eval").schema.features["x"].scale == 0.5
    with pytest.raises(UserError, match=r"data\.inputs: must name the features that the model gets, of x"):
        open_records(dataclasses.replace(changed, features={"x": {"type": "float"}, "y": "int64"}), "eval")


def test_records_with_a_column_more_than_those_of_training_give_the_same_inputs(tmp_path: Path) -> None:
    trained_on = DataConfig(train=(str(write_csv(tmp_path, ARRAYS)),), targets=("y",), weight="w")
    (tmp_path / "more").mkdir()
    more = write_csv(tmp_path / "more", {**ARRAYS, "note": ARRAYS["a"]})
    data = with_inputs_of(trained_on, open_records(trained_on, "train"))
    assert open_records(dataclasses.replace(data, eval=(str(more),)), "eval").schema.inputs == ("a", "b")
