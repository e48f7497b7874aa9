"""Whole runs in half precision, and compiled by XLA."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf
from conftest import metrics_of, train

pytestmark = pytest.mark.long


CONFIG = """
data: {{train: {data}/train, global_batch_size: 96}}
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
optimizer: {{name: sgd, options: {{momentum: 0.9}}}}
lr_schedule: {{base_lr: 0.05}}
train: {{epochs: 2}}
log: {{every_steps: 15, tensorboard: false}}
"""


@pytest.fixture
def config(digits: Path, tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(data=digits))
    return path


def test_an_overflow_on_one_rank_under_float16_halves_the_scale_on_all_and_training_goes_on(
    config: Path, tmp_path: Path
) -> None:
    model = "model={name: user_models:troubled, options: {step: 7, on_rank: 1, what: nan}}"
    words = ["--config", config, "--output-dir", tmp_path / "run", model, "precision=mixed_float16"]
    finished = train(words, launcher="mpirun", np=2)  # which ends with a check that ranks hold the same
    assert finished.returncode == 0, finished.text
    reader = tf.train.load_checkpoint(str(tmp_path / "run" / "checkpoints" / "step-000000030" / "state"))
    (scale,) = [name for name in reader.get_variable_to_shape_map() if name.endswith("dynamic_scale")]
    assert reader.get_tensor(scale) == 2**14  # Keras starts at 2^15
    (updates,) = [name for name in reader.get_variable_to_shape_map() if name.endswith("sgd/iteration")]
    assert reader.get_tensor(updates) == 29
    first, last = metrics_of(tmp_path / "run", "train")
    assert last["loss_average"] < first["loss_average"]
    assert last["skipped_updates"] == 1
