"""What the benchmark of the watchdog's members measures is the real watchdog: all are heard, and all are told."""

from __future__ import annotations

import json
import sys

import pytest
from conftest import PROJECT, run_process

pytestmark = pytest.mark.long


SCRIPT = str(PROJECT / "benchmarks" / "watch_members.py")


def test_forty_ranks_are_heard_and_told() -> None:
    finished = run_process([sys.executable, SCRIPT, "--ranks", "40", "--seconds", "1", "--json"])
    assert finished.returncode == 0, finished.text
    found = json.loads(finished.stdout)
    assert (found["ranks"], found["beat_every_s"]) == (40, 1.0)
    assert 0 < found["cpu_share"] < 1
    assert found["connect_s"] > 0
    assert found["all_told_s"] > 0


@pytest.mark.parametrize("words", [["--ranks", "1"], ["--seconds", "0"]])
def test_bad_words_are_one_line(words: list[str]) -> None:
    finished = run_process([sys.executable, SCRIPT, *words])
    assert finished.returncode == 2
    assert "--ranks must be at least 2, --seconds above 0" in finished.stderr
