"""Models with steps of their own: what test_differential.py does not hold against fit."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import RankFacts

pytestmark = pytest.mark.exhaustive

WAYS = [("mpirun", 2), ("mpirun", 3)]


def loss_of(found: dict[str, Any]) -> float:
    return [row["loss"] for row in found["rows"] if row["split"] == "train"][-1]


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_a_contrastive_model_that_gathers_trains_as_fit_does(rank_facts: RankFacts, launcher: str, np: int) -> None:
    """20 steps over the batch of all ranks."""
    root, *_ = rank_facts("own_steps", launcher, np)
    assert root["contrastive"]["error"] < 1e-5
    assert root["contrastive"]["moved"] > 0.1


@pytest.mark.parametrize(("launcher", "np"), WAYS)
def test_ranks_gather_in_a_step_in_which_one_has_no_record(rank_facts: RankFacts, launcher: str, np: int) -> None:
    """And a number of root's that is a constant on the others."""
    ranks = rank_facts("own_steps", launcher, np)
    assert [facts["short"]["code"] for facts in ranks] == [0] * np
    (row,) = [row for row in ranks[0]["contrastive"]["rows"] if row["split"] == "train"]
    assert row["of_root"] == pytest.approx(row["loss"], rel=1e-5)  # each rank has the loss of all


def test_a_contrastive_loss_over_the_own_batch_is_another_function(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("own_steps", *WAYS[0])
    assert loss_of(root["apart"]) < 0.8 * loss_of(root["contrastive"])


@pytest.mark.parametrize("optimizer", ["critic", "generator"])
def test_compression_reaches_every_optimizer(rank_facts: RankFacts, optimizer: str) -> None:
    """Each is updated alone: the rate of the other is 0."""
    root, _ = rank_facts("own_steps", *WAYS[0])
    uncompressed, compressed = root[optimizer]["none"], root[optimizer]["bf16"]
    assert None not in (uncompressed, compressed)
    assert uncompressed != compressed


def test_gradients_that_are_not_finite_on_one_rank_end_the_run_on_all(rank_facts: RankFacts) -> None:
    """The ranks' graphs differ there by a constant, which TensorFlow folds on one rank only."""
    assert [facts["diverging"]["code"] for facts in rank_facts("own_steps", *WAYS[0])] == [1, 1]
