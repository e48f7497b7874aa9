"""Masks: N ranks, whose records are of very different lengths, train as Keras' `fit` does in one process."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import yaml
from conftest import metrics_of, train
from user_models import tagger

RECORDS, BATCH, LENGTH = 48, 8, 6


pytestmark = pytest.mark.long  # one more of what test_differential.py holds against fit


def table(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [records, 6] and their tags. In each batch of 8 every second record has one token and the others six."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 9, (RECORDS, LENGTH))
    tokens[: RECORDS // 2, 1:] = 0
    tokens = tokens.reshape(2, RECORDS // 2, LENGTH).swapaxes(0, 1).reshape(RECORDS, LENGTH)
    return tokens, np.where(tokens > 0, tokens % 3, 0)


TRAIN, EVAL = table(1), table(2)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masks")
    for name, (x, y) in {"train": TRAIN, "eval": EVAL}.items():
        np.savez(folder / f"{name}.npz", x=x, y=y)
    # prepare shuffles the records of --file, and keeps those of --eval-file in the order in which `fit` sees them.
    words = ["--file", folder / "eval.npz", "--eval-file", folder / "train.npz", "--inputs", "x", "--targets", "y"]
    prepared = train(["prepare", "npz", *words, "--out", folder / "data"])
    assert prepared.returncode == 0, prepared.text
    paths = {"train": str(folder / "data/eval"), "eval": str(folder / "data/train")}
    config = {
        "data": {**paths, "global_batch_size": BATCH, "shuffle": False},
        "train": {"epochs": 1, "steps_per_call": 1},
        "log": {"tensorboard": False, "every_steps": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.mark.parametrize(
    ("ignore_class", "words", "np_"),
    [
        (None, ["train.accumulate_steps=2"], 2),
        pytest.param(None, ["log.tensorboard=true", "log.histograms_every_steps=2"], 3, marks=pytest.mark.long),
        (0, [], 2),
        pytest.param(0, ["jit_compile=true"], 2, marks=pytest.mark.long),
    ],
)
def test_ranks_train_as_fit_does(
    here: Path, tmp_path: Path, ignore_class: int | None, words: list[str], np_: int
) -> None:
    model = f"model={{name: user_models:tagger, options: {{ignore_class: {'null' if ignore_class is None else 0}}}}}"
    # What is masked is counted batch by batch, in Keras too, and prepare has shuffled the records of the evaluation.
    together = f"eval.batch_size_per_rank={RECORDS // np_}"
    started = ["--config", here / "run.yaml", model, *words, together, "--output-dir", tmp_path / "run"]
    finished = train(started, launcher="mpirun", np=np_)
    assert finished.returncode == 0, finished.text
    keras.utils.set_random_seed(1)
    fitted, losses, of_halves = tagger(ignore_class), [], []
    for first in range(0, RECORDS, BATCH):
        x, y = (array[first : first + BATCH] for array in TRAIN)
        of_halves.append(float(np.mean([fitted.loss(y[i::2], fitted(x[i::2])) for i in range(2)])))
        losses.append(float(fitted.train_on_batch(x, y, return_dict=True)["loss"]))
        fitted.reset_metrics()
    rows = metrics_of(tmp_path / "run", "train")
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5)
    # A mean of the ranks' own means would be another number.
    assert np.abs(np.subtract(of_halves, losses)).max() > 0.01
    row = metrics_of(tmp_path / "run", "eval")[-1]
    expected = fitted.evaluate(*EVAL, batch_size=RECORDS, verbose=0, return_dict=True)
    assert {name: row[name] for name in ("loss", "accuracy")} == pytest.approx(expected, abs=1e-5)
