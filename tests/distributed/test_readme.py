"""What README shows does what README says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from conftest import PROJECT, launcher_command, run_process

BEFORE = """
import numpy as np

def load_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 784)).astype(np.float32)
    return (x, (x[:, :10]).argmax(axis=1)), None
"""
AFTER = """
weights = np.concatenate([weight.numpy().ravel() for weight in model.weights])
for rank, other in enumerate(group.gather(weights.tobytes())):
    assert other == weights.tobytes(), rank
print(f"rank {group.rank} of {group.size} holds what the others hold")
"""


def test_the_example_for_model_fit_keeps_ranks_equal(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "fit.py"
    script.write_text(BEFORE + example + AFTER)
    finished = run_process([*launcher_command("horovodrun", 2), sys.executable, str(script)])
    assert finished.returncode == 0, finished.text
    assert finished.stdout.count("holds what the others hold") == 2
    assert len(re.findall(r"^\[0\].*loss: ", finished.stdout, re.MULTILINE)) == 1
