"""An MLP whose matrices are called weight: its names, and that it is otherwise an ordinary model."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_train.models import mlp


@pytest.mark.parametrize("name", ["kernel", "weight"])
def test_variables_are_under_their_layers(name: str) -> None:
    paths = [weight.path for weight in mlp.build(weight_name=name).weights]
    assert paths == [f"hidden1/{name}", "hidden1/bias", f"out_layer/{name}", "out_layer/bias"]


def test_a_name_changes_no_number() -> None:
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    assert np.array_equal(mlp.build()(x), mlp.build(weight_name="weight")(x))
