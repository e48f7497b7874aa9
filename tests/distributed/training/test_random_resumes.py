"""Runs of random models and settings that are stopped and killed at random steps end as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import HANGS_AFTER_S, RankFacts

pytestmark = pytest.mark.exhaustive

IN_ONE_LAUNCH = 10
LEFT_OUT = (7, 20, 23, 25, 30, 32)
"""Seeds that draw settings which do not go together, figures that a model does not show, or an end before a stop."""
SEEDS = [*(seed for seed in range(35) if seed not in LEFT_OUT), 1373]
"""In the last a signal comes before the first step of a start, with an evaluation left, and no average due."""


def found(rank_facts: RankFacts, *words: object) -> dict[str, Any]:
    root, _ = rank_facts("random_resumes", "mpirun", 2, *map(str, words), for_s=6 * HANGS_AFTER_S)
    cases: dict[str, Any] = root["cases"]
    return cases


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_in_parts_ends_as_one_that_nothing_interrupts(rank_facts: RankFacts, seed: int) -> None:
    first = SEEDS.index(seed) // IN_ONE_LAUNCH * IN_ONE_LAUNCH
    case = found(rank_facts, *SEEDS[first : first + IN_ONE_LAUNCH])[str(seed)]
    assert (case["whole"], case["codes"][-1]) == (0, 0), case
    assert len(case["codes"]) > 1, case
    assert case["differ"] == {}, case


def test_a_run_that_resumes_with_another_l2_ends_elsewhere(rank_facts: RankFacts) -> None:
    case = found(rank_facts, "--disturbed", SEEDS[0])[str(SEEDS[0])]
    assert (case["whole"], case["codes"][-1]) == (0, 0), case
    assert any(key.startswith("array model/") for key in case["differ"]), case
