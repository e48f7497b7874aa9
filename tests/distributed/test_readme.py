"""What README shows does what README says."""

from __future__ import annotations

import re
import sys

import pytest
from conftest import PROJECT, Finished, launcher_command, rank_environment, run_process

BEFORE = """
import numpy as np

def load_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(257, 784)).astype(np.float32)
    return (x, (x[:, :10]).argmax(axis=1)), None
"""
AFTER = """
weights = np.concatenate([weight.numpy().ravel() for weight in model.weights])
for rank, other in enumerate(group.gather(weights.tobytes())):
    assert other == weights.tobytes(), rank
print(f"rank {group.rank} of {group.size} holds what the others hold", flush=True)
"""
LATER = """
import tensorflow as tf

rows = 96 if group.rank == 1 else 128
stream = tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows])).batch(32)
model.fit(stream, steps_per_epoch=4, verbose=0, callbacks=[BroadcastVariables()])
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


def test_the_example_for_model_fit_keeps_ranks_equal(finished: Finished) -> None:
    assert finished.stdout.count("holds what the others hold") == 2, finished.text
    assert len(re.findall(r"^\[0\].*loss: ", finished.stdout, re.MULTILINE)) == 1


def test_a_rank_that_runs_out_of_data_ends_all_with_its_number(finished: Finished) -> None:
    assert finished.returncode != 0
    assert "UserError: model.fit: rank 1 has taken 3 of 4 batches in epoch 1: its data ended" in finished.text
