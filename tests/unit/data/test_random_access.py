"""Records read by number: arrays, HDF5, Parquet, tables, images and a user's own class have all that TFRecords have."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import datasets
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf
from made_records import (
    SCHEMA,
    NumpyBatch,
    batches,
    config,
    example,
    ids,
    image_record,
    make_images,
    pipeline,
    pixels,
    write_file,
)
from made_stores import WITH_LISTS, WRITERS, write_array_record, write_hdf5, write_npy, write_parquet
from user_sources import RECORDS, row

from horovod_train.commands.check_data import check_records
from horovod_train.commands.plan import open_outlook
from horovod_train.config.loader import load
from horovod_train.config.settings import DataConfig, Spec
from horovod_train.data.dataset import find_records, open_records
from horovod_train.data.pipeline import Pipeline
from horovod_train.data.random_access.arrow import HuggingFaceFolder, ParquetFile, to_arrays
from horovod_train.data.random_access.store import ArraysParser, FileStore, Request
from horovod_train.data.schema import parse_feature
from horovod_train.errors import UserError

ROWS = [row(record) for record in range(RECORDS)]
ARRAYS = {name: np.stack([one[name] for one in ROWS]) for name in ROWS[0]}
LISTS = [list(range(record % 10)) for record in range(RECORDS)]


def of_class(name: str, **options: Any) -> DataConfig:
    return DataConfig(train=("anywhere",), source=Spec(f"user_sources:{name}", options), targets=("y",))


def read(made: Pipeline, epoch: int = 0) -> list[NumpyBatch]:
    with made.explaining():
        return batches(made, epoch)


def assert_each_once(data: DataConfig, size: int = 3) -> None:
    found = []
    for rank in range(size):
        for batch in read(pipeline(data, rank, size)):
            for place, number in enumerate(batch.ids.tolist()):
                if number >= 0:
                    assert np.array_equal(batch.inputs[place], ROWS[number]["x"])
                    assert batch.targets[place] == ROWS[number]["y"]
                    found.append(number)
    assert sorted(found) == list(range(RECORDS))
    assert found != sorted(found)


@pytest.mark.parametrize("form", WRITERS)
def test_every_record_comes_once_with_its_own_values(form: str, tmp_path: Path) -> None:
    assert_each_once(config(WRITERS[form](tmp_path, ARRAYS), targets=("y",)))


@pytest.mark.parametrize("name", ["Items", "Many", "Named"])
def test_every_record_of_a_class_comes_once_with_its_own_values(name: str) -> None:
    assert_each_once(of_class(name))


def test_several_files_follow_each_other(tmp_path: Path) -> None:
    for part, rows in enumerate([slice(0, 5), slice(5, 100), slice(100, None)]):
        (tmp_path / str(part)).mkdir()
        write_parquet(tmp_path / str(part), {name: array[rows] for name, array in ARRAYS.items()})
    assert_each_once(config(tmp_path / "*" / "*.parquet", targets=("y",)))


@pytest.mark.parametrize("form", WITH_LISTS)
def test_lists_are_padded(form: str, tmp_path: Path) -> None:
    path = WITH_LISTS[form](tmp_path, {"y": ARRAYS["y"]}, LISTS)
    data = config(path, features={"words": {"max_length": 9, "padding": -1}}, targets=("y",))
    for batch in read(pipeline(data)):
        assert batch.inputs.dtype == np.int64
        for number, words in zip(batch.ids.tolist(), batch.inputs.tolist(), strict=True):
            assert number < 0 or words == LISTS[number] + [-1] * (9 - len(LISTS[number]))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.arange(9) % 2 == 0, "uint8"),
        (np.arange(9, dtype=">i4"), "int32"),
        (np.arange(9, dtype=np.uint32), "int64"),
        (np.arange(9, dtype=np.float64), "float64"),
        (np.arange(18, dtype=np.float16).reshape(9, 2), "float16"),
        (np.array([b"a", b"bcd"] * 4 + [b""]), "object"),
        (np.array(["ä", "bcd"] * 4 + [""]), "object"),
    ],
)
def test_dtype_and_shape_come_from_the_records(values: np.ndarray, dtype: str, tmp_path: Path) -> None:
    (batch,) = read(pipeline(config(write_npy(tmp_path, {"v": values})), batch=9))
    assert batch.inputs.dtype == dtype
    expected = np.char.encode(values, "utf-8") if values.dtype.kind == "U" else values
    assert np.array_equal(batch.inputs[np.argsort(batch.ids)], expected.astype(dtype))


def test_what_the_config_says_of_a_feature_is_added(tmp_path: Path) -> None:
    features = {"x": {"scale": 0.5, "offset": 1}, "y": {"classes": 10, "cast": "float32"}}
    batch = read(pipeline(config(write_npy(tmp_path, ARRAYS), features=features, targets=("y",))))[0]
    assert np.array_equal(batch.inputs, [ROWS[number]["x"] * np.float32(0.5) + 1 for number in batch.ids])
    assert batch.targets.dtype == np.float32


def test_the_order_is_that_of_tfrecord_files_with_the_same_blocks(tmp_path: Path) -> None:
    write_file(tmp_path / "r" / "0.tfrecord", [example(x=one["x"].tobytes(), y=one["y"]) for one in ROWS])
    features = {"x": {"type": "bytes", "decode": "raw", "shape": [4, 4, 1]}, "y": {"type": "int64"}}
    values: dict[str, Any] = {"shuffle_window": 20, "features": features, "inputs": ("x",), "targets": ("y",)}
    arrays, files = config(write_npy(tmp_path, ARRAYS), **values), config(tmp_path / "r", **values)
    for here, there in zip(read(pipeline(arrays)), read(pipeline(files)), strict=True):
        assert all(np.array_equal(value, same) for value, same in zip(here, there, strict=True))


def test_records_of_array_record_are_those_of_tfrecords(tmp_path: Path) -> None:
    records = [image_record(number) for number in range(70)]
    make_images(tmp_path / "train", shards=[70])
    write_array_record(tmp_path / "other" / "a.array_record-00000-of-00001", records)
    (tmp_path / "other" / "dataset.json").write_text((tmp_path / "dataset.json").read_text())
    here, there = config(tmp_path / "other"), config(tmp_path / "train")
    for one, other in zip(read(pipeline(here)), read(pipeline(there)), strict=True):
        assert all(np.array_equal(value, same) for value, same in zip(one, other, strict=True))
    path = tmp_path / "other" / "a.array_record-00000-of-00001"
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(pixels(41).tobytes()) + 8] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"a\.array_record.*: record 41: RuntimeError: .*Read by rank 0 of 1"):
        read(pipeline(here))
    assert len(ids(read(pipeline(dataclasses.replace(here, on_bad_record="skip"))))) == 69
    path.write_bytes(b"text")
    with pytest.raises(UserError, match="is not an ArrayRecord file, or is not complete"):
        open_records(here, "train")
    with pytest.raises(UserError, match=r"data\.stage_dir: keeps blocks of TFRecords"):
        open_records(dataclasses.replace(here, stage_dir="/tmp"), "train")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["hdf5", "array_record"])
def test_more_files_than_a_process_may_hold_open_are_read(kind: str, tmp_path: Path, few_descriptors: None) -> None:
    arrays = {"x": np.zeros((2, 2), np.float32), "y": np.arange(2)}
    for number in range(250):
        if kind == "hdf5":
            write_hdf5(tmp_path, arrays).rename(tmp_path / f"{number}.h5")
        else:
            write_array_record(tmp_path / f"{number}.array_record", [image_record(2 * number + row) for row in (0, 1)])
    (tmp_path / "dataset.json").write_text(json.dumps(SCHEMA))
    data = config(tmp_path, **({"targets": ("y",)} if kind == "hdf5" else {}))
    assert len(ids(read(pipeline(data)))) == 500


@pytest.mark.parametrize("kind", ["hdf5", "array_record"])
def test_a_process_without_descriptors_does_not_take_a_file_for_a_damaged_one(kind: str, tmp_path: Path) -> None:
    files = {
        "hdf5": lambda: write_hdf5(tmp_path, {"y": np.arange(2)}),
        "array_record": lambda: write_array_record(tmp_path / "a.array_record", [image_record(0)]),
    }
    path, before = files[kind](), resource.getrlimit(resource.RLIMIT_NOFILE)
    (tmp_path / "dataset.json").write_text(json.dumps(SCHEMA))
    open_records(config(path), "train")  # loads its library
    found = find_records(config(path), "train")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
    try:
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        with pytest.raises(UserError) as raised:
            found.open([str(path)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)
    assert str(raised.value) == f"{path}: cannot be read: Too many open files. Raise their limit: ulimit -n."


def test_classes_of_hugging_face_are_known_and_several_splits_refused(tmp_path: Path) -> None:
    features = datasets.Features({"x": datasets.Value("float32"), "kind": datasets.ClassLabel(names=["a", "b", "c"])})
    made = datasets.Dataset.from_dict({"x": [0.5] * 6, "kind": [0, 1, 2] * 2}, features=features)
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "all"))
    data = config(tmp_path / "all" / "train", targets=("kind",))
    assert open_records(data, "train").schema.features["kind"].classes == 3
    with pytest.raises(UserError, match=r"holds the splits test, train\. Name one of their folders\."):
        open_records(config(tmp_path / "all", targets=("kind",)), "train")


@pytest.mark.parametrize(
    "places", [{"train": ["0", "1"]}, {"train": ["0"], "eval": ["1"]}], ids=["of one split", "of both splits"]
)
def test_folders_of_hugging_face_that_number_other_classes_are_refused(
    tmp_path: Path, places: dict[str, list[str]]
) -> None:
    for number, kinds in enumerate([["bird", "cat", "dog"], ["cat", "dog"]]):
        made = datasets.Dataset.from_dict({"x": [0.5] * 6, "kind": [*kinds, kinds[0]] * 2 if number else kinds * 2})
        made.class_encode_column("kind").save_to_disk(str(tmp_path / str(number)))
    paths = {split: [str(tmp_path / name) for name in names] for split, names in places.items()}
    words = [f"data.{split}=[{', '.join(each)}]" for split, each in paths.items()]
    settings = load([], [*words, "data.targets=kind", "data.global_batch_size=2", "train.epochs=1"])[0]
    with pytest.raises(UserError, match=r"kind 0 is cat; in .* it is bird, so labels would stand for other classes"):
        open_outlook(settings, 1, None)


def test_files_of_a_large_set_of_hugging_face_are_checked_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all of thousands for each block: every check is a request to the file server."""
    made = datasets.Dataset.from_dict({"x": [0.5] * 40, "y": [0] * 40})
    made.save_to_disk(str(tmp_path / "set"), num_shards=20)
    store = HuggingFaceFolder(str(tmp_path / "set"), Request())
    checked: list[str] = []
    monkeypatch.setattr(FileStore, "check", lambda _, path: checked.append(path))
    for _ in range(5):
        store.read(0, 1)
    assert len(checked) == 40
    assert len(set(checked)) == 20


