"""What each rank is doing: its phase, its step, and a detail; and which rank the others wait for, by all of these.

Does not send anything; see watch_thread. Python does not run inside a compiled call. There a probe answers: it reads
the TensorFlow variables in which the call itself records its phase; see steps.step.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from horovod_train.config.settings import WatchConfig
from horovod_train.host import idle_descriptors
from horovod_train.output.logs import ANY_RANK, PHASE
from horovod_train.shown_text import listed

TRAIN = "train"
"""The phase of the compiled training call. The probe's phase is shown instead: input, compute, exchange."""

EXCHANGE = "exchange"

HOOK = "hook"
"""The phase in which a user's hook or a Keras callback is called between steps."""

FINE_PHASES = ("input", "compute", EXCHANGE)
"""Phases that alternate within a step: too many for a log."""
_BETWEEN_HOOKS_S = 60.0
"""A callback may be called at every step: the log shows the phase of each callback no more often."""

_BEATS_PER_S = 256
"""Of all ranks together, at most."""

IN_CALL = "in "
"""Begins the detail of an exchange that Python calls; which call follows: "in hvd.barrier"."""

LONG_PHASES = ("start", "compile")
"""Phases in which a rank may take watch.first_step_after_s. Before its first step it may in any phase."""

log = logging.getLogger(__name__)

Probe = Callable[[], tuple[int, str | None, str]]
"""() → (step, phase inside the compiled call or None, detail). Called about once a second, from a thread."""


@dataclass(frozen=True)
class Beat:
    """A rank's phase, step and detail, and for how long they have not changed."""

    phase: str
    step: int | None
    detail: str
    moves: int
    """how often the main thread has entered a phase: counts as progress, even if it returns to the same phase"""
    seconds: float = field(compare=False)
    has_stepped: bool = False
    """whether a training step is over: a later one that compiles says so by its phase"""


class Heartbeat:
    """Written by the main thread, read by the watchdog. Setting a phase costs a microsecond.

    Logs each new coarse phase, and a probe that fails.
    """

    def __init__(self) -> None:
        self._probe: Probe | None = None
        self._logged_phase = "start"
        self._hooks_logged_at: dict[str, float] = {}
        """By detail, which names the callback."""
        self.has_stepped = False
        """Whether a step has been trained. Until then an error counts as found before training; from then on
        watch.stop_after_s applies outside LONG_PHASES. Set by what trains."""
        self.is_saving: Callable[[], bool] = lambda: False
        """Whether a thread writes a checkpoint beside the main thread. Set by what trains."""
        self._phase = ("start", "", 0)
        self.outer_phase = "start"
        """The phase that the main thread was in when it entered the current one."""
        self._beat = Beat("start", None, "", 0, 0.0)
        self._since = time.monotonic()
        self._lock = threading.Lock()

    def set_probe(self, probe: Probe) -> None:
        """Read steps and the phases inside compiled calls from `probe` from now on."""
        self._probe = probe

    @contextmanager
    def probing(self, probe: Probe) -> Iterator[None]:
        """Read from `probe` inside the block."""
        before, self._probe = self._probe, probe
        try:
            yield
        finally:
            self._probe = before

    def phase(self, name: str, detail: str = "") -> _Phase:
        """Enter a phase immediately. As a context manager it returns to the previous phase at the end.

        detail: a few words that end a sentence: "reading train-00031". A change of detail counts as progress.
        """
        before = self._phase[:2]
        self.outer_phase = before[0]
        self._enter(name, detail)
        return _Phase(lambda: self._enter(*before))

    @property
    def name(self) -> str:
        """The main thread's phase; the probe is not read."""
        return self._phase[0]

    def read_probe(self) -> Beat:
        """Read the probe, which may take long if a device is stuck; return the current beat."""
        step, inner, detail = self._ask_probe()
        name, phase_detail, moves = self._phase
        now = time.monotonic()
        with self._lock:
            phase = inner if name == TRAIN and inner else name
            beat = Beat(phase, step, phase_detail or detail, moves, 0.0, self.has_stepped)
            if beat != self._beat:
                self._beat, self._since = beat, now
        return self.last()

    def last(self) -> Beat:
        """Return the last beat of `read_probe`, with the seconds since it changed."""
        with self._lock:
            return dataclasses.replace(self._beat, seconds=time.monotonic() - self._since)

    def _enter(self, name: str, detail: str) -> None:
        self._phase = (name, detail, self._phase[2] + 1)
        if name == HOOK and time.monotonic() - self._hooks_logged_at.get(detail, -math.inf) < _BETWEEN_HOOKS_S:
            return
        if name != self._logged_phase and name not in FINE_PHASES:
            self._logged_phase = name
            if name == HOOK:
                self._hooks_logged_at[detail] = time.monotonic()
            step = self.read_probe().step
            log.debug(name if step is None else f"{name} after step {step}", extra=PHASE)

    def _ask_probe(self) -> tuple[int | None, str | None, str]:
        probe = self._probe  # the main thread may set another at any moment
        if probe is None:
            return None, None, ""
        try:
            return probe()
        except Exception as error:
            with self._lock:
                is_current = self._probe is probe
                if is_current:
                    # Phases that the main thread enters still count as progress.
                    self._probe = None
            if is_current:
                log.warning(f"cannot read the step and its phases any more: {error}", extra=ANY_RANK)
            return None, None, ""


