"""What hvd.shard says of lists."""

from __future__ import annotations

from typing import Any

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
