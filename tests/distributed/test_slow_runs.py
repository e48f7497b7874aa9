"""What a run says it is limited by is what limits it, on real ranks that are slow for a known reason."""

from __future__ import annotations

import re

import numpy as np
import pytest
from conftest import RankFacts

from horovod_train.distributed.watchdog.heartbeat import FINE_PHASES
from horovod_train.training.phase_times import judge

REASONS = [
    *("compute-bound", "exchange-bound"),
    *("straggler rank 1 in compute", "straggler rank 2 in input", "straggler rank 0 in .*"),
]
"""Patterns of what is said. A rank that is stopped from outside may be stopped in either phase."""


def said_by(verdict: str) -> str:
    """A verdict without its host and its figure."""
    return re.sub(r"(straggler rank \d) \(.*\): .*( in \w+)", r"\1\2", verdict)


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_is_found(rank_facts: RankFacts, reason: str) -> None:
    root = rank_facts("slowed", "srun", 3)[0][reason]
    assert root["code"] == 0
    _, second, _ = root["times"]  # neither the start nor the end, before which all input is there
    assert re.fullmatch(reason, said_by(second["verdict"])), second


@pytest.mark.parametrize("reason", REASONS)
def test_it_would_not_be_found_in_shuffled_marks(rank_facts: RankFacts, reason: str) -> None:
    second = rank_facts("slowed", "srun", 3)[0][reason]["times"][1]
    seconds = np.array([second["seconds"][phase] for phase in FINE_PHASES]).T
    shuffled = np.roll(seconds, 1, axis=0 if "straggler" in reason else 1)
    assert not re.fullmatch(reason, said_by(judge(shuffled, lambda rank: f"rank {rank} (host)")))
