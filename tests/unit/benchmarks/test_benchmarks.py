"""What the benchmarks say of themselves."""

from __future__ import annotations

import sys

import pytest
from conftest import PROJECT, run_process

pytestmark = pytest.mark.long


@pytest.mark.parametrize("script", sorted((PROJECT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_a_benchmark_says_how_to_run_it(script: str) -> None:
    finished = run_process([sys.executable, str(script), "--help"])
    assert finished.returncode == 0
    assert f"python benchmarks/{PROJECT.joinpath(script).name} " in finished.stdout
