"""The watchdog's thread on every rank: sends and receives heartbeats, and ends the process if it must.

What root does with a message is in Coordinator, what the other ranks do in Worker; both are a Watch, which the main
thread uses too: why the run ends, which rank shows its exception, when to exit. The messages, by `kind`:

    beat     root ↔ ranks   `beat`: what the sender is doing
    claim    rank → root    its main thread has failed, and wants to show its exception
    speaker  root → rank    the answer, `rank`: the rank that shows its exception
    cause    root ↔ ranks   `cause`: why the run ends; root passes it on
    stop     root → ranks   `text`: the run is stalled; write log and stacks
    ready    rank → root    it has written them
    leave    root → ranks   end now; `text` as in stop, for a rank that `stop` has not reached
    stalled  rank → root    `text`: root was silent for too long, and this rank ends
    bye      root ↔ ranks   the sender has finished, or, if `has_failed`, has reported that it fails

A stalled run ends in two rounds: root sends `stop`, and the ranks write their stacks and answer `ready`; then root
sends `leave`. No rank ends before all have written, because a launcher kills all ranks when the first has ended.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from horovod_train.config.settings import WatchConfig
from horovod_train.distributed.launch import launcher
from horovod_train.distributed.watchdog.heartbeat import TRAIN, Beat, StallDetector, intervals
from horovod_train.distributed.watchdog.transport import Lost, Message, Server, Transport
from horovod_train.errors import Stalled
from horovod_train.output.console import let_go, to_stderr
from horovod_train.output.logs import SLOW
from horovod_train.output.rank_log import RankLog

if TYPE_CHECKING:  # The watchdog needs no TensorFlow.
    from horovod_train.distributed.group import WorkerGroup
    from horovod_train.distributed.watchdog.watchdog import HostClaim

GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
"""The variable that tells gloo how long to wait for a rank."""
ANSWER_WITHIN_S = 3.0
_SAID_WITHIN_S = 1.0
"""How long a line waits for a reader of the stream."""
PAUSED_AFTER_S = 2.0
"""If a turn of the watchdog's thread is late by this, the process was frozen or short of CPU."""
LEAVE_WITHIN_S = 4.0
"""How long a process may take to end once its run has failed; then the watchdog ends it."""
_FINISHED_AFTER_S = 1.0
"""Other causes arrive earlier than this after Horovod has shut down."""

_STACKS_WITHIN_S = 2.0
"""How long a rank waits for the others to write their stacks: the launcher kills all ranks when the first ends."""
_MAX_FAILURES_REPORTED = 10
_NO_LAUNCHER = "the launcher of this rank has ended, so the rank stops as on SIGTERM"

DISAPPEARED = "disappeared: killed or out of memory?"
LEFT = "ended by itself, by sys.exit or at the end of its script, while other ranks still exchange"

log = logging.getLogger(__name__)

Handler = Callable[[int, Message, float], None]
"""(rank that sent it, message, now)"""


@dataclass(frozen=True)
class Cause:
    """Why a run ends early: what happened to a rank. `what` continues a sentence that begins with the rank's name."""

    rank: int
    what: str
    exit_code: int


class Watchdog:
    """What the main thread asks of the watchdog. This one does not watch: a rank shows its own failures alone."""

    def claim_to_speak(self, exit_code: int) -> bool:
        """Return whether this rank shows its failure. If several ranks fail, one of them does."""
        return True

    def announce_cause(self, cause: Cause) -> None:
        """Tell all ranks why the run ends, unless this rank knows of an earlier cause."""

    def find_cause(self, exit_code: int = 1) -> Cause | None:
        """Return why Horovod has shut down; None if that is still unknown after LEAVE_WITHIN_S.

        exit_code: what this process ends with if the watchdog has to end it meanwhile.
        """
        return None

    def print_once_per_host(self, line: str) -> None:
        """Print a line that all ranks of this host know, unless one of them has printed why the run ends."""
        to_stderr(line)

    def reporting_failure(self) -> AbstractContextManager[None]:
        """Return a context in which this rank reports its failure. The process then ends within a limited time."""
        return nullcontext()

    def close(self) -> None:
        """Tell the other ranks that this one has finished, so that they do not count it as lost."""