def test_a_list_that_lacks_a_value_spoils_its_own_record_only(tmp_path: Path) -> None:
    """Also where the numbers of all lists lie in one array, as Arrow keeps them."""
    lists: list[Any] = [[float(n), n + 0.5] for n in range(10)]
    lists[7] = [1.0, None]
    nested: list[Any] = [[[n, n], [n, n + 1]] for n in range(10)]
    nested[2] = [[1, 2], [None, 3]]
    deep = pa.list_(pa.list_(pa.int64(), 2), 2)
    columns = {"x": pa.array(lists, pa.list_(pa.float32())), "z": pa.array(lists, pa.list_(pa.float32(), 2))}
    tensor = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), [2]), columns["z"])
    table = pa.table({**columns, "deep": pa.array(nested, deep), "tensor": tensor, "y": list(range(10))})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    for name, values in {"x": lists, "z": lists, "deep": nested, "tensor": lists}.items():
        bad = 2 if name == "deep" else 7
        features = {"x": {"max_length": 2}} if name == "x" else {}
        here = config(tmp_path / "a.parquet", shuffle=False, inputs=(name,), targets=("y",), features=features)
        with pytest.raises(UserError, match=rf"record {bad}: feature {name}: .* holds a list that lacks a value"):
            read(pipeline(here))
        found = read(pipeline(dataclasses.replace(here, on_bad_record="skip")))
        kept = [n for n in ids(found) if n >= 0]
        assert kept == [n for n in range(10) if n != bad]
        rows = np.concatenate([batch.inputs[batch.ids >= 0] for batch in found])
        assert rows.tolist() == [values[n] for n in kept]


