"""Classes have names: in the config, as text in tables, and from the folders of images."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from made_records import batches, example, write_file
from made_stores import WRITERS

from horovod_train.commands.check_data import check_records
from horovod_train.config.settings import DataConfig
from horovod_train.data.dataset import class_names, open_records, with_class_names_of
from horovod_train.data.pipeline import Ranks, build_pipeline
from horovod_train.data.random_access.store import ArraysParser
from horovod_train.data.schema import parse_feature, schema_of_names
from horovod_train.errors import UserError

NAMES = ["ant", "bee", "cat"]
FEATURE = {"type": "int64", "class_names": NAMES}


def test_names_are_their_numbers_and_numbers_stay() -> None:
    parser = ArraysParser({"y": parse_feature(FEATURE, "y")})
    for column in (np.array(["cat", "ant ", "bee"]), np.array([b"cat", b"ant", b"bee"], object), np.array([2, 0, 1])):
        parsed = parser.parse({"y": column})
        assert parsed is not None
        assert parsed["y"].tolist() == [2, 0, 1]


def test_a_text_that_is_no_name_and_a_number_that_is_no_class_are_named() -> None:
    parser = ArraysParser({"y": parse_feature(FEATURE, "y")})
    assert parser.parse({"y": np.array(["ant", "dog"])}) is None
    assert (
        parser.problem({"y": "dog"})
        == "feature y: expected one of ant, bee, cat, or its number; the record holds 'dog'"
    )
    assert "from 0 to 2" in str(parser.problem({"y": 3}))


def test_a_long_text_in_place_of_a_name_is_shown_short_wherever_the_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"x,y\n1,ant\n2,{'a' * 30_000}\n")
    config = DataConfig(train=(f"{tmp_path}/t.csv",), targets=("y",), features={"y": {"class_names": NAMES}})
    (fault,) = check_records(config).bad
    assert "record 1: feature y: expected one of ant, bee, cat, or its number; the record holds 'aaa" in fault
    assert len(fault) < len(str(tmp_path)) + 400


@pytest.mark.parametrize("form", ["npz", "parquet", "hdf5"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint16", "uint32", "int64", "bool"])
def test_labels_of_any_whole_numbers_have_names(dtype: str, form: str, tmp_path: Path) -> None:
    labels = np.array([1, 0, 1], dtype)
    path = WRITERS[form](tmp_path, {"x": np.arange(3, dtype=np.float32), "y": labels})
    names = {"y": {"class_names": ["no", "yes"]}}
    config = DataConfig(train=(str(path),), targets=("y",), features=names, shuffle=False)
    pipeline = build_pipeline(
        open_records(config, "train"), config, Ranks(0, 1), seed=0, training=True, global_batch_size=3
    )
    (batch,) = batches(pipeline)
    assert np.asarray(batch.targets).tolist() == labels.tolist()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"type": "bytes", "class_names": NAMES}, "class_names is for type int64"),
        ({"type": "bytes", "decode": "raw", "raw_dtype": "float64", "class_names": NAMES}, "this one is float64"),
        ({"type": "int64", "class_names": ["a", "a"]}, "'a' is given twice"),
        ({"type": "int64", "class_names": NAMES, "classes": 4}, "has 3 names, and classes is 4"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_feature(settings, "data.features: y")


def test_a_table_of_names_is_read_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"{n},{NAMES[n % 3]}\n" for n in range(9)))
    config = DataConfig(
        train=(f"{tmp_path}/t.csv",), targets=("y",), features={"y": {"class_names": NAMES}}, shuffle=False
    )
    records = open_records(config, "train")
    assert records.schema.features["y"].classes == 3
    pipeline = build_pipeline(records, config, Ranks(0, 1), seed=0, training=True, global_batch_size=9)
    (batch,) = batches(pipeline)
    assert np.asarray(batch.targets).tolist() == [0, 1, 2] * 3


@pytest.mark.parametrize(
    ("names", "cells", "expected"),
    [
        (["1", "2", "3", "other"], ["1", "3", "2"], [0, 2, 1]),  # a file without "other", which is all numbers
        (["true", "false"], ["true", "false", "true"], [0, 1, 0]),
        (["cat", "dog"], ["1", "0", "1"], [1, 0, 1]),  # no names, but their numbers
    ],
)
def test_cells_that_are_names_are_no_numbers(
    tmp_path: Path, names: list[str], cells: list[str], expected: list[int]
) -> None:
    (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"{n},{cell}\n" for n, cell in enumerate(cells)))
    features = {"y": {"class_names": names}}
    config = DataConfig(train=(f"{tmp_path}/t.csv",), targets=("y",), features=features, shuffle=False)
    pipeline = build_pipeline(
        open_records(config, "train"), config, Ranks(0, 1), seed=0, training=True, global_batch_size=3
    )
    (batch,) = batches(pipeline)
    assert np.asarray(batch.targets).tolist() == expected


@pytest.mark.parametrize("form", ["parquet", "npz", "hdf5"])
def test_names_that_are_other_numbers_than_their_labels_are_warned_of(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As 0, 1, 10, 11, 2 or 1, 2, 3, beside labels that are numbers. In a CSV file they are looked up by name."""
    path = WRITERS[form](tmp_path, {"x": np.zeros(12, np.float32), "y": np.arange(12)})
    for given in ([str(number) for number in range(12)], [*"abcdefghijkl"]):
        features = {"y": {"class_names": given}}
        open_records(DataConfig(train=(str(path),), inputs=("x",), targets=("y",), features=features), "train")
    assert not caplog.messages
    for names, said in (
        (sorted(map(str, range(12))), "label 2 is named 10"),
        ([str(number) for number in range(1, 13)], "label 0 is named 1"),
    ):
        features = {"y": {"class_names": names}}
        open_records(DataConfig(train=(str(path),), inputs=("x",), targets=("y",), features=features), "train")
        assert caplog.messages[-1].startswith(f"data.features: y: class_names: {said}, because")


