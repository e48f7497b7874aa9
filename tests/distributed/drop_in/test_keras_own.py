"""Keras' own tests of trainers, optimizers and callbacks pass on two ranks, what they compile being distributed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import HANGS_AFTER_S, PROGRAMS, launcher_command, run_process, warm_python

DISTRIBUTED_AT_LEAST = 250
"""Calls of `compile` in those tests; fewer would mean that the program no longer finds where they compile."""


@pytest.mark.exhaustive
def test_what_passes_in_one_process_passes_on_two_ranks(tmp_path: Path) -> None:
    def outcomes(launcher: str, np: int) -> list[dict[str, Any]]:
        out = tmp_path / str(np)
        out.mkdir()
        command = [*launcher_command(launcher, np), *warm_python(), str(PROGRAMS / "keras_own.py"), str(out)]
        finished = run_process(command, timeout_s=8 * HANGS_AFTER_S)
        assert finished.returncode == 0, finished.text
        return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(np)]

    (alone,) = outcomes("none", 1)
    for facts in outcomes("mpirun", 2):
        assert facts["distributed"] > DISTRIBUTED_AT_LEAST
        failed = {name: facts["failed"].get(name, "not run") for name in set(alone["passed"]) - set(facts["passed"])}
        assert not failed, failed
