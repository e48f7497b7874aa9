"""The example configs, run on two ranks as their heads say; shorter, on the same kinds of records."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import PROJECT, Finished, metrics_of, summary_of, train

CONFIGS = PROJECT / "configs"


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "mlp_samples"
    assert train(["prepare", "mlp-samples", "--out", folder, "--records", "2000"]).returncode == 0
    return folder


Start = Callable[..., tuple[Path, Finished]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """(data, configs, *overrides) → run directory and process, on two ranks."""

    def started(data: Path, names: str, *overrides: str, name: str = "run", np: int = 2) -> tuple[Path, Finished]:
        files = [CONFIGS / f"{name}.yaml" for name in names.split()]
        places = [f"data.train={data / 'train'}", f"data.eval={data / 'eval'}"]
        words = ["--config", *files, *places, *overrides, "--output-dir", tmp_path / name]
        finished = train(words, launcher="horovodrun", np=np)
        assert finished.returncode == 0, finished.text
        return tmp_path / name, finished

    return started


def checkpoint(run_dir: Path) -> dict[str, np.ndarray]:
    """All arrays of the newest checkpoint."""
    newest = max(path for path in (run_dir / "checkpoints").iterdir() if path.name.startswith("step-"))
    reader = tf.train.load_checkpoint(str(newest / "state"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def scalars(run_dir: Path, split: str) -> set[str]:
    """The tags of all TensorBoard scalars of a split."""
    events = [event for path in (run_dir / "tensorboard" / split).iterdir() for event in _events(path)]
    return {value.tag for event in events for value in event.summary.value}


def _events(path: Path) -> list[Any]:
    records = tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
    return [tf.compat.v1.Event.FromString(record) for record in records]


@pytest.mark.long
def test_mlp_synchronous_logs_steps_speed_and_devices_and_learns(start: Start, samples: Path) -> None:
    run_dir, finished = start(samples, "mlp_synchronous", "train.epochs=20", "device.log_placement=true")
    rows = metrics_of(run_dir, "train")
    assert [row["step"] for row in rows] == [100, 200]
    assert {"loss", "examples_per_s", "s_per_step"} <= {*rows[-1]}
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert summary_of(run_dir)["config"]["data"]["global_batch_size"] == 200  # 100 a rank
    assert finished.stdout.count("uses CPU") == 2
    assert "device:CPU:0" in finished.stdout + finished.stderr  # where each op was placed


@pytest.mark.long
def test_mlp_asynchronous_ranks_part_between_averages_and_learn(start: Start, samples: Path) -> None:
    run_dir, _ = start(samples, "mlp_synchronous mlp_asynchronous", "train.epochs=20")
    rows = metrics_of(run_dir, "train")
    assert all(row["ranks_apart"] > 0 for row in rows)
    assert all(row["unchanged_parameters"] == 0 for row in rows)
    tables = [json.loads(line) for line in (run_dir / "parameters.jsonl").read_text().splitlines()]
    assert [table["step"] for table in tables] == [row["step"] for row in rows]
    for table in tables:
        assert {*table["parameters"]} == {"hidden1/kernel", "hidden1/bias", "out_layer/kernel", "out_layer/bias"}
        for moves in table["parameters"].values():
            assert len(moves["changed"]) == len(moves["apart"]) == 2
            assert all(moves["changed"]), "each rank changes each parameter by itself"
            assert moves["changed"][0] != moves["changed"][1]
            assert all(apart > 0 for apart in moves["apart"])
    assert {f"apart/{path}" for path in tables[0]["parameters"]} <= scalars(run_dir, "train")
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.exhaustive  # see test_steps and test_guards
def test_mlp_synchronous_learns_from_the_gradients_of_the_step_before(start: Start, samples: Path) -> None:
    late = ["train.epochs=20", "train.synchronization=stale", "checkpoint.every_epochs=10"]
    stale, _ = start(samples, "mlp_synchronous", *late)
    assert metrics_of(stale, "train")[-1]["loss"] < metrics_of(stale, "train")[0]["loss"]
    assert np.any(checkpoint(stale)["exchange/pending/hidden1/kernel"])


@pytest.mark.exhaustive
def test_digits_mlp_decays_in_stairs_and_evaluates_moving_averages_which_are_better(start: Start, digits: Path) -> None:
    """With ten records a step, so that the weights are noisy: 96.9 % instead of 93.9 % at step 400."""
    noisy = ["data.global_batch_size=10", "train.max_steps=400", "eval.every_steps=200", "checkpoint.every_steps=400"]
    run_dir, _ = start(digits, "mnist_mlp digits_mlp", *noisy)
    rows = metrics_of(run_dir, "train")
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.2 * 0.99**epoch for epoch in (0, 1, 2, 2)])
    evaluated = train(["evaluate", run_dir, "--weights", "trained", "--out", run_dir / "trained.json"])
    assert evaluated.returncode == 0, evaluated.text
    trained = json.loads((run_dir / "trained.json").read_text())
    assert metrics_of(run_dir, "eval")[-1]["loss"] < 0.8 * trained["loss"]
    saved = checkpoint(run_dir)
    assert np.abs(saved["ema/layer1/kernel"] - saved["model/layer1/kernel"]).max() > 1e-3


@pytest.mark.exhaustive  # see test_plan_and_runs
def test_digits_convnet_plain_ends_with_its_epochs_and_charts_the_loss_and_its_average(
    start: Start, digits: Path
) -> None:
    run_dir, finished = start(
        digits, "digits_convnet_plain", "train.epochs=1", "log.every_steps=11", "eval.every_epochs=1"
    )
    assert finished.stdout.count("Done training for 1 epoch, 23 steps") == 1
    assert {"loss", "loss_average", "examples_per_s", "s_per_step"} <= scalars(run_dir, "train")
    rows = metrics_of(run_dir, "train")
    assert rows[-1]["loss_average"] < rows[0]["loss"]
