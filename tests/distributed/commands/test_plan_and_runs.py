"""What `plan` foretells, against a run that took place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROJECT, metrics_of, summary_of, train

from horovod_train.config.loader import load
from horovod_train.config.settings import Spec
from horovod_train.models import build_model
from horovod_train.optim.schedules import Horizon, build_formula

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def planned_and_done(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> tuple[dict[str, Any], dict, Path]:
    """The plan of a run, the plan once it is over, and its directory."""
    run_dir = tmp_path_factory.mktemp("plan") / "run"
    words = ["--config", PROJECT / "configs/digits_convnet.yaml", f"data.train={digits}/train", "train.max_steps=30"]
    words += [f"data.eval={digits}/eval", "checkpoint.every_steps=8", "checkpoint.keep=100", "train.epochs=2"]
    words += ["checkpoint.every_epochs=1", "eval.every_epochs=2", "--output-dir", run_dir]
    before = train(["plan", *words, "--json"])
    assert before.returncode == 0, before.text
    finished = train(words)
    assert finished.returncode == 0, finished.text
    after = train(["plan", *words, "--json", "--fast"])
    return json.loads(before.stdout), json.loads(after.stdout), run_dir


def test_steps_and_checkpoints_are_as_planned(planned_and_done: tuple[dict, dict, Path]) -> None:
    plan, _, run_dir = planned_and_done
    assert plan["steps"]["total"] == summary_of(run_dir)["steps"] == 30
    assert plan["checkpoints"]["count"] == len(list((run_dir / "checkpoints").glob("step-*")))


def test_learning_rate_is_as_planned(planned_and_done: tuple[dict, dict, Path]) -> None:
    plan, _, run_dir = planned_and_done
    (logged,) = [row for row in metrics_of(run_dir, "train") if row["step"] == 30]
    config, _ = load([str(run_dir / "config.yaml")])
    rate = build_formula(config.lr_schedule, Horizon(64, 23, 30))
    # What is logged after 30 steps is the rate of the step that would come next.
    assert logged["learning_rate"] == pytest.approx(float(rate(np.float64(30), np)), rel=1e-5, abs=1e-9)
    assert plan["learning_rate"][-1] == {"step": 29, "epoch": 29 / 23, "rate": pytest.approx(float(rate(29.0, np)))}


def test_sizes_are_as_planned(planned_and_done: tuple[dict, dict, Path]) -> None:
    before, after, run_dir = planned_and_done
    (folder,) = (run_dir / "checkpoints").glob("step-*30")
    written = sum(path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json")
    assert before["checkpoints"]["bytes_each"] == pytest.approx(written, rel=1e-3)
    assert after["checkpoints"]["bytes_each"] == written  # --fast: from the checkpoint
    assert before["memory_per_rank"]["parameters"] == build_model(Spec("convnet")).count_params()


def test_a_run_that_is_done_is_said_to_be(planned_and_done: tuple[dict, dict, Path]) -> None:
    before, after, run_dir = planned_and_done
    assert before["resume"] is None
    newest = run_dir / "checkpoints" / "step-000000030"
    assert after["resume"] == {"path": str(newest), "step": 30, "ranks": 1, "steps_left": 0}
    assert any("nothing left to train" in note for note in after["notes"])
