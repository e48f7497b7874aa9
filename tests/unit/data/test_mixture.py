"""Several data sets, some of them repeated: each record as often as asked in each epoch, counted by data set."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from made_records import batches, image_record, make_images, pipeline, pixels, write_file
from made_stores import write_npy

from horovod_train.commands.check_data import _show_audit
from horovod_train.commands.cli import open_screen
from horovod_train.config.loader import dump, load
from horovod_train.config.settings import DataConfig, Mixed
from horovod_train.data.audit import AuditLog, EpochAudit, Start, audit
from horovod_train.data.dataset import open_records
from horovod_train.errors import UserError

A, B, REPEATS = 41, 23, 3
"""The records of two data sets; those of the first one come three times."""


@pytest.fixture(params=["tfrecords", "arrays"])
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The first data set has the images 0 to 40, the second one the images 41 to 63."""
    if request.param == "tfrecords":
        make_images(tmp_path / "data" / "a", shards=[30, 11])
        write_file(tmp_path / "data" / "b" / "0.tfrecord", [image_record(A + number) for number in range(B)])
        return {"train": (Mixed(f"{tmp_path}/data/a", REPEATS), f"{tmp_path}/data/b")}
    features = {"image_raw": {"scale": 1 / 255, "offset": -0.5}}
    for name, numbers in (("a", range(A)), ("b", range(A, A + B))):
        images = np.stack([pixels(number) for number in numbers])
        write_npy(tmp_path / name, {"image_raw": images, "label": np.array(numbers) % 10})
    train = (Mixed(f"{tmp_path}/a/arrays", REPEATS), f"{tmp_path}/b/arrays")
    return {"train": train, "features": features, "inputs": ("image_raw",), "targets": ("label",)}


def shown(data: DataConfig, size: int) -> tuple[Counter[int], list[int]]:
    """How often each image was read by all ranks, and the numbers of all records."""
    images, numbers = Counter[int](), []
    for rank in range(size):
        for batch in batches(pipeline(data, rank, size)):
            for row in np.flatnonzero(batch.ids >= 0):
                image = round((float(batch.inputs[row, 0, 0, 0]) + 0.5) * 255)
                assert np.allclose((batch.inputs[row] + 0.5) * 255, pixels(image))
                images[image] += 1
                numbers.append(int(batch.ids[row]))
    return images, numbers


@pytest.mark.parametrize("window", [8, 10_000])
def test_each_record_comes_as_often_as_its_data_set_repeats(mixed: dict[str, Any], window: int) -> None:
    images, numbers = shown(DataConfig(**mixed, shuffle_window=window), 3)
    assert images == {**dict.fromkeys(range(A), REPEATS), **dict.fromkeys(range(A, A + B), 1)}
    assert sorted(numbers) == list(range(REPEATS * A + B))
    assert numbers != sorted(numbers)


def test_once_is_as_without_repeats_and_more_is_other_data(mixed: dict[str, Any]) -> None:
    def digest(repeats: int) -> str:
        first, second = mixed["train"]
        return open_records(DataConfig(**mixed | {"train": (Mixed(first.path, repeats), second)}), "train").digest

    plain = DataConfig(**mixed | {"train": (mixed["train"][0].path, mixed["train"][1])})
    assert digest(1) == open_records(plain, "train").digest
    assert len({digest(repeats) for repeats in (1, 2, 3)}) == 3


def test_a_bad_record_is_named_in_its_file_and_skipped_at_each_repeat(tmp_path: Path) -> None:
    make_images(tmp_path / "data" / "a", shards=[5])
    write_file(tmp_path / "data" / "b" / "0.tfrecord", [image_record(0), b"text", image_record(2)])
    train = (f"{tmp_path}/data/a", Mixed(f"{tmp_path}/data/b", 2))
    made = pipeline(DataConfig(train=train))
    said = r"b/0\.tfrecord: record 1 at byte \d+: it is not a tf\.train\.Example"
    with pytest.raises(UserError, match=said), made.explaining():
        batches(made)
    _, numbers = shown(DataConfig(train=train, on_bad_record="skip"), 1)
    assert sorted(numbers) == [0, 1, 2, 3, 4, 5, 7, 8, 10]


def run_audited(data: DataConfig, folder: Path, *, forget: int | None = None) -> EpochAudit:
    """An epoch at 2 ranks that is resumed at 3. forget: a record that is not written down."""
    for size, first, last in [(2, 0, 7), (3, 7, None)]:
        for rank in range(size):
            made = pipeline(data, rank, size)
            sets = [(found.name, found.records, found.repeats) for found in made.data_sets]
            start = Start(0, first, rank, size, made.num_records, 8, made.steps_per_epoch, made.content, sets)
            log = AuditLog(str(folder), start)
            for step, batch in enumerate(batches(made, 0, first)[: None if last is None else last - first], first):
                log.append(0, step, np.where(batch.ids == forget, -1, batch.ids)[None])
            log.close()
    (epoch,) = audit(str(folder))
    return epoch


@pytest.mark.long
def test_an_audit_counts_by_data_set(mixed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    epoch = run_audited(DataConfig(**mixed), tmp_path / "run")
    assert [(one.repeats, one.records, one.missing, one.twice) for one in epoch.data_sets] == [
        (REPEATS, REPEATS * A, 0, 0),
        (1, B, 0, 0),
    ]
    _show_audit(open_screen(), [epoch])
    assert f"{REPEATS} ×" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "of"), [(REPEATS * A - 1, 0), (REPEATS * A, 1)])
def test_a_missing_record_is_counted_in_its_data_set(
    mixed: dict[str, Any], tmp_path: Path, number: int, of: int
) -> None:
    epoch = run_audited(DataConfig(**mixed), tmp_path / "run", forget=number)
    assert [one.missing for one in epoch.data_sets] == [int(of == 0), int(of == 1)]
    assert epoch.missing == [number]


def test_a_config_is_written_as_it_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("data: {train: [{path: a, repeats: 2}, b], global_batch_size: 8}\ntrain: {epochs: 1}")
    config, origins = load([str(file)])
    assert config.data.train == (Mixed("a", 2), "b")
    assert config.data.paths("train") == ("a", "b")
    file.write_text(dump(config, origins))
    assert load([str(file)])[0] == config
    assert yaml.safe_load(dump(config))["data"]["train"] == [{"path": "a", "repeats": 2}, "b"]


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ("[{path: a, repeats: 0}]", "data.train.repeats: must be at least 1; received 0."),
        ("[{path: a, repeats: 1.5}]", "data.train.repeats: expected an int; received 1.5."),
        ("[{repeats: 2}]", "data.train.path: is required and missing."),
        ("[{path: a, weight: 2}]", "data.train.weight: unknown key; expected one of path, repeats."),
        ("[{path: 'http://a'}]", "data.train: expected a local path, or one that begins with s3://"),
        ("[3]", "data.train: expected a string; received 3."),
    ],
)
def test_a_wrong_entry_is_named(train: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        load([], [f"data.train={train}", "data.global_batch_size=8", "train.epochs=1"])
    assert said in str(error.value)


def test_repeats_are_for_training_only() -> None:
    words = ["data.train=a", "data.eval=[{path: a, repeats: 2}]", "data.global_batch_size=8", "train.epochs=1"]
    with pytest.raises(UserError, match=r"data\.eval: expected a string; received {"):
        load([], words)
