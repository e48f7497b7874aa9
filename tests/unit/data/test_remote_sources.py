"""Records read by number from an object store: the same ones as from disk, with the same retries."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
from made_records import batches, config, pipeline
from made_stores import WITH_LISTS, WRITERS, write_array_record, write_hugging_face, write_npy
from memory_store import called_before_reads
from user_sources import RECORDS, row

from horovod_train.commands.check_data import check_records
from horovod_train.data import storage
from horovod_train.data.dataset import open_records
from horovod_train.data.random_access import hdf5
from horovod_train.data.storage import Pages, RemoteFile, Storage
from horovod_train.errors import ReadFailed, UserError

ROWS = [row(record) for record in range(RECORDS)]
ARRAYS = {name: np.stack([one[name] for one in ROWS]) for name in ROWS[0]}
LISTS = [list(range(record % 10)) for record in range(RECORDS)]
FORMS = [form for form in WRITERS if form != "hugging face"]
NUMBERS = itertools.count()


def put(path: Path) -> str:
    """Copy a file or folder to a URL that no other test has."""
    url = f"memory://sources-{next(NUMBERS)}/{path.name}"
    files = fsspec.filesystem("memory")
    for file in [path, *path.rglob("*")]:
        if file.is_file() and file.name != "digests.json":
            files.pipe(url + str(file).removeprefix(str(path)), file.read_bytes())
    return url


def remote(tmp_path: Path, url: str, **values: Any) -> Any:
    return config(url, index_dir=str(tmp_path / "indexes"), targets=("y",), **values)


def assert_same(one: Any, other: Any) -> None:
    for left, right in zip(batches(pipeline(one)), batches(pipeline(other)), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[str], None]]:
    return called_before_reads(monkeypatch)


# --- what is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_records_are_those_of_the_same_file_on_disk_in_the_same_order(form: str, tmp_path: Path) -> None:
    path = WRITERS[form](tmp_path, ARRAYS)
    there, here = remote(tmp_path, put(path)), config(path, targets=("y",))
    assert open_records(there, "train").digest == open_records(here, "train").digest
    assert_same(there, here)


@pytest.mark.parametrize("form", [form for form in WITH_LISTS if form != "hugging face"])
def test_lists_of_any_length_are_read_too(form: str, tmp_path: Path) -> None:
    path = WITH_LISTS[form](tmp_path, {"y": ARRAYS["y"]}, LISTS)
    features = {"words": {"max_length": 9}}
    assert_same(remote(tmp_path, put(path), features=features), config(path, targets=("y",), features=features))


def test_tables_of_text_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,y\n" + "".join(f"{number / 2},{number}\n" for number in range(50)))
    assert_same(remote(tmp_path, put(path)), config(path, targets=("y",)))


def test_several_files_and_a_folder_of_them(tmp_path: Path) -> None:
    for part, rows in enumerate([slice(0, 5), slice(5, 100), slice(100, None)]):
        (tmp_path / "all" / str(part)).mkdir(parents=True)
        made = WRITERS["parquet"](tmp_path / "all" / str(part), {name: array[rows] for name, array in ARRAYS.items()})
        made.rename(tmp_path / "all" / f"{part}.parquet")
        (tmp_path / "all" / str(part)).rmdir()
    url = put(tmp_path / "all")
    for name in (url, f"{url}/*.parquet"):
        assert open_records(remote(tmp_path, name), "train").num_records == RECORDS
    assert_same(remote(tmp_path, url), config(tmp_path / "all", targets=("y",)))


def test_data_are_checked_in_a_store_too(tmp_path: Path) -> None:
    arrays = ARRAYS | {"y": np.where(np.arange(RECORDS) == 41, 99, ARRAYS["y"])}
    url = put(WRITERS["hdf5"](tmp_path, arrays))
    report = check_records(remote(tmp_path, url, features={"y": {"classes": 10}}))
    assert report.records == RECORDS
    assert report.bad == [f"{url}: record 41: feature y: expected a value from 0 to 9; the record holds 99."]


def test_a_file_is_read_whole_only_once(tmp_path: Path, asked: list[Callable[[str], None]]) -> None:
    url = put(WRITERS["npy"](tmp_path, {"x": np.zeros((2000, 100)), "y": np.arange(2000)}))
    read: list[str] = []
    asked.append(read.append)
    open_records(remote(tmp_path, url), "train")
    first = len(read)
    open_records(remote(tmp_path, url), "train")
    assert len(read) - first < first


# --- how it is read -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("form", ["hdf5", "npy", "parquet"])
def test_requests_are_made_side_by_side(form: str, tmp_path: Path, asked: list[Callable[[str], None]]) -> None:
    """Although h5py lets one thread read at a time."""
    arrays = {"x": np.random.default_rng(1).random((900, 500)), "y": np.arange(900)}
    made = pipeline(remote(tmp_path, put(WRITERS[form](tmp_path, arrays)), read_threads=3))
    changed, waiting = threading.Condition(), set[int]()

    def meet(path: str) -> None:
        with changed:
            waiting.add(threading.get_ident())
            changed.notify_all()
            assert changed.wait_for(lambda: len(waiting) >= 3, timeout=300), "nobody else reads"

    asked.append(meet)
    batches(made)
    assert len(waiting) >= 3


@pytest.mark.long
def test_an_hdf5_file_takes_few_requests(tmp_path: Path, asked: list[Callable[[str], None]]) -> None:
    """Its chunks are loaded together, and what h5py wants besides comes from pages that are kept."""
    arrays = {"x": np.random.default_rng(1).random((4000, 200)), "y": np.arange(4000)}
    made = pipeline(remote(tmp_path, put(WRITERS["hdf5"](tmp_path, arrays))))
    read: list[str] = []
    asked.append(read.append)
    batches(made)
    blocks = len(made._records.source.blocks.records)
    assert blocks > 10
    assert len(read) <= 3 * blocks


def test_pieces_of_a_file_are_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_PAGE", 100)
    written = np.random.default_rng(1).bytes(1234)
    (tmp_path / "f").write_bytes(written)
    file = RemoteFile(Pages(Storage(), put(tmp_path / "f"), max_pages=3))
    random = np.random.default_rng(2)
    for first, length in random.integers(0, 1300, (300, 2)).tolist():
        file.seek(first)
        assert file.read(length) == written[first : first + length]
        with file.loaded([(first, length), (0, 7)]):
            file.seek(first)
            assert file.read(length) == written[first : first + length]
    assert file.seek(-4, 2) == 1230
    assert file.read() == written[-4:]


def test_a_process_that_leaves_a_file_open_ends_well(tmp_path: Path) -> None:
    """HDF5 would call the file object after the interpreter has ended."""
    path = WRITERS["hdf5"](tmp_path, ARRAYS)
    program = (
        "import fsspec, sys\n"
        "from horovod_train.data.random_access.hdf5 import HDF5File\n"
        "from horovod_train.data.random_access.store import Request\n"
        "fsspec.filesystem('memory').pipe('memory://b/a.h5', open(sys.argv[1], 'rb').read())\n"
        "store = HDF5File('memory://b/a.h5', Request())\n"
        "print(len(store.read(0, 50)['x']))\n"
    )
    finished = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=300)
    assert (finished.returncode, finished.stdout) == (0, "50\n"), finished.stderr


def test_rows_know_where_they_are_in_the_file(tmp_path: Path) -> None:
    wanted = np.arange(60 * 8, dtype=np.int32).reshape(60, 8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("plain", data=wanted)
        file.create_dataset("cut", data=wanted, chunks=(7, 4))
    content = (tmp_path / "a.h5").read_bytes()
    with h5py.File(tmp_path / "a.h5", "r") as file:
        (plain,) = hdf5._Rows(file["plain"]).ranges(5, 20)
        assert content[plain[0] : sum(plain)] == wanted[5:20].tobytes()
        cut = hdf5._Rows(file["cut"]).ranges(5, 20)
        assert len(cut) == 3 * 2
        found = [np.frombuffer(content[at : at + length], np.int32).reshape(7, 4) for at, length in cut]
        columns = [np.concatenate(found[side::2]) for side in (0, 1)]
        assert np.array_equal(np.concatenate(columns, axis=1), wanted[0:21])


# --- failures and bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", ["hdf5", "parquet", *(pytest.param(more, marks=pytest.mark.long) for more in ("npy", "feather"))]
)
def test_requests_that_fail_are_repeated_and_end_the_reading_in_one_line(
    form: str, tmp_path: Path, asked: list[Callable[[str], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(storage, "_PAGE", 1000)  # the files are small
    url = put(WRITERS[form](tmp_path, {"x": np.random.default_rng(1).random((400, 50)), "y": np.arange(400)}))
    expected = batches(pipeline(remote(tmp_path, url)))
    made = pipeline(remote(tmp_path, url, retry_s=0.3))
    again = pipeline(remote(tmp_path, url, on_bad_record="skip", retry_s=0.3))
    left = itertools.chain([True] * 2, itertools.repeat(False))

    def fail_twice(path: str) -> None:
        if next(left):
            raise OSError(errno.EIO, "500")

    asked.append(fail_twice)
    for one, other in zip(batches(made), expected, strict=True):
        assert np.array_equal(one.ids, other.ids)
    assert not next(left)

    def fail(path: str) -> None:
        raise OSError(errno.EIO, "Internal\n Error")

    asked[:] = [fail]
    said = rf"^{url}\S*: cannot be read any more: Internal Error; tried for 0\.3 s \(data\.retry_s\)\.$"
    with pytest.raises(ReadFailed, match=said), again.explaining():  # what cannot be read now is no bad record
        list(again.batches(0, 0, 1))


def test_a_file_that_has_changed_is_noticed_when_it_is_first_read(tmp_path: Path) -> None:
    path = WRITERS["parquet"](tmp_path, ARRAYS)
    url = put(path)
    made = pipeline(remote(tmp_path, url))
    fsspec.filesystem("memory").pipe(url, path.read_bytes() + b"more")
    with pytest.raises(UserError, match=rf"^{url}: was changed while in use: "), made.explaining():
        list(made.batches(0, 0, 1))


def write_table_of_images(folder: Path) -> Path:
    (folder / "i.csv").write_text("x,y\na.jpg,1\nb.jpg,2\n")
    return folder / "i.csv"


def write_records(folder: Path) -> Path:
    write_array_record(folder / "r" / "a.array_record", [b"a"])
    (folder / "r" / "dataset.json").write_text('{"features": {"x": "int64"}, "inputs": ["x"], "targets": []}')
    return folder / "r"


def write_no_hdf5(folder: Path) -> Path:
    (folder / "no.h5").write_bytes(b"text" * 300)
    return folder / "no.h5"


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda folder: write_hugging_face(folder, ARRAYS), r"{url}: Hugging Face's datasets are only read from a lo"),
        (write_records, r"{url}/a\.array_record: ArrayRecord files are only read from a local disk\. Copy them"),
        (write_table_of_images, r"{url}: the image files of column x are only read from a local disk\."),
        (lambda folder: write_npy(folder, ARRAYS) / "x.npy", r"{url} is one array\. Name its folder"),
        (write_no_hdf5, r"{url}: cannot be read as HDF5: "),
    ],
)
def test_what_is_only_read_from_a_disk_is_refused(write: Callable[[Path], Path], said: str, tmp_path: Path) -> None:
    url = put(write(tmp_path))
    features = {"x": {"decode": "image", "shape": [8, 8, 3]}} if url.endswith("csv") else {}
    values = {"targets": ()} if url.endswith("/r") else {}
    with pytest.raises(UserError) as raised:
        open_records(dataclasses.replace(remote(tmp_path, url, features=features), **values), "train")
    assert "\n" not in str(raised.value)
    assert re.match(r"(data(\.train)?: )?" + said.format(url=url), str(raised.value)), raised.value