class _Phase:
    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # After a failure, keep the phase in which it happened, for the report.
        if error is None:
            self._leave()


def files_being_read() -> str:
    """Return the TFRecord files that this process is reading now, as "reading train-00031.tfrecord".

    For a probe: it asks the kernel (Linux; "" elsewhere), so it also sees the file that blocks a thread.
    """
    folder = Path("/proc/self/fd")
    names: set[str] = set()
    idle = idle_descriptors()
    for descriptor in os.listdir(folder) if folder.is_dir() else []:
        if int(descriptor) in idle:
            continue
        try:
            name = (folder / descriptor).readlink().name
        except OSError:  # closed in the meantime
            continue
        if name.endswith((".tfrecord", ".gz")):
            names.add(name)
    return f"reading {listed(sorted(names), 3, 'files')}" if names else ""


class Intervals(NamedTuple):
    """How often ranks send heartbeats and are checked, in seconds."""

    turn_s: float
    """between two checks of the ranks"""
    beat_s: float
    """between two heartbeats of a rank; longer if root would receive hundreds of them per second"""
    silent_after_s: float
    """a rank that sends no heartbeat for this long counts as frozen or unreachable"""


def intervals(limits: WatchConfig, ranks: int) -> Intervals:
    turn_s = min(1.0, limits.warn_after_s / 8)
    beat_s = max(turn_s, ranks / _BEATS_PER_S)
    return Intervals(turn_s, beat_s, max(limits.warn_after_s / 2, 4 * beat_s))


@dataclass
class _LastBeat:
    beat: Beat
    received_at: float
    changed_at: float