@pytest.mark.parametrize(
    ("names", "expected"), [(["cat  ", "dog  "], [0, 1, 0, 0]), (["cat", "cat ", "dog"], [0, 2, 0, 1])]
)
def test_names_may_end_in_blanks(names: list[str], expected: list[int]) -> None:
    """As columns of fixed width have them; the same without blanks is another name, if both are given."""
    parser = ArraysParser({"y": parse_feature({"type": "int64", "class_names": names}, "y")})
    parsed = parser.parse({"y": np.array(["cat  ", "dog  ", "cat", "cat "], object)})
    assert parsed is not None
    assert parsed["y"].tolist() == expected


def test_labels_that_folders_give_have_names_in_any_order(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    names = sorted(map(str, range(12)))
    for name in names:
        (tmp_path / name).mkdir()
        image.new("RGB", (8, 8)).save(tmp_path / name / "0.png")
    config = DataConfig(train=(str(tmp_path),), targets=("label",), features={"image": {"shape": [8, 8, 3]}})
    found = with_class_names_of(config, open_records(config, "train"))
    assert open_records(found, "train").schema.class_names == {"label": tuple(names)}


def test_prepared_labels_have_names_in_any_order(tmp_path: Path) -> None:
    """As `prepare images` numbers folders that are called 0 to 11: their names are sorted as texts."""
    names = sorted(map(str, range(12)))
    path = write_file(tmp_path / "a.tfrecord", [example(x=0.0, y=label) for label in range(12)])
    features = {"x": "float", "y": {"type": "int64", "class_names": names}}
    config = DataConfig(train=(str(path),), inputs=("x",), targets=("y",), features=features)
    assert open_records(config, "train").schema.class_names == {"y": tuple(names)}


@pytest.mark.parametrize("declared", ["bytes", {"type": "bytes"}])
def test_a_column_that_is_text_stays_text_where_all_of_it_reads_as_numbers(tmp_path: Path, declared: object) -> None:
    (tmp_path / "t.csv").write_text("x,y\n007,1\n1.50,0\ntrue,1\n")
    config = DataConfig(train=(f"{tmp_path}/t.csv",), targets=("y",), features={"x": declared}, shuffle=False)
    pipeline = build_pipeline(
        open_records(config, "train"), config, Ranks(0, 1), seed=0, training=True, global_batch_size=3
    )
    (batch,) = batches(pipeline)
    assert np.asarray(batch.inputs).tolist() == [b"007", b"1.50", b"true"]


def test_a_cell_that_is_no_name_does_not_make_numbers_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x,y\n0.5,1\n1.5,2\n2.5,0\n")
    features = {"y": {"class_names": ["1", "2", "3"]}}
    config = DataConfig(train=(f"{tmp_path}/t.csv",), targets=("y",), features=features, shuffle=False)
    pipeline = build_pipeline(
        open_records(config, "train"), config, Ranks(0, 1), seed=0, training=True, global_batch_size=3
    )
    with pytest.raises(UserError, match=r"record 2: feature y: expected one of 1, 2, 3.*'0'"), pipeline.explaining():
        batches(pipeline)


@pytest.mark.parametrize("names", [3, [["a"], ["b"]]])
def test_names_of_another_kind_are_refused_in_one_line(tmp_path: Path, names: object) -> None:
    (tmp_path / "t.csv").write_text("x,y\n0.5,1\n1.5,2\n")
    config = DataConfig(train=(f"{tmp_path}/t.csv",), targets=("y",), features={"y": {"class_names": names}})
    with pytest.raises(UserError, match="class_names"):
        open_records(config, "train")


def test_names_in_another_order_than_the_folders_are_refused(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in NAMES:
        (tmp_path / "p" / name).mkdir(parents=True)
        image.new("RGB", (8, 8)).save(tmp_path / "p" / name / "0.jpg")
    label = {"class_names": ["bee", "ant", "cat"]}
    features = {"image": {"shape": [8, 8, 3]}, "label": label}
    config = DataConfig(train=(f"{tmp_path}/p",), targets=("label",), features=features)
    with pytest.raises(UserError, match="bee, ant, cat; the records have ant, bee, cat, in this order"):
        open_records(config, "train")
    features["label"] = {"class_names": NAMES}
    assert open_records(config, "train").schema.features["label"].class_names == tuple(NAMES)


def test_names_that_folders_have_are_kept_in_the_config_and_records_without_a_schema_have_none(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in NAMES:
        (tmp_path / "p" / name).mkdir(parents=True)
        image.new("RGB", (8, 8)).save(tmp_path / "p" / name / "0.jpg")
    config = DataConfig(train=(f"{tmp_path}/p",), targets=("label",), features={"image": {"shape": [8, 8, 3]}})
    records = open_records(config, "train")
    found = with_class_names_of(config, records)
    assert class_names(found, {}) == tuple(NAMES)
    assert open_records(found, "train").digest == records.digest  # what a resume reads
    parsed = dataclasses.replace(records, schema=schema_of_names(("image",), ("label",)))
    assert with_class_names_of(config, parsed) == config