def test_files_whose_numbers_have_other_widths_are_read_together(tmp_path: Path) -> None:
    for name, kinds in {"a": (np.float32, np.int64), "b": (np.float64, np.int32)}.items():
        np.savez(tmp_path / f"{name}.npz", x=np.full((6, 2), 0.5, kinds[0]), y=np.arange(6).astype(kinds[1]))
    both = config(tmp_path, targets=("y",))
    (batch,) = read(pipeline(both, batch=12))
    assert sorted(batch.targets.tolist()) == sorted([*range(6)] * 2)
    assert (batch.inputs == 0.5).all()


@pytest.mark.parametrize("form", ["npy", "npz", "packed npz"])
def test_arrays_in_fortran_order_are_read(form: str, tmp_path: Path) -> None:
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    path = WRITERS[form](tmp_path, {"x": np.asfortranarray(x), "y": np.arange(8)})
    (batch,) = read(pipeline(config(path, targets=("y",), shuffle=False)))
    assert np.array_equal(batch.inputs, x)
    assert np.array_equal(batch.targets, np.arange(8))


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(23):
        file = tmp_path / "images" / f"class{number % 3}" / f"{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(tf.io.encode_png(np.full((8, 6, 3), number, np.uint8)).numpy())
    return tmp_path / "images"


