"""When a run leaves for its deadline, and after which calls its ranks vote: reckoned from what the run has measured."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import keras
import numpy as np
import pytest
from conftest import run_process

from horovod_train.config.settings import EarlyStoppingConfig
from horovod_train.distributed.launch import launcher
from horovod_train.distributed.launch.launcher import STOP_SIGNALS
from horovod_train.output.files import STOP_FILE
from horovod_train.training.stopping import (
    LEASE_LOST,
    SECONDS_BETWEEN_VOTES,
    EarlyStopping,
    Margin,
    PeriodicSync,
    StopCoordinator,
    StopReason,
    collected_signals,
    seconds_between_votes,
    usual_longest,
)


class Alone:
    """A group of one rank, whose sums are its own numbers."""

    size = 1
    controller = "MPI"

    def sum(self, arrays: Sequence[object]) -> list[np.ndarray]:
        return [np.asarray(array, float) for array in arrays]


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("horovod_train.training.stopping.time.monotonic", lambda: self.now)


def longest_without_a_meeting(pace: PeriodicSync, clock: Clock, call_s: float, calls: int) -> float:
    last, longest = clock.now, 0.0
    for _ in range(calls):
        clock.now += call_s
        if pace.is_due():
            pace.meet([0.0])
            longest, last = max(longest, clock.now - last), clock.now
    return max(longest, clock.now - last)


@pytest.mark.parametrize("fails", [False, True])
def test_after_calls_of_another_kind_the_first_call_is_voted_on(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Training calls of 10 s, around an evaluation in calls of 0.1 s, of which ten make a second."""
    clock = Clock(monkeypatch)
    pace = PeriodicSync(Alone())  # type: ignore[arg-type]
    assert longest_without_a_meeting(pace, clock, 10.0, calls=3) == 10.0
    try:
        with pace.other_calls("evaluate"):
            assert longest_without_a_meeting(pace, clock, 0.1, calls=100) == pytest.approx(SECONDS_BETWEEN_VOTES)
            if fails:
                raise ValueError
    except ValueError:
        pass
    assert longest_without_a_meeting(pace, clock, 10.0, calls=20) == 10.0


class Ring(Alone):
    """As if this were one of 400 ranks over gloo, all of which take the same time."""

    size = 400
    controller = "gloo"

    def sum(self, arrays: Sequence[object]) -> list[np.ndarray]:
        return [self.size * np.asarray(array, float) for array in arrays]


def test_hundreds_of_ranks_in_a_ring_vote_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_between_votes(400, is_ring=False) == seconds_between_votes(100, is_ring=True) == 1.0
    assert seconds_between_votes(400, is_ring=True) == 4.0
    clock = Clock(monkeypatch)
    assert longest_without_a_meeting(PeriodicSync(Ring()), clock, 0.1, 400) == pytest.approx(4.0)  # type: ignore[arg-type]
    assert longest_without_a_meeting(PeriodicSync(Alone()), clock, 0.1, 400) == pytest.approx(1.0)  # type: ignore[arg-type]


