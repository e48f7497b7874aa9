"""The watchdog's thread on every rank: sends heartbeats, hears the other ranks, and ends the process if it must.

What differs between root and the other ranks is in coordinator and worker; what the main thread calls, in watchdog.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from horovod_train.distributed.watchdog.heartbeat import Beat
from horovod_train.distributed.watchdog.stall_detector import StallDetector, StallLimits
from horovod_train.distributed.watchdog.transport import Lost, Message
from horovod_train.errors import Stalled
from horovod_train.output.console import let_go, to_stderr
from horovod_train.output.rank_log import NullRankLog

if TYPE_CHECKING:  # The watchdog itself needs no TensorFlow.
    from horovod_train.distributed.group import WorkerGroup

LEAVE_WITHIN_S = 4.0
"""How long a process may take to end once its run has failed; then the watchdog ends it."""

ANSWER_WITHIN_S = 3.0
_AWAY_AFTER_S = 2.0
_MOST_FAILURES_SAID = 10

DISAPPEARED = "disappeared: killed or out of memory?"


@dataclass(frozen=True)
class Cause:
    """Why a run ends early: what happened to a rank. `what` continues a sentence that begins with the rank's name."""

    rank: int
    what: str
    exit_code: int


class Role:
    """`changed` guards all that is public here, and what is sent."""

    def __init__(self, group: WorkerGroup, log: NullRankLog, limits: StallLimits, judged: list[int]) -> None:
        self.group, self.log = group, log
        self.limits = limits = dataclasses.replace(limits, ranks=group.size)
        self.names = [group.name(rank) for rank in range(group.size)]
        self.stall_detector = StallDetector(self.names, judged, limits)
        self.changed = threading.Condition()
        self.speaker: int | None = None
        """The rank that shows its exception: the first that failed."""
        self.cause: Cause | None = None
        self.is_closed = False
        self.away_until = 0.0
        """Until then this process counts as just having been frozen, or short of CPU."""
        self._ends_since: float | None = None
        self._exit_code = 1
        self._said = False
        self._turned_at = time.monotonic()
        self._next_turn = self._next_beat = 0.0
        self._failures: set[str] = set()

    def start(self) -> None:
        for target in (self._watch, self._look):
            threading.Thread(target=target, name=f"watch{target.__name__}", daemon=True).start()

    # Coordinator and Worker implement these; called under `changed`, except poll.

    def poll(self, timeout_s: float) -> list[tuple[int, Message | Lost]]:
        """Wait for messages: (rank, message)."""
        raise NotImplementedError

    def receive(self, rank: int, message: Message, now: float) -> None:
        raise NotImplementedError

    def lose(self, rank: int, lost: Lost, now: float) -> None:
        raise NotImplementedError

    def beat(self, beat: Beat, now: float) -> None:
        """Send a heartbeat."""
        raise NotImplementedError

    def decide(self, now: float) -> None:
        """React if other ranks are silent or make no progress."""
        raise NotImplementedError

    def claim(self) -> None:
        """Ask to be the rank that shows its exception; `speaker` is the answer."""
        raise NotImplementedError

    def tell(self, cause: Cause) -> None:
        """Tell all ranks."""
        raise NotImplementedError

    def send(self, message: Message) -> None:
        raise NotImplementedError

    def close_connections(self) -> None:
        raise NotImplementedError

    # Coordinator and Worker share these.

    def know(self, cause: Cause) -> None:
        """Record why the run ends. Only the first cause counts."""
        if self.cause is None and not self.is_closed:
            self.cause = cause
            self.start_exit_timer(cause.exit_code)
            self.changed.notify_all()
            if cause.what == DISAPPEARED:
                # Immediately, because a launcher may end this process too in a moment.
                self.say_once(f"stopped: {self.names[cause.rank]} {cause.what}")
            if cause.rank != self.group.rank:
                in_background(lambda: self.log.write("cause", f"{self.names[cause.rank]} {cause.what}"))

    def report_silent(self, now: float) -> None:
        """Name a silent rank as the cause, after Horovod has given up.

        gloo gives up after HOROVOD_GLOO_TIMEOUT_SECONDS, maybe before this watchdog would.
        """
        silent = self.stall_detector.silent(now, after_s=4 * self.limits.beat_s)
        if self.cause is None and silent:
            self.tell(Cause(silent[0], self.stall_detector.silence(silent[:1], now), Stalled.exit_code))

    def start_exit_timer(self, exit_code: int) -> None:
        """Give the process LEAVE_WITHIN_S to end, from now on."""
        if self._ends_since is None:
            self._ends_since, self._exit_code = time.monotonic(), exit_code

    def say_once(self, line: str) -> None:
        if not self._said:
            self._said = True
            to_stderr(line)

    def note_end(self, ended: str, exit_code: int, **facts: Any) -> None:
        beat = self.group.heartbeat.last()
        self.log.end(ended, exit_code, **{"step": beat.step, "phase": beat.phase, "error": None, **facts})

    def record_stall(self, text: str) -> None:
        """Write log, stacks and end. A file system that hangs does not delay the process for long."""

        def record() -> None:
            self.log.write("stall", text)
            self.log.write_stacks("stalled")
            self.note_end("stalled", Stalled.exit_code, error=text)

        in_background(record).join(ANSWER_WITHIN_S - 1)

    def _watch(self) -> None:
        while not self.is_closed:
            with self._surviving():
                self._turn()
                continue
            time.sleep(self.limits.turn_s / 10)  # If every turn fails, do not use a whole core.
        self.close_connections()

    def _turn(self) -> None:
        """Process all messages, then decide: at most once in turn_s, however many arrive."""
        received = self.poll(self.limits.turn_s)
        now = time.monotonic()
        with self.changed:
            if now - self._turned_at > self.limits.turn_s + _AWAY_AFTER_S:
                # Other ranks must not count as silent for the time in which this process could not hear.
                self.stall_detector.discount_own_pause(now - self._turned_at)
                self.away_until = now + _AWAY_AFTER_S
            self._turned_at = now
            for rank, message in received:
                with self._surviving():
                    if isinstance(message, Lost):
                        self.lose(rank, message, now)
                    else:
                        self.receive(rank, message, now)
            if now >= self._next_beat:
                self._next_beat = now + self.limits.beat_s
                self.beat(self.group.heartbeat.last(), now)
            if self._ends_since is not None:
                self._end_in_time(now - self._ends_since)
            elif now >= self._next_turn and not self.is_closed:
                self._next_turn = now + self.limits.turn_s
                self.decide(now)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Report each error in the watchdog once and continue: without the watchdog a stalled run would not end."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:300]
            if text not in self._failures and len(self._failures) < _MOST_FAILURES_SAID:
                self._failures.add(text)
                told = "".join(traceback.format_exception(error))
                in_background(lambda: self.log.write("warning", f"the watch met an error and continues: {told}"))
                to_stderr(f"warning: the watch of {self.names[self.group.rank]} met an error and continues: {text}")

    def _end_in_time(self, seconds: float) -> None:
        """End the process if it should have ended by itself. A save may take as long as a stall.

        A process that no launcher started as a rank is not ended: it may be more than this run.
        """
        patience = self.limits.stop_after_s if self.group.heartbeat.name == "save" else LEAVE_WITHIN_S
        if seconds < patience or self.group.launcher == "none":
            return
        followed = self.cause if self.cause and self.cause.rank != self.group.rank else None
        line = f"stopped: {self.names[followed.rank]} {followed.what}" if followed else ""
        if line:
            self.say_once(line)

        def record() -> None:
            self.log.write_stacks(f"this rank did not end within {seconds:.0f} s")
            if followed:
                self.note_end("followed", self._exit_code, error=line, cause=followed.rank)

        in_background(record).join(1.0)
        end_process(self._exit_code)

    def _look(self) -> None:
        # In a separate thread, because it may hang if a device is stuck.
        while not self.is_closed:
            self.group.heartbeat.look()
            time.sleep(self.limits.turn_s)


def in_background(action: Callable[[], object]) -> threading.Thread:
    """Run an action that uses a disk in a thread: it may hang, and the watchdog must not."""
    thread = threading.Thread(target=action, name="watch_disk", daemon=True)
    thread.start()
    return thread


def end_process(exit_code: int) -> None:
    """End now: Python's own exit would wait for a main thread that does not return."""
    let_go()
    os._exit(exit_code)