IMAGE = {"image": {"decode": "image", "shape": [4, 4, 3], "resize": "stretch"}}


def shown(made: Pipeline) -> dict[int, int]:
    """Which picture → its label."""
    found = [(batch.inputs[row], batch.targets[row]) for batch in read(made) for row in np.flatnonzero(batch.ids >= 0)]
    return {int(picture[0, 0, 0]): int(label) for picture, label in found}


def test_images_in_folders_need_no_preparation(images: Path) -> None:
    data = config(images, features=IMAGE, targets=("label",))
    assert shown(pipeline(data)) == {number: number % 3 for number in range(23)}
    assert open_records(data, "train").schema.features["label"].classes == 3


def test_a_table_of_image_files_needs_no_preparation(images: Path) -> None:
    lines = [f"class{number % 3}/{number:02}.png,{number * 2}" for number in range(23)]
    (images / "table.csv").write_text("\n".join(["image,double", *lines]))
    data = config(images / "table.csv", features=IMAGE, targets=("double",))
    assert shown(pipeline(data)) == {number: number * 2 for number in range(23)}
    (images / "class1" / "04.png").unlink()
    with pytest.raises(UserError, match=r"table\.csv: record 4: image: .*class1/04\.png does not exist"):
        open_records(data, "train")


def test_labels_of_two_image_folders_count_alike(images: Path) -> None:
    held_out = images.parent / "eval"
    for name in ("class0", "class2"):
        (held_out / name).mkdir(parents=True)
        (held_out / name / "a.png").write_bytes((images / "class0" / "00.png").read_bytes())
    (held_out / ".hidden").mkdir()
    data = dataclasses.replace(config(images, features=IMAGE, targets=("label",)), eval=(str(held_out),))
    for split in ("train", "eval"):
        with pytest.raises(UserError, match=r"images has the class class1, and .*eval does not"):
            open_records(data, split)
    (held_out / "class1").mkdir()
    assert open_records(data, "eval").schema.features["label"].classes == 3


