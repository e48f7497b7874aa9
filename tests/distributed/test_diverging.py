"""Numbers that are not finite on one rank: all stop at one step and name it, or leave the update out, unharmed."""

from __future__ import annotations

import re
from typing import Any

import pytest
from conftest import RankFacts


@pytest.fixture
def ranks(rank_facts: RankFacts) -> list[dict[str, Any]]:
    return rank_facts("diverging", "mpirun", 2)


@pytest.mark.parametrize(
    ("name", "done", "named"),
    [
        ("every_step", 3, 3),
        ("loss_alone", 3, 3),
        ("stale", 4, 3),  # its gradients are those of one step earlier
        ("local", 4, 3),  # the ranks meet at step 4
        ("local_at_its_end", 3, 3),
        ("skip_in_vain", 5, 5),
        ("float16_in_vain", 53, 53),
    ],
)
def test_all_ranks_stop_at_one_step_and_name_rank_and_step_of_the_cause(
    ranks: list[dict[str, Any]], name: str, done: int, named: int
) -> None:
    for facts in ranks:
        assert facts[name]["done"] == done
        loss = "inf" if name == "loss_alone" else r"\S+"
        line = (
            rf"Model diverged with loss = {loss} at step {named}: loss or gradients are not finite on rank 1 \([^,]+\)"
        )
        assert re.match(line, facts[name]["why"])


@pytest.mark.parametrize("name", ["skip", "skip_stale", "float16"])
def test_a_skipped_update_leaves_no_trace_in_weights_or_statistics(ranks: list[dict[str, Any]], name: str) -> None:
    for facts in ranks:
        assert facts[name]["goes_on"]
        assert facts[name]["done"] == 6
        assert facts[name]["skipped"] == 1
        assert facts[name]["is_finite"]
        assert facts[name]["moved"] > 0