class StallDetector:
    """Receives the heartbeats of ranks. `now`: seconds on one clock, the same in all calls.

    names: of every rank, as shown in messages. watched: the ranks whose heartbeats arrive here; the others count as
    waiting.
    """

    def __init__(self, names: Sequence[str], watched: Sequence[int], limits: WatchConfig) -> None:
        self.names, self.limits = names, limits
        self._silent_after_s = intervals(limits, len(names)).silent_after_s
        self._watched = set(watched)
        self._last_beats: dict[int, _LastBeat] = {}
        self._has_stepped = False

    def hear(self, rank: int, beat: Beat, now: float) -> None:
        self._has_stepped |= beat.has_stepped
        last = self._last_beats.get(rank)
        changed_at = last.changed_at if last and last.beat == beat else now
        self._last_beats[rank] = _LastBeat(beat, now, changed_at)

    def forget(self, rank: int) -> None:
        """Remove a rank that has finished: it does not wait, and no rank waits for it."""
        self._watched.discard(rank)
        self._last_beats.pop(rank, None)

    def discount_pause(self, seconds: float) -> None:
        """Discount a time in which this process was frozen and could receive no heartbeat."""
        for last in self._last_beats.values():
            last.received_at += seconds
            last.changed_at += seconds

    def idle_s(self, now: float) -> float:
        """Return how long no rank has made progress."""
        return min((now - last.changed_at for last in self._last_beats.values()), default=0.0)

    def warn_after_s(self, now: float) -> float:
        return self.limits.warn_after_s * self._limit_factor(now)

    def stop_after_s(self, now: float) -> float:
        return self.limits.stop_after_s * self._limit_factor(now)

    def silent_ranks(self, now: float, after_s: float | None = None) -> list[int]:
        """Return ranks that have sent no heartbeat for `after_s`, after at least one; the longest silent first.

        after_s: the default is so long that chance cannot explain it.
        """
        since = {rank: last.received_at for rank, last in self._last_beats.items()}
        limit_s = self._silent_after_s if after_s is None else after_s
        return sorted((rank for rank in since if now - since[rank] > limit_s), key=lambda rank: (since[rank], rank))

    def describe_stall(self, now: float) -> str:
        """Name the suspect and say what it was doing, and how many ranks wait."""
        if silent := self.silent_ranks(now):
            return f"{listed([self.names[rank] for rank in silent], 4)} {self.describe_silence(silent, now)}"
        beats = {rank: last.beat for rank, last in self._last_beats.items()}
        waiting = [rank for rank, beat in beats.items() if beat.phase == EXCHANGE]
        suspects = {rank: beat for rank, beat in beats.items() if beat.phase != EXCHANGE}
        calls = {
            rank: beat.detail for rank, beat in beats.items() if rank in waiting and beat.detail.startswith(IN_CALL)
        }
        if len(calls) == len(beats) and len(set(calls.values())) > 1:
            return self._describe_calls(calls, now)
        if not suspects:
            suspects = _furthest_back(beats)
        elif not waiting:
            suspects = _furthest_back(suspects)
        if len(suspects) == len(beats) > 1 and len({beat.phase for beat in suspects.values()}) == 1:
            return self._describe_all(beats, now)
        # Of several suspects, choose the furthest back; of these, the one that has been in its phase longest.
        rank = max(_furthest_back(suspects), key=lambda rank: (self._seconds_in_phase(rank, now), -rank))
        waiting = waiting if waiting and rank not in waiting else [other for other in beats if other not in suspects]
        call = {calls.get(other, "") for other in waiting}
        where = f" {call.pop()}" if len(call) == 1 and call != {""} else ""
        waiters = _describe_waiters(len(waiting), "it")
        return f"{self.names[rank]} has been {self._describe_phase(rank, now)}{waiters}{where}"

    def describe_silence(self, silent: Sequence[int], now: float) -> str:
        """Return what follows the names of silent ranks in a message."""
        last = self._last_beats[silent[0]]
        have, them = ("has", "it") if len(silent) == 1 else ("have", "them")
        last_phase = f"last seen in {last.beat.phase}{_at_step(last.beat)}{_detail(last.beat)}"
        silent_s = now - last.received_at
        waiters = len(self.names) - len(silent) - (len(self._watched) - len(self._last_beats))
        return f"{have} sent no heartbeat for {silent_s:.0f} s, {last_phase}{_describe_waiters(waiters, them)}"

    def _limit_factor(self, now: float) -> float:
        """Return the factor by which the limits are longer now. A silent rank does not compile: it is frozen."""
        silent = self.silent_ranks(now)
        compiling = (last.beat.phase in LONG_PHASES for rank, last in self._last_beats.items() if rank not in silent)
        is_long = not self._has_stepped or any(compiling)
        return max(1.0, self.limits.first_step_after_s / self.limits.stop_after_s) if is_long else 1.0

    def _describe_all(self, beats: Mapping[int, Beat], now: float) -> str:
        rank = max(beats, key=lambda rank: self._seconds_in_phase(rank, now))
        who = "both ranks" if len(beats) == 2 else f"all {len(beats)} ranks"
        why = ": none is behind the others" if beats[rank].phase == EXCHANGE else ""
        return f"{who} have been {self._describe_phase(rank, now)}{why}"

    def _describe_calls(self, calls: Mapping[int, str], now: float) -> str:
        """Describe ranks that wait for each other in different exchanges, which no time can end."""
        ranks_in: dict[str, list[str]] = {}
        for rank, call in calls.items():
            ranks_in.setdefault(call, []).append(self.names[rank])
        seconds = min(self._seconds_in_phase(rank, now) for rank in calls)
        where = "; ".join(f"{listed(names, 4)} {call}" for call, names in ranks_in.items())
        return f"ranks have waited for each other in different exchanges for {seconds:.0f} s: {where}"

    def _describe_phase(self, rank: int, now: float) -> str:
        beat = self._last_beats[rank].beat
        return f"in {beat.phase} for {self._seconds_in_phase(rank, now):.0f} s{_at_step(beat)}{_detail(beat)}"

    def _seconds_in_phase(self, rank: int, now: float) -> float:
        last = self._last_beats[rank]
        return last.beat.seconds + now - last.received_at


def _furthest_back(beats: Mapping[int, Beat]) -> dict[int, Beat]:
    """Return the ranks at the smallest step; a rank without a step is behind all others."""
    steps = {rank: -1 if beat.step is None else beat.step for rank, beat in beats.items()}
    return {rank: beat for rank, beat in beats.items() if steps[rank] == min(steps.values())}


def _at_step(beat: Beat) -> str:
    return "" if beat.step is None else f" at step {beat.step}"


def _detail(beat: Beat) -> str:
    return f", {beat.detail}" if beat.detail else ""


def _describe_waiters(count: int, them: str) -> str:
    if count <= 0:
        return ""
    return f"; {count} rank{'s wait' if count > 1 else ' waits'} for {them}"