class Watch(Watchdog, ABC):
    """What this rank knows of the others, and does about it.

    `changed` guards all attributes, and sending. What the main thread may call, see Watchdog, takes it by itself; every
    other method is called under it.

    host_claim: decides which rank of this host prints why the run ends; without it the first remaining rank does.
    """

    def __init__(
        self,
        group: WorkerGroup,
        log: RankLog,
        limits: WatchConfig,
        transport: Transport,
        host_claim: HostClaim | None = None,
    ) -> None:
        self.group, self.log, self.limits, self.transport = group, log, limits, transport
        self.intervals = intervals(limits, group.size)
        self.names = [group.name(rank) for rank in range(group.size)]
        watched = range(group.size) if group.rank == 0 else [0, group.rank]  # whose heartbeats arrive here
        self.detector = StallDetector(self.names, watched, limits)
        self.changed = threading.Condition()
        self.speaker: int | None = None
        """The rank that shows its exception: the first that failed."""
        self.cause: Cause | None = None
        self.exit_code = 1
        self.exits_since: float | None = None
        """When this process began to exit; None if it has not."""
        self.is_closed = False
        self.finished: list[int] = []
        """The ranks that have said that they end, as far as this one is told, in that order."""
        self.failed: set[int] = set()
        """Those of them that had failed, maybe because another had: they are no cause by themselves."""
        self.has_failed = False
        """This rank has reported that it fails."""
        self.paused_until = 0.0
        """Until this time the process counts as recently frozen, or short of CPU."""
        self.paused_s = 0.0
        """For how long it was that."""
        self._host_claim = host_claim
        self._has_printed = False

    @property
    @abstractmethod
    def handlers(self) -> dict[str, Handler]:
        """What to do with a message, by its kind. Other kinds are ignored."""

    @abstractmethod
    def lose(self, rank: int, now: float) -> None:
        """React to a rank that has closed its connection."""

    @abstractmethod
    def decide(self, now: float) -> None:
        """React if other ranks are silent or make no progress."""

    @abstractmethod
    def claim(self) -> None:
        """Ask to be the rank that shows its exception; `speaker` is the answer."""

    def _hear(self, rank: int, message: Message, now: float) -> None:
        self.detector.hear(rank, Beat(**message["beat"]), now)

    def _finish(self, rank: int, message: Message, now: float) -> None:
        if rank not in self.finished:  # it may say so twice
            self.finished.append(rank)
        if message.get("has_failed"):
            self.failed.add(rank)
        self.detector.forget(rank)

    def discount_pause(self, seconds: float, now: float) -> None:
        """Do not count other ranks as silent for a time in which this process could not hear them."""
        self.detector.discount_pause(seconds)
        self.paused_s = max(seconds, self.paused_s if now < self.paused_until else 0.0)
        self.paused_until = now + PAUSED_AFTER_S

    def set_speaker(self, rank: int) -> None:
        self.speaker = rank
        self.changed.notify_all()

    def claim_to_speak(self, exit_code: int) -> bool:
        with self.changed:
            self.start_exit_timer(exit_code)
            if self.cause is None:
                self.claim()
            self.changed.wait_for(lambda: self.speaker is not None or self.cause is not None, ANSWER_WITHIN_S)
            return self.cause is None and self.speaker in (None, self.group.rank)

    def announce_cause(self, cause: Cause) -> None:
        with self.changed:
            if self.cause is None and not self.is_closed:
                self.transport.send({"kind": "cause", "cause": vars(cause)})
            self.record_cause(cause)

    def record_cause(self, cause: Cause) -> None:
        """Record why the run ends. Only the first cause counts."""
        if self.cause is None and not self.is_closed:
            self.cause = cause
            self.start_exit_timer(cause.exit_code)
            self.changed.notify_all()
            if cause.what == DISAPPEARED:
                # Immediately, because a launcher may end this process too in a moment.
                self.print_once_per_host(f"stopped: {self.names[cause.rank]} {cause.what}")
            if cause.rank != self.group.rank:
                in_background(lambda: self.log.write("cause", f"{self.names[cause.rank]} {cause.what}"))

    def find_cause(self, exit_code: int = 1) -> Cause | None:
        deadline = time.monotonic() + LEAVE_WITHIN_S
        with self.changed:
            self.start_exit_timer(exit_code)
            while self.cause is None and time.monotonic() < deadline:
                self.changed.wait(self.intervals.turn_s)
                if self.cause is None:  # this rank may have to say why itself, which takes time too
                    self.exits_since = time.monotonic()
                self.report_silent(time.monotonic())
                if time.monotonic() > deadline - LEAVE_WITHIN_S + _FINISHED_AFTER_S:
                    self.report_finished()
                    self.report_suspended(time.monotonic())
            return self.cause

    def report_silent(self, now: float) -> None:
        """Name a silent rank as the cause, after Horovod has given up.

        gloo gives up after HOROVOD_GLOO_TIMEOUT_SECONDS, maybe before this watchdog would.
        """
        silent = self.detector.silent_ranks(now, after_s=4 * self.intervals.beat_s)
        if self.cause is None and silent:
            self.announce_cause(Cause(silent[0], self.detector.describe_silence(silent[:1], now), Stalled.exit_code))

    def report_finished(self) -> None:
        """Name the first rank that has finished as the cause, after Horovod has given up: the others need it."""
        left = [rank for rank in self.finished if rank not in self.failed]
        if self.cause is None and left:
            self.announce_cause(Cause(left[0], LEFT, 1))

    def report_suspended(self, now: float) -> None:
        """Name this process's suspension as the cause, after gloo has given up: its limit runs on meanwhile.

        All ranks of a job are suspended together, so no other rank has been silent.
        """
        if self.cause or self.group.controller != "gloo" or now > self.paused_until + LEAVE_WITHIN_S:
            return
        limit_s = os.environ.get(GLOO_TIMEOUT, "")
        if limit_s.isdecimal() and self.paused_s >= float(limit_s):
            limit = f"longer than gloo waits ({GLOO_TIMEOUT}: {limit_s})"
            self.announce_cause(Cause(self.group.rank, f"was suspended for {self.paused_s:.0f} s, {limit}", 1))

    def start_exit_timer(self, exit_code: int) -> None:
        """Let the watchdog's thread end this process if it does not end by itself in time."""
        if self.exits_since is None:
            self.exits_since, self.exit_code = time.monotonic(), exit_code

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:
        if self.group.launcher != "none":
            _end_process_in_time(self.log)
        # Report the step of this moment, or that of the last heartbeat if a device is stuck.
        in_background(self.group.heartbeat.read_probe, 0.5)
        yield
        with self.changed:  # The thread keeps this lock while it ends a stalled run, until it ends the process.
            # This rank has reported its failure, so it must not count as disappeared.
            self.has_failed = True
            self.say_bye()

    def close(self) -> None:
        with self.changed:
            if self.cause is None:
                self.say_bye()
            self.is_closed = True

    def say_bye(self) -> None:
        self.transport.send({"kind": "bye", "has_failed": self.has_failed})

    def print_once_per_host(self, line: str) -> None:
        with self.changed:
            if self._is_first_of_host():
                _say(line)

    def _is_first_of_host(self) -> bool:
        if self._host_claim is not None:
            with suppress(OSError):
                return self._host_claim.take()
        hosts, this_rank = self.group.hosts, self.group.rank
        lost_rank = self.cause.rank if self.cause else None
        neighbours = [rank for rank, host in enumerate(hosts) if host == hosts[this_rank] and rank != lost_rank]
        is_first = this_rank == min(neighbours, default=this_rank) and not self._has_printed
        self._has_printed |= is_first
        return is_first

    def record_end(self, ended: str, exit_code: int, **facts: Any) -> None:
        beat = self.group.heartbeat.last()
        self.log.end(ended, exit_code, **{"step": beat.step, "phase": beat.phase, "error": None, **facts})

    def record_stall(self, text: str) -> None:
        """Write the log, the stacks and the end. A file system that hangs does not delay the process for long."""

        def record() -> None:
            self.log.write("stall", text)
            self.log.write_stacks("stalled")
            self.record_end("stalled", Stalled.exit_code, error=text)

        in_background(record, ANSWER_WITHIN_S - 1)


