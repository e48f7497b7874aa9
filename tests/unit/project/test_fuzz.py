"""Configs, weights and records that are damaged at random end in one line, soon. To repeat a case: see fuzzed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROJECT

SEED = 20_261_126


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        ("config", 25),
        pytest.param("config", 1000, marks=pytest.mark.long),
        pytest.param("weights", 300, marks=pytest.mark.long),
        pytest.param("records", 300, marks=pytest.mark.long),
    ],
)
def test_what_is_damaged_at_random_is_one_line(kind: str, cases: int, tmp_path: Path) -> None:
    command = [sys.executable, str(PROJECT / "tests/fuzzed.py"), kind, str(SEED), str(cases), str(tmp_path / "fuzz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    facts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert [fact for fact in facts if fact["problem"]] == []
    assert len(facts) == cases, f"case {SEED + len(facts)} ended the process ({done.returncode}): {done.stderr[-2000:]}"
