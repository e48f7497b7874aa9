"""What a run says it is limited by is what limits it, on real ranks that are slow for a known reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROJECT, RankFacts, summary_of, train
from user_slow import TRACED_IN_S

from horovod_train.training.hooks.log import judge
from horovod_train.training.open_run import MEASURED_PHASES

pytestmark = pytest.mark.long


EVERYWHERE = "input-bound|straggler rank . in input"
"""Where all ranks parse slowly: the others have their next batch by the time the slowest has, and look fast."""

TRAINED_ON = 1437
"""Digits in an epoch."""

HEALTHY = "(compute|exchange|input)-bound"

REASONS = [
    (2, "straggler rank 1 in compute"),
    *(
        pytest.param(
            3, reason, marks=pytest.mark.exhaustive
        )  # on cores that do much else besides, another may be the reason
        for reason in (
            *("compute-bound", "exchange-bound", "hook-bound"),
            *("straggler rank 1 in compute", "straggler rank 2 in compute", "straggler rank 1 in hook"),
            *("straggler rank 0 in input", "straggler rank 2 in input", "straggler rank 0 in .*"),
            *(EVERYWHERE, HEALTHY),
        )
    ),
]
"""Numbers of ranks, and patterns of what is said. A rank that is stopped from outside may be in either phase."""


def said_mostly(verdicts: Iterable[str]) -> str:
    """The most frequent verdict without host and figure: on busy cores any rank is sometimes the slowest."""
    said = (re.sub(r"(straggler rank \d) \(.*\): .*( in \w+)", r"\1\2", verdict) for verdict in verdicts)
    return Counter(said).most_common(1)[0][0]


def between(times: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All but the start and the end, before which all input is there."""
    assert len(times) == 5
    return times[1:-1]


@pytest.mark.exhaustive
def test_an_evaluation_that_is_slow_on_one_rank_is_no_stall(digits: Path, tmp_path: Path) -> None:
    """Both call 10 batches at once, which takes rank 1 longer than the limit. The first evaluation compiles."""
    words = [
        *("data.global_batch_size=20", f"data.train={digits}/train", f"data.eval={digits}/eval"),
        *("train.max_steps=40", "model=user_slow:in_evaluation", "eval={every_steps: 20, every_epochs: null}"),
        "watch={warn_after_s: 3, stop_after_s: 6, first_step_after_s: 60}",
    ]
    config = PROJECT / "configs" / "digits_convnet.yaml"
    finished = train(["--config", config, *words, "--output-dir", tmp_path / "run"], launcher="srun", np=2)
    assert finished.returncode == 0, finished.text
    assert "has been in" not in finished.stdout


def test_a_step_that_compiles_is_neither_a_stall_nor_slow(digits: Path, tmp_path: Path) -> None:
    """Each takes longer than the limit: the first step, the shorter one that ends an epoch, those of evaluations."""
    words = [
        *("data.global_batch_size=500", f"data.train={digits}/train", f"data.eval={digits}/eval"),
        *("train.epochs=2", "eval.every_epochs=1", "model=user_slow:to_trace", "log.histograms_every_steps=2"),
        "watch={warn_after_s: 3, stop_after_s: 4, first_step_after_s: 300}",
    ]
    config = PROJECT / "configs" / "digits_convnet.yaml"
    finished = train(["--config", config, *words, "--output-dir", tmp_path / "run"], launcher="srun", np=2)
    assert finished.returncode == 0, finished.text
    assert "compiling the step again" in finished.stdout
    assert " been in " not in finished.text
    # If one compilation counted as training time, all records together would not come to this.
    assert summary_of(tmp_path / "run")["examples_per_s"] > 2 * TRAINED_ON / TRACED_IN_S


@pytest.mark.parametrize(("np_", "reason"), REASONS)
def test_the_reason_is_found(rank_facts: RankFacts, np_: int, reason: str) -> None:
    root = rank_facts("slowed", "srun", np_)[0][reason]
    assert root["code"] == 0
    times = between(root["times"])
    assert re.fullmatch(reason, said_mostly(row["verdict"] for row in times)), times


@pytest.mark.parametrize(("np_", "reason"), REASONS[:-2])  # of the others any rank may be the slowest
def test_it_would_not_be_found_in_shuffled_marks(rank_facts: RankFacts, np_: int, reason: str) -> None:
    verdicts = []
    for row in between(rank_facts("slowed", "srun", np_)[0][reason]["times"]):
        seconds = np.array([row["seconds"][phase] for phase in MEASURED_PHASES]).T
        shuffled = np.roll(seconds, 1, axis=0 if "straggler" in reason else 1)
        verdicts.append(judge(shuffled, lambda rank: f"rank {rank} (host)"))
    assert not re.fullmatch(reason, said_mostly(verdicts)), verdicts
