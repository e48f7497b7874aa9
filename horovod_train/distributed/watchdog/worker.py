"""The role of every rank but root: follow root's messages, and check that root is not silent."""

from __future__ import annotations

import time
from collections.abc import Mapping

from horovod_train.distributed.watchdog.state import ANSWER_WITHIN_S, DISAPPEARED, Cause, WatchState, end_process
from horovod_train.distributed.watchdog.transport import Message
from horovod_train.distributed.watchdog.watch_thread import Handler
from horovod_train.errors import Stalled
from horovod_train.output.console import to_stderr

_STACKS_WITHIN_S = 2.0
"""How long a rank waits for the others to write their stacks: the launcher kills all ranks when the first ends."""


class Worker:
    """state: its transport is the connection to root."""

    def __init__(self, state: WatchState) -> None:
        self._state = state
        self.handlers: Mapping[str, Handler] = {
            "beat": state.hear,
            "speaker": lambda rank, message, now: state.set_speaker(message["rank"]),
            "cause": lambda rank, message, now: state.record_cause(Cause(**message["cause"])),
            "stop": self._stop,
            "leave": self._leave,
            "bye": self._finish,
        }

    def lose(self, rank: int, now: float) -> None:
        state = self._state
        if state.finished:
            return
        state.detector.forget(rank)
        if now < state.paused_until and state.cause is None:
            state.record_stall("this process was frozen, and the others have ended meanwhile")
            end_process(Stalled.exit_code)
        state.record_cause(Cause(rank, DISAPPEARED, 1))

    def decide(self, now: float) -> None:
        """End this process if root is silent and no rank makes progress."""
        state = self._state
        if not state.detector.silent_ranks(now) or state.detector.idle_s(now) < state.detector.stop_after_s(now):
            return
        sentence = state.detector.describe_stall(now)
        state.transport.send({"kind": "stalled", "text": sentence})
        # All remaining ranks come here at about the same time and cannot agree on which reports. The first rank that is
        # not on root's host does, because that host may have failed.
        hosts = state.group.hosts
        remote_ranks = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
        if state.group.rank == min(remote_ranks, default=1):
            to_stderr(f"error: stalled: {sentence}; the stacks of the other ranks are in logs/")
        state.record_stall(sentence)
        time.sleep(_STACKS_WITHIN_S)
        end_process(Stalled.exit_code)

    def claim(self) -> None:
        self._state.transport.send({"kind": "claim"})

    def _finish(self, rank: int, message: Message, now: float) -> None:
        if rank not in self._state.finished:
            self._state.finished.append(rank)
        self._state.detector.forget(rank)

    def _stop(self, rank: int, message: Message, now: float) -> None:
        self._state.record_stall(message["text"])
        self._state.transport.send({"kind": "ready"})
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while time.monotonic() < deadline and not self._state.transport.poll(0.1):
            pass  # Any message ends the wait: root sends `leave`, or its connection is lost.
        end_process(Stalled.exit_code)

    def _leave(self, rank: int, message: Message, now: float) -> None:
        """End this process; the `stop` that should have done so did not arrive."""
        self._state.record_stall(message["text"])
        end_process(Stalled.exit_code)
