"""An MLP whose matrices are called weight: its names, and that it is otherwise an ordinary model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import keras
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


@pytest.mark.long  # see test_export
def test_a_saved_model_loads_where_there_is_only_keras(tmp_path: Path) -> None:
    model = mlp.build(weight_name="weight")
    model.save(tmp_path / "m.keras")
    script = (
        "import sys; sys.modules['horovod_train'] = None\n"
        f"import keras, numpy as np; model = keras.models.load_model({str(tmp_path / 'm.keras')!r})\n"
        "print(repr(model(np.ones((1, 5), np.float32)).numpy().item()))"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert float(finished.stdout) == float(keras.ops.convert_to_numpy(model(np.ones((1, 5), np.float32))).item())
