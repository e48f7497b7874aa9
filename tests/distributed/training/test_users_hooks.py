"""Hooks of the user's own, Keras callbacks, a tracker and a timeline, on two ranks."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import user_callbacks
import user_models
from conftest import PROJECT, RankFacts, train

from horovod_train.checkpoint.layout import open_checkpoint
from horovod_train.inference.run import load_weights
from horovod_train.output.lease import open_lease
from horovod_train.output.metrics import metrics_in

WAY = ("mpirun", 2)


def test_users_hooks_are_called_on_every_rank_at_their_steps(rank_facts: RankFacts) -> None:
    for facts in rank_facts("hooked", *WAY):
        assert facts["without"]["called"] == []
        assert facts["noted"]["called"] == [4, 5, 8, 10, 12]


def test_a_hook_that_looks_changes_nothing(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("hooked", *WAY)
    assert root["noted"]["weights_sha256"] == root["without"]["weights_sha256"] is not None


def test_a_reason_of_one_rank_stops_all_ranks_at_this_step(rank_facts: RankFacts) -> None:
    found = rank_facts("hooked", *WAY)
    assert [facts["stopped"]["code"] for facts in found] == [75, 75]
    assert found[0]["stopped"]["steps"] == 6
    assert found[0]["stopped"]["ended"] == "rank 1 has had enough"


def test_a_run_that_a_hook_has_stopped_resumes_where_it_stopped(rank_facts: RankFacts) -> None:
    found = rank_facts("hooked", *WAY)
    assert [facts["resumed"]["code"] for facts in found] == [0, 0]
    assert [facts["resumed"]["called"] for facts in found] == [[8, 12], [8, 12]]
    assert found[0]["resumed"]["weights_sha256"] == found[0]["without"]["weights_sha256"]


@pytest.mark.long
def test_a_run_that_a_hook_has_ended_is_not_trained_on_by_the_same_command(rank_facts: RankFacts) -> None:
    found = rank_facts("called_back", *WAY)
    for facts in found:
        assert (facts["ended"]["code"], facts["ended"]["called"]) == (0, [4])
        assert (facts["ended before"]["code"], facts["ended before"]["called"]) == (0, [])
    for name in ("ended", "ended before"):
        assert (found[0][name]["steps"], found[0][name]["ended"]) == (6, "rank 1 has seen enough")


@pytest.mark.long
def test_callbacks_are_told_the_same_on_all_ranks_as_fit_tells_them(rank_facts: RankFacts) -> None:
    one, other = (facts["called back"] for facts in rank_facts("called_back", *WAY))
    assert one["code"] == other["code"] == 0
    assert one["told"] == other["told"]
    epoch = [("epoch begins", 0), ("evaluated", None), ("epoch ends", 0)]
    expected = [(what, number if what == "evaluated" else index) for index in range(4) for what, number in epoch]
    assert [(what, number) for what, number, _ in one["told"]] == [("begin", 4), *expected, ("end", 4)]
    assert one["told"][0][2] == 5
    last = one["told"][-2][2]
    assert {"loss", "val_loss"} <= last.keys()
    assert (last["loss"], last["val_loss"]) == (one["train"]["loss"], one["eval"]["loss"])
    added = last.pop("learning_rate")  # by ReduceLROnPlateau, for those after it
    assert added == pytest.approx(one["train"]["learning_rate"], rel=1e-6)
    assert one["told"][-1][2] == last


@pytest.mark.long
def test_a_learning_rate_on_a_plateau_falls_on_all_ranks(rank_facts: RankFacts) -> None:
    """Nothing is better by 10, so that it falls after each epoch but the first."""
    root, _ = rank_facts("called_back", *WAY)
    assert root["called back"]["train"]["learning_rate"] == pytest.approx(0.001 * 0.1**2)


@pytest.mark.long
def test_callbacks_have_their_state_after_a_resume(rank_facts: RankFacts) -> None:
    root, other = rank_facts("called_back", *WAY)
    whole, again = root["called back"], root["resumed, called back"]
    assert again["weights_sha256"] == whole["weights_sha256"] is not None
    assert [what for what, *_ in again["stopped"]][-2:] == ["epoch begins", "end"]
    assert [told[:2] for told in again["told"][:2]] == [["begin", 4], ["epoch begins", 2]]
    assert again["told"][-1] == whole["told"][-1]
    assert again["told"] == other["resumed, called back"]["told"]


class Fitted(NamedTuple):
    """What `fit` did in one process: what NotesWeights was told, and the weights that the model has then."""

    told: list[list[Any]]
    weights: list[np.ndarray]


def fitted(*swapping: keras.callbacks.Callback, **options: Any) -> Fitted:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(40, 6))
    y = (x.sum(axis=1) > 0).astype(np.int64)
    keras.utils.set_random_seed(1)
    model = user_models.vector()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.3, momentum=0.9, use_ema=True, ema_momentum=0.8, **options), loss)
    user_callbacks.told.clear()
    noting = [*swapping, user_callbacks.NotesWeights()]
    model.fit(x, y, batch_size=8, epochs=4, shuffle=False, validation_data=(x, y), verbose=0, callbacks=noting)
    return Fitted(list(user_callbacks.told), [weight.numpy() for weight in model.trainable_weights])


def same_as_fit(found: list[list[Any]], fit: Fitted) -> None:
    assert [told[:2] for told in found] == [told[:2] for told in fit.told]
    for one, other in zip(found, fit.told, strict=True):
        assert one[2] == pytest.approx(other[2], abs=1e-6), one[:2]


@pytest.mark.long
def test_averages_are_swapped_as_fit_does(rank_facts: RankFacts) -> None:
    """Evaluations and what comes after SwapEMAWeights see the averages, training the weights; the same on all ranks."""
    one, other = (facts["averaged"] for facts in rank_facts("called_back", *WAY))
    assert one["code"] == other["code"] == 0
    assert one["told"] == other["told"]
    fit = fitted(keras.callbacks.SwapEMAWeights(swap_on_epoch=True))
    same_as_fit(one["told"], fit)
    (_, _, begins), (_, _, ends) = one["told"][2], one["told"][1]
    assert begins[:-1] != pytest.approx(ends[:-1], abs=1e-3)


@pytest.mark.long
def test_what_is_exported_is_what_fit_ends_with(rank_facts: RankFacts) -> None:
    """And the trained weights, with which it resumes, are there too."""
    root, _ = rank_facts("called_back", *WAY)
    keras.utils.clear_session()  # names as in the run
    model = user_models.vector()
    found = open_checkpoint(str(Path(root["runs"]) / "averaged"), "--checkpoint")
    assert load_weights(model, found, "auto") == "ema"
    for one, other in zip(model.trainable_weights, fitted().weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=0, atol=1e-6)
    exported = model.get_weights()
    assert load_weights(model, found, "trained") == "trained"
    assert np.abs(exported[0] - model.get_weights()[0]).max() > 1e-3


@pytest.mark.long
def test_averages_resume_bit_for_bit_at_the_end_of_an_epoch(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("called_back", *WAY)
    whole, again = root["averaged"], root["averaged, resumed"]
    assert again["weights_sha256"] == whole["weights_sha256"] is not None
    assert again["told"][-3:] == whole["told"][-3:]
    assert again["stopped"][:4] == whole["told"][:4]


@pytest.mark.long
def test_a_hook_that_stops_between_two_averages_of_ranks_waits_for_the_next(rank_facts: RankFacts) -> None:
    """So that the run ends with the same bits as without."""
    root, _ = rank_facts("called_back", *WAY)
    whole, again = root["local"], root["local, resumed"]
    assert (again["first_code"], again["code"]) == (75, 0)
    assert again["weights_sha256"] == whole["weights_sha256"] is not None


@pytest.mark.long
def test_weights_are_overwritten_with_averages_as_fit_does(rank_facts: RankFacts) -> None:
    """Without SwapEMAWeights evaluations see the weights, and the end the averages."""
    root, _ = rank_facts("called_back", *WAY)
    same_as_fit(root["overwritten"]["told"], fitted(ema_overwrite_frequency=3))


@pytest.mark.long
def test_callbacks_see_the_same_weights_on_all_ranks_at_the_end_of_an_epoch_also_under_local(
    rank_facts: RankFacts,
) -> None:
    """Without an evaluation there, before which ranks exchange anyway: the epoch ends between two exchanges."""
    root, other = (facts["mean, local"] for facts in rank_facts("called_back", *WAY))
    assert (root["code"], other["code"]) == (0, 0)
    assert root["told"] == other["told"]


@pytest.mark.long
def test_a_run_can_end_with_the_mean_of_its_last_epochs(rank_facts: RankFacts) -> None:
    """By the callback that the docs show; with a cyclical rate, and resumed in the third epoch."""
    root, other = (facts["mean"] for facts in rank_facts("called_back", *WAY))
    assert root["told"] == other["told"]
    ends = [np.array(weights[:-1]) for what, _, weights in root["told"] if what == "epoch ends"]
    assert root["told"][-1][2][:-1] == pytest.approx(np.mean(ends[1:], axis=0), abs=1e-6)
    assert np.abs(ends[-1] - np.mean(ends[1:], axis=0)).max() > 1e-3
    again = rank_facts("called_back", *WAY)[0]["mean, resumed"]
    assert again["weights_sha256"] == root["weights_sha256"] is not None


ALONE = ("called_back_alone", "none", 1)


@pytest.mark.long
def test_evaluations_of_callbacks_and_hooks_change_no_line_of_metrics(rank_facts: RankFacts) -> None:
    (facts,) = rank_facts(*ALONE)
    with_, without = facts["evaluates"], facts["stops where an epoch begins"]
    assert with_["losses"] == {line: without["losses"][line] for line in with_["losses"]}
    assert {"train 4", "train 5", "train 8", "train 10"} <= with_["losses"].keys()


@pytest.mark.long
def test_early_stopping_by_a_figure_that_a_callback_adds(rank_facts: RankFacts) -> None:
    (facts,) = rank_facts(*ALONE)
    assert (facts["adds"]["code"], facts["adds"]["steps"]) == (0, 10)


@pytest.mark.long
def test_what_is_exported_has_what_callbacks_make_of_averages_at_the_end(rank_facts: RankFacts) -> None:
    (facts,) = rank_facts(*ALONE)
    keras.utils.clear_session()  # names as in the run
    model = user_models.vector()
    found = open_checkpoint(str(Path(facts["runs"]) / "halved"), "--checkpoint")
    assert load_weights(model, found, "evaluated") == "trained"
    assert load_weights(model, found, "auto") == "ema"
    for one, other in zip(model.trainable_weights, fitted(user_callbacks.Halves()).weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=0, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("how", ["stopped", "interrupted"])
def test_callbacks_that_change_weights_and_rates_resume_bit_for_bit(rank_facts: RankFacts, how: str) -> None:
    """Inside an epoch, and in an evaluation at an epoch at which weights are unfrozen."""
    (facts,) = rank_facts(*ALONE)
    whole, again = facts["meddled"], facts[how]
    assert (whole["code"], again["first_code"], again["code"]) == (0, 75, 0)
    assert again["weights_sha256"] == whole["weights_sha256"] is not None
    assert again["told"] == whole["told"] == [["end", None, {"epochs": 4, "batches": 20, "tests": 4}]]
    for split, figure in (("train", "learning_rate"), ("eval", "loss")):
        assert again[split][figure] == whole[split][figure]


@pytest.mark.long
def test_an_evaluation_that_is_interrupted_where_weights_are_unfrozen_gives_the_same(rank_facts: RankFacts) -> None:
    (facts,) = rank_facts(*ALONE)
    assert len(facts["interrupted"]["stopped"]) == 1
    assert facts["interrupted"]["losses"] == facts["meddled"]["losses"]


@pytest.mark.long
def test_hooks_of_an_interrupted_evaluation_are_called_after_it(rank_facts: RankFacts) -> None:
    (facts,) = rank_facts(*ALONE)
    assert facts["hooks of interrupted"] == [[step, step] for step in (5, 10, 15, 20)]


@pytest.mark.long
def test_a_run_that_is_over_points_to_its_best_checkpoint_again(rank_facts: RankFacts) -> None:
    """Which a kill after the last save has prevented."""
    (facts,) = rank_facts(*ALONE)
    before, after = facts["best of interrupted"]
    assert before == after


@pytest.mark.long
@pytest.mark.parametrize(
    ("run", "steps"), [("stops in a test", 3), ("stops where an epoch begins", 10), ("stops at the start", 0)]
)
def test_stop_training_stops_wherever_it_is_set(rank_facts: RankFacts, run: str, steps: int) -> None:
    (facts,) = rank_facts(*ALONE)
    found = facts[run]
    assert (found["code"], found["steps"]) == (0, steps)
    assert found["ended"] == "a callback has set model.stop_training"


@pytest.mark.long
def test_a_callback_that_freezes_a_layer_ends_the_run(rank_facts: RankFacts) -> None:
    """In `fit` that changes nothing, or takes effect with a batch of another size."""
    (facts,) = rank_facts(*ALONE)
    assert facts["freezes"]["code"] == 1


@pytest.mark.long
def test_a_state_that_differs_between_ranks_ends_the_run_at_the_first_save(rank_facts: RankFacts) -> None:
    assert [facts["apart"]["code"] for facts in rank_facts("called_back", *WAY)] == [86, 86]


@pytest.mark.long
def test_stop_training_on_one_rank_stops_all_at_this_step(rank_facts: RankFacts) -> None:
    """A callback that is told of batches is told of each, though several steps are one call."""
    found = [facts["stopped by one"] for facts in rank_facts("called_back", *WAY)]
    assert [facts["code"] for facts in found] == [0, 0]
    assert found[0]["steps"] == 7
    assert found[0]["ended"] == "a callback has set model.stop_training"
    assert [[number for _, number, _ in facts["told"]] for facts in found] == [[0, 1, 2, 3, 4, 0, 1]] * 2


HOOKED = ("log={every_steps: 2, tensorboard: false}", "model=user_models:small")


def on_digits(digits: Path) -> list[str | Path]:
    config = PROJECT / "configs" / "digits_convnet.yaml"
    return ["--config", config, f"data.train={digits}/train", f"data.eval={digits}/eval", *HOOKED]


@pytest.mark.long
@pytest.mark.parametrize(
    ("hook", "raised"),
    [
        pytest.param("fail_while_others_meet", "ValueError: the hook has slipped", marks=pytest.mark.exhaustive),
        ("quit_while_others_meet", "SystemExit: 0"),
    ],
)
def test_a_hook_that_fails_on_one_rank_ends_all_though_the_others_wait_for_it(
    digits: Path, tmp_path: Path, hook: str, raised: str
) -> None:
    words = [*on_digits(digits), f"hooks=user_hooks:{hook}", "--output-dir", tmp_path / "run"]
    finished = train(words, launcher="mpirun", np=2)
    assert finished.returncode == 1, finished.text
    assert f"hooks: user_hooks:{hook} failed after step 2: {raised}" in finished.stderr
    assert "rank 1 (" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.long
def test_a_run_whose_directory_another_has_taken_ends_as_one_that_found_it_taken(digits: Path, tmp_path: Path) -> None:
    """Under SLURM the other's checkpoints would else count as this run's, which would be requeued beside it.

    What the other has written of its steps stays as it is.
    """
    words = [*on_digits(digits), "hooks=user_hooks:lose_the_directory", "--output-dir", tmp_path / "run"]
    words += ["log.every_steps=1", "log.writers=[user_hooks:Steps]"]
    finished = train(words, launcher="mpirun", np=2)
    assert finished.returncode == 73, finished.text
    assert "output_dir: another run has taken the directory" in finished.stderr
    assert not any((tmp_path / "run" / "checkpoints").glob("step-*"))
    rows = metrics_in((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [(row.step, row.split) for row in rows] == [(1, "train")]
    assert (tmp_path / "run" / "steps.txt").read_text() == "1 "
    assert not (tmp_path / "run" / "times.jsonl").exists()
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.long
def test_sys_exit_in_the_users_code_is_not_taken_for_success(digits: Path, tmp_path: Path) -> None:
    words = [*on_digits(digits), "log.writers=[user_hooks:Quits]", "--output-dir", tmp_path / "run"]
    finished = train(words)
    assert finished.returncode == 1, finished.text
    (line,) = finished.stderr.splitlines()
    assert line.startswith(f"error: sys.exit(0) was called (at {PROJECT / 'tests' / 'user_hooks.py'}:")
    assert (tmp_path / "run" / "quits.txt").read_text() == "closed"


@pytest.mark.long
def test_writers_of_a_run_without_the_lease_are_not_made(digits: Path, tmp_path: Path) -> None:
    """They might begin their files anew, which are another run's."""
    (tmp_path / "run").mkdir()
    with closing(open_lease(tmp_path / "run")):
        finished = train([*on_digits(digits), "log.writers=[user_hooks:Quits]", "--output-dir", tmp_path / "run"])
    assert finished.returncode == 73, finished.text
    assert "is in use by another run" in finished.stderr
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == []


