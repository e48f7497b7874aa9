"""Why and when a run ends early: signals, walltime, the stop file, early stopping; the same on all ranks.

Ranks agree on requests by one small reduction; early stopping reads reduced values. Does not save and does not end the
process.
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_train.checkpoint.manager import SLOWEST_BYTES_PER_S, LongestTimes, Store
from horovod_train.config.settings import EarlyStoppingConfig, Watched
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.launch import launcher
from horovod_train.distributed.launch.launcher import STOP_SIGNALS
from horovod_train.output.console import show_cursor
from horovod_train.output.files import STOP_FILE
from horovod_train.output.lease import Lease

STOP_FILE_REASON = f"{STOP_FILE} file"
SECONDS_BETWEEN_VOTES = 1.0
RING_RANKS = 100
"""So many ranks over gloo vote once in SECONDS_BETWEEN_VOTES, more of them less often."""
FIRST_SAVE_S = 60.0
"""Time kept for a save before the deadline if none has been measured; or a tenth of the time left, if that is less."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StopReason:
    """Why a run ends. restartable: it could continue; starting it again resumes it."""

    text: str
    restartable: bool = False


_WALLTIME, _LEASE = "walltime", "another run has taken the run directory"
_SAVES = "checkpoints cannot be saved"
# The lease first: without it nothing can be saved, and the stop file is another run's. The file next, because it would
# stop the next start too.
_ALL = (_LEASE, STOP_FILE_REASON, *(number.name for number in STOP_SIGNALS), _WALLTIME, _SAVES)
LEASE_LOST = StopReason(_LEASE, restartable=True)
SAVES_FAILED = StopReason(_SAVES, restartable=True)


def seconds_between_votes(ranks: int, *, is_ring: bool) -> float:
    """Return how often ranks vote, so that votes take less than one percent of the time.

    is_ring: gloo's collectives go round all ranks, so a vote takes longer the more there are: by
    benchmarks/projection.py, with 20 µs for a message, one percent of a second from 125 ranks on.
    """
    return SECONDS_BETWEEN_VOTES * (max(1.0, ranks / RING_RANKS) if is_ring else 1.0)


def usual_longest(seconds: Iterable[float]) -> float:
    """Return the longest of the times that something took; of three or more the second longest; 0 of none.

    The longest may include a suspension, which the clocks used here count; what is slow is slow more than once.
    """
    longest = heapq.nlargest(3, seconds)
    return longest[1] if len(longest) == 3 else max(longest, default=0.0)


class PeriodicSync:
    """Picks the calls after which ranks synchronise, the same on all ranks: one every `seconds_between_votes`."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group, self._last = group, time.monotonic()
        self._between_s = seconds_between_votes(group.size, is_ring=group.controller == "gloo")
        self._calls, self._calls_between = 0, 1
        self._kind = ""
        self._recent_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=10))
        """By the kind of the calls: what is slow each time may be rare among faster ones."""

    @property
    def longest_s(self) -> float:
        """The longest recent time between two synchronisations, as in usual_longest of each kind of calls."""
        return max(map(usual_longest, self._recent_s.values()), default=0.0)

    def is_due(self) -> bool:
        """Call after each compiled call; returns whether to synchronise now."""
        self._calls += 1
        return self._calls >= self._calls_between

    def meet(self, values: Sequence[float]) -> np.ndarray:
        """Collective: return the sums of the values over ranks. Also exchanges the times that set the pace."""
        own_seconds = time.monotonic() - self._last
        self._recent_s[self._kind].append(own_seconds)
        sums, seconds = self.group.sum([values, own_seconds])
        mean_seconds = float(seconds) / self.group.size  # the same on all ranks
        wanted = int(self._calls * self._between_s / max(mean_seconds, 1e-6))
        # At most twice as many as were just measured: right after a restart the time measured is no call's.
        self._calls_between = max(1, min(wanted, 2 * self._calls))
        self._last, self._calls = time.monotonic(), 0
        return sums

    def restart(self) -> None:
        """Call before calls of another kind, which may take longer: the first one is due."""
        self._last, self._calls, self._calls_between = time.monotonic(), 0, 1

    def forget(self) -> None:
        """Forget times that will not occur again, such as the first call, which compiles."""
        self._recent_s.clear()
        self.restart()

    @contextmanager
    def other_calls(self, kind: str) -> Iterator[None]:
        """Calls inside the block are of another kind than those before and after it."""
        before, self._kind = self._kind, kind
        self.restart()
        try:
            yield
        finally:
            self._kind = before
            self.restart()


@dataclass
class Margin:
    """How long before its deadline a run stops: twice the measured time of each part of stopping.

    The longest times are as in usual_longest. first_save_s: the least time for a save.
    """

    first_save_s: float
    expected_save_s: float = 0.0
    """By the size of a checkpoint; 0 once a whole save has been measured."""
    save_s: float = 0.0
    """The longest time that a save blocked training, including its wait for the previous save."""
    write_s: float = 0.0
    """The longest time a save was written in the background; a run that stops waits for its last one."""
    between_votes_s: float = SECONDS_BETWEEN_VOTES
    """The longest recent time between two votes."""
    time_to_safe_step_s: float = 0.0
    """How long it may take until a step at which the run can stop and a vote takes place."""
    hook_s: float = 0.0
    """The longest call of a user's hook or callback, during which ranks do not vote."""

    def seconds(self) -> float:
        saving_s = max(self.first_save_s, self.expected_save_s, 2 * (self.save_s + self.write_s))
        between_votes_s = max(self.between_votes_s, SECONDS_BETWEEN_VOTES)
        return saving_s + 2 * (self.time_to_safe_step_s + self.hook_s + between_votes_s)