def test_two_tables_may_name_the_same_image(images: Path) -> None:
    for name in ("a.csv", "b.csv"):
        (images / name).write_text("image,y\nclass0/00.png,1\nclass1/01.png,2\n")
    (images / "c.csv").hardlink_to(images / "a.csv")
    data = config(images / "a.csv", features=IMAGE, targets=("y",))
    both = dataclasses.replace(data, train=(str(images / "a.csv"), str(images / "b.csv")))
    assert open_records(both, "train").num_records == 4
    same = dataclasses.replace(data, train=(str(images / "a.csv"), str(images / "c.csv")))
    with pytest.raises(UserError, match=r"c\.csv: is the same file as .*a\.csv"):
        open_records(same, "train")


@pytest.mark.long
def test_a_file_that_is_no_image_is_named(images: Path) -> None:
    (images / "class0" / "03.png").write_bytes(b"text")
    data = config(images, features=IMAGE, targets=("label",))
    with pytest.raises(UserError, match=r"^\S+/images/class0/03\.png: feature image: expected an image as JPEG, PNG"):
        read(pipeline(data))
    assert len(shown(pipeline(dataclasses.replace(data, on_bad_record="skip")))) == 22
    (fault,) = check_records(data).bad
    assert fault.startswith(f"{images}/class0/03.png: feature image: expected an image as JPEG, PNG")
    (images / "table.csv").write_text("image,y\nclass1/01.png,1\nclass0/03.png,2\n")
    (fault,) = check_records(config(images / "table.csv", features=IMAGE, targets=("y",))).bad
    assert fault.startswith(
        f"{images}/table.csv: record 1 ({images}/class0/03.png): feature image: expected an image as JPEG"
    )


# --- records that cannot be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (of_class("Items", torn=[41]), r"anywhere: record 41: ValueError: torn page \(at .*user_sources\.py:\d+\)\."),
        (of_class("Many", torn=[41]), r"anywhere: record 41: OSError: torn page \(at .*user_sources\.py:\d+\)\."),
        (
            dataclasses.replace(of_class("Items", other=[41]), inputs=("x",)),
            r"anywhere: record 41: ValueError: it has none of x, y; it has z\.",
        ),
        (
            of_class("Items", odd=[41]),
            r"record 41: feature x: expected uint8\[4, 4, 1\]; the record holds uint8\[3, 4, 1\]",
        ),
    ],
)
def test_a_bad_record_is_named_or_skipped(data: DataConfig, said: str) -> None:
    with pytest.raises(UserError, match=f"{said}.* Read by rank 0 of 1; data.on_bad_record=skip"):
        read(pipeline(data))
    made = pipeline(dataclasses.replace(data, on_bad_record="skip"))
    assert sorted(ids(read(made))) == [number for number in range(RECORDS) if number != 41]
    assert len(made.skipped) == 1


