"""The tests can fail: each guard of a resume is switched off, and what the tests compare comes out different."""

from __future__ import annotations

import pytest
from conftest import RankFacts


def test_with_all_guards_on_a_resumed_run_ends_like_an_undisturbed_one(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("unguarded", "mpirun", 2)
    assert root["codes"] == [0, 0]
    assert root["resumed"]["all on"] == 0
    assert root["ends"]["all on"] == root["whole"]


@pytest.mark.parametrize("guard", ["seeds", "slots", "averages", "place in the data", "own statistics"])
def test_without_one_guard_it_ends_elsewhere(rank_facts: RankFacts, guard: str) -> None:
    root, _ = rank_facts("unguarded", "mpirun", 2)
    assert root["resumed"][guard] == 0
    assert root["ends"][guard] != root["whole"]


def test_without_the_broadcast_ranks_hold_different_weights_and_the_check_sees_it(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("unguarded", "mpirun", 2)
    assert root["answers"]["all on"] == 1
    assert root["answers"]["broadcast"] == 2


def test_late_and_local_exchange_go_on_where_they_were(rank_facts: RankFacts) -> None:
    root, _ = rank_facts("unguarded", "mpirun", 2)
    for whole, parts in root["modes"].values():
        assert whole == parts
    whole, parts = root["stale without what is pending"]
    assert whole != parts
