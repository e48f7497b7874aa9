"""Where time goes: what a thread sees of the phases of a step, and what is concluded from all ranks' times."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from horovod_train.training import open_run
from horovod_train.training.hooks.log import judge
from horovod_train.training.open_run import MEASURED_PHASES, PhaseTimes, Stopwatch


def name(rank: int) -> str:
    return f"rank {rank} (node{rank})"


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ([[6, 3, 0, 1]], "input-bound"),
        ([[1, 3, 0, 6]], "compute-bound"),  # a single rank has nobody to exchange with
        ([[1, 8, 0, 1], [1, 7, 0, 2]], "compute-bound"),
        ([[1, 3, 0, 6], [1, 3, 0, 6]], "exchange-bound"),
        # Three ranks wait for one, so what they wait is no cost of the exchange.
        ([[1, 3, 0, 6], [1, 8, 0, 1], [1, 3, 0, 6], [1, 3, 0, 6]], "straggler rank 1 (node1): 167 % slower in compute"),
        ([[0, 3, 0, 7], [0, 3, 0, 7], [6, 3, 0, 1]], "straggler rank 2 (node2): 60 % of its time in input"),
        # A little slower than the others, as some rank always is.
        ([[0, 8, 0, 2], [0, 9, 0, 1]], "compute-bound"),
        # In a callback of one rank, and in a hook of all.
        ([[0, 3, 0, 7], [0, 3, 6, 1], [0, 3, 0, 7]], "straggler rank 1 (node1): 60 % of its time in hook"),
        ([[0, 3, 6, 1], [0, 3, 6, 1]], "hook-bound"),
        # In 20 looks some rank is often seen computing twice as much as another; in 2 000 it is twice as slow.
        ([[0, 0.6, 0, 0.4], [0, 0.3, 0, 0.7]], "compute-bound"),
        ([[0, 60, 0, 40], [0, 30, 0, 70]], "straggler rank 0 (node0): 100 % slower in compute"),
        # The exchange is slow although nobody is late.
        ([[0, 2, 0, 8], [0, 3, 0, 7]], "exchange-bound"),
    ],
)
def test_the_verdict_follows_from_the_times_of_all_ranks(seconds: list[list[float]], verdict: str) -> None:
    assert judge(np.array(seconds, float), name) == verdict


def test_the_straggler_is_found_wherever_it_is() -> None:
    for slow in range(5):
        seconds = np.tile([1.0, 2.0, 0.0, 7.0], (5, 1))
        seconds[slow] = [1.0, 8.0, 0.0, 1.0]
        assert judge(seconds, name).startswith(f"straggler rank {slow} (node{slow}): ")


class Looks:
    """In the place of the thread's event and clock: each look comes after so many seconds and sees such a phase."""

    def __init__(self, *looks: tuple[float, str | None]) -> None:
        self._left, self.now = list(looks), 0.0
        self.phase: str | None = None

    def wait(self, seconds: float) -> bool:
        if not self._left:
            return True
        passed_s, self.phase = self._left.pop(0)
        self.now += passed_s
        return False

    def set(self) -> None: ...


def test_times_add_up_to_what_has_passed_in_compiled_training(monkeypatch: pytest.MonkeyPatch) -> None:
    training = [(0.1, "compute"), (0.1, "compute"), (7.0, "compute"), (0.1, "exchange")]  # for 7 s it was stopped
    looks = Looks((0.1, None), *training, (0.1, None), (0.1, "input"), (0.2, "input"))
    monkeypatch.setattr(open_run, "time", SimpleNamespace(perf_counter=lambda: looks.now))
    times = PhaseTimes(lambda: looks.phase)
    times._ended = looks  # type: ignore[assignment]
    with times:
        times._thread.join(300)
    taken = dict(zip(MEASURED_PHASES, times.take(), strict=True))
    # The first look after another phase does not know when training began.
    assert taken == pytest.approx({"input": 0.2, "compute": 7.1, "hook": 0.0, "exchange": 0.1})
    assert not times.take().any()


def test_a_call_in_which_the_process_was_suspended_makes_no_step_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("horovod_train.training.open_run.time.perf_counter", lambda: now)
    watch = Stopwatch()
    watch.start()
    found = [watch.s_per_step()]
    for seconds, steps in [(4.0, 4), (3600.0, 4), (8.0, 4), (6.0, 4)]:
        now += seconds
        watch.count(steps, 0)
        found.append(watch.s_per_step())
    assert found == [0.0, 1.0, 1.0, 1.5, 1.5]
