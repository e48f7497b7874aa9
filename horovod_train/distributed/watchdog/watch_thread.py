"""The watchdog's thread on every rank: sends and receives heartbeats, and ends the process if it must.

What root does with a message, and what the other ranks do, is in coordinator and worker. The messages, by `kind`:

    beat     root ↔ ranks   `beat`: what the sender is doing
    claim    rank → root    its main thread has failed, and wants to show its exception
    speaker  root → rank    the answer, `rank`: the rank that shows its exception
    cause    root ↔ ranks   `cause`: why the run ends; root passes it on
    stop     root → ranks   `text`: the run is stalled; write log and stacks
    ready    rank → root    it has written them
    leave    root → ranks   end now; `text` as in stop, for a rank that `stop` has not reached
    stalled  rank → root    `text`: root was silent for too long, and this rank ends
    bye      root ↔ ranks   the sender has finished
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from horovod_train.distributed.watchdog.state import PAUSED_AFTER_S, WatchState, end_process, in_background
from horovod_train.distributed.watchdog.transport import Lost, Message
from horovod_train.output.console import to_stderr

LEAVE_WITHIN_S = 4.0
"""How long a process may take to end once its run has failed; then the watchdog ends it."""

_MAX_FAILURES_REPORTED = 10

Handler = Callable[[int, Message, float], None]
"""(rank that sent it, message, now)"""


class Role(Protocol):
    """What differs between root and the other ranks. Everything here is called under `WatchState.changed`."""

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What to do with a message, by its kind. Other kinds are ignored."""

    def lose(self, rank: int, now: float) -> None:
        """React to a rank that has closed its connection."""

    def decide(self, now: float) -> None:
        """React if other ranks are silent or make no progress."""

    def claim(self) -> None:
        """Ask to be the rank that shows its exception; `WatchState.speaker` is the answer."""


class WatchThread:
    def __init__(self, state: WatchState, role: Role) -> None:
        self._state, self._role = state, role
        self._turn_s, self._beat_s, _ = state.intervals
        self._turned_at = time.monotonic()
        self._next_turn = self._next_beat = 0.0
        self._failures: set[str] = set()

    def start(self) -> None:
        for target in (self._watch, self._read_probe):
            threading.Thread(target=target, name=f"watch{target.__name__}", daemon=True).start()

    def _watch(self) -> None:
        while not self._state.is_closed:
            with self._reporting_errors():
                self._turn()
                continue
            time.sleep(self._turn_s / 10)  # If every turn fails, do not use a whole core.
        if self._state.cause is None:
            # Send it again: if `close` could not, the others would take the closed connection for a lost rank.
            self._state.transport.send({"kind": "bye"})
        self._state.transport.close()

    def _turn(self) -> None:
        """Process all messages; then decide, at most once in turn_s, however many messages arrive."""
        state = self._state
        received = state.transport.poll(self._turn_s)
        now = time.monotonic()
        with state.changed:
            if now - self._turned_at > self._turn_s + PAUSED_AFTER_S:
                state.discount_pause(now - self._turned_at, now)
            self._turned_at = now
            for rank, message in received:
                with self._reporting_errors():
                    self._receive(rank, message, now)
            if now >= self._next_beat:
                self._next_beat = now + self._beat_s
                beat = state.group.heartbeat.last()
                state.detector.hear(state.group.rank, beat, now)
                state.transport.send({"kind": "beat", "beat": vars(beat)})
            if state.exits_since is not None:
                self._end_if_overdue(now - state.exits_since)
            elif now >= self._next_turn and not state.is_closed:
                self._next_turn = now + self._turn_s
                self._role.decide(now)

    def _receive(self, rank: int, message: Message | Lost, now: float) -> None:
        if isinstance(message, Lost):
            if message.closed:
                self._role.lose(rank, now)
            return
        kind = message.get("kind")
        if isinstance(kind, str) and (handler := self._role.handlers.get(kind)):
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
                state = self._state
                in_background(lambda: state.log.write("warning", f"the watchdog continues after an error: {trace}"))
                name = state.names[state.group.rank]
                to_stderr(f"warning: the watchdog of {name} continues after an error: {text}")

    def _end_if_overdue(self, seconds: float) -> None:
        """End the process if it has not ended by itself in time. A save may take as long as a stall.

        Do not end a process that no launcher started as a rank, because it may do more than this run.
        """
        state = self._state
        limit_s = state.limits.stop_after_s if state.group.heartbeat.name == "save" else LEAVE_WITHIN_S
        if seconds < limit_s or state.group.launcher == "none":
            return
        remote_cause = state.cause if state.cause and state.cause.rank != state.group.rank else None
        line = f"stopped: {state.names[remote_cause.rank]} {remote_cause.what}" if remote_cause else ""
        if line:
            state.print_once_per_host(line)

        def record() -> None:
            state.log.write_stacks(f"this rank did not end within {seconds:.0f} s")
            if remote_cause:
                state.record_end("followed", state.exit_code, error=line, cause=remote_cause.rank)

        in_background(record).join(1.0)
        end_process(state.exit_code)

    def _read_probe(self) -> None:
        # In a separate thread, because it may hang if a device is stuck.
        while not self._state.is_closed:
            self._state.group.heartbeat.read_probe()
            time.sleep(self._turn_s)
