"""`plan` and the checkpoint to resume from: the one that the run would take, and what follows from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_records import make_images

from horovod_train.checkpoint.layout import CHECKPOINTS, Facts
from horovod_train.checkpoint.manager import CheckpointStore
from horovod_train.checkpoint.tensors import write
from horovod_train.commands.plan import find_resume
from horovod_train.config.settings import CheckpointConfig, Config
from horovod_train.errors import UserError
from horovod_train.main import main


def save(run_dir: Path, step: int, name: str = "", *, config: dict[str, Any] | None = None, began_at: str = "") -> Path:
    folder = run_dir / "checkpoints" / (name or f"step-{step:09d}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    facts = Facts(step, 0, 0, ranks=2, config=config or {}, versions={}, began_at=began_at)
    write(folder, {"w": np.arange(step)}, facts)
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`run`, whose newest checkpoint is damaged, with one set aside and one abandoned; and `other`."""
    save(tmp_path / "run", 5)
    save(tmp_path / "run", 10)
    next(save(tmp_path / "run", 15).glob("state.data*")).write_bytes(b"")
    save(tmp_path / "run", 20, "step-000000020.abandoned")
    save(tmp_path / "run", 25, "step-000000025.damaged")
    save(tmp_path / "other", 3)
    save(tmp_path / "other", 7)
    save(tmp_path / "again", 9, config={"checkpoint": {"resume": "other"}}, began_at="other")
    save(tmp_path / "by-auto", 8, config={"checkpoint": {"resume": "auto"}}, began_at="other")
    next(save(tmp_path / "broken", 4).glob("state.data*")).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def step_or_words(find: Callable[[], Any]) -> str:
    """Which checkpoint is found, by its folder; or the sentence that refuses."""
    try:
        found = find()
    except UserError as error:
        return str(error)
    return "none" if found is None else str(found.folder)


@pytest.mark.parametrize(
    ("run_dir", "resume", "expected"),
    [
        ("run", "auto", "run/checkpoints/step-000000010"),
        ("new", "auto", "none"),
        ("new", "never", "none"),
        ("new", "other", "other/checkpoints/step-000000007"),
        ("new", "other/checkpoints", "other/checkpoints/step-000000007"),
        ("new", "other/checkpoints/step-000000003", "other/checkpoints/step-000000003"),
        ("again", "other", "again/checkpoints/step-000000009"),
        ("again", "./other/", "again/checkpoints/step-000000009"),
        ("by-auto", "other", "by-auto/checkpoints/step-000000008"),
        ("run", "run/checkpoints/step-000000005", "run/checkpoints/step-000000005"),
        ("run", "run/checkpoints/step-000000020.abandoned", "run/checkpoints/step-000000020.abandoned"),
        ("by-auto", "run/checkpoints/step-000000010", "checkpoint.resume: run/checkpoints/step-000000010 is of"),
        ("again", "other/checkpoints", "checkpoint.resume: other/checkpoints is of another run than the"),
        ("run", "never", "checkpoint.resume: never, but run/checkpoints holds checkpoints"),
        ("new", "nowhere", "checkpoint.resume: no checkpoint at nowhere"),
        ("new", "run", "checkpoint.resume: run/checkpoints/step-000000015 is damaged"),
        ("broken", "auto", "checkpoint.resume: auto, but none of the 1 checkpoint(s)"),
    ],
)
def test_plan_takes_the_checkpoint_that_the_run_takes(runs: Path, run_dir: str, resume: str, expected: str) -> None:
    config = Config(output_dir=run_dir, checkpoint=CheckpointConfig(resume=resume))
    planned = step_or_words(lambda: find_resume(config)[0])
    taken = step_or_words(lambda: CheckpointStore(Path(run_dir) / CHECKPOINTS, 3).find(resume))
    assert planned == taken
    assert planned.startswith(expected)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What the command prints, on 70 records."""
    code = main(["plan", "--fast", "--config", "run.yaml", "--json", *words])
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (2 if facts["faults"] else 0)
    return facts


@pytest.fixture
def config_file(runs: Path) -> Path:
    make_images(runs / "data" / "train")
    file = runs / "run.yaml"
    file.write_text("output_dir: run\ndata: {train: data/train, global_batch_size: 16}\ntrain: {epochs: 6}\n")
    return file


def test_the_checkpoint_to_resume_from_is_shown_however_it_is_named(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = plan(capsys)
    assert facts["resume"] == {"path": "run/checkpoints/step-000000010", "step": 10, "ranks": 2, "steps_left": 20}
    assert any("the checkpoint of step 15 is damaged" in note for note in facts["notes"])
    for path, step in (("other", 7), ("other/checkpoints", 7), ("other/checkpoints/step-000000003", 3)):
        assert plan(capsys, "output_dir=new", f"checkpoint.resume={path}")["resume"]["step"] == step


def test_time_is_that_of_the_steps_that_are_left(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """6 epochs of 70 records, of which 2 are done; the command's line at the end of a run that is done."""
    words = ["--examples-per-s", "10", "--time", "20"]
    time = plan(capsys, *words)["time"]
    assert (time["records"], time["seconds"], time["jobs"]) == (280, 28.0, 2)
    assert plan(capsys, "output_dir=new", *words)["time"]["records"] == 420
    assert plan(capsys, "train.epochs=2", *words)["time"]["records"] == 0
    main(["plan", "--fast", "--config", "run.yaml", "train.epochs=2", *words])
    assert "for 0 records, evaluation counted as training; fits into 00:00:20" in capsys.readouterr().out


def test_that_a_run_does_not_begin_at_its_path_again_is_said(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = plan(capsys, "output_dir=by-auto", "checkpoint.resume=other")
    assert facts["resume"]["step"] == 8
    assert any("this run began at other, and resumes from its own newest" in note for note in facts["notes"])
    assert not any("began at" in note for note in plan(capsys, "output_dir=by-auto")["notes"])


def test_a_checkpoint_that_cannot_be_resumed_from_is_one_fault_and_the_figures_are_shown(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = plan(capsys, "checkpoint.resume=never")
    (fault,) = facts["faults"]
    assert "never, but run/checkpoints holds checkpoints" in fault
    assert facts["steps"]["total"] == 30


def test_the_global_batch_of_the_checkpoint_is_kept_at_another_number_of_ranks(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that began with 2 ranks of 8 records."""
    shutil.rmtree("run")
    save(Path("run"), 10, config={"data": {"global_batch_size": 16}})
    words = ["data.global_batch_size=null", "data.batch_size_per_rank=8", "--np", "4"]
    facts = plan(capsys, *words)
    assert (facts["batch"]["global"], facts["steps"]["per_epoch"]) == (16, 5)
    assert "the global batch stays 16; data.batch_size_per_rank 8 would make it 32 here" in facts["notes"]
    assert plan(capsys, "output_dir=new", *words)["batch"]["global"] == 32
