"""Models with steps of their own train at several ranks as `fit` trains them in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
from conftest import RankFacts

pytestmark = pytest.mark.long  # one more of what test_differential.py holds against fit

WAY = ("mpirun", 2)


def figures(found: dict[str, Any], split: str) -> dict[str, Any]:
    return [row for row in found["rows"] if row["split"] == split][-1]


@pytest.mark.parametrize("np", [2, 3])
@pytest.mark.parametrize("model", ["vae", "wgan"])
def test_ranks_train_as_fit_does_on_the_whole_batch(rank_facts: RankFacts, model: str, np: int) -> None:
    """20 steps with uneven shares and short steps at the end of epochs: one optimizer, and two."""
    found = [facts[model] for facts in rank_facts("own_steps", "mpirun", np)]
    assert [facts["code"] for facts in found] == [0] * np
    assert found[0]["error"] < 1e-5
    assert found[0]["moved"] > 0.1


@pytest.mark.parametrize("np", [2, 3])
@pytest.mark.parametrize("model", ["contrastive", "pairs"])
def test_contrastive_models_train_as_fit_does(rank_facts: RankFacts, model: str, np: int) -> None:
    """One gathers the batch of all ranks; the other has a loss for each record, by compute_loss."""
    root, *_ = rank_facts("own_steps_more", "mpirun", np)
    assert root[model]["error"] < 1e-5
    assert root[model]["moved"] > 0.1


def test_a_contrastive_loss_over_the_own_batch_is_another_function(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("own_steps_more", *WAY)
    assert figures(root["apart"], "train")["loss"] < 0.8 * figures(root["contrastive"], "train")["loss"]


def test_a_stopped_run_with_two_optimizers_ends_as_one_that_was_not(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("own_steps", *WAY)
    assert root["wgan resumed"]["sha256"] == root["wgan"]["sha256"] is not None


def test_drawn_numbers_and_averages_are_the_same_after_a_stop(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("own_steps_more", *WAY)
    assert root["drawing resumed"]["sha256"] == root["drawing"]["sha256"] is not None


def test_figures_are_of_the_records_of_all_ranks(rank_facts: RankFacts) -> None:
    """Metrics and plain numbers; an evaluation between two lines of training leaves the model's metrics alone."""
    root, _ = rank_facts("own_steps", *WAY)
    found, expected = figures(root["vae"], "eval"), root["vae"]["evaluation"]
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    trained = figures(root["vae"], "train")
    assert trained["loss"] == pytest.approx(trained["kl_loss"] + trained["reconstruction"], rel=1e-5)
    assert figures(root["wgan"], "train")["generator_optimizer_learning_rate"] == pytest.approx(0.003)


def test_weights_of_records_reach_every_optimizer(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("own_steps_more", *WAY)
    assert root["weighted"]["error"] < 1e-5
    assert root["weighted"]["moved"] > 0.1
    unweighted, _ = rank_facts("own_steps", *WAY)
    assert root["weighted"]["sha256"] != unweighted["wgan"]["sha256"]


def test_compression_reaches_every_optimizer(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("own_steps_more", *WAY)
    assert root["compressed"]["ended"] == "done"
    assert all(math.isfinite(value) for value in figures(root["compressed"], "train").values() if value != "train")


def test_gradients_that_are_not_finite_on_one_rank_end_the_run_on_all(rank_facts: RankFacts) -> None:
    """The ranks' graphs differ there by a constant, which TensorFlow folds on one rank only."""
    assert [facts["diverging"]["code"] for facts in rank_facts("own_steps_more", *WAY)] == [1, 1]
