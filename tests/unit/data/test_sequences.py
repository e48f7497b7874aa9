"""Lists of any length whose items have a shape, and SequenceExamples: padded, and named where they are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf
from made_records import batches, config, example, pipeline, write_file

from horovod_train.commands.check_data import check_records
from horovod_train.config.settings import DataConfig, Spec
from horovod_train.errors import UserError

SEQUENCES: dict[str, Any] = {
    "label": {"type": "int64", "classes": 5},
    "tags": {"type": "int64", "max_length": 4, "padding": -1},
    "words": {"type": "int64", "max_length": 6, "sequence": True, "classes": 100},
    "points": {"type": "float", "max_length": 5, "shape": [2], "sequence": True, "padding": 0.5},
    "frames": {"type": "bytes", "decode": "raw", "max_length": 5, "shape": [2, 2], "sequence": True, "padding": 9},
    "names": {"type": "bytes", "max_length": 3, "sequence": True},
}


def feature(values: list[Any]) -> tf.train.Feature:
    if values and isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if values and isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def sequence(context: dict[str, list[Any]], **lists: list[list[Any]]) -> bytes:
    made = tf.train.SequenceExample(
        context=tf.train.Features(feature={name: feature(values) for name, values in context.items()}),
        feature_lists=tf.train.FeatureLists(
            feature_list={
                name: tf.train.FeatureList(feature=[feature(item) for item in items]) for name, items in lists.items()
            }
        ),
    )
    return bytes(made.SerializeToString())


def frame(number: int) -> bytes:
    return bytes([number, number + 1, number + 2, number + 3])


def record(number: int, **changed: Any) -> bytes:
    lists: dict[str, Any] = {
        "words": [[word] for word in range(number)],
        "points": [[float(point), -float(point)] for point in range(number)],
        "frames": [[frame(place)] for place in range(number % 3)],
        "names": [[b"a"]] * min(number, 3),
    }
    return sequence({"label": [number], "tags": list(range(number))}, **{**lists, **changed})


def data_of(folder: Path, records: list[bytes], features: dict[str, Any], **values: Any) -> DataConfig:
    write_file(folder / "a.tfrecord", records)
    return config(folder, features=features, inputs=tuple(features), shuffle=False, **values)


def test_the_lists_of_sequence_examples_are_padded(tmp_path: Path) -> None:
    data = data_of(tmp_path, [record(number) for number in range(5)], SEQUENCES)
    (batch,) = batches(pipeline(data, batch=5))
    found = batch.inputs
    assert found["label"].tolist() == [0, 1, 2, 3, 4]
    assert found["tags"].tolist() == [list(range(n)) + [-1] * (4 - n) for n in range(5)]
    assert found["words"].tolist() == [list(range(n)) + [0] * (6 - n) for n in range(5)]
    assert found["points"].shape == (5, 5, 2)
    assert found["points"][3].tolist() == [[0, 0], [1, -1], [2, -2], [0.5, 0.5], [0.5, 0.5]]
    assert (found["frames"].dtype, found["frames"].shape) == (np.uint8, (5, 5, 2, 2))
    assert found["frames"][2].tolist() == [[[0, 1], [2, 3]], [[1, 2], [3, 4]], *[[[9, 9], [9, 9]]] * 3]
    assert found["names"][1].tolist() == [b"a", b"", b""]


def test_items_of_an_example_have_a_shape(tmp_path: Path) -> None:
    features: dict[str, Any] = {
        "points": {"type": "float", "max_length": 3, "shape": [2], "scale": 2.0},
        "frames": {"type": "bytes", "decode": "raw", "max_length": 2, "shape": [4]},
    }
    records = [example(points=[0.5 * n for n in range(2 * k)], frames=[frame(n) for n in range(k)]) for k in (2, 1)]
    (batch,) = batches(pipeline(data_of(tmp_path, records, features), batch=2))
    assert batch.inputs["points"].tolist() == [[[0, 1], [2, 3], [0, 0]], [[0, 1], [0, 0], [0, 0]]]
    assert batch.inputs["frames"].tolist() == [[[0, 1, 2, 3], [1, 2, 3, 4]], [[0, 1, 2, 3], [0] * 4]]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"words": [[1]] * 7}, "feature words: expected at most 6 items; the record holds 7"),
        ({"words": [[1], [1, 2]]}, "feature words: expected 1 values in each item; item 1 holds 2"),
        ({"words": [[b"a"]]}, "feature words: expected int64; the record holds bytes"),
        ({"words": [[100]]}, "feature words: expected a value from 0 to 99; the record holds 100"),
        ({"points": [[1.0]]}, "feature points: expected 2 values in each item; item 0 holds 1"),
        ({"frames": [[b"abc"]]}, r"feature frames: expected 4 bytes for uint8[2, 2] in each item; the record holds 3"),
    ],
)
def test_a_wrong_list_is_named_and_can_be_left_out(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    data = data_of(tmp_path, [record(1), record(2, **changed), record(3)], SEQUENCES)
    made = pipeline(data, batch=3)
    with pytest.raises(UserError) as raised, made.explaining():
        batches(made)
    assert "a.tfrecord: record 1 at byte" in str(raised.value)
    assert said in str(raised.value)
    report = check_records(data)
    assert len(report.bad) == 1
    assert said in report.bad[0]
    left = pipeline(config(tmp_path, features=SEQUENCES, inputs=tuple(SEQUENCES), on_bad_record="skip"), batch=3)
    assert sorted(number for number in batches(left)[0].ids.tolist() if number >= 0) == [0, 2]


@pytest.mark.parametrize(
    ("values", "said"),
    [([1.0] * 3, "expected 2 values in each item; item 1 holds 1"), ([1.0] * 8, "at most 3 items")],
)
def test_a_list_of_an_example_that_has_no_whole_items_is_named(values: list[float], said: str, tmp_path: Path) -> None:
    features = {"points": {"type": "float", "max_length": 3, "shape": [2]}}
    made = pipeline(data_of(tmp_path, [example(points=values)], features), batch=1)
    with pytest.raises(UserError) as raised, made.explaining():
        batches(made)
    assert said in str(raised.value)


@pytest.mark.parametrize("form", ["tfrecord", "parquet"])
def test_padding_is_no_class(form: str, tmp_path: Path) -> None:
    lists, path = [[1, 2], [9], [3, 10], [-1]], tmp_path / f"a.{form}"
    if form == "tfrecord":
        write_file(path, [example(x=values) for values in lists])
    else:
        pa.parquet.write_table(pa.table({"x": lists}), path)
    features = {"x": {"type": "int64", "max_length": 3, "padding": -1, "classes": 10}}
    data = config(path, features=features, inputs=("x",), shuffle=False, on_bad_record="skip")
    (batch,) = batches(pipeline(data, batch=4))
    assert batch.inputs[batch.ids >= 0].tolist() == [[1, 2, -1], [9, -1, -1]]
    expected = "x: expected a value from 0 to 9; the record holds"
    bad = [line.rpartition("feature ")[2] for line in check_records(data).bad]
    assert bad == [f"{expected} 10.", f"{expected} -1."]


class Tracks:
    """Points of any number."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 6

    def __getitem__(self, record: int) -> dict[str, Any]:
        return {"points": np.full((record, 2), record, np.float32), "label": record}


def test_a_class_may_give_lists_of_items(tmp_path: Path) -> None:
    data = DataConfig(
        train=("any",),
        source=Spec("test_sequences:Tracks"),
        features={"points": {"max_length": 5, "shape": [2], "padding": -1}},
        targets=("label",),
        shuffle=False,
    )
    (batch,) = batches(pipeline(data, batch=6))
    assert batch.inputs.shape == (6, 5, 2)
    for number, row in enumerate(batch.inputs):
        assert (row[:number] == number).all()
        assert (row[number:] == -1).all()
