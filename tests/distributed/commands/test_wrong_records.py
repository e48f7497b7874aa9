"""Tables as people have them: labels beside what is predicted, more columns in one file, a number that is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Finished, metrics_of, train

pytestmark = pytest.mark.long


CONFIG = """
data: {{train: {here}/t.csv, eval: {here}/t.csv, targets: y, weight: w, global_batch_size: 20}}
model: user_models:sum_of_features
loss: mean_squared_error
optimizer: adam
lr_schedule: {{base_lr: 0.5}}
train: {{epochs: 3}}
log: {{tensorboard: false}}
"""


def write(path: Path, columns: str, rows: int = 40) -> Path:
    """y is far from a + b, so that a model that gets it gives other numbers."""
    values = {"a": 1, "b": 2, "y": 1000, "w": 1, "more": 5000}
    lines = [",".join(str(values[name] + row * (name != "w")) for name in columns.split(",")) for row in range(rows)]
    path.write_text("\n".join([columns, *lines]) + "\n")
    return path


def done(finished: Finished) -> Finished:
    assert finished.returncode == 0, finished.text
    return finished


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    write(folder / "t.csv", "a,b,y,w")
    (folder / "config.yaml").write_text(CONFIG.format(here=folder))
    done(train(["--config", folder / "config.yaml", "--output-dir", folder / "run"], launcher="mpirun", np=2))
    return folder


def predicted(here: Path, *words: object, np_: int = 1) -> np.ndarray:
    out = here / "out.npz"
    out.unlink(missing_ok=True)
    done(train(["predict", *words, "--out", out], launcher="mpirun" if np_ > 1 else "none", np=np_))
    with np.load(out) as found:
        return np.asarray(found["output"])


def test_predictions_do_not_depend_on_labels_in_the_file(here: Path) -> None:
    """Nor on columns that the training had not."""
    bare = predicted(here, here / "run", "--data", write(here / "q.csv", "a,b"), np_=2)
    assert np.ptp(bare) < 1000
    assert np.allclose(bare, predicted(here, here / "run"))
    assert np.allclose(bare, predicted(here, here / "run", "--data", write(here / "m.csv", "more,y,a,w,b")))


@pytest.mark.exhaustive
def test_predictions_by_a_config_do_not_depend_on_labels_in_the_file(here: Path) -> None:
    """Which, unlike that of the run, does not name the inputs."""
    words = ["--config", here / "config.yaml", "--checkpoint", here / "run", "--data"]
    bare = predicted(here, *words, write(here / "q.csv", "a,b"))
    assert np.allclose(bare, predicted(here, *words, here / "t.csv"))


def test_an_evaluation_during_training_gets_the_inputs_of_training(here: Path) -> None:
    """Its table has a column more, which is no input for that; the records are the same."""
    more = write(here / "more.csv", "more,a,b,y,w")
    words = ["--config", here / "config.yaml", f"data.eval={more}", "--output-dir", here / "again"]
    done(train(words, launcher="mpirun", np=2))
    found, expected = ([row["loss"] for row in metrics_of(here / name, "eval")] for name in ("again", "run"))
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_number_that_is_none_is_named_with_its_record(here: Path) -> None:
    columns: dict[str, Any] = {name: np.arange(40, dtype=np.float32) for name in "abyw"}
    columns["a"][7] = np.nan
    np.savez(here / "n.npz", **columns)
    words = ["--config", here / "config.yaml", f"data.train={here}/n.npz", "--output-dir", here / "nan"]
    finished = train(words, launcher="mpirun", np=2)
    assert finished.returncode == 1, finished.text
    said = f"because of a record: {here}/n.npz: record 7: an input is not finite. Nothing of the step has been saved."
    (line,) = [line for line in finished.stderr.splitlines() if "Model diverged" in line]
    assert said in line
    assert "base_lr" not in line


def test_a_label_without_an_output_ends_a_run_in_one_line(here: Path) -> None:
    words = ["--config", here / "config.yaml", "loss=sparse_categorical_crossentropy", "--output-dir", here / "labels"]
    finished = train(words, launcher="mpirun", np=2)
    assert finished.returncode == 2, finished.text
    lines = [line for line in finished.stderr.splitlines() if "data.targets: " in line]
    assert 1 <= len(lines) <= 2  # each rank has such records
    for line in lines:
        assert "has the label 10" in line  # one of 1000 to 1039, whichever TensorFlow sees first
        assert "the model has outputs for labels from 0 to 0. Build the model with more outputs, or correct" in line
    assert "Traceback" not in finished.text