class StopCoordinator:
    """Collects this rank's stop reasons. `vote` returns the first reason of any rank, the same on all.

    received: the numbers of the signals so far; see collected_signals.
    deadline: by when the process must have ended, on time.monotonic's clock, or None.
    run_dir: on root, the folder in which a file named STOP asks the run to end; None on other ranks.
    """

    def __init__(
        self,
        group: WorkerGroup,
        lease: Lease,
        store: Store,
        received: Set[int],
        *,
        deadline: float | None,
        run_dir: Path | None,
    ) -> None:
        self.deadline, self.lease, self.store, self._received = deadline, lease, store, received
        self.stop_file = run_dir / STOP_FILE if run_dir else None
        self.margin = Margin(min(FIRST_SAVE_S, self._left_s() / 10))
        self.at_walltime: dict[str, float] = {}
        """Set when the ranks stop for the deadline: time left, time kept for stopping, and the measured times."""
        self.pace = PeriodicSync(group)
        self._save_times = LongestTimes()
        self._hook_times: defaultdict[tuple[str, str], LongestTimes] = defaultdict(LongestTimes)
        """By what is called: one is slow each time, another never."""

    def _left_s(self) -> float:
        return 0.0 if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def expect_save(self, bytes_each: int) -> None:
        """Until a save has been measured, keep what one of so many bytes may take; at most a third of the time left."""
        self.margin.expected_save_s = min(bytes_each / SLOWEST_BYTES_PER_S, self._left_s() / 3)

    def note_save(self, seconds: float) -> None:
        """Note how long a save blocked training; the save before it is whole then."""
        if self.margin.save_s:
            self.margin.expected_save_s = 0.0
        self._save_times.add(seconds)
        self.margin.save_s = usual_longest(self._save_times)

    def note_hook(self, called: tuple[str, str], seconds: float) -> None:
        """Note how long a user's hook, or a method of a callback, took; called: its name, and that of the method."""
        self._hook_times[called].add(seconds)
        self.margin.hook_s = max(map(usual_longest, self._hook_times.values()))

    def vote(self) -> StopReason | None:
        """Collective: return why the run must stop now, or None; the same on all ranks."""
        local_reasons = self._reasons()
        counts = self.pace.meet([float(reason in local_reasons) for reason in _ALL])
        agreed = [reason for reason, count in zip(_ALL, counts, strict=True) if count]
        if _WALLTIME in agreed and not self.at_walltime and self.deadline is not None:
            measured = {
                "left_s": self.deadline - time.monotonic(),
                "kept_s": self.margin.seconds(),
                **asdict(self.margin),
            }
            self.at_walltime = {name: round(seconds, 3) for name, seconds in measured.items()}
        return StopReason(agreed[0], restartable=True) if agreed else None

    def vote_periodically(self) -> StopReason | None:
        """Collective: vote about once a second; call after each compiled call."""
        return self.vote() if self.pace.is_due() else None

    def _reasons(self) -> set[str]:
        reasons = {signal.Signals(number).name for number in tuple(self._received)}
        self.margin.write_s = max(usual_longest(self.store.write_times), self.store.write_under_way_s)
        self.margin.between_votes_s = self.pace.longest_s
        if self.deadline is not None and time.monotonic() + self.margin.seconds() >= self.deadline:
            reasons.add(_WALLTIME)
        if self.stop_file is not None and os.path.exists(self.stop_file):  # False too if the disk is gone
            reasons.add(STOP_FILE_REASON)
        if self.lease.lost:
            reasons.add(_LEASE)
        if self.store.given_up:
            reasons.add(_SAVES)
        return reasons


_for_forked: list[Callable[[], Any]] = []
"""What a process undoes that is forked inside of `collected_signals`, as multiprocessing's workers are: SIGTERM has to
end it, and its own SIGINT must not count as a second one of its parent."""
_forking = threading.local()
"""The signals that a thread has blocked before it forks, as `mask`."""


def _before_fork() -> None:
    # A signal that comes before a forked process has undone them waits; Python would forget it.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS if _for_forked else ())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    for undo in _for_forked:
        undo()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


@contextmanager
def _undone_in_forked(undo: Callable[[], Any]) -> Iterator[None]:
    _for_forked.append(undo)
    try:
        yield
    finally:
        _for_forked.remove(undo)


