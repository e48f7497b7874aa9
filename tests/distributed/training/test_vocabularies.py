"""What layers hold besides weights: of another vocabulary of data.preprocess no run goes on; means are the run's."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from conftest import rank_environment, train

pytestmark = pytest.mark.long

PARTS = """
import os
from pathlib import Path

import keras

own = Path(f"words-{os.environ.get('OMPI_COMM_WORLD_RANK')}.txt")
words = (own if own.exists() else Path("words.txt")).read_text().split()
vectorize = keras.layers.TextVectorization(vocabulary=words, output_sequence_length=4)


def numbers(texts):
    return vectorize(texts)


def build():
    model = keras.Sequential([keras.Input((4,), dtype="int64"), keras.layers.Embedding(8, 4)])
    model.add(keras.layers.GlobalAveragePooling1D())
    model.add(keras.layers.Dense(1))
    return model
"""

CONFIG = """
data: {train: t.csv, eval: t.csv, inputs: text, targets: liked, global_batch_size: 8, preprocess: "parts:numbers"}
model: parts:build
loss: {name: binary_crossentropy, options: {from_logits: true}}
lr_schedule: {base_lr: 0.1}
train: {epochs: 1}
log: {tensorboard: false}
"""


def test_of_other_words_nothing_is_trained_evaluated_predicted_or_exported(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "t.csv").write_text("text,liked\n" + "a good film,1\nbad film,0\n" * 8)
    (tmp_path / "words.txt").write_text("good bad film")
    (tmp_path / "words-1.txt").write_text("bad good film")
    resumed = ["--config", "c.yaml", "--output-dir", "run", "train.epochs=2"]
    run = partial(train, cwd=tmp_path, environment=rank_environment())
    table = "table lookup_table of vectorize in data.preprocess parts:numbers"
    apart = run(["--config", "c.yaml", "--output-dir", "run"], launcher="mpirun", np=2)
    assert apart.returncode == 2, apart.text
    assert f"ranks disagree at the start on {table}" in apart.text
    assert not (tmp_path / "run" / "checkpoints").exists()
    trained = run(["--config", "c.yaml", "--output-dir", "run"])
    assert trained.returncode == 0, trained.text
    apart = run(["evaluate", "run"], launcher="mpirun", np=2)
    assert f"ranks disagree at the start on {table}" in apart.text
    (tmp_path / "words.txt").write_text("bad good film")
    for words in (resumed, ["evaluate", "run"], ["predict", "run", "--out", "p.npz"], ["export", "run", "--out", "m"]):
        refused = run(words)
        assert refused.returncode == 2, refused.text
        assert table in refused.text
        assert "so weights would stand for other words" in refused.text
    (tmp_path / "words.txt").write_text("good bad film")
    assert run(resumed).returncode == 0


SCALED = """
from pathlib import Path

import keras
import numpy as np


def build():
    scale = keras.layers.Normalization()
    scale.adapt(np.array([[0.0], [float(Path("scale.txt").read_text())]], np.float32))
    return keras.Sequential([keras.Input((1,)), scale, keras.layers.Dense(1)])
"""


def test_an_evaluation_normalises_as_the_run_did_on_all_ranks(tmp_path: Path) -> None:
    """Though the model that is built now would not: means are derived from weights that rank 0 alone reads."""
    (tmp_path / "scaled.py").write_text(SCALED)
    (tmp_path / "t.csv").write_text("x,y\n" + "1,2\n3,4\n" * 8)
    (tmp_path / "scale.txt").write_text("2")
    run = partial(train, cwd=tmp_path, environment=rank_environment())
    words = ["data={train: t.csv, eval: t.csv, inputs: x, targets: y, global_batch_size: 8}", "model=scaled:build"]
    words += ["loss=mean_squared_error", "train.epochs=1", "log.tensorboard=false", "lr_schedule.base_lr=0.01"]
    (tmp_path / "c.yaml").write_text("seed: 1\n")
    assert run(["--config", "c.yaml", *words, "--output-dir", "run"]).returncode == 0
    (tmp_path / "scale.txt").write_text("200")
    alone, together = run(["evaluate", "run"]), run(["evaluate", "run"], launcher="mpirun", np=2)
    assert (alone.returncode, together.returncode) == (0, 0), together.text
    loss, same = (float(re.findall(r"loss\D+([\d.e-]+)", each.stdout)[-1]) for each in (alone, together))
    assert same == pytest.approx(loss, rel=1e-5)
