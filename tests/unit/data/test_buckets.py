"""Batches by length: less padding, each record once at any number of ranks, and the same steps for all of them."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_records import NumpyBatch, batches, config, example, ids, pipeline, write_file

from horovod_train.commands.check_data import check_records
from horovod_train.config.loader import load
from horovod_train.config.settings import DataConfig
from horovod_train.data import reader
from horovod_train.data.dataset import build_plan, open_records
from horovod_train.data.sampler import Buckets, Plan
from horovod_train.data.sampler import padding_share as padding_share_of
from horovod_train.data.source import mark_skipped
from horovod_train.errors import ReadFailed, UserError
from horovod_train.training.open_run import _scan

RECORDS, MOST = 1003, 60
LENGTHS = np.random.default_rng(5).integers(0, MOST + 1, RECORDS)
FEATURES: dict[str, Any] = {
    "words": {"type": "int64", "max_length": MOST, "padding": -1},
    "tags": {"type": "int64", "max_length": MOST, "shape": [2]},
    "label": {"type": "int64"},
}


def words_of(record: int) -> list[int]:
    return [record + place for place in range(int(LENGTHS[record]))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of lists; `tags` are half as long as `words`."""
    made = tmp_path_factory.mktemp("lists")
    rows = [
        example(words=words_of(record), tags=[1] * (2 * (len(words_of(record)) // 2)), label=record)
        for record in range(RECORDS)
    ]
    for shard, part in enumerate(np.array_split(np.arange(RECORDS), 3)):
        write_file(made / f"{shard}.tfrecord", [rows[record] for record in part])
    return made


def data_of(folder: Path, tmp_path: Path, by: str | None = "words", **values: Any) -> DataConfig:
    given: dict[str, Any] = {"features": FEATURES, "inputs": ("words", "tags"), "targets": ("label",)}
    return config(folder, **{**given, "bucket_by_length": by, "index_dir": str(tmp_path / "kept"), **values})


def of_ranks(data: DataConfig, size: int, **values: Any) -> list[list[NumpyBatch]]:
    return [batches(pipeline(data, rank, size, batch=32), **values) for rank in range(size)]


def padding_share(found: list[NumpyBatch]) -> float:
    """The share of `words` that are padding."""
    values = np.concatenate([batch.inputs["words"][batch.ids >= 0].ravel() for batch in found])
    return float((values == -1).mean())


def test_each_record_comes_once_with_its_own_values_at_any_number_of_ranks(folder: Path, tmp_path: Path) -> None:
    data = data_of(folder, tmp_path, bucket_steps=8)
    steps: list[list[set[int]]] = []
    for size in (1, 2, 3):
        found = of_ranks(data, size)
        assert sorted(number for rank in found for number in ids(rank)) == list(range(RECORDS))
        steps.append([{n for batch in step for n in ids([batch])} for step in zip(*found, strict=True)])
        for batch in (batch for rank in found for batch in rank):
            for number, words in zip(batch.ids.tolist(), batch.inputs["words"].tolist(), strict=True):
                if number >= 0:
                    assert words == words_of(number) + [-1] * (len(words) - len(words_of(number)))
    assert steps[0] == steps[1] == steps[2]


def test_all_ranks_cut_lists_at_the_longest_of_the_step(folder: Path, tmp_path: Path) -> None:
    for step in zip(*of_ranks(data_of(folder, tmp_path, bucket_steps=8), 3), strict=True):
        longest = max(LENGTHS[n] for batch in step for n in ids([batch]))
        assert {batch.inputs["words"].shape[1] for batch in step} == {max(longest, 1)}
        assert {batch.inputs["tags"].shape[1:] for batch in step} == {(max(longest, 1), 2)}  # they have its max_length


def test_lists_of_another_max_length_are_cut_by_themselves(folder: Path, tmp_path: Path) -> None:
    features = {**FEATURES, "tags": {**FEATURES["tags"], "max_length": MOST + 1}}
    for batch in batches(pipeline(data_of(folder, tmp_path, features=features), batch=32)):
        longest = max(LENGTHS[n] for n in ids([batch]))
        assert batch.inputs["words"].shape[1] == max(longest, 1)
        assert batch.inputs["tags"].shape[1:] == (max(longest // 2, 1), 2)


def test_tags_that_end_in_padding_stay_as_long_as_their_words(tmp_path: Path) -> None:
    """The tag of a word outside of what is looked for, and of a full stop, is often 0."""
    write_file(tmp_path / "a.tfrecord", [example(words=[3, 4, 5], tags=[1, 0, 0]), example(words=[6], tags=[0])])
    lists: Any = {name: {"type": "int64", "max_length": 9} for name in ("words", "tags")}
    data = config(tmp_path, features=lists, inputs=("words",), targets=("tags",), bucket_by_length="words")
    (batch,) = batches(pipeline(dataclasses.replace(data, index_dir=str(tmp_path / "kept")), batch=2))
    assert sorted(batch.inputs.tolist()) == [[3, 4, 5], [6, 0, 0]]
    assert sorted(batch.targets.tolist()) == [[0, 0, 0], [1, 0, 0]]


def test_there_is_less_padding(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shares = {
        "max_length": padding_share(batches(pipeline(data_of(folder, tmp_path, None), batch=32))),
        "1 step": padding_share(batches(pipeline(data_of(folder, tmp_path, bucket_steps=1), batch=32))),
        "31 steps": padding_share(batches(pipeline(data_of(folder, tmp_path), batch=32))),
    }
    with capsys.disabled():
        print("\nshare of padding:", ", ".join(f"{name} {share:.3f}" for name, share in shares.items()))
    assert shares["max_length"] == pytest.approx(1 - LENGTHS.mean() / MOST, abs=1e-9)
    assert shares["1 step"] < shares["max_length"]
    assert shares["31 steps"] < 0.6 * shares["1 step"]
    assert padding_share_of(pipeline(data_of(folder, tmp_path), batch=32)._plan)["words"] == pytest.approx(
        shares["31 steps"]
    )


def test_epochs_differ_and_are_repeated_exactly(folder: Path, tmp_path: Path) -> None:
    made = pipeline(data_of(folder, tmp_path, bucket_steps=8), batch=32)
    first = batches(made, epoch=0)
    assert [batch.ids.tolist() for batch in batches(made, epoch=0)] == [batch.ids.tolist() for batch in first]
    assert [set(ids([batch])) for batch in batches(made, epoch=1)] != [set(ids([batch])) for batch in first]
    widths = [batch.inputs["words"].shape[1] for batch in first]
    assert widths != sorted(widths), "the steps of a pool come in a random order"


@pytest.mark.parametrize("first_step", [1, 8, *(pytest.param(more, marks=pytest.mark.long) for more in (7, 30, 31))])
def test_a_pass_may_begin_at_any_step(folder: Path, tmp_path: Path, first_step: int) -> None:
    made = pipeline(data_of(folder, tmp_path, bucket_steps=8), batch=32)
    rest, whole = batches(made, epoch=1, first_step=first_step), batches(made, epoch=1)[first_step:]
    assert len(rest) == len(whole)
    for one, other in zip(rest, whole, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert np.array_equal(one.inputs["words"], other.inputs["words"])


@pytest.mark.parametrize(
    "values", [{"cache": "memory"}, {"fold": "1/4"}, {"drop_remainder": True}, {"shuffle_window": 64}]
)
def test_it_goes_with_other_ways_to_read(folder: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    data = data_of(folder, tmp_path, bucket_steps=8, **values)
    records = open_records(data, "train")
    found = [number for rank in of_ranks(data, 2, epochs=2) for number in ids(rank)]
    each = 2 * (records.num_records // 32 * 32 if data.drop_remainder else records.num_records)
    assert len(found) == each
    if not data.drop_remainder:
        assert sorted(found) == sorted(2 * list(range(records.num_records)))


def test_evaluation_is_as_without(folder: Path, tmp_path: Path) -> None:
    with_buckets, without = (
        batches(pipeline(data_of(folder, tmp_path, by), batch=32, training=False)) for by in ("words", None)
    )
    for one, other in zip(with_buckets, without, strict=True):
        assert np.array_equal(one.inputs["words"], other.inputs["words"])
        assert one.inputs["words"].shape[1] == MOST


def test_the_order_is_part_of_what_a_resume_compares(folder: Path, tmp_path: Path) -> None:
    prints = [
        pipeline(data, batch=32).fingerprint
        for data in (
            data_of(folder, tmp_path, None),
            data_of(folder, tmp_path),
            data_of(folder, tmp_path, "tags"),
            data_of(folder, tmp_path, bucket_steps=8),
        )
    ]
    assert len(set(prints)) == 4
    assert pipeline(data_of(folder, tmp_path), batch=32).fingerprint == prints[1]


# --- where the lengths come from --------------------------------------------------------------------------------------


def buckets_of(data: DataConfig) -> Buckets:
    found = open_records(data, "train").find_buckets(data)
    assert found is not None
    return found


def test_lengths_are_read_once_and_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_of(folder, tmp_path)
    first = buckets_of(data)
    assert first.lengths[:, first.names.index("words")].tolist() == LENGTHS.tolist()
    (kept,) = (tmp_path / "kept").glob("lengths-*.npy")
    measured: list[str] = []
    measure = reader._measure_lengths

    def noted(*arguments: Any) -> np.ndarray:
        measured.append("measured")
        return measure(*arguments)

    monkeypatch.setattr(reader, "_measure_lengths", noted)
    assert np.array_equal(buckets_of(data).lengths, first.lengths)
    assert not measured
    kept.write_bytes(kept.read_bytes()[:200])
    assert np.array_equal(buckets_of(data).lengths, first.lengths)
    other = {**FEATURES, "words": {**FEATURES["words"], "padding": 0}}
    assert buckets_of(dataclasses.replace(data, features=other)).names == first.names
    assert measured == ["measured"] * 2


def test_ranks_that_keep_other_lengths_are_told_apart_at_the_start(folder: Path, tmp_path: Path) -> None:
    """Lengths of lists that do not decide the order count too: all ranks cut all lists alike."""
    data = data_of(folder, tmp_path)
    facts = _scan(data, ["train"], needs_labels=True)["train"].facts
    (kept,) = (tmp_path / "kept").glob("lengths-*.npy")
    lengths = np.load(kept)
    lengths[7, 1 - buckets_of(data).names.index("words")] += 1
    np.save(kept, lengths)
    other = _scan(data, ["train"], needs_labels=True)["train"].facts
    (differs,) = (name for name in facts if facts[name] != other[name])
    assert differs.startswith("lengths of lists of data.train (each host keeps them: remove lengths-*.npy from ")


def test_lengths_that_could_not_be_read_now_are_not_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_of(folder, tmp_path)
    open_records(data, "train")  # indexes the files
    pread, reads = os.pread, itertools.count()

    def fail_later(*arguments: Any) -> bytes:
        if next(reads) > 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(*arguments)

    with monkeypatch.context() as failing:
        failing.setattr(os, "pread", fail_later)
        with pytest.raises(ReadFailed, match="cannot be read any more: Input/output error"):
            buckets_of(data)
    assert not list((tmp_path / "kept").glob("lengths-*.npy"))
    found = buckets_of(data)
    assert found.lengths[:, found.names.index("words")].tolist() == LENGTHS.tolist()


def test_padding_at_the_end_of_a_list_does_not_count(tmp_path: Path) -> None:
    write_file(tmp_path / "a.tfrecord", [example(words=values) for values in ([1, 0, 2, 0, 0], [0, 0], [3])])
    data = config(tmp_path, features={"words": {"type": "int64", "max_length": 5}}, inputs=("words",))
    assert buckets_of(dataclasses.replace(data, bucket_by_length="words")).lengths.tolist() == [[3], [0], [1]]


def test_a_bad_record_is_named_when_it_is_used_and_has_room_once_it_is_repaired(tmp_path: Path) -> None:
    write_file(tmp_path / "a.tfrecord", [example(words=values) for values in ([1], [1] * 6, [3, 4])])
    data = config(
        tmp_path,
        features={"words": {"type": "int64", "max_length": 5}},
        inputs=("words",),
        bucket_by_length="words",
        index_dir=str(tmp_path),
    )
    assert buckets_of(data).lengths.tolist() == [[1], [5], [2]]
    made = pipeline(data, batch=3)
    with pytest.raises(UserError, match=r"record 1 at byte .* expected at most 5 values"), made.explaining():
        batches(made)
    assert len(check_records(data).bad) == 1
    (batch,) = batches(pipeline(dataclasses.replace(data, on_bad_record="skip"), batch=3))
    assert sorted(batch.ids.tolist()) == [mark_skipped(1), 0, 2]
    assert batch.inputs.shape == (3, 5)


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("records", "batch", "steps"), [(1, 1, 1), (7, 3, 2), (64, 8, 3), (65, 8, 8), (1000, 7, 5)])
def test_pools_of_any_size_lose_nothing(records: int, batch: int, steps: int) -> None:
    sizes = np.random.default_rng(records).integers(0, 50, (records, 1)).astype(np.int32)
    plan = Plan(np.array([records]), batch, 3, "shuffled", 16, buckets=Buckets(("a",), sizes, "a", steps, (50,)))
    sequence = plan.sequence(2)
    for size in (1, 2, 5):
        found = [plan.rows(sequence, rank, size, 0, plan.steps_per_epoch) for rank in range(size)]
        numbers = np.concatenate([rows.records[rows.real] for rows in found])
        assert sorted(numbers.tolist()) == list(range(records))
    one = plan.rows(sequence, 0, 1, 0, plan.steps_per_epoch)
    for first in range(plan.steps_per_epoch):
        part = plan.rows(plan.sequence(2), 0, 1, first, plan.steps_per_epoch)
        assert np.array_equal(part.records, one.records[first:])
    widths = plan.widths(sequence, 0, plan.steps_per_epoch)[:, 0]
    longest = [max(sizes[row[real], 0].max(), 1) for row, real in zip(one.records, one.real, strict=True)]
    assert widths.tolist() == longest


def test_steps_of_a_pool_come_in_another_order_in_each_epoch() -> None:
    buckets = Buckets(("words",), np.arange(64, dtype=np.int32)[:, None], "words", 32, (64,))
    records = np.arange(64).reshape(32, 2)
    one, same, other = (buckets.sort(records, 1, epoch, 0).tolist() for epoch in (0, 0, 1))
    assert one == same != other
    later = buckets.sort(records, 1, 0, 32).tolist()
    assert sorted(later) == sorted(one)
    assert later != one, "and in each pool of an epoch"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.bucket_by_length=3"], "data.bucket_by_length: expected a string"),
        (
            ["data.bucket_by_length=words", "data.shuffle=false"],
            "data.bucket_by_length: has no effect unless data.shuffle: true",
        ),
        (["data.bucket_by_length=words", "data.parse=a:b"], "data.bucket_by_length: needs features, whose max_length"),
        (["data.bucket_by_length=words", "jit_compile=true"], "data.bucket_by_length: does not go with jit_compile"),
        (["data.bucket_steps=8"], "data.bucket_steps: has no effect unless data.bucket_by_length;"),
        (["data.bucket_by_length=words", "data.bucket_steps=0"], "data.bucket_steps: must be at least 1; received 0"),
        (["data.bucket_by_length=words", "data.bucket_steps=x"], "data.bucket_steps: expected an int"),
        (["data.train=[]", "data.dataset=a:b", "data.bucket_by_length=w"], "data.bucket_by_length: "),
    ],
)
def test_bad_settings_get_one_line(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        load([], ["data.train=here", "data.global_batch_size=8", "train.epochs=1", *words])
    assert str(raised.value).removeprefix("command line: ").startswith(said)


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ("label", "label is no list (a feature with max_length). The lists of data.features: words, tags."),
        ("length", "length is no list (a feature with max_length). The lists of data.features: words, tags."),
    ],
)
def test_a_feature_that_is_no_list_is_refused(folder: Path, tmp_path: Path, by: str, said: str) -> None:
    data = data_of(folder, tmp_path, by)
    with pytest.raises(UserError) as raised:
        build_plan(open_records(data, "train"), data, seed=1, training=True, global_batch_size=8)
    assert str(raised.value) == f"data.bucket_by_length: {said}"
