"""What README shows does what README says, and every command of README and docs can be run."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import PROJECT, Finished, launcher_command, rank_environment, run_process, train
from documents import blocks, pages

BEFORE = """
import numpy as np

def load_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(257, 784)).astype(np.float32)
    return (x, (x[:, :10]).argmax(axis=1)), None
"""
AFTER = """
weights = np.concatenate([weight.numpy().ravel() for weight in model.weights])
for rank, other in enumerate(hvd.allgather_object(weights.tobytes())):
    assert other == weights.tobytes(), rank
print(f"rank {hvd.rank()} of {hvd.size()} holds what the others hold", flush=True)
"""
LATER = """
import tensorflow as tf

rows = 96 if hvd.rank() == 1 else 128
stream = tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows])).batch(32)
model.fit(stream, steps_per_epoch=4, verbose=0, callbacks=callbacks[:1])
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The example on rows that two ranks cannot share evenly; then rank 1 runs out of data, which must end rank 0."""
    (example,) = re.findall(r"```python\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    script = tmp_path_factory.mktemp("readme") / "fit.py"
    script.write_text(BEFORE + example + AFTER + LATER)
    patient = {f"HOROVOD_STALL_{what}_TIME_SECONDS": "600" for what in ("CHECK", "SHUTDOWN")}
    words = [*launcher_command("horovodrun", 2), sys.executable, str(script)]
    return run_process(words, environment=rank_environment() | patient)


@pytest.mark.long
def test_the_example_for_model_fit_keeps_ranks_equal(finished: Finished) -> None:
    assert finished.stdout.count("holds what the others hold") == 2, finished.text
    assert len(re.findall(r"^\[0\].*loss: ", finished.stdout, re.MULTILINE)) == 1


@pytest.mark.long
def test_a_rank_that_runs_out_of_data_ends_all_with_its_number(finished: Finished) -> None:
    assert finished.returncode != 0
    assert "error: model.fit: rank 1 has taken 3 of 4 batches in epoch 1: its data ended" in finished.text


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    """The project's folder as a reader has it after a first run: with configs, data and a run directory."""
    folder = tmp_path_factory.mktemp("reader") / "project"
    folder.mkdir()
    for name in ("configs", "scripts", "examples", "horovod_train"):
        (folder / name).symlink_to(PROJECT / name)
    shutil.copytree(digits, folder / "data" / "digits")
    words = [
        "--config",
        "configs/digits_convnet.yaml",
        "train.epochs=3",
        "checkpoint.every_epochs=1",
        "data.audit=true",
    ]
    finished = train(words, cwd=folder)
    assert finished.returncode == 0, finished.text
    return folder


def pages_with_commands() -> list[Path]:
    return [page for page in pages() if any(block.commands and not block.not_run for block in blocks(page))]


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", pages_with_commands(), ids=lambda page: page.name)
def test_the_commands_of_a_page_can_be_run_one_after_the_other(page: Path, project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    shutil.copytree(project, folder, symlinks=True)
    for block in blocks(page):
        if block.commands and not block.not_run:
            words = ["bash", "-euo", "pipefail", "-c", block.commands]
            finished = run_process(words, cwd=folder, timeout_s=600, environment=rank_environment())
            assert finished.returncode == 0, f"{block}\n{finished.text}"
