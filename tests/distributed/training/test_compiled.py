"""A compiled model brings its loss, metrics and optimizer; what the config names wins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import yaml
from conftest import Finished, metrics_of, train
from test_weights import BATCH, EPOCHS, EVAL, PER_STEP, TRAIN, means_so_far
from user_models import compiled_pair, compiled_vector

Start = Callable[..., Finished]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with records, a config without loss, metrics and optimizer, and a file with a compiled model."""
    folder = tmp_path_factory.mktemp("compiled")
    for name, arrays in {"train": TRAIN, "eval": EVAL}.items():
        np.savez(folder / f"{name}.npz", **arrays._asdict())
    # prepare shuffles the records of --file, and keeps those of --eval-file in the order in which `fit` sees them.
    words = ["--file", folder / "eval.npz", "--eval-file", folder / "train.npz", "--inputs", "x"]
    made = train(["prepare", "npz", *words, "--targets", "y", "importance", "--out", folder / "data"])
    assert made.returncode == 0, made.text
    paths = {"train": str(folder / "data/eval"), "eval": str(folder / "data/train")}
    config = {
        "data": {**paths, "targets": "y", "global_batch_size": BATCH, "shuffle": False},
        "train": {"epochs": EPOCHS},
        "log": {"tensorboard": False},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    keras.utils.set_random_seed(1)
    compiled_vector().save(folder / "whole.keras")
    return folder


@pytest.fixture
def start(here: Path, tmp_path: Path) -> Start:
    def start_run(words: list[Any], np_: int = 1, command: tuple[str, ...] = ()) -> Finished:
        launched: dict[str, Any] = {"launcher": "mpirun", "np": np_} if np_ > 1 else {}
        return train([*command, "--config", here / "run.yaml", *words, "--output-dir", tmp_path / "run"], **launched)

    return start_run


def fitted(model: keras.Model, targets: Any, of_eval: Any) -> tuple[list[float], dict[str, float]]:
    """The losses of `fit` after each step, as it shows them, and what `evaluate` returns."""
    losses: list[float] = []
    noted = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    model.fit(TRAIN.x, targets, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[noted])
    return losses, model.evaluate(EVAL.x, of_eval, batch_size=len(EVAL.x), verbose=0, return_dict=True)


@pytest.mark.parametrize(
    ("model", "np_"),
    [
        pytest.param("user_models:compiled_vector", 3, marks=pytest.mark.exhaustive),
        pytest.param("{here}/whole.keras", 2, marks=pytest.mark.long),
    ],
)
def test_a_compiled_model_trains_as_fit_does(start: Start, here: Path, tmp_path: Path, model: str, np_: int) -> None:
    """Its loss, momentum, rate and metrics; from a function, and from a file that brings its weights too."""
    finished = start([f"model={model.format(here=here)}", *PER_STEP], np_)
    assert finished.returncode == 0, finished.text
    for part in ("loss", "metrics", "weighted_metrics", "optimizer"):
        assert f"{part}: as the model was compiled" in finished.stdout
    keras.utils.set_random_seed(1)
    losses, evaluation = fitted(compiled_vector(), TRAIN.y, EVAL.y)
    rows = metrics_of(tmp_path / "run", "train")
    assert list(means_so_far([row["loss"] for row in rows])) == pytest.approx(losses, abs=1e-6)
    found = metrics_of(tmp_path / "run", "eval")[-1]
    assert found["weighted_accuracy"] == found["accuracy"]
    assert {name: found[name] for name in ("loss", "accuracy")} == pytest.approx(
        {name: evaluation[name] for name in ("loss", "accuracy")}, abs=1e-6
    )


@pytest.mark.long
def test_losses_of_outputs_with_their_weights_are_those_of_fit(start: Start, tmp_path: Path) -> None:
    finished = start(["model=user_models:compiled_pair", "data.targets=[y, importance]", *PER_STEP], 2)
    assert finished.returncode == 0, finished.text
    keras.utils.set_random_seed(1)
    targets, of_eval = ({"y": each.y, "importance": each.importance[:, None]} for each in (TRAIN, EVAL))
    losses, evaluation = fitted(compiled_pair(), targets, of_eval)
    rows = metrics_of(tmp_path / "run", "train")
    assert list(means_so_far([row["loss"] for row in rows])) == pytest.approx(losses, abs=1e-6)
    found = metrics_of(tmp_path / "run", "eval")[-1]
    names = ("loss", "y_loss", "importance_loss", "y_accuracy", "importance_mean_absolute_error")
    assert {name: found[name] for name in names} == pytest.approx({n: evaluation[n] for n in names}, abs=1e-6)


@pytest.mark.long
def test_what_the_config_names_wins_and_the_log_says_so(start: Start, tmp_path: Path) -> None:
    """The optimizer is replaced; the loss stays, with weights of classes that the config adds; the rate too."""
    words = ["model=user_models:compiled_vector", "train.max_steps=1", *PER_STEP]
    finished = start([*words, "optimizer=adam", "loss.class_weight={0: 2}", "metrics=sparse_categorical_accuracy"])
    assert finished.returncode == 0, finished.text
    assert "loss: as the model was compiled" in finished.stdout
    assert "optimizer: of the config, not as the model was compiled" in finished.stdout
    assert "\nmetrics: of the config, not as the model was compiled" in finished.stdout
    assert metrics_of(tmp_path / "run", "train")[0]["learning_rate"] == pytest.approx(0.001)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ([], 0.3),
        pytest.param(["lr_schedule.base_lr=0.2"], 0.2, marks=pytest.mark.exhaustive),
        (["lr_schedule.warmup_epochs=1"], 0.15),
    ],
)
def test_the_rate_is_the_compiled_one_until_the_config_says_another(
    start: Start, tmp_path: Path, words: list[str], rate: float
) -> None:
    """Warm-up over an epoch of 4 steps rises to the compiled rate: after the first step it stands at the second's."""
    finished = start(["model=user_models:compiled_vector", "train.max_steps=1", *PER_STEP, *words])
    assert finished.returncode == 0, finished.text
    assert metrics_of(tmp_path / "run", "train")[0]["learning_rate"] == pytest.approx(rate)