def test_a_vote_right_after_the_pace_was_forgotten_does_not_put_off_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after the first call, or after an evaluation: no time has passed, so the vote measured no call."""
    clock = Clock(monkeypatch)
    pace = PeriodicSync(Alone())  # type: ignore[arg-type]
    for start_over in (pace.forget, pace.restart):
        start_over()
        assert pace.is_due()
        pace.meet([0.0])
        assert longest_without_a_meeting(pace, clock, 0.1, calls=200) <= SECONDS_BETWEEN_VOTES + 0.11


def test_how_long_building_and_compiling_took_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = PeriodicSync(Alone())  # type: ignore[arg-type]
    longest_without_a_meeting(pace, clock, 60.0, calls=1)
    assert pace.longest_s == 60.0
    pace.forget()
    longest_without_a_meeting(pace, clock, 0.5, calls=4)
    assert pace.longest_s < 2.0


@pytest.mark.parametrize("seed", range(50))
def test_a_run_has_left_at_its_deadline_where_nothing_takes_twice_as_long_as_it_ever_has(seed: int) -> None:
    """A run is asked to leave at a vote, walks on to where it can be left, saves, and waits for two writes at most.

    Of three times or more the longest is taken for a suspension.
    """
    draw = random.Random(seed)
    call_s, blocked_s, write_s, time_to_safe_step_s = (draw.uniform(0.001, most) for most in (5, 20, 40, 10))
    written: list[float] = []
    stopping = coordinator(write_times=written)
    margin = stopping.margin
    margin.time_to_safe_step_s = time_to_safe_step_s
    deadline, now = 1000.0, 0.0
    while not written or now + margin.seconds() < deadline:
        now += draw.uniform(0.1, 1) * call_s
        margin.between_votes_s = call_s
        if not written or draw.random() < 0.1:
            blocked = draw.uniform(0.5, 1) * blocked_s
            now += blocked
            stopping.note_save(blocked)
            written.append(draw.uniform(0.5, 1) * write_s)
            margin.write_s = usual_longest(written)
    # From the last vote at which there was time enough: a call, the way to a step at which to leave, and the save.
    left = now + time_to_safe_step_s + draw.uniform(1, 2) * (margin.save_s + margin.write_s)
    assert left <= deadline
    assert deadline - now >= margin.seconds() - 2 * (call_s + margin.save_s + margin.write_s), "it left too early"


def test_a_margin_never_falls_below_what_was_kept_before_a_save_was_measured() -> None:
    margin = Margin(first_save_s=60.0)
    before = margin.seconds()
    margin.save_s, margin.write_s = 1.0, 2.0
    assert margin.seconds() == before > 60.0
    margin.write_s = 100.0
    assert margin.seconds() > 202.0


def test_time_is_kept_for_a_large_first_save_until_one_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run that saves first at the end of its job's time loses all, at each start anew."""
    Clock(monkeypatch).now = 100.0

    def kept(gigabytes: float, saves: int) -> float:
        stopping = coordinator(deadline=3700.0)
        stopping.expect_save(int(gigabytes * 1e9))
        for _ in range(saves):
            stopping.note_save(1.0)
        return stopping.margin.seconds()

    assert [kept(0.001, 0), kept(0.001, 2)] == [62.0, 62.0]
    assert [kept(50, 0), kept(50, 1), kept(50, 2)] == [1002.0, 1002.0, 62.0]
    assert kept(500, 0) == 1202.0


def coordinator(
    *, deadline: float | None = None, run_dir: Path | None = None, received: Set[int] = frozenset(), **found: Any
) -> StopCoordinator:
    """Of one rank. found: what the lease and the store of checkpoints have found."""
    both: Any = SimpleNamespace(**{"lost": False, "given_up": "", "write_times": [], "write_under_way_s": 0.0, **found})
    return StopCoordinator(Alone(), both, both, received, deadline=deadline, run_dir=run_dir)  # type: ignore[arg-type]


def test_a_short_job_keeps_a_tenth_of_its_time_for_the_first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch).now = 100.0
    assert coordinator(deadline=200.0).margin.seconds() == 10.0 + 2 * SECONDS_BETWEEN_VOTES
    assert coordinator(deadline=100.0 + 3600).margin.seconds() == 60.0 + 2 * SECONDS_BETWEEN_VOTES