@contextmanager
def collected_signals() -> Iterator[Set[int]]:
    """Collect signals as stop reasons instead of ending the process; a second SIGINT ends it immediately.

    In an interactive process that no launcher started, such as a notebook's, a second SIGINT raises KeyboardInterrupt
    instead, after the compiled call under way. SIGHUP remains ignored if it is, as under `nohup`. Outside the main
    thread, to which Python gives signals, none are collected.
    """
    received: set[int] = set()
    if threading.current_thread() is not threading.main_thread():
        log.warning(
            f"signals do not stop this run, because it is not in the main thread: use the file {STOP_FILE}, or "
            "train.max_time"
        )
        yield received
        return
    is_deaf = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    collected = [number for number in STOP_SIGNALS if not (number == signal.SIGHUP and is_deaf)]
    keeps_process = hasattr(sys, "ps1") and launcher.detect().launcher == "none"

    def receive(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in received and keeps_process:
            raise KeyboardInterrupt
        received.add(number)

    # None: set by a library in C, as one that LD_PRELOAD names, and Python cannot set it again.
    collected = [number for number in collected if signal.getsignal(number) is not None]
    before = {number: signal.signal(number, receive) for number in collected}

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        with _undone_in_forked(put_back), nullcontext() if keeps_process else _end_at_second_sigint():
            yield received
    finally:
        put_back()


@contextmanager
def _end_at_second_sigint() -> Iterator[None]:
    """Listen in a thread: Python tells it of signals immediately, but runs handlers only after a compiled call."""
    receiving, sending = socket.socketpair()
    sending.setblocking(False)

    def listen() -> None:
        received = b""
        while received.count(signal.SIGINT) < 2:
            if not (number := receiving.recv(1)):
                return
            received += number
        showing = threading.Thread(target=show_cursor, daemon=True)  # may wait for the terminal
        showing.start()
        showing.join(1.0)
        os._exit(128 + signal.SIGINT)

    before = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=listen, name="second SIGINT", daemon=True).start()
    try:
        with _undone_in_forked(lambda: signal.set_wakeup_fd(-1)):
            yield
    finally:
        signal.set_wakeup_fd(before)
        sending.close()


class BestTracker:
    """The best value, its step, and the number of evaluations since: variables, so that a checkpoint contains them."""

    def __init__(self, name: str, watched: Watched) -> None:
        self.metric, self.sign = watched.metric, 1 if watched.mode == "max" else -1
        self.value = tf.Variable(math.nan, dtype=tf.float64, trainable=False, name=f"{name}_value")
        self.step = tf.Variable(-1, dtype=tf.int64, trainable=False, name=f"{name}_step")
        self.evaluations_since = tf.Variable(0, dtype=tf.int64, trainable=False, name=f"{name}_evaluations_since")
        variables = (self.value, self.step, self.evaluations_since)
        self.variables = {variable.name.removesuffix(":0"): variable for variable in variables}

    def forget(self) -> None:
        """Reset, as for another metric."""
        self.value.assign(math.nan)
        self.step.assign(-1)
        self.evaluations_since.assign(0)

    def update(self, step: int, values: Mapping[str, float], *, min_delta: float = 0.0) -> None:
        """Take the values of an evaluation, the same on all ranks. NaN, or no such value, never counts as best."""
        new, old = values.get(self.metric, math.nan), float(self.value)
        is_better = math.isnan(old) or self.sign * (new - old) > min_delta
        if math.isnan(new) or not is_better:
            self.evaluations_since.assign_add(1)
        else:
            self.value.assign(new)
            self.step.assign(step)
            self.evaluations_since.assign(0)


class EarlyStopping:
    """Decides after an evaluation whether to stop: the target is reached, or patience has run out."""

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self.config = config
        self.best = BestTracker("early_stopping", config)

    def update(self, step: int, values: Mapping[str, float]) -> StopReason | None:
        """Take the values of an evaluation, the same on all ranks; return the stop reason or None."""
        reached = self.reached(values.get(self.config.metric, math.nan))
        # A value that reaches the target is kept however little better it is, so that a later start knows of it.
        self.best.update(step, values, min_delta=0 if reached else self.config.min_delta)
        return reached or self.ended()

    def reached(self, value: float) -> StopReason | None:
        """Return a stop reason if `value` reaches the target, else None."""
        name, target = self.config.metric, self.config.target
        if target is not None and self.best.sign * (value - target) >= 0:
            return StopReason(f"target reached: {name} {value:.6g}")
        return None

    def ended(self) -> StopReason | None:
        """Return the stop reason that the evaluations so far give, also after a restart; else None."""
        if reached := self.reached(float(self.best.value)):
            return reached
        name, evaluations = self.config.metric, int(self.best.evaluations_since)
        if self.config.patience is not None and evaluations >= self.config.patience:
            if math.isnan(float(self.best.value)):
                return StopReason(f"early stopping: {name} was no number in any of {evaluations} evaluation(s)")
            best = f"{float(self.best.value):.6g} at step {int(self.best.step)}"
            return StopReason(f"early stopping: {name} has not been better than {best} for {evaluations} evaluations")
        return None