@pytest.mark.long
def test_a_trained_one_is_evaluated_and_exported_and_planned(start: Start, here: Path, tmp_path: Path) -> None:
    planned = start(["model=user_models:compiled_vector"], command=("plan",))
    assert planned.returncode == 0, planned.text
    said = " ".join(planned.stdout.split())
    assert "learning rate as the compiled optimizer says" in said
    assert "compiled loss: as the model was compiled; metrics: as the model was compiled" in said
    finished = start([f"model={here}/whole.keras", "train.max_steps=2"])
    assert f"starting from {here}/whole.keras" in finished.stdout.splitlines()
    assert finished.returncode == 0, finished.text
    evaluated = train(["evaluate", tmp_path / "run", "--out", tmp_path / "figures.json"])
    assert evaluated.returncode == 0, evaluated.text
    figures, row = yaml.safe_load((tmp_path / "figures.json").read_text()), metrics_of(tmp_path / "run", "eval")[-1]
    assert (figures["loss"], figures["accuracy"]) == pytest.approx((row["loss"], row["accuracy"]), abs=1e-7)
    exported = train(["export", tmp_path / "run", "--out", tmp_path / "plain.keras"])
    assert exported.returncode == 0, exported.text
    assert not keras.saving.load_model(tmp_path / "plain.keras").compiled


WRONG = {
    "a compile of its own": (["model=user_models:compiled_its_way"], "compiled by a compile() of its own"),
    "options of no optimizer": (["optimizer.options.momentum=0.9"], "the model is compiled with an optimizer; give"),
    "averages twice": (
        ["model.options={use_ema: true}", "train.ema_decay=0.9"],
        "train.ema_decay: the optimizer keeps averages itself (use_ema); leave out one of the two.",
    ),
    "warm-up to a schedule": (
        ["model.options={schedule: true}", "lr_schedule.warmup_epochs=1"],
        "lr_schedule.base_lr: is required with other settings of lr_schedule, because the model's optimizer is",
    ),
    "another precision": (
        ["model={here}/whole.keras", "precision=mixed_bfloat16"],
        "precision: mixed_bfloat16, but the model is made of layers in float32; write precision: float32.",
    ),
    "no file": (["model={here}/no.keras"], "no.keras: cannot be loaded: File not found"),
    "options of a file": (
        ["model={{name: {here}/whole.keras, options: {{hidden: 3}}}}"],
        "whole.keras is a file, which takes no options; received {'hidden': 3}.",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_taken_over_is_one_line(start: Start, here: Path, name: str) -> None:
    words, expected = WRONG[name]
    words = [word.format(here=here) if "{here}" in word else word for word in words]
    finished = start(["model=user_models:compiled_vector", *words])
    assert finished.returncode == 2, finished.text
    (line,) = finished.stderr.splitlines()
    assert expected in line
