"""The trainer ends where Keras' `fit` does: the same weights and the same figures, at any number of ranks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
from conftest import HANGS_AFTER_S, PROGRAMS, RankFacts

sys.path.insert(0, str(PROGRAMS))
from differential_cases import Case
from differential_more import CASES, uncovered
from differential_random import case_of

Facts = Callable[..., dict[str, Any]]
UNEVEN = ["own train_step", "class weights"]
"""Cases in which ranks have different numbers of records in a step; "plain" is one too."""

IN_ONE_LAUNCH = 40
"""Cases, of which each takes seconds on each rank."""

CORE = {
    1: ["function as metric", "Dice", "optimizer MultiOptimizer", "own train_step that draws"],
    2: ["mask, mean_with_sample_weight, weights"],
}
"""By ranks. One has those that ranks have no part in, or of whose kind test-all trains more on three."""
LONG = {
    1: [
        *("mask, sum, weights", "two losses, metrics by output", "constraint", "short names", "schedule"),
        *("IntegerLookup", "accumulated, a mask of training", "accumulated, a mask of dropout"),
    ],
    3: [
        "mask, mean_with_sample_weight, weights",
        *("plain", "own train_step, weights", "layer with a counter, local"),
        *("activity_regularizer, weights", "optimizer that holds another", "layer that assigns in evaluations"),
        *("metrics of states that are no sums", "XLA, mask", "loss of losses", "own compute_loss, private sum"),
        *("BatchNormalization, synchronised, accumulated", "accumulated, outputs of training"),
    ],
}


@pytest.fixture
def facts(rank_facts: RankFacts) -> Facts:
    """(ranks, names of cases, words) → what root found of each case; each combination is launched once."""

    def found(np: int, names: tuple[str, ...], words: tuple[str, ...] = ()) -> dict[str, Any]:
        way = "mpirun" if np > 1 else "none"
        root, *_ = rank_facts("differential", way, np, *words, *names, for_s=6 * HANGS_AFTER_S)
        cases: dict[str, Any] = root["cases"]
        return cases

    return found


def _cases(np: int) -> list[Any]:
    """All cases, of which most are one more of a kind."""

    def marks(name: str) -> list[pytest.MarkDecorator]:
        if name in CORE.get(np, []):
            return []
        return [pytest.mark.long if name in LONG.get(np, []) else pytest.mark.exhaustive]

    return [pytest.param(np, name, id=f"{np}-{name}", marks=marks(name)) for name in CASES]


@functools.cache
def _launched_with(np: int, name: str) -> tuple[str, ...]:
    """The cases that one launch trains together: those of one mark, some at a time."""
    by_mark: dict[str, list[str]] = {}
    for parameters in _cases(np):
        by_mark.setdefault(str(parameters.marks), []).append(parameters.values[1])
    return _chunk_of(name, next(names for names in by_mark.values() if name in names))


def _chunk_of(name: str, names: list[str]) -> tuple[str, ...]:
    begin = names.index(name) // IN_ONE_LAUNCH * IN_ONE_LAUNCH
    return tuple(names[begin : begin + IN_ONE_LAUNCH])


@pytest.mark.parametrize(("np", "name"), [*_cases(1), *_cases(2), *_cases(3)])
def test_ranks_end_where_fit_does(facts: Facts, np: int, name: str) -> None:
    _compare(case_of(name), np, facts(np, _launched_with(np, name))[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(60))
def test_ranks_end_where_fit_does_with_all_of_it_together(facts: Facts, seed: int) -> None:
    np, names = 1 + seed % 3, [f"random {each}" for each in range(seed % 3, 60, 3)]
    name = f"random {seed}"
    _compare(case_of(name), np, facts(np, tuple(names))[name])


def _compare(case: Case, np: int, found: dict[str, Any]) -> None:
    if case.refused:
        assert case.refused in found["error"]
        return
    assert "error" not in found, found["error"]
    assert found["apart"] == 0.0
    if np in case.equal_on:
        assert found["weights"] <= (case.alone_within if np == 1 else case.weights_within)
        assert not found["missing"]
        figures = {key: pair for key, pair in found["figures"].items() if pair[1] is not None}
        assert {key: pair[0] for key, pair in figures.items()} == pytest.approx(
            {key: pair[1] for key, pair in figures.items()}, rel=case.figures_within, abs=case.figures_within
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.refused])
def test_what_a_checkpoint_holds_is_all_that_training_goes_on_from(facts: Facts, name: str) -> None:
    """A model that is built anew, and gets those variables, ends with the same bits as one that trained on."""
    names = [name for name, case in CASES.items() if not case.refused]
    found = facts(2, _chunk_of(name, names), ("--resumed",))[name]
    assert found.get("resumed") == [], found


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in UNEVEN)])
def test_with_equal_shares_uneven_steps_end_elsewhere(facts: Facts, name: str) -> None:
    names = tuple(UNEVEN) if name in UNEVEN else (name,)
    assert facts(3, names, ("--equal-shares",))[name]["weights"] > 1e-4


def test_every_class_of_keras_has_a_case() -> None:
    assert uncovered() == {"metrics": [], "losses": [], "optimizers": [], "schedules": []}
