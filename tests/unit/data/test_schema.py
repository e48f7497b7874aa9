"""What a record holds: said in dataset.json or in the config, checked before anything is read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_records import FEATURES, SCHEMA, config, image_record, make_images, write_file

from horovod_train.config.settings import DataConfig
from horovod_train.data.dataset import open_records
from horovod_train.data.schema import dump_schema, parse_schema
from horovod_train.errors import UserError

WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "x: features: is required and missing."),
    ({"features": {}}, "x: features must name at least one"),
    ({"features": {"a": {"shape": [3]}}}, "x: a: type: is required and missing."),
    ({"features": {"a": {"type": "string"}}}, "x: a: type: expected one of int64, float, bytes; received 'string'"),
    ({"features": {"a": {"type": "int64", "shap": [3]}}}, "x: a: shap: unknown key; did you mean shape"),
    ({"features": {"a": {"type": "int64", "shape": [3, -1]}}}, "x: a: shape: must be at least 1; received -1"),
    ({"features": {"a": {"type": "int64", "shape": "3"}}}, "x: a: shape: expected an int; received '3'"),
    ({"features": {"a": {"type": "int64", "max_length": 0}}}, "x: a: max_length: must be at least 1; received 0"),
    (
        {"features": {"a": {"type": "bytes", "max_length": 4, "decode": "image", "shape": [2, 2, 3]}}},
        "max_length is for lists of values or of raw bytes, not of images.",
    ),
    ({"features": {"a": {"type": "int64", "sequence": True}}}, "x: a: sequence: true needs max_length: the most items"),
    ({"features": {"a": {"type": "int64", "sequence": 3, "max_length": 2}}}, "x: a: sequence: expected true or false"),
    ({"features": {"a": {"type": "int64", "max_length": 4, "padding": 0.5}}}, "x: a: padding: 0.5 is no int64."),
    (
        {"features": {"a": {"type": "bytes", "decode": "raw", "max_length": 4, "padding": -1}}},
        "x: a: padding: -1 is no uint8.",
    ),
    (
        {"features": {"a": {"type": "bytes", "decode": "raw", "max_length": 4, "padding": 300}}},
        "x: a: padding: 300 is no uint8.",
    ),
    ({"features": {"a": {"type": "int64", "scale": "1/255"}}}, "x: a: scale: expected a number; received '1/255'"),
    ({"features": {"a": {"type": "int64", "cast": "int7"}}}, "x: a: cast: expected one of uint8"),
    ({"features": {"a": {"type": "int64", "decode": "raw"}}}, "decode: raw is for type bytes; this one is int64"),
    ({"features": {"a": {"type": "bytes", "decode": "image"}}}, "an image needs shape"),
    ({"features": {"a": {"type": "bytes", "decode": "raw", "resize": "crop"}}}, "resize is for decode: image"),
    ({"features": {"a": {"type": "bytes", "cast": "int32"}}}, "bytes that are not decoded have no cast"),
    ({"features": {"a": {"type": "float", "classes": 3}}}, "classes is for integers; this one is float32"),
    ({"features": {"a": "int64"}}, "x: inputs must name the features that the model gets, of a"),
    ({"features": {"a": "int64"}, "inputs": ["b"]}, "x: inputs: there is no feature b; there are a"),
    ({"features": {"a": "int64"}, "inputs": "a", "targets": [3]}, "x: targets: expected a string; received 3"),
    (
        {"features": {"a": {"type": "int64", "class_names": [False, True]}}, "inputs": "a"},
        "class_names: expected a string; received False. YAML takes yes, no, on and off for true and false; put words",
    ),
    ({"features": {"a": "int64"}, "inputs": "a", "target": "a"}, "x: target: unknown key; did you mean targets"),
]


@pytest.mark.parametrize(("content", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_a_wrong_schema_is_named(content: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        parse_schema(content, "x")
    assert said in str(error.value)


def test_a_schema_is_written_and_read_back() -> None:
    schema = parse_schema({**SCHEMA, "counts": {"train": 70}}, "x")
    assert parse_schema(json.loads(dump_schema(schema)), "x") == schema


def test_dataset_json_lies_beside_the_records_or_above(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train")
    above = open_records(config(folder), "train").schema
    (tmp_path / "dataset.json").rename(folder / "dataset.json")
    assert open_records(config(folder), "train").schema.features == above.features


def test_the_config_wins_over_dataset_json(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train")
    only_label = config(folder, features={"label": "int64"}, inputs=("label",))
    assert list(open_records(only_label, "train").schema.features) == ["label"]
    assert open_records(config(folder, inputs=("label",)), "train").schema.inputs == ("label",)


def test_records_without_a_schema_are_refused(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train")
    (tmp_path / "dataset.json").unlink()
    with pytest.raises(UserError, match=r"has no dataset.json, in it or above it, and there is no data\.features"):
        open_records(config(folder), "train")


def test_two_kinds_of_records_are_not_mixed(tmp_path: Path) -> None:
    one, other = make_images(tmp_path / "one/train"), make_images(tmp_path / "other/train")
    both = {**SCHEMA, "features": {**FEATURES, "label": {"type": "float"}}}
    (tmp_path / "other/dataset.json").write_text(json.dumps(both))
    with pytest.raises(UserError, match=r"differ in feature label; records of two kinds cannot be mixed"):
        open_records(config(one, eval=()).__class__(train=(str(one), str(other))), "train")


def test_a_lost_file_is_noticed(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train")
    (tmp_path / "dataset.json").write_text(json.dumps({**SCHEMA, "counts": {"train": 70}}))
    assert open_records(config(folder), "train").num_records == 70
    (folder / "1.tfrecord").unlink()
    with pytest.raises(UserError, match=r"train: holds 63 records; .*dataset.json says 70"):
        open_records(config(folder), "train")


def test_two_prepared_datasets_are_each_held_to_their_own_counts(tmp_path: Path) -> None:
    one, other = make_images(tmp_path / "one/train"), make_images(tmp_path / "other/train", shards=[5])
    for folder, count in [(one, 70), (other, 5)]:
        (folder.parent / "dataset.json").write_text(json.dumps({**SCHEMA, "counts": {"train": count}}))
    both = DataConfig(train=(str(one), f"{other}/"))
    assert open_records(both, "train").num_records == 75
    write_file(other / "0.tfrecord", [image_record(0)])
    with pytest.raises(UserError, match=r"other/train/: holds 1 records; .*other/dataset.json says 5"):
        open_records(both, "train")


def test_paths_and_schemas_are_checked_without_tensorflow(tmp_path: Path) -> None:
    program = """
import sys
from horovod_train.config.settings import DataConfig
from horovod_train.data import dataset, schema
from horovod_train.data import sampler
from horovod_train.data import tfrecord_index as index
from horovod_train.errors import UserError
try:
    dataset.open_records(DataConfig(train=(sys.argv[1],)), "train")
except UserError as error:
    print(error)
print("tensorflow" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "nowhere")]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.splitlines()
    assert said == [f"data.train: {tmp_path}/nowhere does not exist; {tmp_path} does.", "False"]