@pytest.mark.parametrize("part", ["save", "hook", "write", "votes"])
def test_the_longest_of_each_time_counts_for_the_margin_though_the_last_was_short(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    clock = Clock(monkeypatch)
    written: list[float] = []
    stopping = coordinator(deadline=clock.now + 36_000, write_times=written)
    before = stopping.margin.seconds()
    for seconds in (100.0, 100.0, 0.0):
        clock.now += seconds if part == "votes" else 0.0
        if part == "save":
            stopping.note_save(seconds)
        elif part == "hook":
            stopping.note_hook(("saves", ""), seconds)
        elif part == "write":
            written.append(seconds)
        assert stopping.vote() is None
    stopping.vote()  # what a vote has measured, the next one counts
    first_save = 60.0 if part in ("save", "write") else 0.0
    assert stopping.margin.seconds() == before - first_save + 200.0 - (2 * SECONDS_BETWEEN_VOTES) * (part == "votes")


def test_the_second_longest_time_between_votes_of_the_last_ten_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = PeriodicSync(Alone())  # type: ignore[arg-type]
    longest = []
    for seconds in (30.0, 40.0, *[1.0] * 10):
        clock.now += seconds
        pace.meet([0.0])
        longest.append(pace.longest_s)
    assert longest == [30.0, 40.0, *[30.0] * 8, 1.0, 1.0]


def test_calls_that_are_slow_each_time_count_though_they_are_rare_among_faster_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five votes of training, then an evaluation that is one call of a minute."""
    clock = Clock(monkeypatch)
    pace = PeriodicSync(Alone())  # type: ignore[arg-type]
    for evaluations in range(4):
        longest_without_a_meeting(pace, clock, 1.0, calls=5)
        assert pace.longest_s == (60.0 if evaluations else 1.0)
        with pace.other_calls("evaluate"):
            longest_without_a_meeting(pace, clock, 60.0, calls=1)


def test_a_save_under_way_that_is_slower_than_those_before_counts() -> None:
    stopping = coordinator(deadline=time.monotonic() + 36_000, write_times=[5.0, 5.0], write_under_way_s=100.0)
    stopping.vote()
    assert stopping.margin.write_s == 100.0


def test_what_was_measured_when_the_ranks_stopped_for_the_deadline_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary has it: a later vote, as at the end of the run, comes when the save has taken its time."""
    clock = Clock(monkeypatch)
    stopping = coordinator(deadline=clock.now + 1000)
    assert (stopping.vote(), stopping.at_walltime) == (None, {})
    for passed in (950.0, 45.0):
        clock.now += passed
        assert stopping.vote() == StopReason("walltime", restartable=True)
        assert (stopping.at_walltime["left_s"], stopping.at_walltime["kept_s"]) == (50.0, 62.0)


def test_each_reason_stops_the_run_and_the_file_that_would_stop_the_next_start_comes_first(tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()
    terminated = {int(signal.SIGTERM)}
    reasons: list[tuple[dict[str, Any], str]] = [
        ({"lost": True}, "another run has taken the run directory"),
        ({"given_up": "no space"}, "checkpoints cannot be saved"),
        ({"received": terminated}, "SIGTERM"),
        ({"run_dir": tmp_path}, "STOP file"),
        ({"run_dir": tmp_path, "received": terminated, "given_up": "no space"}, "STOP file"),
    ]
    for given, said in reasons:
        assert coordinator(**given).vote() == StopReason(said, restartable=True)
    assert coordinator().vote() is None


def test_a_signal_that_comes_while_others_are_told_is_told_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    received = {int(signal.SIGTERM), int(signal.SIGINT)}
    stopping = coordinator(received=received)
    named = signal.Signals

    def name_and_receive(number: int) -> signal.Signals:
        received.add(int(signal.SIGHUP))  # its handler runs in this thread
        return named(number)

    monkeypatch.setattr(signal, "Signals", name_and_receive)
    assert stopping._reasons() == {"SIGTERM", "SIGINT"}
    assert stopping._reasons() == {"SIGTERM", "SIGINT", "SIGHUP"}


def test_a_run_that_has_lost_its_directory_ends_for_that_whatever_else_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was suspended, until after its walltime: to save, or to tell of a stop, is the other run's."""
    Clock(monkeypatch)
    (tmp_path / STOP_FILE).touch()
    found = {"lost": "pid 7 on node12", "given_up": "full"}
    stopping = coordinator(deadline=0.0, run_dir=tmp_path, received={signal.SIGTERM}, **found)
    assert stopping.vote() == LEASE_LOST


def test_a_target_that_was_reached_by_little_is_known_after_a_restart() -> None:
    config = EarlyStoppingConfig(metric="accuracy", mode="max", target=0.9, min_delta=0.05)
    stopping = EarlyStopping(config)
    assert stopping.update(10, {"accuracy": 0.88}) is None
    assert stopping.ended() is None
    reached = stopping.update(20, {"accuracy": 0.91})
    assert reached is not None
    assert stopping.ended() == reached
    assert int(stopping.best.step) == 20


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_value_equal_to_the_target_reaches_it(mode: Literal["min", "max"]) -> None:
    worse, better = (0.75, 0.25) if mode == "min" else (0.25, 0.75)
    for value, is_reached in ((worse, False), (0.5, True), (better, True)):
        stopping = EarlyStopping(EarlyStoppingConfig(metric="any", mode=mode, target=0.5))
        assert (stopping.update(1, {"any": value}) is not None) == is_reached


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("min_delta", [0.0, 0.25])
@pytest.mark.parametrize("patience", [1, 2, 3])
def test_patience_runs_out_where_it_does_in_fit(mode: Literal["min", "max"], min_delta: float, patience: int) -> None:
    """Values in quarters, so that no sum is rounded."""
    for seed in range(20):
        values = np.random.default_rng(seed).integers(0, 8, size=30) / 4
        ours = EarlyStopping(EarlyStoppingConfig(metric="any", mode=mode, min_delta=min_delta, patience=patience))
        of_keras = keras.callbacks.EarlyStopping("any", min_delta, patience, mode=mode)
        of_keras.set_model(SimpleNamespace(stop_training=False))
        of_keras.on_train_begin()
        for epoch, value in enumerate(values):
            of_keras.on_epoch_end(epoch, {"any": value})
            assert (ours.update(epoch, {"any": value}) is not None) == of_keras.model.stop_training
            assert (float(ours.best.value), int(ours.best.step)) == (of_keras.best, of_keras.best_epoch)
            if of_keras.model.stop_training:
                break


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    """As where the metric is another one now: patience begins anew, and any value is better."""

    def state_of(stopping: EarlyStopping) -> list[str]:
        return [str(variable.numpy()) for variable in stopping.best.variables.values()]

    config = EarlyStoppingConfig(metric="any", mode="max", patience=3)
    fresh, used = EarlyStopping(config), EarlyStopping(config)
    for step in (1, 2, 3):
        used.update(step, {"any": 0.5})
    assert state_of(used) == ["0.5", "1", "2"]
    used.best.forget()
    assert state_of(used) == state_of(fresh)


def test_a_value_that_stays_the_same_is_no_better() -> None:
    stopping = EarlyStopping(EarlyStoppingConfig(metric="accuracy", mode="max", patience=2))
    ended = [stopping.update(step, {"accuracy": 0.5}) is not None for step in (1, 2, 3)]
    assert ended == [False, False, True]
    assert int(stopping.best.step) == 1


def test_a_value_that_is_never_a_number_is_named_as_that() -> None:
    stopping = EarlyStopping(EarlyStoppingConfig(metric="f1", mode="max", patience=2))
    assert stopping.update(1, {"f1": math.nan}) is None
    ended = stopping.update(2, {})
    assert ended is not None
    assert ended.text == "early stopping: f1 was no number in any of 2 evaluation(s)"
    assert stopping.ended() == ended  # also after a restart


def test_the_time_of_a_hook_is_kept_for_another() -> None:
    stopping = coordinator()
    before = stopping.margin.seconds()
    for seconds in (0.1, 0.2, 0.1):
        stopping.note_hook(("fast", ""), seconds)
    stopping.note_hook(("slow", ""), 30.0)
    assert stopping.margin.seconds() == before + 60
    for seconds in (29.0, 28.0, 27.0):
        stopping.note_hook(("slow", ""), seconds)
    assert stopping.margin.seconds() == before + 58


def test_a_suspension_is_no_measure_of_what_was_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would make a run leave for its deadline twice as long before that as it was suspended."""
    clock = Clock(monkeypatch)
    written = [2.0, 3.0]
    stopping = coordinator(write_times=written)
    for _ in range(3):
        stopping.note_save(1.0)
        stopping.note_hook(("evaluates", ""), 5.0)
        longest_without_a_meeting(stopping.pace, clock, 1.0, calls=5)
    assert stopping.vote() is None
    before = stopping.margin.seconds()
    stopping.note_save(3600.0)
    stopping.note_hook(("evaluates", ""), 3600.0)
    written.append(3600.0)
    longest_without_a_meeting(stopping.pace, clock, 3600.0, calls=1)
    assert stopping.vote() is None
    assert stopping.margin.seconds() == before


def test_what_is_slow_again_is_slow() -> None:
    written = [2.0, 3.0]
    stopping = coordinator(write_times=written)
    for seconds in (1.0, 1.0, 40.0, 50.0):
        stopping.note_save(seconds)
        stopping.note_hook(("evaluates", ""), seconds)
        written.append(seconds)
    assert stopping.vote() is None
    margin = stopping.margin
    assert (margin.save_s, margin.hook_s, margin.write_s) == (40.0, 40.0, 40.0)


def test_of_two_times_the_longest_counts() -> None:
    assert [usual_longest(times) for times in ([], [3.0], [1.0, 3.0], [2.0, 1.0, 3.0])] == [0.0, 3.0, 3.0, 2.0]


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_deadline_stays_where_it_is_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    clock = Clock(monkeypatch)
    stopping = coordinator(deadline=1900.0)
    now = time.time()
    monkeypatch.setattr("horovod_train.training.stopping.time.time", lambda: now + 3600 * hours)
    assert stopping.vote() is None
    clock.now = 1890.0
    assert stopping.vote() == StopReason("walltime", restartable=True)


def test_signals_that_announce_the_end_are_collected_and_an_ignored_hangup_stays_ignored() -> None:
    announced = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGHUP}
    assert set(STOP_SIGNALS) == announced
    for handler, expected in [(signal.SIG_DFL, announced), (signal.SIG_IGN, announced - {signal.SIGHUP})]:
        before = signal.signal(signal.SIGHUP, handler)
        try:
            with collected_signals() as received:
                for number in announced:
                    os.kill(os.getpid(), number)
            assert received == expected
            assert signal.getsignal(signal.SIGHUP) == handler
        finally:
            signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_no_signal_is_collected_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A run in another thread starts all the same."""
    found: list[object] = []

    def run() -> None:
        with collected_signals() as received:
            found.append(received)

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [set()]
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
    said = "signals do not stop this run, because it is not in the main thread: use the file STOP, or train.max_time"
    assert caplog.messages == [said]


def test_a_second_sigint_interrupts_an_interactive_process_and_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a cell that is interrupted twice, whose notebook keeps what it has computed."""
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    before = signal.getsignal(signal.SIGINT)
    with collected_signals() as received:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert received == {signal.SIGTERM, signal.SIGINT}
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


FORKS = """
import multiprocessing, os, signal, time
from horovod_train.training.stopping import collected_signals

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)  # whatever the process that starts this one ignores
forks = multiprocessing.get_context("fork")
ready = forks.Event()

def wait():
    ready.set()
    while True:
        time.sleep(0.05)  # not one long wait: a signal that comes directly before it would not end it

with collected_signals() as received:
    with forks.Pool(2) as pool:  # its end sends SIGTERM, and waits
        assert pool.map(abs, [-2, -1]) == [2, 1]
    child = forks.Process(target=wait)
    child.start()
    assert ready.wait(60)
    for pid in (child.pid, os.getpid()):
        os.kill(pid, signal.SIGINT)
    child.join()
    assert received == {signal.SIGINT}
print("saved")
"""


def test_a_forked_process_ends_at_sigterm_and_its_sigint_does_not_count_as_a_second_one_of_its_parent() -> None:
    """Else the end of a pool would wait for ever, and one Ctrl-C in a terminal would end the run without a save."""
    finished = run_process([sys.executable, "-c", FORKS], timeout_s=120)
    assert (finished.returncode, finished.stdout) == (0, "saved\n"), finished.text


def test_a_signal_that_a_library_in_c_has_taken_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python could not give it back."""
    known = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGUSR2 else known(number))
    before = known(signal.SIGUSR2)
    with collected_signals():
        assert known(signal.SIGUSR2) == before
        assert known(signal.SIGUSR1) != signal.SIG_DFL


@pytest.mark.parametrize("interactive", [False, True])
def test_a_second_sigint_ends_a_rank_as_sigint_does_though_a_compiled_call_never_returns(
    monkeypatch: pytest.MonkeyPatch, interactive: bool
) -> None:
    """Also an interactive one that a launcher started: the others wait for it. Other signals end nothing."""
    codes, has_ended = list[int](), threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), has_ended.set()))
    monkeypatch.setattr(launcher, "detect", lambda: SimpleNamespace(launcher="mpirun"))
    if interactive:
        monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    with collected_signals():
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert not has_ended.wait(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        assert has_ended.wait(60)
    assert codes == [130]
    assert signal.set_wakeup_fd(-1) == -1  # else later signals would be written into whatever file gets its number
