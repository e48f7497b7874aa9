"""The trainer ends where Keras' `fit` does: the same weights and the same figures, at any number of ranks."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import HANGS_AFTER_S, PROGRAMS, launcher_command, run_process, warm_python

sys.path.insert(0, str(PROGRAMS))
from differential_cases import CASES

Facts = Callable[..., dict[str, Any]]
UNEVEN = ["plain", "activity_regularizer", "own train_step", "layer with a scale", "class weights"]
"""Cases in which ranks have different numbers of records in a step."""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """(ranks, names of cases, words) → what root found of each case; each combination is launched once."""

    @functools.cache
    def found(np: int, names: tuple[str, ...], words: tuple[str, ...] = ()) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("differential")
        program = str(PROGRAMS / "differential.py")
        launched = [*launcher_command("mpirun" if np > 1 else "none", np), *warm_python(), program]
        finished = run_process([*launched, str(out), *words, *names], timeout_s=6 * HANGS_AFTER_S)
        assert finished.returncode == 0, finished.text
        return json.loads((Path(out) / "rank-0.json").read_text())["cases"]

    return found


def _cases(np: int) -> list[Any]:
    """All cases; at two ranks all of them are more of a kind, as three are tested."""
    return [
        pytest.param(np, name, id=f"{np}-{name}", marks=[pytest.mark.long] if case.long or np == 2 else [])
        for name, case in CASES.items()
    ]


def _launched_with(np: int, name: str) -> tuple[str, ...]:
    """The cases that one launch trains together: the long ones apart from the others."""
    return tuple(each for each, case in CASES.items() if case.long == CASES[name].long)


@pytest.mark.parametrize(("np", "name"), [*_cases(1), *_cases(2), *_cases(3)])
def test_ranks_end_where_fit_does(facts: Facts, np: int, name: str) -> None:
    case, found = CASES[name], facts(np, _launched_with(np, name))[name]
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


@pytest.mark.parametrize("name", UNEVEN)
def test_with_equal_shares_uneven_steps_end_elsewhere(facts: Facts, name: str) -> None:
    assert facts(3, tuple(UNEVEN), ("--equal-shares",))[name]["weights"] > 1e-4