def test_a_run_of_two_ranks_that_is_resumed_is_one_run_in_a_tracker(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("hooked", *WAY)
    calls = root["tracked"]["calls"]
    assert [(call["run_id"], call["step"]) for call in calls if call["call"] == "start"] == [
        *((None, 0), ("the first", 6))
    ]
    assert [call["step"] for call in calls if call["call"] == "log"] == [4, 6, 8, 12]
    ends = [(call["ended"], call["files"]) for call in calls if call["call"] == "finish"]
    assert ends == [("stopped", ["config.yaml", "summary.json"]), ("done", ["config.yaml", "summary.json"])]
    assert root["tracked"]["csv"] == ["step", "4", "6", "8", "12"]
    assert root["resumed"]["weights_sha256"] == root["without"]["weights_sha256"]


def test_a_timeline_tells_what_horovod_did_and_when_each_rank_was_ready(rank_facts: RankFacts) -> None:
    """In Chrome's trace format, in which each tensor is a process with a name."""
    root, _ = rank_facts("hooked", *WAY)
    assert not root["tracked"]["untracked"]
    (events,) = root["tracked"]["timelines"]
    names = [event["args"].get("name", "") for event in events if event.get("name") == "process_name"]
    assert any("gradient" in name for name in names), names
    counts = Counter(event["name"] for event in events if event["ph"] == "B")
    assert counts["NEGOTIATE_ALLGATHER"] > 6  # as ranks add up numbers under `deterministic`
    assert counts["ALLGATHER"] > 6
    assert {event["name"] for event in events if event["ph"] == "X"} == {"0", "1"}
