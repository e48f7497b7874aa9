"""Two datasets are the same if the same records come in the same order, wherever the files lie; or a file is named."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_records import config, image_record, make_images, pipeline, write_file

from horovod_train.checkpoint.layout import Checkpoint, Facts
from horovod_train.config.settings import Config, DataConfig
from horovod_train.data import source
from horovod_train.data.batch_source import BatchSource
from horovod_train.data.dataset import open_records
from horovod_train.data.source import Part, digest_of
from horovod_train.data.tfrecord import open_tfrecords
from horovod_train.errors import UserError
from horovod_train.training.initial_state import check_held_out, check_position

Change = Callable[[Path], Any]
CONFIG = {"seed": 1, "data": {"global_batch_size": 8}}
NOW = Config(seed=1, data=DataConfig(global_batch_size=8))


def other_content(folder: Path) -> None:
    """As many records of the same length, so that neither sizes nor counts tell."""
    write_file(folder / "1.tfrecord", [image_record(number) for number in range(100, 107)])


def swap(folder: Path) -> None:
    for old, new in [("0", "x"), ("1", "0"), ("x", "1")]:
        (folder / f"{old}.tfrecord").rename(folder / f"{new}.tfrecord")


CHANGES: list[tuple[str, Change, str]] = [
    ("missing", lambda folder: (folder / "1.tfrecord").unlink(), "lacks 1.tfrecord, which rank 0 has"),
    (
        "added",
        lambda folder: shutil.copy(folder / "1.tfrecord", folder / "9.tfrecord"),
        "has 9.tfrecord, which rank 0 lacks",
    ),
    ("content", other_content, "has other content in 1.tfrecord than rank 0"),
    ("two swapped", swap, "has other content in 0.tfrecord, 1.tfrecord than rank 0"),
    (
        "renamed",
        lambda folder: (folder / "1.tfrecord").rename(folder / "3.tfrecord"),
        "lacks 1.tfrecord, which rank 0 has",
    ),
]


def test_a_file_that_counts_more_often_is_not_said_to_be_missing() -> None:
    once, twice = [("a", "1"), ("b", "2"), ("b", "2")], [("a", "1"), ("a", "1"), ("b", "2")]
    said = "differs from rank 0 in how often files count: a 1 time, not 2, b 2 times, not 1"
    assert source.difference(once, twice, "rank 0") == said


def parts(*files: Path) -> Sequence[Part]:
    return open_tfrecords([str(file) for file in files], DataConfig()).parts


def parts_of(folder: Path) -> Sequence[Part]:
    return open_records(config(folder), "train").source.parts


def tell(here: Sequence[Part], there: Sequence[Part]) -> str:
    return source.difference(source.names_of(here), source.names_of(there), "rank 0")


def test_a_copy_elsewhere_and_of_another_time_is_the_same(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "a/train")
    shutil.copytree(tmp_path / "a", tmp_path / "b/c")
    for path in (tmp_path / "b/c/train").iterdir():
        os.utime(path, ns=(0, 12345))
    assert digest_of(parts_of(folder)) == digest_of(parts_of(tmp_path / "b/c/train"))


@pytest.mark.parametrize(("change", "said"), [case[1:] for case in CHANGES], ids=[case[0] for case in CHANGES])
def test_a_change_is_noticed_and_its_file_is_named(tmp_path: Path, change: Change, said: str) -> None:
    before = parts_of(make_images(tmp_path / "train"))
    change(tmp_path / "train")
    after = parts_of(tmp_path / "train")
    assert digest_of(before) != digest_of(after)
    assert tell(after, before) == said


def test_another_order_of_the_same_folders_is_noticed(tmp_path: Path) -> None:
    files = {
        name: write_file(tmp_path / name / "0.tfrecord", [image_record(number) for number in numbers])
        for name, numbers in {"a": range(5), "b": range(5, 10)}.items()
    }
    one, other = parts(files["a"], files["b"]), parts(files["b"], files["a"])
    assert digest_of(one) != digest_of(other)
    assert tell(other, one) == "has the same files as rank 0 in another order, from file 1 on (0.tfrecord)"


@pytest.mark.parametrize("record", [0, 1, 299, 300, 599])
def test_each_record_counts(tmp_path: Path, record: int) -> None:
    records = [image_record(number) for number in range(600)]
    before = parts(write_file(tmp_path / "a/0.tfrecord", records))
    records[record] = image_record(record + 1)
    after = parts(write_file(tmp_path / "b/0.tfrecord", records))
    assert before[0].size == after[0].size
    assert digest_of(before) != digest_of(after)


def test_each_long_record_counts(tmp_path: Path) -> None:
    """Between long records scanning reads headers only, and the checksum just before each."""
    records = [bytes([number]) * 50_000 for number in range(40)]
    before = parts(write_file(tmp_path / "a/0.tfrecord", records))
    for record in (0, 17, 39):
        changed = [*records[:record], b"x" * 50_000, *records[record + 1 :]]
        assert digest_of(parts(write_file(tmp_path / f"{record}/0.tfrecord", changed))) != digest_of(before)


def test_what_a_checkpoint_keeps_of_many_files_is_small(tmp_path: Path) -> None:
    names = [(f"train-{number:06}-of-100000.tfrecord", f"{number * 2654435761 % 2**32:08x}") for number in range(10**5)]
    packed = source.pack(names)
    assert len(packed) < 1_000_000
    assert source.unpack(packed) == names


@pytest.mark.parametrize("text", ["", "?", "AAAA", source.pack([("a", "01234567")])[:-8]])
def test_what_was_not_packed_is_unknown(text: str) -> None:
    assert source.unpack(text) is None


# --- resuming ---------------------------------------------------------------------------------------------------


def saved(folder: Path, *, step: int, epoch: int, records: int) -> Checkpoint:
    """What a run on the folder has saved there."""
    train = pipeline(config(folder))
    facts = Facts(step, epoch, records, 1, CONFIG, {}, data=train.fingerprint, data_files=train.files)
    return Checkpoint(Path("step-5"), facts, {})


@pytest.mark.parametrize(("change", "said"), [(other_content, "other content in 1.tfrecord"), (swap, "0.tfrecord, 1")])
def test_a_resume_inside_an_epoch_with_other_data_of_the_same_counts_names_the_file(
    tmp_path: Path, change: Change, said: str
) -> None:
    found = saved(make_images(tmp_path / "train", shards=(7, 7, 23)), step=2, epoch=0, records=16)
    check_position(NOW, pipeline(config(tmp_path / "train")), found)
    change(tmp_path / "train")
    with pytest.raises(UserError, match=f"stands after record 16 of an epoch of other data: data.train now.* {said}"):
        check_position(NOW, pipeline(config(tmp_path / "train")), found)


def test_a_resume_at_the_end_of_an_epoch_takes_other_data_and_says_so(tmp_path: Path, said: list[str]) -> None:
    found = saved(make_images(tmp_path / "train"), step=9, epoch=1, records=0)
    check_position(NOW, pipeline(config(tmp_path / "train")), found)
    assert said == []
    other_content(tmp_path / "train")
    check_position(NOW, pipeline(config(tmp_path / "train")), found)
    assert said == [
        "warning: the training data are not those of step-5: data.train now has other content in 1.tfrecord than the "
        "checkpoint"
    ]


def test_a_resume_with_data_whose_labels_stand_for_other_classes_is_refused(tmp_path: Path) -> None:
    found = saved(make_images(tmp_path / "train"), step=9, epoch=1, records=0)
    trained = dataclasses.replace(found.facts, class_names={"label": ("cat", "dog")})
    train = pipeline(config(tmp_path / "train"))
    train.class_names = {"label": ("dog", "cat")}
    with pytest.raises(UserError, match=r"data\.train: label 0 is dog; in step-5 it is cat, so labels would stand for"):
        check_position(NOW, train, dataclasses.replace(found, facts=trained))
    train.class_names = {}
    check_position(NOW, train, dataclasses.replace(found, facts=trained))


HELD_OUT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"fold": "1/5"}, {"fold": "1/5"}, ""),
    ({"fold": "1/5"}, {}, ""),  # nothing is held out any more
    ({"fold": "1/5"}, {"fold": "2/5"}, r"step-5: was trained with data\.fold 1/5; 2/5 would evaluate on records that"),
    ({"eval_fraction": 0.2}, {"eval_fraction": 0.2}, ""),
    (
        {"eval_fraction": 0.2},
        {"eval_fraction": 0.25},
        r"with data\.eval_fraction 0\.2; 0\.25 would evaluate",
    ),
    ({"eval_fraction": 0.2}, {"fold": "1/5"}, r"was trained with data\.fold null; 1/5 would evaluate"),
    ({}, {"eval_fraction": 0.2}, r"was trained with data\.eval_fraction null; 0\.2 would evaluate"),
]


@pytest.mark.parametrize(("then", "now", "line"), HELD_OUT)
def test_a_resume_that_would_evaluate_on_what_was_trained_is_refused(
    then: dict[str, Any], now: dict[str, Any], line: str
) -> None:
    found = Checkpoint(Path("step-5"), Facts(5, 1, 0, 1, {"data": then}, {}), {})
    with pytest.raises(UserError, match=line) if line else nullcontext():
        check_held_out(Config(data=DataConfig(**now)), cast(BatchSource, SimpleNamespace(files="")), found)


@pytest.mark.parametrize("way", ["spelt otherwise", "is a link", "lies elsewhere"])
def test_a_part_that_is_held_out_is_of_the_files_wherever_they_lie(tmp_path: Path, way: str) -> None:
    """A part drawn anew of the same files has records that were trained on; of others, of any names, it has none."""
    folder = make_images(tmp_path / "train", shards=(7, 7))
    data = DataConfig(train=(str(folder),), eval_fraction=0.2)
    files = source.pack(source.names_of(open_records(data, "train").source.parts))
    settings = {"data": {"train": [str(folder)], "eval_fraction": 0.2}}
    found = Checkpoint(Path("step-5"), Facts(5, 1, 0, 1, settings, {}, data_files=files), {})
    other = folder
    if way == "is a link":
        (other := tmp_path / "link").symlink_to(folder)
    elif way == "lies elsewhere":
        other = Path(shutil.copytree(folder, tmp_path / "copy"))
    now = dataclasses.replace(data, train=(f"{other}/",), eval_fraction=0.25)
    train = cast(
        BatchSource, SimpleNamespace(files=source.pack(source.names_of(open_records(now, "train").source.parts)))
    )
    with pytest.raises(UserError, match=r"0\.25 would evaluate") if way != "lies elsewhere" else nullcontext():
        check_held_out(Config(data=now), train, found)


def test_a_part_that_is_held_out_of_changed_files_is_said(tmp_path: Path, said: list[str]) -> None:
    folder = make_images(tmp_path / "train", shards=(7, 7))
    data = DataConfig(train=(str(folder),), eval_fraction=0.2)

    def now() -> Any:
        return SimpleNamespace(files=source.pack(source.names_of(open_records(data, "train").source.parts)))

    settings = {"data": {"train": [str(folder)], "eval_fraction": 0.2}}
    found = Checkpoint(Path("step-5"), Facts(5, 1, 0, 1, settings, {}, data_files=now().files), {})
    check_held_out(Config(data=data), now(), found)
    assert said == []
    (folder / "0.tfrecord").rename(folder / "9.tfrecord")
    check_held_out(Config(data=data), now(), found)
    assert "data.eval_fraction: data.train now lacks 0.tfrecord, which the checkpoint has, so other records" in said[0]


def test_a_refusal_names_the_settings_that_have_changed(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train", shards=(7, 7, 23))
    now = dataclasses.replace(NOW, data=dataclasses.replace(NOW.data, drop_remainder=True))
    train = pipeline(config(folder, drop_remainder=True))
    for found in (saved(folder, step=2, epoch=0, records=16), saved(folder, step=5, epoch=1, records=0)):
        with pytest.raises(UserError, match=r"data\.drop_remainder: false → true\. Resume with"):
            check_position(now, train, found)
