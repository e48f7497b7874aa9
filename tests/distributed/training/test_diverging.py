"""Numbers that are not finite on one rank: all stop at one step and name it, or leave the update out, unharmed."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from conftest import RankFacts

pytestmark = pytest.mark.long


@pytest.fixture
def ranks(rank_facts: RankFacts) -> list[dict[str, Any]]:
    return rank_facts("diverging", "mpirun", 2)


@pytest.mark.parametrize(
    ("name", "done", "named"),
    [
        ("every_step", 3, 3),
        ("loss_alone", 3, 3),
        ("gradients_alone", 3, 3),
        ("stale", 4, 3),  # its gradients are those of one step earlier
        ("local", 4, 3),  # the ranks meet at step 4
        ("skip_in_vain", 5, 5),
        ("float16_in_vain", 53, 53),
    ],
)
def test_all_ranks_stop_at_one_step_and_name_rank_and_step_of_the_cause(
    ranks: list[dict[str, Any]], name: str, done: int, named: int
) -> None:
    for facts in ranks:
        assert facts[name]["done"] == done
        assert named_step(facts[name]["why"]) == named


@pytest.mark.parametrize("name", ["stale_at_its_end", "local_at_its_end"])
def test_a_save_or_a_check_after_a_step_that_failed_on_one_rank_names_that_rank(
    ranks: list[dict[str, Any]], name: str
) -> None:
    """The ranks have not met since: nothing can be compared or saved before they have."""
    for facts in ranks:
        assert facts[name]["goes_on"]
        assert named_step(facts[name]["why"]) == 3


def test_weights_that_are_not_finite_are_neither_compared_nor_saved(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert re.match(r"Model diverged at step 3: model/\S+ is not finite on rank 1 \(", facts["weight"]["why"])


def test_a_large_gradient_that_alone_is_not_finite_ends_the_run_with_the_call(ranks: list[dict[str, Any]]) -> None:
    """It is looked at only then, in the weights."""
    for facts in ranks:
        assert not facts["large_alone"]["goes_on"]
        why = facts["large_alone"]["why"]
        assert re.match(r"Model diverged at step 1: model/\S+/large/kernel is not finite on rank 0 \(", why)


def test_an_infinite_loss_is_shown_and_a_finite_one_is_not_given_as_the_reason(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert "with loss = inf at step 3: loss or gradients are not" in facts["loss_alone"]["why"]
        assert "Model diverged at step 3: gradients, but not the loss, are not" in facts["gradients_alone"]["why"]


@pytest.mark.parametrize("name", ["skip", "skip_stale", "skip_stale_at_its_end", "float16"])
def test_a_skipped_update_leaves_no_trace_in_weights_or_statistics(ranks: list[dict[str, Any]], name: str) -> None:
    for facts in ranks:
        assert facts[name]["goes_on"]
        assert facts[name]["why"] == ""
        assert facts[name]["is_finite"]
        assert math.isfinite(facts[name]["loss"])
        assert facts[name]["moved"] > 0
        if "at_its_end" not in name:  # there, it is yet to be left out
            assert facts[name]["done"] == 6
            assert facts[name]["skipped"] == 1


def test_a_skipped_update_leaves_statistics_as_they_were_on_the_ranks_too_whose_records_were_fine(
    ranks: list[dict[str, Any]],
) -> None:
    """As on one rank, which has the records of all."""
    for facts in ranks:
        assert (facts["skip_all"]["skipped"], facts["skip_all"]["moved"]) == (1, 0.0)
        assert facts["skip_all"]["is_finite"]


def named_step(why: str) -> int:
    """The step at which rank 1, and it alone, is said to have failed."""
    found = re.match(
        r"Model diverged(?: with loss = (?:NaN|inf))? at step (\d+): [^(]+ not finite on rank 1 \([^,]+\)", why
    )
    assert found, why
    return int(found[1])
