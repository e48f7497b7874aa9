"""What hvd.shard gives each rank, and what it says of lists."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow
import numpy as np
import pytest
import tensorflow as tf

from horovod_train.errors import UserError
from horovod_train.tensorflow.sharding import shard

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
