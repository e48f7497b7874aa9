"""What is wrong with files and classes that are read by number is said in one line, before anything is trained."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from made_records import config
from made_stores import write_hdf5, write_npy, write_parquet

from horovod_train.commands.check_data import check_records
from horovod_train.config.settings import DataConfig, Spec
from horovod_train.data.dataset import open_records
from horovod_train.data.random_access import store
from horovod_train.data.random_access.arrow import ParquetFile
from horovod_train.data.random_access.source import _first_records
from horovod_train.data.random_access.store import even_blocks
from horovod_train.data.schema import load_schema
from horovod_train.data.storage import DEFAULT
from horovod_train.errors import ReadFailed, RunError, UserError

FIVE = {"x": np.arange(10.0, dtype=np.float32).reshape(5, 2), "y": np.arange(5)}


def refusal(data: DataConfig) -> str:
    with pytest.raises(UserError) as error:
        open_records(data, "train")
    said = str(error.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("NoLength", {}, "user_sources:NoLength needs __len__; see docs/data.md."),
        ("NoRecords", {}, "user_sources:NoRecords needs __getitem__ or read; see docs/data.md."),
        ("RECORDS", {}, "user_sources:RECORDS is no class, nor a function that returns records."),
        ("Items", {"says": -1}, "user_sources:Items: its __len__ raises ValueError: __len__() should return >= 0."),
        ("Items", {"says": 2.5}, "its __len__ raises TypeError: 'float' object cannot be interpreted as an integer"),
        ("Items", {"says": 138}, "its __len__ is 138, but record 137 raises IndexError: no record 137 (at "),
        ("Items", {"rows": 3}, "data.source.options: user_sources:Items: got an unexpected keyword argument 'rows'"),
        ("Many", {"short": True}, "user_sources:Many: its read gives 0 rows of x for 1 records. It must give one row"),
        ("Lists", {}, "user_sources:Lists: its __getitem__ must return a dict of features by name; received a list."),
        ("Broken", {}, "user_sources:Broken: FileNotFoundError: no anywhere (at "),
        ("Named", {"says": ""}, "user_sources:Named: its fingerprint must return a string that is not empty"),
        (
            "Named",
            {"says": 5},
            "user_sources:Named: its fingerprint must return a string that is not empty; received 5",
        ),
        ("Items", {"torn": list(range(137))}, "anywhere: none of its first records can be read; record 0: ValueError"),
    ],
)
def test_a_class_that_does_not_serve_is_named(name: str, options: dict[str, Any], said: str) -> None:
    found = refusal(DataConfig(train=("anywhere",), source=Spec(f"user_sources:{name}", options), targets=("y",)))
    assert said in found
    assert found.startswith(("data.source", "anywhere"))


@pytest.mark.parametrize("name", ["Items", "Many"])
def test_no_records_are_an_error(name: str) -> None:
    data = DataConfig(train=("anywhere",), source=Spec(f"user_sources:{name}", {"records": 0}), targets=("y",))
    assert refusal(data) == "data.train: anywhere holds no record."


def test_the_class_of_the_second_entry_must_give_the_same_kind_of_record(tmp_path: Path) -> None:
    write_npy(tmp_path / "one", FIVE)
    write_npy(tmp_path / "two", FIVE | {"x": np.zeros((5, 3), np.float32)})
    data = DataConfig(train=(f"{tmp_path}/one/arrays", f"{tmp_path}/two/arrays"), targets=("y",))
    said = refusal(data)
    assert said.endswith("two/arrays: record 0: feature x: expected float32[2]; the record holds float32[3].")


def test_records_that_would_be_read_twice_are_refused(tmp_path: Path) -> None:
    path = write_npy(tmp_path, FIVE)
    said = "is named twice; its records would be read twice. Name it once."
    assert refusal(DataConfig(train=(str(path), f"{path}/"))).endswith(said)
    source = Spec("user_sources:Items")
    assert refusal(DataConfig(train=("a", "a"), source=source)) == f"data.train: a {said}"
    (tmp_path / "link").symlink_to(path)
    linked = refusal(DataConfig(train=(str(path), f"{tmp_path}/link")))
    twice = "its records would be read twice. Name it once."
    assert linked == f"{tmp_path}/link/x.npy: is the same file as {path}/x.npy; {twice}"


def in_folder(**arrays: np.ndarray) -> Callable[[Path], Path]:
    return lambda folder: write_npy(folder, arrays)


def as_hdf5(name: str, values: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        with h5py.File(folder / "a.h5", "w") as file:
            file[name] = values
        return folder / "a.h5"

    return write


def as_parquet(values: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        pa.parquet.write_table(pa.table({"x": values}), folder / "a.parquet")
        return folder / "a.parquet"

    return write


def as_parquet_twice(folder: Path) -> Path:
    pa.parquet.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"]), folder / "a.parquet")
    return folder / "a.parquet"


def as_file(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def cut(folder: Path) -> Path:
    file = write_npy(folder, FIVE) / "x.npy"
    file.write_bytes(file.read_bytes()[:-30])
    return file.parent


def declared(shape: tuple[int, ...]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        with (folder / "x.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        return folder

    return write


LISTS = pa.array([[1, 2], [3]])

BAD_FILES: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    "unequal lengths": (in_folder(x=np.zeros(5), y=np.zeros(4)), {}, "arrays: x has 5 rows, y has 4. If only some are"),
    "no such input": (in_folder(x=np.zeros(5)), {"inputs": ("z",)}, "has no feature z; it has x."),
    "no such target": (in_folder(x=np.zeros(5)), {"targets": ("z",)}, "data.targets: the records of {path} have no z"),
    "no such feature": (
        in_folder(x=np.zeros(5)),
        {"features": {"z": {}}},
        "data.features: the records of {path} have no z",
    ),
    "nothing left": (in_folder(y=np.zeros(5)), {"targets": ("y",)}, "data.inputs: nothing is left for the model of y"),
    "complex": (in_folder(x=np.zeros(5, complex)), {}, "x is complex128[5]; expected rows of numbers or text."),
    "unsigned 64": (in_folder(x=np.zeros(5, np.uint64)), {}, "data.features: x: uint64 is not supported; store it as"),
    "another shape": (
        in_folder(x=np.zeros((5, 2))),
        {"features": {"x": {"shape": [3]}}},
        "record 0: feature x: expected float64[3]",
    ),
    "another type": (
        in_folder(x=np.zeros(5)),
        {"features": {"x": "int64"}},
        "x: expected int64[]; the record holds float64[]",
    ),
    "no image": (
        in_folder(x=np.zeros(5)),
        {"features": {"x": {"decode": "image", "shape": [4, 4, 3]}}},
        "feature x: expected the bytes of an image's file; the record holds float64[]",
    ),
    "class out of range": (
        in_folder(x=np.arange(3, 8)),
        {"features": {"x": {"classes": 3}}},
        "from 0 to 2; the record holds 3",
    ),
    "pickled": (in_folder(x=np.array([{}], object)), {}, "x is object[1]; expected rows of numbers or text"),
    "cut short": (cut, {}, "x.npy: is not complete: 168 bytes expected, 138 there."),
    "rows that are not there": (declared((3, 2**62, 4)), {}, "x.npy: is not complete: "),
    "rows of nothing": (declared((2**45, 0)), {}, f"x declares {2**45} rows; expected values that are there"),
    "less than no rows": (declared((-3, 2)), {}, "x.npy declares the shape [-3, 2]"),
    "one array": (as_file("x.npy", b""), {}, "x.npy is one array. Name its folder"),
    "no npz": (as_file("x.npz", b"text"), {}, "x.npz: cannot be read as an npz archive of arrays, or a "),
    "no HDF5": (as_file("x.h5", b"text"), {}, "x.h5: cannot be read as HDF5"),
    "no Parquet": (as_file("x.parquet", b"text"), {}, "x.parquet: cannot be read as Parquet"),
    "no Arrow": (as_file("x.arrow", b"text"), {}, "x.arrow: cannot be read as Arrow"),
    "UTF-16": (as_file("x.csv", "a,b\n1,2\n".encode("utf-16")), {}, "x.csv: is not UTF-8 text. It is UTF-16: iconv -f"),
    "no table": (as_file("x.csv", b"a,b\n1\n"), {}, "x.csv:2: expected 2 cells, as in the header; got 1."),
    "scalar in HDF5": (
        as_hdf5("x", 3.0),
        {},
        "a.h5: x is float64[]; expected rows of numbers, text, or lists.",
    ),
    "empty HDF5": (as_hdf5("group/x", np.zeros((0, 3))), {}, "a.h5 holds no record."),
    "nested column": (as_parquet([{"a": 1}]), {}, "a.parquet: column x is struct<a: int64>; expected numbers, text"),
    "a name of two columns": (as_parquet_twice, {}, "a.parquet: 2 columns are named x. Give each another name."),
    "lists of any length": (as_parquet(LISTS), {}, "data.features: x: holds lists of any length. Give the most values"),
    "lists that are too long": (
        as_parquet(LISTS),
        {"features": {"x": {"max_length": 1}}},
        "record 0: feature x: expected at most 1 values of int64; the record holds int64[2].",
    ),
    "lists of other lengths": (
        as_parquet(LISTS),
        {"features": {"x": {"shape": [1]}}},
        "record 0: feature x: expected int64[1]; the record holds int64[2].",
    ),
    "stage_dir": (
        in_folder(x=np.zeros(5)),
        {"stage_dir": "/tmp"},
        "data.stage_dir: keeps blocks of TFRecords, and data.train",
    ),
    "parse": (
        in_folder(x=np.zeros(5)),
        {"parse": "a:b"},
        "data.parse: gets serialized records, of TFRecords, and data.train",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_does_not_serve_is_named(name: str, tmp_path: Path) -> None:
    write, values, said = BAD_FILES[name]
    path = write(tmp_path)
    assert said.format(path=path) in refusal(config(path, **values))


@pytest.mark.long
@pytest.mark.parametrize(
    ("library", "file", "extra"),
    [
        ("pyarrow", "a.parquet", "parquet"),
        ("array_record", "a.array_record", "array_record"),
        ("datasets", "saved", "huggingface"),
    ],
)
def test_a_missing_library_is_one_line_that_names_the_extra(
    library: str, file: str, extra: str, tmp_path: Path
) -> None:
    if library == "datasets":
        (tmp_path / file).mkdir()
        (tmp_path / file / "state.json").touch()
    else:
        (tmp_path / file).touch()
    (tmp_path / "dataset.json").write_text('{"features": {"x": "int64"}, "inputs": ["x"]}')
    script = (
        f"import sys; sys.modules['{library}'] = sys.modules['tensorflow'] = None\n"
        "from horovod_train.config.settings import DataConfig\n"
        "from horovod_train.data.dataset import open_records\n"
        f"open_records(DataConfig(train=({str(tmp_path / file)!r},)), 'train')"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 1
    last = finished.stderr.splitlines()[-1]
    # One reader serves both splits and does not know which setting named the file.
    setting = "data" if library == "array_record" else "data.train"
    assert f"{setting}: {tmp_path / file}: needs {library} (" in last
    assert last.endswith(f"pip install 'horovod_train[{extra}]'.")


def test_columns_whose_names_are_not_text_are_refused(tmp_path: Path) -> None:
    for write in (pa.parquet.write_table, pa.feather.write_feather):
        write(pa.table({"a_column": [1, 2]}), path := tmp_path / f"a.{write.__name__.removeprefix('write_')}")
        path = path.rename(path.with_suffix(".parquet" if "table" in path.name else ".feather"))
        path.write_bytes(path.read_bytes().replace(b"a_column", b"a_c\xff\xfemn"))
        assert f"{path}: cannot be read as " in refusal(config(path))


def test_a_bit_that_has_changed_in_a_parquet_page_with_a_checksum_is_noticed(tmp_path: Path) -> None:
    path, numbers = tmp_path / "a.parquet", np.arange(1000, 1040)
    options = {"use_dictionary": False, "compression": "none", "write_page_checksum": True}
    pa.parquet.write_table(pa.table({"x": numbers}), path, 20, **options)
    content = bytearray(path.read_bytes())
    content[content.index(numbers[30:32].tobytes())] ^= 1
    path.write_bytes(content)
    load = open_records(config(path), "train").source.open()
    assert not load(0).faults
    assert "CRC checksum verification failed" in str(load(1).faults)


def test_an_arrow_file_that_is_compressed_is_not_decompressed_to_count_its_records(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.feather", np.random.default_rng(0)
    text = [bytes(rng.integers(0, 16, 100, np.uint8)) * 50 for _ in range(60)]
    pa.feather.write_feather(pa.table({"x": text, "y": range(60)}), path, "zstd", chunksize=20)
    content = bytearray(path.read_bytes())
    with pa.ipc.open_file(path) as reader:
        assert (reader.num_record_batches, reader.get_batch(1).num_rows) == (3, 20)
    frames = [at for at in range(len(content)) if content.startswith(b"\x28\xb5\x2f\xfd", at)]
    longest = sorted(frames, key=lambda at: min(other for other in [*frames, len(content)] if other > at) - at)[-3:]
    middle = sorted(longest)[1]
    content[middle : middle + 4] = bytes(4)  # of the text of the second batch
    path.write_bytes(content)
    source = open_records(config(path, inputs=("x",), targets=("y",)), "train").source
    assert (source.blocks.num_records, source.blocks.total_bytes > 60 * len(text[0])) == (60, True)
    load = source.open()
    assert not load(0).faults
    assert "ZSTD" in str(load(1).faults)


@pytest.mark.parametrize("compression", ["uncompressed", "zstd"])
def test_the_bytes_of_an_arrow_file_are_those_in_memory(tmp_path: Path, compression: str) -> None:
    """Of a compressed one those of its largest batch count for all: here the first is small."""
    rows = [[1.0]] * 2 + [[1.0] * 500] * 20
    table = pa.table({"x": rows, "y": range(22)})
    with pa.ipc.new_file(
        path := tmp_path / "a.arrow",
        table.schema,
        options=pa.ipc.IpcWriteOptions(compression=None if compression == "uncompressed" else compression),
    ) as writer:
        writer.write_table(table[:2])
        writer.write_table(table[2:])
    data = config(path, inputs=("y",), targets=(), features={"x": {"max_length": 500}})
    counted = open_records(data, "train").source.blocks.total_bytes
    assert counted == pytest.approx(table[:2].nbytes + table[2:].nbytes, rel=0.15)
    assert (counted > path.stat().st_size) == (compression == "zstd")


def test_records_are_described_by_the_first_that_can_be_read(tmp_path: Path) -> None:
    """Of a later block, or where bad records are skipped of a later file."""
    numbers = np.arange(1000, 1300)
    options = {"use_dictionary": False, "compression": "none", "write_page_checksum": True}
    for name, rows in (("a", 150), ("b", 300)):
        pa.parquet.write_table(pa.table({"x": numbers}), tmp_path / f"{name}.parquet", rows, **options)
    damaged = {}
    for name in "ab":
        content = bytearray((tmp_path / f"{name}.parquet").read_bytes())
        content[content.index(numbers[3:5].tobytes())] ^= 1
        damaged[name] = tmp_path / f"{name}-damaged.parquet"
        damaged[name].write_bytes(content)
    assert open_records(config(damaged["a"]), "train").num_records == 300
    alone = config(damaged["b"], on_bad_record="skip")
    assert "none of its first records can be read" in refusal(alone)
    others = dataclasses.replace(alone, train=(str(damaged["b"]), str(tmp_path / "a.parquet")))
    assert open_records(others, "train").num_records == 600


@pytest.mark.parametrize("on_bad_record", ["skip", "error"])
@pytest.mark.parametrize("first", [None, [1, None]], ids=str)
def test_records_are_described_by_the_first_without_nulls(tmp_path: Path, first: Any, on_bad_record: Any) -> None:
    """A null would say that a column is text. check-data finds that one record bad, and no other."""
    numbers = [first, *([number] for number in range(1, 60))] if first else [None, *range(1, 60)]
    path, options = as_parquet(numbers)(tmp_path), {"x": {"max_length": 4}} if first else {}
    read = DataConfig(train=(str(path),), inputs=("x",), features=options, on_bad_record=on_bad_record)
    if on_bad_record == "error":
        assert "a.parquet: record 0: feature x: " in refusal(read)
        return
    assert open_records(read, "train").schema.features["x"].type == "int64"
    (fault,) = check_records(read).bad
    assert "a.parquet: record 0: feature x: " in fault


def test_padding_of_lists_is_none_of_their_values(tmp_path: Path) -> None:
    path = as_parquet([[1, 3], [2], [], [1, 1, 2]])(tmp_path)
    report = check_records(DataConfig(train=(str(path),), inputs=("x",), features={"x": {"max_length": 4}}))
    assert report.bad == []
    assert report.features["x"].figures() == [1, 3, pytest.approx(10 / 6)]


def test_a_dataset_json_that_is_too_deep_or_has_endless_numbers_is_refused(tmp_path: Path) -> None:
    for text in ("[" * 100_000, f'{{"features": {"9" * 5000}}}'):
        (tmp_path / "dataset.json").write_text(text)
        with pytest.raises(UserError, match=r"dataset\.json: cannot be read as JSON: "):
            load_schema(str(tmp_path / "dataset.json"))


@pytest.mark.parametrize(
    ("number", "exit_code", "advice"),
    [(errno.ESTALE, 1, ""), (errno.EIO, 1, ""), (errno.EMFILE, 2, r"Raise their limit: ulimit -n\.")],
)
def test_an_error_of_the_system_makes_no_record_a_bad_one(number: int, exit_code: int, advice: str) -> None:
    """With on_bad_record: skip, good records would be left out for as long as it lasts."""

    def read(first: int, last: int) -> Any:
        raise OSError(number, os.strerror(number))

    class Failing:
        blocks = even_blocks(8, 8)

        def name(self, record: int) -> str:
            return f"x.npy, record {record}"

    failing: Any = Failing()
    failing.read = read
    said = rf"^x\.npy, record 4: cannot be read: {os.strerror(number)}\.{advice and ' '}{advice}$"
    with pytest.raises(RunError, match=said) as raised:
        store._read(failing, 4, 8)
    assert raised.value.exit_code == exit_code
    with pytest.raises(RunError) as raised:
        next(_first_records(failing))
    assert raised.value.exit_code == exit_code


@pytest.mark.parametrize("write", [write_parquet, write_hdf5])
def test_a_library_that_cannot_read_now_makes_no_record_a_bad_one(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, FIVE)
    records = open_records(config(path, on_bad_record="skip"), "train")
    load = records.source.open()

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "[Errno 5] Error reading bytes from file")

    monkeypatch.setattr(ParquetFile, "_read_batch", fail)
    monkeypatch.setattr(h5py.Dataset, "__getitem__", fail)
    with pytest.raises(ReadFailed, match=rf"^{path}: record 0: cannot be read: .*Error reading bytes from file\.$"):
        load(0)
    monkeypatch.setattr(h5py, "File", fail)
    monkeypatch.setattr("pyarrow.parquet.ParquetFile", fail)
    with pytest.raises(ReadFailed, match=rf"^{path}: cannot be read: .*Error reading bytes from file\.$"):
        open_records(config(path), "train")


def test_a_long_read_is_made_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives at most 2 GiB at a time."""
    (tmp_path / "x").write_bytes(bytes(range(100)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: pread(fd, min(length, 7), offset))
    assert DEFAULT.read(str(tmp_path / "x"), 10, 50) == bytes(range(10, 60))
    assert DEFAULT.read(str(tmp_path / "x"), 90, 50) == bytes(range(90, 100))