@pytest.mark.parametrize(
    ("settings", "values", "bad"),
    [
        ({"type": "float", "max_length": 3}, [[1.5, 2.0], [1, 2], [], [1.0, 2.0, 3.0, 4.0]], [3]),
        ({"type": "int64", "max_length": 3}, [[True], [2], np.array([3], np.uint64), [4.0]], [2, 3]),
        ({"type": "bytes", "max_length": 2}, [["a"], ["bb", "c"], [b"d"], [1], ["\udc80"]], [3, 4]),
        ({"type": "bytes", "shape": [2]}, [np.array(["a", "b"]), np.array(["aa", "b"]), ["c", "d"], ["e"]], [3]),
        ({"type": "bytes"}, ["a", b"b", "x\udc80"], [2]),
        ({"type": "float"}, [1.5, np.float32(2.5), True, None, "a"], [3, 4]),
        ({"type": "int64", "class_names": ["dog", "cat"]}, ["cat", 0, np.int32(1), "cow", 2], [3, 4]),
    ],
)
def test_a_record_is_good_or_bad_whatever_its_neighbours_are(
    settings: dict[str, Any], values: list[Any], bad: list[int]
) -> None:
    parser = ArraysParser({"x": parse_feature(settings, "x")})
    records = [{"x": value} for value in values]
    assert [number for number, record in enumerate(records) if parser.problem(record)] == bad
    assert parser.parse(records) is None
    good = [record for number, record in enumerate(records) if number not in bad]
    together, alone = parser.parse(good), [parser.parse([record]) for record in good]
    assert together is not None
    assert together["x"].tolist() == [one["x"].tolist()[0] for one in alone if one]


def test_a_damaged_chunk_of_hdf5_is_named_or_skipped(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path, ARRAYS)
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(1)
    with path.open("r+b") as damaged:
        damaged.seek(chunk.byte_offset)
        damaged.write(bytes(chunk.size))
    data = config(path, targets=("y",))
    with pytest.raises(UserError, match=r"a\.h5: record \d+: OSError: .*Read by rank 0 of 1"):
        read(pipeline(data))
    left = ids(read(pipeline(dataclasses.replace(data, on_bad_record="skip"))))
    assert sorted(left) == [*range(50), *range(100, RECORDS)]


@pytest.mark.parametrize("layout", ["chunks", "contiguous"])
def test_rows_of_hdf5_that_were_never_written_are_named_and_are_a_fault(layout: str, tmp_path: Path) -> None:
    chunked = {"chunks": (10, 3)} if layout == "chunks" else {}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["y"] = np.arange(1000)
        file.create_dataset("x", (1000, 4), np.float32, **chunked)
        file.create_dataset("later", (0, 4), np.float32, maxshape=(None, 4), chunks=(10, 4))  # holds nothing
        if chunked:
            file["x"][:300] = 1.0
    data = config(tmp_path / "a.h5", inputs=("x",), targets=("y",))
    records = open_records(data, "train")
    written = "60 of 200 chunks were ever written; the others read" if chunked else "was never written, and reads"
    said = f"{tmp_path}/a.h5: x: {written} as the fill value. Write the file again, if its writer has died."
    assert records.notes == [said]
    report = check_records(data)
    assert (report.bad, report.notes) == ([said], [])
    shutil.copy(tmp_path / "a.h5", tmp_path / "b.h5")
    with h5py.File(tmp_path / "b.h5", "r+") as file:
        file["x"][:] = 0.0
    assert open_records(config(tmp_path / "b.h5", inputs=("x",), targets=("y",)), "train").notes == []


