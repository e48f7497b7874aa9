"""What hvd.shard gives each rank, and what it says of lists."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow
import numpy as np
import pytest
import tensorflow as tf

from horovod_train.errors import UserError
from horovod_train.tensorflow import sharding
from horovod_train.tensorflow.sharding import check_given, shard, take_given

ROWS = np.zeros((8, 3), np.float32)


@pytest.mark.parametrize("inputs", [[ROWS, ROWS], (ROWS, ROWS[:, :1]), [tf.constant(ROWS), ROWS]])
def test_several_inputs_in_a_list_are_said_to_be_given_one_by_one(inputs: Any) -> None:
    with pytest.raises(UserError, match=r"Give several inputs one by one, .*hvd\.shard\(x1, x2, y\), or as a dict\.$"):
        shard(inputs, np.zeros(8))


@pytest.mark.parametrize("rows", [[np.zeros(2), np.zeros(3)], [[1], [2, 3]]])
def test_rows_of_different_lengths_are_to_be_padded(rows: Any) -> None:
    with pytest.raises(UserError, match=r"Pad them to one shape\.$"):
        shard(rows, np.zeros(2))


@pytest.mark.parametrize(("size", "count"), [(1, 1), (2, 2), (2, 3), (3, 3), (3, 4), (3, 5), (3, 6), (4, 9)], ids=str)
def test_each_record_counts_on_one_rank_and_all_ranks_have_equally_many(
    monkeypatch: pytest.MonkeyPatch, size: int, count: int
) -> None:
    monkeypatch.setattr(horovod.tensorflow, "size", lambda: size)
    numbers = np.arange(count, dtype=np.int64)
    arrays, datasets = [], []
    for rank in range(size):
        monkeypatch.setattr(horovod.tensorflow, "rank", lambda rank=rank: rank)
        x, parts, weights = shard(numbers, {"negative": -numbers})
        assert np.array_equal(parts["negative"], -x)
        arrays.append(list(zip(x.tolist(), weights.tolist(), strict=True)))
        dataset = shard(tf.data.Dataset.from_tensor_slices((numbers, -numbers)))
        found = [[float(part) for part in record] for record in dataset]
        assert all(y == -x for x, y, _ in found)
        datasets.append([(x, weight) for x, _, weight in found])
    assert arrays == datasets
    assert {len(records) for records in arrays} == {-(-count // size)}
    assert sorted(x for records in arrays for x, weight in records if weight == 1.0) == numbers.tolist()
    assert {weight for records in arrays for _, weight in records} <= {0.0, 1.0}


def test_fewer_records_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod.tensorflow, "size", lambda: 4)
    monkeypatch.setattr(horovod.tensorflow, "rank", lambda: 0)
    for data in ((np.zeros(3),), (tf.data.Dataset.from_tensor_slices((np.zeros(3), np.zeros(3))),)):
        with pytest.raises(UserError, match="expected at least one record for each of 4 ranks; received 3"):
            shard(*data)


X, Y = np.random.default_rng(0).normal(size=(64, 3)), np.arange(64) % 3
OTHER = np.random.default_rng(1).permutation(64)
LOST = "in order or in values, so records would be lost"


def pairs(x: Any, y: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y))


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([(X, Y)], [(X[OTHER], Y[OTHER])], f"argument 1, argument 2, of 64 rows, differ on rank 1 from rank 0 {LOST}"),
        ([(X, Y)], [(X, Y)], None),
        ([({"a": X},)], [({"a": X[OTHER]},)], rf"argument 1\['a'\], of 64 rows, differs on rank 1 from rank 0 {LOST}"),
        ([(X, Y)], [(X + 1, Y)], None),  # as by noise or rounding: targets in one order
        ([(X,)], [(X * (1 + 1e-7),)], None),  # as another processor computes them
        ([(X, np.ones(64))], [(X[OTHER], np.ones(64))], "argument 1, of 64 rows, differs"),  # that show no order
        ([(np.ones((64, 2)),)], [(np.zeros((64, 2)),)], None),
        ([(X, Y)], [(X[:60], Y[:60])], "the same rows; received 64 of them on rank 0, 60 on rank 1"),
        ([(X, Y), (X, Y)], [(X, Y), (X[OTHER], Y[OTHER])], "argument 1, argument 2, of 64 rows"),
        ([(X, Y), (X, Y)], [(X[OTHER], Y[OTHER])], None),  # root alone evaluates
        ([(Y.astype(str).astype(object),)], [(Y[OTHER].astype(str).astype(object),)], "argument 1, of 64 rows"),
        ([([object() for _ in range(8)],)], [([object() for _ in range(8)],)], None),
        ([(pairs(X, Y),)], [(pairs(X[OTHER], Y[OTHER]),)], "part 1 of a record, part 2 of a record, of 64 rows"),
        ([(pairs(X, Y),)], [(pairs(X, Y),)], None),
        ([(pairs(X, Y),)], [(pairs(X[:60], Y[:60]),)], "the same rows; received 64 of them on rank 0, 60 on rank 1"),
        ([(pairs(X, Y).map(lambda x, y: (x, y)),)], [(pairs(X[OTHER], Y[OTHER]).map(lambda x, y: (x, y)),)], None),
    ],
)
def test_ranks_that_hold_other_rows_are_refused_unless_an_array_shows_that_the_order_is_one(
    monkeypatch: pytest.MonkeyPatch, ours: list[Any], theirs: list[Any], said: str | None
) -> None:
    """And that the numbers of rows differ, also of datasets that are not read."""
    monkeypatch.setattr(horovod.tensorflow, "size", lambda: 2)
    monkeypatch.setattr(horovod.tensorflow, "rank", lambda: 0)
    take_given()
    given = []
    for calls in (ours, theirs):
        for call in calls:
            shard(*call)
        given.append(take_given())
    assert take_given() == []
    if said is None:
        check_given(given)
        return
    with pytest.raises(UserError, match=rf"^hvd\.shard: .*{said}") as error:
        check_given(given)
    assert "\n" not in str(error.value)


class Counted(np.ndarray):
    """Counts the bytes that are copied out of it by the numbers of rows."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        Counted.copied += found.nbytes if isinstance(key, np.ndarray) else 0
        return found


def test_of_a_large_array_a_few_rows_are_compared() -> None:
    rows = np.zeros((2000, 1 << 16), np.float32).view(Counted)
    sharding._seen_of(rows)
    assert 0 < Counted.copied <= sharding._SAMPLED_BYTES


def test_of_a_script_that_shards_each_batch_some_calls_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod.tensorflow, "size", lambda: 2)
    monkeypatch.setattr(horovod.tensorflow, "rank", lambda: 0)
    take_given()
    for _ in range(100):
        shard(np.arange(4))
    assert len(take_given()) == sharding._NOTED_CALLS
