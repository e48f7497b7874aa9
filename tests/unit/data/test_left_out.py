"""What is in a folder of records and is not read is named once; what could block for ever is not opened."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_records import config, make_images
from made_stores import write_npy, write_parquet
from PIL import Image

from horovod_train.commands.check_data import check_records
from horovod_train.commands.plan import open_outlook
from horovod_train.config.settings import Config, Mixed, TrainConfig
from horovod_train.data.dataset import open_records
from horovod_train.errors import UserError
from horovod_train.training import open_run

IMAGE = {"image": {"shape": [4, 4, 1]}}
ARRAYS = {"x": np.arange(6, dtype=np.float32), "y": np.arange(6)}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            Image.fromarray(np.full((4, 4), number, np.uint8)).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def notes(path: Path, **values: Any) -> list[str]:
    return [*open_records(config(path, **values), "train").notes]


def test_images_of_other_kinds_are_counted_and_some_are_named(photos: Path) -> None:
    assert notes(photos, features=IMAGE) == []
    for number in range(4):
        (photos / "dog" / f"{number}.tif").write_bytes(b"II*")
    (photos / "cat" / ".DS_Store").touch()
    (photos / "loose.png").touch()
    (photos / "cat" / "more").mkdir()
    (note,) = notes(photos, features=IMAGE)
    assert note == (
        f"{photos}: 6 files are left out: loose.png, cat/more, dog/0.tif and 3 more. Read are only *.jpg, *.jpeg, "
        "*.png, *.webp, *.bmp, *.gif in its folders."
    )
    report = check_records(config(photos, features=IMAGE))
    assert (report.notes, report.bad, report.records) == ([note], [], 6)


def test_hidden_files_are_no_records(photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "._0.png").write_bytes(b"\0\5\x16\7 of macOS")
    (photos / "@eaDir" / "0.jpg").mkdir(parents=True)
    assert open_records(config(photos, features=IMAGE), "train").num_records == 6
    assert open_records(config(photos, features=IMAGE), "train").schema.class_names["label"] == ("cat", "dog")
    arrays = Path(write_npy(tmp_path, ARRAYS))
    (arrays / "._x.npy").write_bytes(b"\0\5\x16\7 of macOS")
    assert open_records(config(arrays, targets=("y",)), "train").schema.inputs == ("x",)


def test_the_name_of_a_file_says_its_kind_in_capitals_too(tmp_path: Path) -> None:
    (tmp_path / "A.CSV").write_text("x,y\n1,2\n")
    for path in (tmp_path, tmp_path / "A.CSV"):
        assert open_records(config(path, targets=("y",)), "train").schema.inputs == ("x",)
    (tmp_path / "a.tsv").write_text("x\ty\n1\t2\n")
    with pytest.raises(UserError, match=r"a\.tsv is read as TFRecords, because its name fits none of .*\*\.csv\.$"):
        open_records(config(tmp_path / "a.tsv"), "train")


def test_a_folder_of_images_that_are_not_read_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "0.tif").touch()
    with pytest.raises(UserError, match=r"expected a folder for each class, with \*\.jpg, .* files; found cat/0\.tif"):
        open_records(config(tmp_path), "train")


@pytest.mark.parametrize("kind", ["images", "npy", "tfrecord", "glob"])
def test_a_named_pipe_is_not_opened(kind: str, photos: Path, tmp_path: Path) -> None:
    if kind == "images":
        os.mkfifo(photos / "cat" / "p.jpg")
        assert "1 file is left out: cat/p.jpg" in notes(photos, features=IMAGE)[0]
        return
    folder = write_npy(tmp_path, ARRAYS) if kind == "npy" else make_images(tmp_path / "records")
    pipe = folder / ("z.npy" if kind == "npy" else "z.tfrecord")
    os.mkfifo(pipe)
    with pytest.raises(UserError, match=rf"{pipe}: expected a regular file; it is a pipe"):
        open_records(config(pipe if kind == "glob" else folder), "train")


def test_files_beside_records_are_named(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "records")
    assert notes(folder) == []
    for name in ("part-00001", "old.parquet", "README.md", "_SUCCESS", ".hidden"):
        (folder / name).touch()
    make_images(folder / "more")
    (note,) = notes(folder)
    assert note == (f"{folder}: 3 files are left out: old.parquet, part-00001, more/. Read are only *.tfrecord*.")


def test_what_a_run_writes_beside_records_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    write_parquet(tmp_path / "tables", ARRAYS)
    for _ in range(2):  # the first time writes digests
        assert notes(tmp_path / "tables") == []
    (tmp_path / "tables" / "b.csv").write_text("x,y\n1,2\n")
    assert "1 file is left out: b.csv. Read are only *.parquet." in notes(tmp_path / "tables")[0]


def test_an_index_is_no_file_of_records(tmp_path: Path) -> None:
    """Records of other names are read by a glob, whose index is in their folder; it ends as arrays do."""
    folder = make_images(tmp_path / "train", (5,))
    (folder / "0.tfrecord").rename(folder / "part-0")
    assert open_records(config(folder / "part-*"), "train").num_records == 5
    assert (folder / "index.npz").exists()
    with pytest.raises(
        UserError, match=r"holds no \*\.tfrecord\* files\. It holds .*; name other files with a glob\.$"
    ):
        open_records(config(folder), "train")


def test_files_beside_arrays_are_named(tmp_path: Path) -> None:
    folder = write_npy(tmp_path, ARRAYS)
    assert notes(folder) == []
    (folder / "more.npz").touch()
    assert "1 file is left out: more.npz" in notes(folder)[0]


def test_both_splits_name_them_once(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "records")
    (folder / "old.bin").touch()
    data = config(folder, eval=(str(folder),))
    assert len({*open_records(data, "train").notes, *open_records(data, "eval").notes}) == 1


def test_copies_that_editors_and_programs_leave_beside_records_are_left_out(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "records")
    for name in ("0.tfrecord.bak", "0.tfrecord~", "0.tfrecord.tmp", "0.tfrecord.crc"):
        shutil.copy(folder / "0.tfrecord", folder / name)
    named = "4 files are left out: 0.tfrecord.bak, 0.tfrecord.crc, 0.tfrecord.tmp and 1 more. Read are only"
    for path in (folder, folder / "*.tfrecord*"):
        records = open_records(config(path), "train")
        assert records.num_records == 70
        (note,) = records.notes
        assert note.startswith(f"{path}: {named} ")
    assert open_records(config(folder / "*.bak"), "train").num_records == 40  # as the glob says
    assert open_records(config(folder / "0.tfrecord.bak"), "train").num_records == 40
    for path in folder.glob("*.tfrecord"):
        path.unlink()
    assert open_records(config(folder), "train").num_records == 160  # there is nothing else


@pytest.mark.parametrize("kind", ["tfrecord", "parquet"])
def test_a_copy_of_a_file_is_said_to_be_read_twice(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    if kind == "tfrecord":
        make_images(folder)
    else:
        folder.mkdir()
        write_parquet(folder, ARRAYS)
    values = {} if kind == "tfrecord" else {"targets": ("y",)}
    first = sorted(path.name for path in folder.glob(f"*.{kind}"))[0]
    shutil.copy(folder / first, folder / f"z.{kind}")
    (note,) = notes(folder, **values)
    said = "so its records are read twice. Leave it out, or write repeats: 2 if that is meant."
    assert note == f"data.train: {folder}/z.{kind} holds the same as {folder}/{first}, {said}"
    for name in ("y", "x"):
        shutil.copy(folder / first, folder / f"{name}.{kind}")
    assert "read twice, as are those of 2 more files. Leave" in notes(folder, **values)[0]
    for name in ("x", "y", "z"):
        (folder / f"{name}.{kind}").unlink()
    repeated = dataclasses.replace(config(folder, **values), train=(Mixed(str(folder), 3),))
    assert not open_records(repeated, "train").notes


def test_empty_files_are_no_copies_of_each_other(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "records")
    for name in ("x", "y"):
        (folder / f"{name}.tfrecord").touch()
    assert notes(folder, on_bad_record="skip") == []


@pytest.mark.parametrize("how", ["the same folder", "a hard link", "a copy"])
def test_records_that_are_trained_and_evaluated_on_are_named(how: str, tmp_path: Path) -> None:
    folder, other = make_images(tmp_path / "train"), tmp_path / "eval"
    if how == "the same folder":
        other = folder
    else:
        other.mkdir()
        make = os.link if how == "a hard link" else shutil.copy
        make(folder / "1.tfrecord", other / "held.tfrecord")
    data = config(folder, eval=(str(other),))
    opened = open_run._scan(data, ["train", "eval"], needs_labels=True)
    (note,) = opened["eval"].notes
    more = " (2 more files are in both)" if how == "the same folder" else ""
    pair = ("0", f"{other}/0") if how == "the same folder" else ("1", f"{other}/held")
    assert note == (
        f"data.eval: {pair[1]}.tfrecord holds the records of {folder}/{pair[0]}.tfrecord, which are trained on{more}; "
        "evaluation would show what was learnt by heart. Give other records, or data.eval_fraction."
    )
    planned = open_outlook(
        Config(data=dataclasses.replace(data, global_batch_size=8), train=TrainConfig(epochs=1)), 1, None
    )
    assert planned.eval_records is not None
    assert planned.eval_records.notes == [note]
    for part in ({"fold": "1/5"}, {"eval_fraction": 0.2}):
        parted = dataclasses.replace(data, eval=(str(folder),), **part)
        assert open_run._scan(parted, ["train", "eval"], needs_labels=True)["eval"].notes == []