def in_background(action: Callable[[], object], wait_s: float = 0.0) -> None:
    """Run an action in a thread, and wait for it this long: it uses a disk or a stream, which may hang.

    Where no thread can be started it is left out: that the watchdog goes on, and ends a process, matters more.
    """
    thread = threading.Thread(target=action, name="watch_disk", daemon=True)
    with suppress(RuntimeError):
        thread.start()
        thread.join(wait_s)


def _say(line: str) -> None:
    """Print a line, unless nobody reads the stream: a full pipe would hold the watchdog."""
    in_background(lambda: to_stderr(line), _SAID_WITHIN_S)


def end_process(exit_code: int) -> None:
    """End the process immediately: Python's exit would wait for a main thread that does not return.

    The main thread may hold the lock of a stream that nobody reads.
    """
    in_background(let_go, _SAID_WITHIN_S)
    os._exit(exit_code)


def _end_process_in_time(log: RankLog) -> None:
    """End the process later even if the watchdog's thread cannot.

    Python's own exit, in which no Python thread runs, may hang in TensorFlow, Horovod or, last of all, MPI.
    """
    log.end_process_after(2 * LEAVE_WITHIN_S - 1)
    if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        signal.alarm(math.ceil(2 * LEAVE_WITHIN_S))


class WatchThread:
    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._turn_s, self._beat_s, _ = watch.intervals
        self._turned_at = time.monotonic()
        self._next_turn = self._next_beat = 0.0
        self._failures: set[str] = set()
        self._is_told = False
        """This process has been asked to end because its launcher has."""

    def start(self) -> None:
        for target in (self._run, self._read_probe):
            threading.Thread(target=target, name=f"watch{target.__name__}", daemon=True).start()

    def _run(self) -> None:
        while not self._watch.is_closed:
            with self._reporting_errors():
                self._turn()
                continue
            time.sleep(self._turn_s / 10)  # If every turn fails, do not use a whole core.
        if self._watch.cause is None:
            # Send it again: if `close` could not, the others would take the closed connection for a lost rank.
            self._watch.say_bye()
        self._watch.transport.close()

    def _turn(self) -> None:
        """Process all messages; then decide, at most once in turn_s, however many messages arrive."""
        watch = self._watch
        received = watch.transport.poll(self._turn_s)
        now = time.monotonic()
        with watch.changed:
            if now - self._turned_at > self._turn_s + PAUSED_AFTER_S:
                watch.discount_pause(now - self._turned_at, now)
            self._turned_at = now
            for rank, message in received:
                with self._reporting_errors():
                    self._receive(rank, message, now)
            if now >= self._next_beat:
                self._next_beat = now + self._beat_s
                beat = watch.group.heartbeat.last()
                watch.detector.hear(watch.group.rank, beat, now)
                watch.transport.send({"kind": "beat", "beat": vars(beat)})
            if watch.exits_since is not None:
                self._end_if_overdue(now - watch.exits_since)
            elif now >= self._next_turn and not watch.is_closed:
                self._next_turn = now + self._turn_s
                watch.decide(now)
                if not self._is_told and launcher.parent_has_ended():
                    self._is_told = True
                    self._end_without_launcher()

    def _receive(self, rank: int, message: Message | Lost, now: float) -> None:
        if isinstance(message, Lost):
            if message.closed:
                self._watch.lose(rank, now)
            return
        kind = message.get("kind")
        if isinstance(kind, str) and (handler := self._watch.handlers.get(kind)):
            handler(rank, message, now)

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """Report each error in the watchdog once and continue: without the watchdog a stalled run would not end."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:300]
            if text not in self._failures and len(self._failures) < _MAX_FAILURES_REPORTED:
                self._failures.add(text)
                trace = "".join(traceback.format_exception(error))
                watch = self._watch
                in_background(lambda: watch.log.write("warning", f"the watchdog continues after an error: {trace}"))
                name = watch.names[watch.group.rank]
                to_stderr(f"warning: the watchdog of {name} continues after an error: {text}")

    def _end_if_overdue(self, seconds: float) -> None:
        """End the process if it has not ended by itself in time. A save may take as long as a stall.

        Do not end a process that no launcher started as a rank, because it may do more than this run.
        """
        watch = self._watch
        heartbeat = watch.group.heartbeat
        is_saving = heartbeat.name == "save" or heartbeat.is_saving()
        limit_s = watch.limits.stop_after_s if is_saving else LEAVE_WITHIN_S
        if seconds < limit_s or watch.group.launcher == "none":
            return
        remote_cause = watch.cause if watch.cause and watch.cause.rank != watch.group.rank else None
        line = f"stopped: {watch.names[remote_cause.rank]} {remote_cause.what}" if remote_cause else ""
        if line:
            watch.print_once_per_host(line)

        def record() -> None:
            watch.log.write_stacks(f"this rank did not end within {seconds:.0f} s")
            if remote_cause:
                watch.record_end("followed", watch.exit_code, error=line, cause=remote_cause.rank)

        in_background(record, 1.0)
        end_process(watch.exit_code)

    def _end_without_launcher(self) -> None:
        """Ask this process to stop, as its launcher would: a run saves, and a script without a handler ends.

        Otherwise the ranks would train on where nobody looks, and hold their GPUs.
        """
        to_stderr(f"warning: {self._watch.names[self._watch.group.rank]}: {_NO_LAUNCHER}")
        in_background(lambda: self._watch.log.write("warning", _NO_LAUNCHER), 1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    def _read_probe(self) -> None:
        # In a separate thread, because it may hang if a device is stuck.
        while not self._watch.is_closed:
            self._watch.group.heartbeat.read_probe()
            time.sleep(self._turn_s)


class Coordinator(Watch):
    """The watch on root: receive all heartbeats, detect stalls, and pass on to all ranks what one of them reports."""

    transport: Server
    _slow_since: float | None = None

    @property
    def handlers(self) -> dict[str, Handler]:
        return {
            "beat": self._hear,
            "bye": self._finish,
            "claim": lambda rank, message, now: self._answer(rank),
            "cause": lambda rank, message, now: self.announce_cause(Cause(**message["cause"])),
            "stalled": self._end_frozen_root,
        }

    def lose(self, rank: int, now: float) -> None:
        if rank not in self.finished:
            self.detector.forget(rank)
            self.announce_cause(Cause(rank, DISAPPEARED, 1))

    def decide(self, now: float) -> None:
        detector = self.detector
        idle_s = detector.idle_s(now)
        if self._is_alone():
            return
        if idle_s >= detector.stop_after_s(now):
            self._stop(detector.describe_stall(now), now)
        elif idle_s >= detector.warn_after_s(now) and self._slow_since is None:
            self._slow_since = now - idle_s
            self._warn(detector.describe_stall(now))
        elif idle_s < detector.warn_after_s(now) and self._slow_since is not None:
            self._warn(f"the ranks make progress again, after {now - idle_s - self._slow_since:.0f} s")
            self._slow_since = None

    def _is_alone(self) -> bool:
        """Return whether all other ranks have finished, and root still trains, so that no rank waits."""
        group = self.group
        return len(self.finished) == group.size - 1 > 0 and group.heartbeat.name == TRAIN

    def claim(self) -> None:
        self._answer(self.group.rank)

    def _answer(self, rank: int) -> None:
        if self.speaker is None:
            self.set_speaker(rank)
        self.transport.send_to(rank, {"kind": "speaker", "rank": self.speaker})

    def _end_frozen_root(self, rank: int, message: Message, now: float) -> None:
        """End this process: it was frozen, and the others have ended because of that."""
        self.record_stall(f"the other ranks have ended: {message['text']}")
        end_process(Stalled.exit_code)

    def _warn(self, text: str) -> None:
        in_background(lambda: log.warning(text, extra=SLOW))

    def _stop(self, sentence: str, now: float) -> None:
        self.transport.send({"kind": "stop", "text": sentence})
        unready = set(self.transport.ranks) - set(self.detector.silent_ranks(now))
        hint = "; the stacks of all ranks are in logs/" if self.log.name else ""
        _say(f"error: stalled: {sentence}{hint}")
        self.record_stall(sentence)
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while unready and time.monotonic() < deadline:
            for rank, message in self.transport.poll(0.1):
                if isinstance(message, Lost) or message.get("kind") == "ready":
                    unready.discard(rank)
        self.transport.send({"kind": "leave", "text": sentence})
        end_process(Stalled.exit_code)


class Worker(Watch):
    """The watch on every rank but root: follow root's messages, and check that root is not silent."""

    @property
    def handlers(self) -> dict[str, Handler]:
        return {
            "beat": self._hear,
            "bye": self._finish,
            "speaker": lambda rank, message, now: self.set_speaker(message["rank"]),
            "cause": lambda rank, message, now: self.record_cause(Cause(**message["cause"])),
            "stop": self._stop,
            "leave": self._leave,
        }

    def lose(self, rank: int, now: float) -> None:
        if self.finished:
            return
        self.detector.forget(rank)
        if now < self.paused_until and self.cause is None:
            self.record_stall("this process was frozen, and the others have ended meanwhile")
            end_process(Stalled.exit_code)
        self.record_cause(Cause(rank, DISAPPEARED, 1))

    def decide(self, now: float) -> None:
        """End this process if root is silent and no rank makes progress."""
        if not self.detector.silent_ranks(now) or self.detector.idle_s(now) < self.detector.stop_after_s(now):
            return
        sentence = self.detector.describe_stall(now)
        self.transport.send({"kind": "stalled", "text": sentence})
        # All remaining ranks come here at about the same time and cannot agree on which reports. The first rank that is
        # not on root's host does, because that host may have failed.
        hosts = self.group.hosts
        remote_ranks = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
        if self.group.rank == min(remote_ranks, default=1):
            _say(f"error: stalled: {sentence}; the stacks of the other ranks are in logs/")
        self.record_stall(sentence)
        time.sleep(_STACKS_WITHIN_S)
        end_process(Stalled.exit_code)

    def claim(self) -> None:
        self.transport.send({"kind": "claim"})

    def _stop(self, rank: int, message: Message, now: float) -> None:
        self.record_stall(message["text"])
        self.transport.send({"kind": "ready"})
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while time.monotonic() < deadline and not self.transport.poll(0.1):
            pass  # Any message ends the wait: root sends `leave`, or its connection is lost.
        end_process(Stalled.exit_code)

    def _leave(self, rank: int, message: Message, now: float) -> None:
        """End this process; the `stop` that should have done so did not arrive."""
        self.record_stall(message["text"])
        end_process(Stalled.exit_code)