def test_a_damaged_list_of_chunks_is_found_by_its_records(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["y"] = np.arange(1000)
        file.create_dataset("x", data=np.ones((1000, 4), np.float32), chunks=(2, 4))
    content = path.read_bytes()
    leaf = content.rindex(b"TREE")
    path.write_bytes(content[:leaf] + b"GONE" + content[leaf + 4 :])
    report = check_records(config(path, inputs=("x",), targets=("y",)))
    assert any("wrong B-tree signature" in fault for fault in report.bad)


def test_chunks_of_labels_do_not_decide_over_blocks_of_images(tmp_path: Path) -> None:
    """h5py itself chunks labels that are compressed by the thousand."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((2000, 64, 64), np.uint8), chunks=(4, 64, 64))
        file.create_dataset("y", data=np.arange(2000), chunks=(1000,), compression="gzip")
    records = open_records(config(tmp_path / "a.h5", targets=("y",)), "train")
    assert (records.source.blocks.records % 4 == 0).all()
    assert records.source.blocks.records.max() < 1000


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()])
def test_text_in_the_layout_of_polars_is_text(tmp_path: Path, kind: Any) -> None:
    words = ["a", "", "a long one that does not fit into the view"]
    column = pa.array(words if kind == pa.string_view() else [word.encode() for word in words], kind)
    table = pa.table({"x": column, "y": [0, 1, 2]})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    first = read(pipeline(config(tmp_path / "a.arrow", targets=("y",), shuffle=False), batch=3))[0]
    assert [bytes(word) for word in first.inputs] == [word.encode() for word in words]


@pytest.mark.long
def test_a_damaged_row_group_is_read_up_to_the_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that follow a damaged one are lost with it; looking for it must not read each record from the start."""
    path, records = tmp_path / "a.parquet", 3000
    table = pa.table({"x": np.random.default_rng(3).random(records), "y": range(records)})
    pa.parquet.write_table(table, path, compression="zstd", use_dictionary=False, data_page_size=2048)
    damaged = bytearray(path.read_bytes())
    damaged[12_000:12_100] = bytes(100)
    path.write_bytes(damaged)
    reads, read_batch = list[int](), ParquetFile._read_batch
    monkeypatch.setattr(ParquetFile, "_read_batch", lambda *given: (reads.append(given[-1]), read_batch(*given))[1])
    data = config(path, targets=("y",), shuffle_mb=1)
    with pytest.raises(UserError, match=r"a\.parquet: record \d+: OSError: .*Read by rank 0 of 1"):
        read(pipeline(data))
    reads.clear()
    left = sorted(ids(read(pipeline(dataclasses.replace(data, on_bad_record="skip")))))
    assert left == [*range(len(left))]
    assert 1000 < len(left) < 2000
    assert len(reads) < 20


def test_equal_lists_of_text_are_duplicates_and_texts_are_not_run_together(tmp_path: Path) -> None:
    words = [["one", "two"], ["two", "one"], ["one", "two"]]
    table = {"words": words, "first": ["ab", "a", "ab"], "second": ["c", "bc", "c"], "y": [0, 0, 0]}
    pa.parquet.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=1)
    texts = config(tmp_path / "a.parquet", inputs=("first", "second"), targets=("y",))
    assert check_records(texts).duplicates == 1
    lists = config(tmp_path / "a.parquet", inputs=("words",), targets=("y",), features={"words": {"max_length": 2}})
    assert check_records(lists).duplicates == 1


@pytest.mark.long
@pytest.mark.parametrize("is_dictionary", [False, True])
def test_a_row_group_of_more_text_than_arrow_counts_has_no_bad_record(tmp_path: Path, is_dictionary: bool) -> None:
    """2.3 GB of the same text, which is a small file."""
    records, text = 23_000, "a" * 100_000
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(records, np.int32)), pa.array([text]))
    if not is_dictionary:
        texts = pa.chunked_array([texts[:11_500].cast(pa.string()), texts[11_500:].cast(pa.string())])
    pa.parquet.write_table(pa.table({"x": texts, "y": np.arange(records)}), tmp_path / "a.parquet")
    data = config(tmp_path / "a.parquet", inputs=("x",), targets=("y",))
    block = open_records(data, "train").source.open()(0)
    assert not block.faults
    assert isinstance(block.data, dict)
    assert block.data["y"][-1] == records - 1
    assert block.data["x"][-1] == text


def test_a_null_in_parquet_is_a_bad_record(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"x": [0.5, None, 1.5], "y": [0, 1, 2]}), tmp_path / "a.parquet")
    data = config(tmp_path / "a.parquet", targets=("y",))
    with pytest.raises(
        UserError, match=r"a\.parquet: record 1: feature x: expected float64\[\]; the record holds nothing"
    ):
        read(pipeline(data))
    assert sorted(ids(read(pipeline(dataclasses.replace(data, on_bad_record="skip"))))) == [0, 2]


