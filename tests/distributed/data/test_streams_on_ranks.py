"""Streams of unequal length on real ranks: no rank waits for ever, each record counts once, and a run resumes."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from conftest import Finished, metrics_of, summary_of, train

CONFIG = """
data: {dataset: user_streams:uneven, batch_size_per_rank: 4}
model: user_models:tiny
loss: {name: sparse_categorical_crossentropy, options: {from_logits: true}}
lr_schedule: {base_lr: 0.05}
train: {epochs: 2, steps_per_call: 5}
eval: {every_epochs: 2}
log: {every_steps: 1000, tensorboard: false}
deterministic: true
"""
STEPS_AT_3 = 17
"""An epoch's: rank 0 has 22 records, rank 1 has 67, and rank 2 none."""


def run(folder: Path, name: str, np: int, *words: str) -> Finished:
    (folder / "c.yaml").write_text(CONFIG)
    launcher = "none" if np == 1 else "mpirun"
    return train(["--config", folder / "c.yaml", "--output-dir", folder / name, *words], launcher=launcher, np=np)


@pytest.mark.long
def test_three_ranks_of_which_one_has_no_records_count_each_record_once(tmp_path: Path) -> None:
    """At a learning rate of 0 the mean over an epoch is one over its records, however they are spread over ranks."""
    found = {}
    words = ["model=user_streams:linear", "lr_schedule.base_lr=0", "train.epochs=1", "eval.every_epochs=1"]
    for np in (3, 1):
        finished = run(tmp_path, f"at-{np}", np, *words)
        assert finished.returncode == 0, finished.text
        found[np] = [metrics_of(tmp_path / f"at-{np}", split)[-1]["loss"] for split in ("train", "eval")]
        assert "is a stream: ranks end each epoch together" in finished.text
        assert "the same rows" not in finished.text
    assert found[3] == pytest.approx(found[1], rel=1e-5)
    assert summary_of(tmp_path / "at-3")["steps"] == STEPS_AT_3
    assert found[3][0] != pytest.approx(found[3][1], rel=1e-3), "two sets of records, so the figures can differ"


@pytest.mark.long
def test_three_ranks_train_as_one_on_a_batch_that_they_do_not_divide(tmp_path: Path) -> None:
    """Of an epoch of one step: later ones hold other records, by the number of ranks."""
    rng = numpy.random.default_rng(5)
    numpy.savez(tmp_path / "a.npz", x=rng.normal(size=(8, 6)).astype(numpy.float32), y=rng.integers(0, 2, 8))
    options = f"{{path: {tmp_path / 'a.npz'}, inputs: [x], targets: [y]}}"
    found = {}
    for ranks in (3, 1):
        data = [f"data.dataset={{name: user_streams:of_arrays, options: {options}}}", "data.batch_size_per_rank=null"]
        finished = run(tmp_path, f"at-{ranks}", ranks, *data, "data.global_batch_size=8", "model=user_streams:linear")
        assert finished.returncode == 0, finished.text
        assert summary_of(tmp_path / f"at-{ranks}")["steps"] == 2
        found[ranks] = [metrics_of(tmp_path / f"at-{ranks}", split)[-1]["loss"] for split in ("train", "eval")]
    assert found[3] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.long
def test_ranks_that_get_the_same_rows_are_told_so_once_and_that_elements_are_batches(tmp_path: Path) -> None:
    words = ["data.dataset={name: user_streams:unsharded, options: {batch: 3}}", "model=user_streams:of_triples"]
    finished = run(tmp_path, "a", 2, *words)
    assert finished.returncode == 0, finished.text
    assert finished.text.count("data.dataset: all 2 ranks seem to train on the same rows: the first records are") == 1
    assert (
        finished.text.count("user_streams:unsharded gives batches, and each counts as one record. Leave batch()") == 1
    )


@pytest.mark.parametrize("np", [pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.exhaustive)])
def test_a_model_trains_by_its_own_step_as_by_ours(tmp_path: Path, np: int) -> None:
    """On uneven streams: steps that few records fill, or none, and of three ranks one without any."""
    found = {}
    for model in ("linear", "by_itself"):
        words = [f"model=user_streams:{model}", "data.steps_per_epoch=20", *(["loss=auto"] * (model == "by_itself"))]
        finished = run(tmp_path, model, np, *words)
        assert finished.returncode == 0, finished.text
        found[model] = metrics_of(tmp_path / model, "eval")[-1]["loss"]
    assert "the same rows" not in finished.text
    assert "gives batches" not in finished.text
    assert found["by_itself"] == pytest.approx(found["linear"], rel=1e-5)
    assert summary_of(tmp_path / "by_itself")["steps"] == summary_of(tmp_path / "linear")["steps"]


@pytest.mark.exhaustive
def test_a_run_that_was_stopped_by_its_own_step_ends_as_one_that_was_not(tmp_path: Path) -> None:
    words = ["model=user_streams:by_itself", "loss=auto"]
    assert run(tmp_path, "whole", 2, *words).returncode == 0
    for stop in ("train.max_steps=9", "train.max_steps=null"):
        finished = run(tmp_path, "stopped", 2, *words, stop)
        assert finished.returncode == 0, finished.text
    found, expected = summary_of(tmp_path / "stopped"), summary_of(tmp_path / "whole")
    assert found["weights_sha256"] == expected["weights_sha256"]


@pytest.mark.exhaustive
def test_a_run_that_was_stopped_inside_an_epoch_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    assert run(tmp_path, "whole", 3).returncode == 0
    for stop in (STEPS_AT_3 + 9, 2 * STEPS_AT_3):
        finished = run(tmp_path, "stopped", 3, f"train.max_steps={stop}")
        assert finished.returncode == 0, finished.text
    assert f"at step {STEPS_AT_3 + 9}" in finished.text
    found, expected = summary_of(tmp_path / "stopped"), summary_of(tmp_path / "whole")
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["steps"] == expected["steps"]


@pytest.mark.exhaustive
def test_on_other_ranks_a_run_resumes_only_from_the_end_of_an_epoch(tmp_path: Path) -> None:
    """There is no place in the streams of two ranks that means what a place in those of three meant."""
    given = ["data.global_batch_size=12", "data.batch_size_per_rank=null", "data.steps_per_epoch=12"]
    assert run(tmp_path, "a", 3, *given, "train.max_steps=9").returncode == 0
    refused = run(tmp_path, "a", 2, *given)
    assert refused.returncode == 2, refused.text
    assert "Resume with as many ranks, the same data.dataset, seed 1" in refused.stderr
    assert run(tmp_path, "a", 3, *given, "train.max_steps=12").returncode == 0
    finished = run(tmp_path, "a", 2, *given)
    assert finished.returncode == 0, finished.text
    assert summary_of(tmp_path / "a")["steps"] == 24


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.dataset={name: user_streams:broken, options: {how: empty}}"], "no rank has a record."),
        (
            ["data.dataset={name: user_streams:of_size, options: {epoch_0: 9}}", "checkpoint.best={metric: loss}"],
            "checkpoint.best and early_stopping need an evaluation, and there is none.",
        ),
    ],
)
def test_a_stream_that_cannot_be_used_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    finished = run(tmp_path, "a", 2, *words)
    assert finished.returncode == 2, finished.text
    errors = [line for line in finished.stderr.splitlines() if "data.dataset:" in line]
    assert 1 <= len(errors) <= 2, finished.text
    assert said in errors[0]
    assert "Traceback" not in finished.text
