"""The tests can fail: guards are switched off one by one, and what the tests look at comes out different."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import PROJECT, Finished, RankFacts, launcher_command, metrics_of, run_process, warm_python

from horovod_train.checkpoint.layout import verify


@pytest.mark.long  # as the run in test_users_hooks.py does that a hook stops
def test_with_all_guards_on_a_resumed_run_ends_like_an_undisturbed_one(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("unguarded", "mpirun", 2)
    assert root["codes"] == [0, 0]
    assert root["resumed"]["all on"] == 0
    assert root["ends"]["all on"] == root["whole"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("guard", ["seeds", "slots", "averages", "place in the data", "own average of the loss"])
def test_without_one_guard_it_ends_elsewhere(rank_facts: RankFacts, guard: str) -> None:
    root, _ = rank_facts("unguarded_more", "mpirun", 2)
    assert root["resumed"][guard] == 0
    assert root["ends"][guard] != root["whole"]


@pytest.mark.long
def test_without_the_broadcast_ranks_hold_different_weights_and_the_check_sees_it(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("unguarded", "mpirun", 2)
    assert root["answers"]["all on"] == 1
    assert root["answers"]["broadcast"] == 2


@pytest.mark.exhaustive
def test_late_and_local_exchange_go_on_where_they_were(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("unguarded_more", "mpirun", 2)
    for mode in ("stale", "local"):
        whole, parts, _ = root[mode]
        assert whole == parts
    whole, _, without_what_is_pending = root["stale"]
    assert whole != without_what_is_pending


UNGUARDED = """
import sys
from horovod_train import main
from horovod_train.output import logs
from horovod_train.training import stopping
logs.load_tensorflow()
import tensorflow as tf
from horovod_train.training import state
from horovod_train.training.steps import optimizers, step
{patch}
sys.exit(main.main(sys.argv[1:]))
"""


def unguarded(patch: str, launcher: str, np: int, folder: Path, *words: str | Path) -> Finished:
    script = folder / "unguarded.py"
    script.write_text(UNGUARDED.format(patch=patch))
    given = [str(script), *map(str, words), "--output-dir", str(folder / "run")]
    return run_process([*launcher_command(launcher, np), *warm_python(), *given])


@pytest.fixture(scope="session")
def words(digits: Path) -> list[str]:
    loss = "loss={name: sparse_categorical_crossentropy, options: {from_logits: true}}"
    data = [f"data.train={digits}/train", f"data.eval={digits}/eval", "data.global_batch_size=96", "data.augment=[]"]
    return ["--config", str(PROJECT / "configs" / "digits_convnet.yaml"), *data, loss, "log.tensorboard=false"]


def test_without_the_looks_at_gradients_and_weights_a_nan_spoils_the_weights_and_the_run_ends_as_if_well(
    words: list[str], tmp_path: Path
) -> None:
    model = "model={name: user_models:troubled, options: {step: 7, on_rank: 0, what: nan}}"
    short = ["train.max_steps=12", "eval.every_epochs=null", model]
    looks = [
        "optimizers.are_finite = optimizers.seem_finite = step.variables_are_finite = lambda values: tf.constant(True)",
        "state.TrainState.check_finite = lambda *_: None",
    ]
    finished = unguarded("; ".join(looks), "none", 1, tmp_path, *words, *short)
    assert finished.returncode == 0, finished.text
    assert metrics_of(tmp_path / "run", "train")[-1]["loss"] is None  # not finite


@pytest.mark.long
def test_a_run_that_fails_on_all_ranks_finishes_the_checkpoint_that_a_slow_disk_still_takes(
    words: list[str], tmp_path: Path
) -> None:
    """mpirun ends all ranks with the first that leaves, so the others must wait for root."""
    slow = "import time; from horovod_train.checkpoint import manager; write = manager.write"
    patch = f"{slow}; manager.write = lambda *these: (time.sleep(3), write(*these))"
    model = "model={name: user_models:troubled, options: {step: 7, on_rank: 1, what: nan}}"
    short = [
        "train.max_steps=12",
        "eval.every_epochs=null",
        "checkpoint.every_steps=5",
        "train.steps_per_call=1",
        model,
    ]
    finished = unguarded(patch, "mpirun", 2, tmp_path, *words, *short)
    assert finished.returncode == 1, finished.text
    assert finished.stderr.count("error: Model diverged") == 1
    assert "waiting for the checkpoint of step 5, which is being written" in finished.stdout
    saved = tmp_path / "run" / "checkpoints" / "step-000000005"
    assert verify(saved).facts.step == 5
    assert f"the last good checkpoint: {saved}" in finished.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize(("slowest", "code"), [(1.0, 0), (50e6, 87)])
def test_a_save_may_take_longer_than_a_stall_if_its_size_allows(
    words: list[str], tmp_path: Path, slowest: float, code: int
) -> None:
    """slowest: bytes a second of a disk that still works."""
    slow = "import time; from horovod_train.checkpoint import manager; write = manager.write"
    patch = f"{slow}; manager.SLOWEST_BYTES_PER_S = {slowest}"
    patch += "; manager.write = lambda *these: (time.sleep(45), write(*these))"
    limits = ["watch.warn_after_s=2", "watch.stop_after_s=20", "watch.first_step_after_s=120"]
    short = ["train.max_steps=3", "eval.every_epochs=null", "checkpoint.every_epochs=null"]
    finished = unguarded(patch, "mpirun", 2, tmp_path, *words, *limits, *short)
    assert finished.returncode == code, finished.text
    if code:
        assert "rank 0 " in finished.stderr
        assert re.search(r"in save for \d+ s at step 3, writing \d+ MB", finished.stderr), finished.text


@pytest.mark.long
def test_without_the_vote_a_rank_that_leaves_alone_leaves_the_others_waiting(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()  # only root looks for it
    own_reason = "next((stopping.StopReason(text, True) for text in self._reasons()), None)"
    patch = f"stopping.StopCoordinator.vote = lambda self: {own_reason}"
    limits = ["watch.warn_after_s=2", "watch.stop_after_s=6", "watch.first_step_after_s=6"]
    finished = unguarded(patch, "mpirun", 2, tmp_path, *words, *limits)
    assert finished.returncode == 87, finished.text
