"""Cross-validation: parts are equal and the same in every run; training leaves one out, and evaluation reads it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import batches, ids, image_record, make_images, pixels, write_file
from made_stores import write_npy

from horovod_train.config.loader import load
from horovod_train.config.settings import DataConfig, Mixed
from horovod_train.data.dataset import Split, open_records
from horovod_train.data.pipeline import Pipeline, Ranks, build_pipeline
from horovod_train.data.subsets import held_out_records, parts_of_records
from horovod_train.errors import UserError

RECORDS, FOLDS = 70, 4


@pytest.fixture(params=["tfrecords", pytest.param("arrays", marks=pytest.mark.long)])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "tfrecords":
        path = str(make_images(tmp_path / "data" / "all"))
        found = json.loads((tmp_path / "data" / "dataset.json").read_text())
        (tmp_path / "data" / "dataset.json").write_text(json.dumps(found | {"counts": {"all": RECORDS}}))
        return {"train": (path,), "eval": (path,)}
    images = np.stack([pixels(number) for number in range(RECORDS)])
    path = str(write_npy(tmp_path, {"image_raw": images, "label": np.arange(RECORDS) % 10}))
    features = {"image_raw": {"scale": 1 / 255, "offset": -0.5}}
    return {"train": (path,), "eval": (path,), "features": features, "targets": ("label",)}


def pipeline(data: DataConfig, split: Split, rank: int = 0, size: int = 1, seed: int = 1) -> Pipeline:
    records = open_records(data, split)
    ranks, training = Ranks(rank, size), split == "train"
    return build_pipeline(records, data, ranks, seed=seed, training=training, global_batch_size=8)


def shown(data: DataConfig, split: Split, size: int = 1, seed: int = 1) -> list[int]:
    """The images that all ranks read."""
    found = []
    for rank in range(size):
        for batch in batches(pipeline(data, split, rank, size, seed)):
            for row in np.flatnonzero(batch.ids >= 0):
                image = round((float(batch.inputs[row, 0, 0, 0]) + 0.5) * 255)
                assert np.allclose((batch.inputs[row] + 0.5) * 255, pixels(image))
                assert batch.targets[row] == image % 10
                found.append(image)
    return found


def test_each_record_is_evaluated_in_one_fold_and_trained_on_in_the_others(stored: dict[str, Any]) -> None:
    evaluated: list[int] = []
    for number in range(1, FOLDS + 1):
        data = DataConfig(**stored, fold=f"{number}/{FOLDS}")
        left_out, used = shown(data, "eval", 2), shown(data, "train", 3)
        assert sorted(left_out + used) == list(range(RECORDS))
        evaluated += left_out
    assert sorted(evaluated) == list(range(RECORDS))


def test_folds_are_those_of_any_seed_and_other_folds_are_other_data(stored: dict[str, Any]) -> None:
    first, second = (DataConfig(**stored, fold=f"{number}/{FOLDS}") for number in (1, 2))
    assert shown(first, "train", seed=1) != shown(first, "train", seed=2)
    assert sorted(shown(first, "train", seed=1)) == sorted(shown(first, "train", seed=2))
    digests = [open_records(data, split).digest for data in (first, second) for split in ("train", "eval")]
    assert len({*digests, open_records(DataConfig(**stored), "train").digest}) == 5


@pytest.mark.parametrize(
    ("fraction", "held_out"),
    [(0.2, 14), (0.001, 1), *(pytest.param(*more, marks=pytest.mark.long) for more in [(0.5, 35), (0.9, 63)])],
)
def test_a_fraction_is_evaluated_and_the_rest_trained_on(
    stored: dict[str, Any], fraction: float, held_out: int
) -> None:
    data = DataConfig(**stored, eval_fraction=fraction)
    evaluated, used = shown(data, "eval", 2), shown(data, "train", 3, seed=2)
    assert len(evaluated) == held_out
    assert sorted(evaluated + used) == list(range(RECORDS))
    parts: list[dict[str, Any]] = [
        {},
        {"fold": "1/5"},
        *({"eval_fraction": part} for part in (fraction, 1.004 * fraction)),
    ]
    digests = {
        open_records(DataConfig(**stored, **part), split).digest for split in ("train", "eval") for part in parts
    }
    assert len(digests) == 7  # without parts, both splits are the same; the last two have equally many records


@settings(max_examples=200)
@given(st.floats(0.01, 0.99), st.integers(2, 400))
def test_a_fraction_is_spread_evenly(fraction: float, records: int) -> None:
    held_out = held_out_records(records, fraction)
    assert abs(held_out.sum() - records * fraction) <= 1
    assert np.all(np.abs(np.cumsum(held_out) - np.arange(1, records + 1) * fraction) < 2)


def test_a_fraction_is_the_same_in_every_version() -> None:
    """Or a run that is resumed would be evaluated on what it was trained on."""
    assert np.flatnonzero(held_out_records(40, 0.2)).tolist() == [2, 6, 13, 15, 21, 26, 34, 39]
    chosen = [held_out_records(n, part) for n in (1, 2, 7, 1000, 12345) for part in (0.01, 0.2, 1 / 3, 0.5, 0.95)]
    digest = hashlib.sha256(b"".join(np.packbits(each).tobytes() for each in chosen)).hexdigest()
    assert digest.startswith("2f304e4443f33a88")


def test_a_fraction_of_one_record_is_refused(tmp_path: Path) -> None:
    path = (str(write_npy(tmp_path, {"x": np.zeros((1, 2), np.float32)})),)
    with pytest.raises(UserError, match=r"data\.eval_fraction: 0\.2 of 1 record leaves none to train\."):
        open_records(DataConfig(train=path, eval=path, eval_fraction=0.2), "train")


def test_a_fraction_alone_says_what_is_evaluated() -> None:
    words = ["data.train=[a, b]", "data.global_batch_size=8", "train.epochs=1", "data.eval_fraction=0.2"]
    config, _ = load([], words)
    assert config.data.eval == config.data.train == ("a", "b")


def test_numbers_of_records_have_no_gaps_at_any_number_of_ranks(stored: dict[str, Any]) -> None:
    data = DataConfig(**stored, fold=f"2/{FOLDS}")
    found = [number for rank in range(3) for number in ids(batches(pipeline(data, "train", rank, 3)))]
    assert sorted(found) == list(range(len(shown(data, "train"))))


def test_a_fold_of_a_mixture_repeats_what_it_has(stored: dict[str, Any]) -> None:
    (path,) = stored["train"]
    data = DataConfig(**stored | {"train": (Mixed(path, 2),)}, fold=f"1/{FOLDS}")
    found, left_out = shown(data, "train"), shown(data, "eval")
    assert sorted(found) == sorted([*({*range(RECORDS)} - {*left_out})] * 2)
    (data_set,) = open_records(data, "train").data_sets
    assert (data_set.records, data_set.repeats) == (RECORDS - len(left_out), 2)


def test_a_bad_record_has_its_number_in_the_file(tmp_path: Path) -> None:
    make_images(tmp_path / "all", shards=[5])
    write_file(
        tmp_path / "all" / "0.tfrecord", [*map(image_record, range(40)), b"text", *map(image_record, range(41, 50))]
    )
    part = int(parts_of_records(50, 5)[40]) + 1
    path = (str(tmp_path / "all"),)
    made = pipeline(DataConfig(train=path, eval=path, fold=f"{part}/5"), "eval")
    with pytest.raises(UserError, match=r"0\.tfrecord: record 40 at byte"), made.explaining():
        batches(made)
    data = DataConfig(train=path, eval=path, fold=f"{part}/5", on_bad_record="skip")
    assert len(shown(data, "eval")) == 9
    assert len(shown(data, "train")) == 40


@settings(max_examples=200)
@given(st.integers(2, 40), st.integers(0, 400))
def test_parts_have_equal_sizes_and_are_spread_evenly(folds: int, more: int) -> None:
    records = folds + more
    parts = parts_of_records(records, folds)
    assert len(parts) == records
    for group in np.split(parts, range(folds, records, folds)):
        assert len({*group.tolist()}) == len(group)
    assert np.ptp(np.bincount(parts, minlength=folds)) <= 1


def test_parts_are_the_same_in_every_version() -> None:
    """Or a run that is resumed would be evaluated on what it was trained on."""
    assert parts_of_records(10, 4).tolist() == [3, 0, 1, 2, 1, 3, 0, 2, 0, 1]
    chosen = [parts_of_records(records, folds) for records in (5, 7, 1000, 12345) for folds in (2, 3, 5)]
    digest = hashlib.sha256(b"".join(parts.astype("<i8").tobytes() for parts in chosen)).hexdigest()
    assert digest.startswith("37c99ee106ddd2e7")


def test_parts_are_drawn() -> None:
    parts = parts_of_records(4000, 4).reshape(-1, 4)
    assert np.all(np.abs((parts == 0).mean(axis=0) - 0.25) < 0.05)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.fold=3"], "data.fold: expected k/K, like 1/5, or data.eval_fraction for a fraction; received 3."),
        (["data.fold=five"], "data.fold: expected k/K with k from 1 to K, and K at least 2, like 1/5; received five."),
        (["data.fold=0/5"], "data.fold: expected k/K"),
        (["data.fold=6/5"], "data.fold: expected k/K"),
        (["data.fold=1/1"], "data.fold: expected k/K"),
        (["data.eval_fraction=0"], "data.eval_fraction: must be above 0 and below 1; received 0."),
        (["data.eval_fraction=1"], "data.eval_fraction: must be above 0 and below 1; received 1."),
        (["data.eval_fraction=0.2", "data.fold=1/5"], "data.eval_fraction: give either this or data.fold, not both."),
        (["data.eval_fraction=0.2", "data.eval=other"], "data.eval_fraction: parts the records of data.train, so"),
        (
            ["data.fold=1/5", "data.eval=other"],
            "data.fold: parts the records of data.train, so data.eval must name the same, or be left out "
            "(data.eval=[]); received data.train a and data.eval other. To evaluate on other records: data.fold=null.",
        ),
    ],
)
def test_a_wrong_fold_is_named(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        load([], ["data.train=a", "data.global_batch_size=8", "train.epochs=1", *words])
    assert said in str(error.value)


def test_more_folds_than_records_are_refused(stored: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"data\.fold: 1/71 needs at least 71 records; there are 70\."):
        open_records(DataConfig(**stored, fold="1/71"), "train")
