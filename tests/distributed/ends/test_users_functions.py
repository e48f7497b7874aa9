"""Functions of the user's own that build a model are called on one rank of a host before the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Finished, train

pytestmark = pytest.mark.long


CONFIG = """
data: {{train: {data}/train, global_batch_size: 96}}
model: {{name: user_faults:downloads, options: {{file: {folder}/weights, fails: {fails}}}}}
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
lr_schedule: {{base_lr: 0.1}}
train: {{max_steps: 2}}
log: {{tensorboard: false}}
"""


def run(digits: Path, folder: Path, *, fails: bool) -> Finished:
    (folder / "config.yaml").write_text(CONFIG.format(data=digits, folder=folder, fails=str(fails).lower()))
    words = ["--config", folder / "config.yaml", "--output-dir", folder / "run"]
    return train(words, launcher="mpirun", np=2)


def test_a_rank_does_not_find_half_of_what_another_rank_downloads(digits: Path, tmp_path: Path) -> None:
    finished = run(digits, tmp_path, fails=False)
    assert finished.returncode == 0, finished.text


@pytest.mark.exhaustive
def test_a_function_that_fails_on_the_first_rank_is_not_called_on_the_others(digits: Path, tmp_path: Path) -> None:
    finished = run(digits, tmp_path, fails=True)
    assert finished.returncode == 2, finished.text
    (line,) = [line for line in finished.stderr.splitlines() if "error: " in line]
    assert ": model: user_faults:downloads with options " in line
    assert "OSError: no network here (at " in line
    assert not (tmp_path / "weights").exists()