def tensors_of(kind: str) -> pa.Array:
    if kind == "file":
        rows = [{"bytes": b"a"}, {"bytes": b"b"}, {"bytes": b"c"}]
        fields = pa.array(rows, pa.struct([("bytes", pa.binary())]))
        return pa.StructArray.from_arrays([fields.field("bytes")], ["bytes"], mask=pa.array([False, True, False]))
    if kind == "arrow":
        storage = pa.array([[1.0, 2.0], None, [5.0, 6.0]], pa.list_(pa.float32(), 2))
        return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), [2]), storage)
    features = pytest.importorskip("datasets").Features({"x": datasets_array(kind)})
    storage = pa.array([[[1, 2]], None, [[5, 6]]], features.arrow_schema.field("x").type.storage_type)
    return pa.ExtensionArray.from_storage(features.arrow_schema.field("x").type, storage)


def datasets_array(dtype: str) -> Any:
    return pytest.importorskip("datasets").Array2D((1, 2), dtype)


@pytest.mark.parametrize("kind", ["file", "arrow", "float32", "int32"])
def test_a_null_among_tensors_and_files_is_that_record(kind: str) -> None:
    (values,) = to_arrays(pa.table({"x": tensors_of(kind)})).values()
    assert [value is None for value in values] == [False, True, False]
    assert kind == "file" or np.asarray(values[2]).ravel().tolist() == [5, 6]


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "float32"])
def test_a_null_leaves_the_other_records_of_its_row_group(dtype: str, tmp_path: Path) -> None:
    table = {
        "x": pa.array([1, None, 3, 4], getattr(pa, dtype)()),
        "words": pa.array([[1, 2], [3], None, [4]], pa.list_(pa.int64())),
        "y": [0, 1, 2, 3],
    }
    pa.parquet.write_table(pa.table(table), tmp_path / "a.parquet")
    features = {"words": {"max_length": 2}}
    data = config(tmp_path / "a.parquet", inputs=("x", "words"), targets=("y",), features=features)
    report = check_records(data)
    assert [line.partition(": ")[2].partition(":")[0] for line in report.bad] == ["record 1", "record 2"]
    found = read(pipeline(dataclasses.replace(data, on_bad_record="skip")))
    values = {
        number: (batch.inputs["x"][row], batch.inputs["words"][row].tolist())
        for batch in found
        for row, number in enumerate(batch.ids.tolist())
        if number >= 0
    }
    assert values == {0: (1, [1, 2]), 3: (4, [4, 0])}


def test_check_data_names_all_bad_records() -> None:
    report = check_records(of_class("Items", torn=[3, 40], odd=[41]))
    assert [line.partition(": ")[2].partition(":")[0] for line in report.bad] == ["record 3", "record 40", "record 41"]
    assert report.features["y"].high == 9


def test_check_data_reads_on_after_a_bad_first_record(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"x": [1.0, 2.0, 3.0], "y": [7, 1, 9]}), tmp_path / "a.parquet")
    report = check_records(config(tmp_path / "a.parquet", targets=("y",), features={"y": {"classes": 3}}))
    assert [line.partition(": ")[2].partition(":")[0] for line in report.bad] == ["record 0", "record 2"]
    assert report.features["y"].high == 1


# --- what is read -----------------------------------------------------------------------------------------------------


def test_a_rank_reads_only_its_own_records_of_a_class_that_gives_them_singly() -> None:
    made = pipeline(of_class("Items"), 1, 4)
    own = made._records.source._stores[0]._records  # type: ignore[attr-defined]
    own.read_records.clear()
    assert {*ids(read(made))} <= {*own.read_records}
    assert len(own.read_records) <= -(-RECORDS // 4) + 8  # as many more as a step has rows of padding


def test_what_is_kept_in_memory_is_not_read_again() -> None:
    made = pipeline(dataclasses.replace(of_class("Items"), cache="memory"))
    first = ids(read(made))
    own = made._records.source._stores[0]._records  # type: ignore[attr-defined]
    own.read_records.clear()
    assert sorted(ids(read(made, epoch=1))) == sorted(first)
    assert own.read_records == []
