"""Runs of random models and settings that are stopped and killed at random steps end as if nothing had happened."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
from conftest import HANGS_AFTER_S, PROGRAMS, launcher_command, run_process, warm_python

IN_ONE_LAUNCH = 10
REFUSED = (5, 20)
"""Seeds that draw settings which do not go together, or figures that a model does not show."""
SEEDS = [seed for seed in range(30) if seed not in REFUSED]
Found = Callable[[tuple[int, ...]], dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Seeds → what root found of each; the same ones are launched once."""

    @functools.cache
    def launched(seeds: tuple[int, ...]) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("resumes")
        program = [*warm_python(), str(PROGRAMS / "random_resumes.py"), str(out), *map(str, seeds)]
        finished = run_process([*launcher_command("mpirun", 2), *program], timeout_s=6 * HANGS_AFTER_S)
        assert finished.returncode == 0, finished.text
        cases: dict[str, Any] = json.loads((out / "rank-0.json").read_text())["cases"]
        return cases

    return launched


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_in_parts_ends_as_one_that_nothing_interrupts(found: Found, seed: int) -> None:
    first = SEEDS.index(seed) // IN_ONE_LAUNCH * IN_ONE_LAUNCH
    case = found(tuple(SEEDS[first : first + IN_ONE_LAUNCH]))[str(seed)]
    assert (case["whole"], case["codes"][-1]) == (0, 0), case
    assert len(case["codes"]) > 1, case
    assert case["differ"] == {}, case
