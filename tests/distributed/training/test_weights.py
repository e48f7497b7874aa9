"""Weights of records and classes: N ranks compute what Keras' `fit` computes in one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import yaml
from conftest import Finished, metrics_of, train
from user_models import vector

RECORDS, BATCH, EPOCHS = 50, 16, 2  # the last step of an epoch has 2 records, so that one of 3 ranks has none
CLASS_WEIGHT = {0: 2.5, 2: 0.25}
LOSS = {"name": "sparse_categorical_crossentropy", "options": {"from_logits": True}}
ACCURACY = "sparse_categorical_accuracy"
PER_STEP = ["log.every_steps=1", "train.steps_per_call=1"]

WEIGHTS: dict[str, list[str]] = {
    "sample": ["data.weight=importance"],
    "class": [f"loss.class_weight={CLASS_WEIGHT}"],
    "both": ["data.weight=importance", f"loss.class_weight={CLASS_WEIGHT}"],
}


class Table(NamedTuple):
    """The arrays of some records."""

    x: np.ndarray
    y: np.ndarray
    importance: np.ndarray


def table(seed: int, records: int) -> Table:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(records, 6)).astype(np.float32)
    importance = rng.gamma(0.5, 2.0, size=records).astype(np.float32)
    importance[::7] = 0.0
    return Table(x, (np.abs(x.sum(axis=1)) % 3).astype(np.int64), importance)


TRAIN, EVAL = table(1, RECORDS), table(2, 21)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the records, and run.yaml that trains on them."""
    folder = tmp_path_factory.mktemp("weights")
    for name, arrays in {"train": TRAIN, "eval": EVAL}.items():
        np.savez(folder / f"{name}.npz", **arrays._asdict())
    # prepare shuffles the records of --file, and keeps those of --eval-file in the order in which `fit` sees them.
    words = ["--file", folder / "eval.npz", "--eval-file", folder / "train.npz", "--inputs", "x"]
    made = train(["prepare", "npz", *words, "--targets", "y", "importance", "--out", folder / "data"])
    assert made.returncode == 0, made.text
    paths = {"train": str(folder / "data/eval"), "eval": str(folder / "data/train")}
    config = {
        "data": {**paths, "targets": "y", "global_batch_size": BATCH, "shuffle": False},
        "model": "user_models:vector",
        "loss": LOSS,
        "metrics": [{"name": ACCURACY, "options": {"name": "accuracy"}}],
        "weighted_metrics": [{"name": ACCURACY, "options": {"name": "weighted_accuracy"}}],
        "lr_schedule": {"base_lr": 0.3},
        "train": {"epochs": EPOCHS},
        "log": {"tensorboard": False},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


Start = Callable[..., Finished]


@pytest.fixture
def start(here: Path, tmp_path: Path) -> Start:
    def start_run(words: list[str], np_: int = 1) -> Finished:
        launched: dict[str, Any] = {"launcher": "mpirun", "np": np_} if np_ > 1 else {}
        return train(["--config", here / "run.yaml", *words, "--output-dir", tmp_path / "run"], **launched)

    return start_run


class Fitted(NamedTuple):
    """What Keras computes in one process."""

    losses: list[float]
    """Of each step, as `fit` shows it: the mean over the epoch so far."""
    evaluation: dict[str, float]


def fit(weighted: str, reduction: str = "sum_over_batch_size") -> Fitted:
    keras.utils.set_random_seed(1)
    model = vector()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    accuracy = [keras.metrics.SparseCategoricalAccuracy(name=name) for name in ("accuracy", "weighted_accuracy")]
    model.compile(keras.optimizers.SGD(0.3), loss, metrics=accuracy[:1], weighted_metrics=accuracy[1:])
    losses: list[float] = []
    noted = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    own, class_weight = sample_weights(TRAIN, weighted), CLASS_WEIGHT if weighted == "class" else None
    model.fit(
        *TRAIN[:2],
        sample_weight=None if weighted == "class" else own,  # Keras refuses both
        class_weight=class_weight,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[noted],
    )
    of_eval = None if weighted == "class" else EVAL.importance  # `evaluate` knows no weights of classes
    return Fitted(losses, model.evaluate(*EVAL[:2], sample_weight=of_eval, batch_size=21, verbose=0, return_dict=True))


def sample_weights(arrays: Table, weighted: str) -> np.ndarray:
    by_class = np.array([CLASS_WEIGHT.get(label, 1.0) for label in arrays.y.tolist()], np.float32)
    of_records = arrays.importance if weighted != "class" else np.ones_like(by_class)
    return of_records * by_class if weighted != "sample" else of_records


def means_so_far(losses: list[float]) -> Iterator[float]:
    """As `fit` shows losses: within an epoch, the mean of the steps' losses by their records."""
    counts = [min(BATCH, RECORDS - first) for first in range(0, RECORDS, BATCH)]
    for epoch in range(EPOCHS):
        own = losses[epoch * len(counts) : (epoch + 1) * len(counts)]
        for step in range(1, len(counts) + 1):
            yield float(np.average(own[:step], weights=counts[:step]))


@pytest.mark.parametrize(
    ("weighted", "np_"),
    [pytest.param("both", 3, marks=pytest.mark.long), pytest.param("class", 2, marks=pytest.mark.exhaustive)],
)
def test_a_weighted_run_is_that_of_fit_in_one_process(start: Start, tmp_path: Path, weighted: str, np_: int) -> None:
    finished = start([*WEIGHTS[weighted], *PER_STEP], np_)
    assert finished.returncode == 0, finished.text
    expected = fit(weighted)
    rows = metrics_of(tmp_path / "run", "train")
    assert list(means_so_far([row["loss"] for row in rows])) == pytest.approx(expected.losses, abs=1e-6)
    found = metrics_of(tmp_path / "run", "eval")[-1]
    assert {name: found[name] for name in expected.evaluation} == pytest.approx(expected.evaluation, abs=1e-6)
    if weighted != "class":
        assert found["accuracy"] != pytest.approx(found["weighted_accuracy"], abs=1e-3)


@pytest.mark.long
def test_the_loss_is_divided_by_records_unless_its_reduction_says_otherwise(start: Start, tmp_path: Path) -> None:
    """In Keras too; and the comparisons above can fail."""
    by_records, by_weights = fit("both"), fit("both", "mean_with_sample_weight")
    assert by_records.losses[0] != pytest.approx(by_weights.losses[0], abs=1e-3)
    own = sample_weights(Table(*(array[:BATCH] for array in TRAIN)), "both")
    assert by_records.losses[0] == pytest.approx(by_weights.losses[0] * own.mean(), rel=1e-5)
    words = [*WEIGHTS["both"], *PER_STEP, "loss.options.reduction=mean_with_sample_weight"]
    finished = start(words, 2)
    assert finished.returncode == 0, finished.text
    rows = metrics_of(tmp_path / "run", "train")
    assert list(means_so_far([row["loss"] for row in rows])) == pytest.approx(by_weights.losses, abs=1e-6)


@pytest.mark.long
def test_evaluate_weights_as_the_run_did_and_predict_needs_no_weights(start: Start, tmp_path: Path) -> None:
    finished = start(WEIGHTS["both"])
    assert finished.returncode == 0, finished.text
    in_the_run = metrics_of(tmp_path / "run", "eval")[-1]
    evaluated = train(["evaluate", tmp_path / "run", "--out", tmp_path / "figures.json"])
    assert evaluated.returncode == 0, evaluated.text
    figures = yaml.safe_load((tmp_path / "figures.json").read_text())
    for name in ("loss", "accuracy", "weighted_accuracy"):
        assert figures[name] == pytest.approx(in_the_run[name], abs=1e-7)
    bare = tmp_path / "bare"
    np.savez(tmp_path / "bare.npz", x=EVAL.x)
    words = ["--file", tmp_path / "bare.npz", "--inputs", "x", "--eval-fraction", "0.5", "--out", bare]
    assert train(["prepare", "npz", *words]).returncode == 0
    predicted = train(["predict", tmp_path / "run", "--data", bare / "eval", "--out", tmp_path / "out.npz"])
    assert predicted.returncode == 0, predicted.text


WRONG = {
    "no such feature": (["data.weight=weight"], "data.weight: there is no feature weight; there are x, y, importance."),
    "several numbers": (
        ["data.weight=x"],
        "data.weight: expected one number a record, shape []; feature x is float32[",
    ),
    "no class": (
        ["loss.class_weight={rare: 2}"],
        "loss.class_weight: expected classes, which are integers from 0 on; received 'rare'.",
    ),
    "negative": (
        ["loss.class_weight={1: -2}"],
        "loss.class_weight: expected a weight of 0 or more for class 1; received -2.",
    ),
    "no number": (["loss.class_weight.1=much"], "expected a weight of 0 or more for class 1; received 'much'."),
    "no mapping": (["loss.class_weight=2"], "loss.class_weight: expected a mapping of its keys; received 2."),
    "not of an output": (
        ["loss={name: per_output, options: {a: mse}, class_weight: {1: 2}}"],
        "loss.class_weight: with per_output give it to an output: loss.options.OUTPUT.class_weight.",
    ),
    "weighted by nothing": (
        [],
        "weighted_metrics: needs data.weight or a class_weight of the loss; without one, write metrics.",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights_are_one_line(start: Start, name: str) -> None:
    words, expected = WRONG[name]
    unweighted = [] if name == "weighted by nothing" else ["weighted_metrics=[]"]
    finished = start([*unweighted, *words])
    assert finished.returncode == 2, finished.text
    (line,) = finished.stderr.splitlines()
    assert expected in line


@pytest.mark.long
def test_a_record_with_a_negative_weight_is_named_or_left_out(start: Start, here: Path, tmp_path: Path) -> None:
    """The weight may be scaled: x and importance − 1 are negative in some records."""
    data = yaml.safe_load((here / "data" / "dataset.json").read_text())["features"]
    data["importance"]["offset"] = -0.01
    words = ["data.weight=importance", "weighted_metrics=[]", f"data.features={data}", "data.inputs=x"]
    finished = start(words, 2)
    assert finished.returncode == 2, finished.text
    # Whichever of them a rank finds first.
    named = r"record \d+ .*feature importance: expected a weight of 0 or more; it is -[\d.e-]+ Read by rank \d of 2"
    assert re.search(named, finished.stderr), finished.text
    # Shuffled, so that a record is on another rank in the second epoch.
    finished = start([*words, "data.on_bad_record=skip", "data.shuffle=true"], 2)
    assert finished.returncode == 0, finished.text
    left_out = int(np.sum(TRAIN.importance < 0.01))
    assert metrics_of(tmp_path / "run", "train")[-1]["skipped_records"] == left_out > 0


@pytest.mark.long
def test_plan_and_the_printed_config_show_the_weights(here: Path, tmp_path: Path) -> None:
    words = ["--config", here / "run.yaml", *WEIGHTS["both"], "--output-dir", tmp_path / "run"]
    planned = train(["plan", *words])
    assert planned.returncode == 0, planned.text
    assert "x → y, weighted by importance" in planned.stdout
    assert "class 0: 2.5, class 2: 0.25, others: 1" in planned.stdout
    printed = train([*words, "--print-config"])
    assert printed.returncode == 0, printed.text
    shown = yaml.safe_load(printed.stdout)
    assert shown["data"]["weight"] == "importance"
    assert shown["loss"]["class_weight"] == {"0": 2.5, "2": 0.25}
