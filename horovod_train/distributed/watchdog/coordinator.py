"""Root's role: receive all heartbeats, detect stalls, and pass on to all ranks what one of them reports.

A stalled run ends in two rounds: root sends `stop`, and the ranks write their stacks and answer `ready`; then root
sends `leave`. No rank ends before all have written, because a launcher kills all ranks when the first has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from horovod_train.distributed.watchdog.heartbeat import TRAIN
from horovod_train.distributed.watchdog.state import (
    ANSWER_WITHIN_S,
    DISAPPEARED,
    Cause,
    WatchState,
    end_process,
    in_background,
)
from horovod_train.distributed.watchdog.transport import Lost, Message, Server
from horovod_train.distributed.watchdog.watch_thread import Handler
from horovod_train.errors import Stalled
from horovod_train.output.console import to_stderr
from horovod_train.output.logs import SLOW

log = logging.getLogger(__name__)


class Coordinator:
    """server: the transport of `state`."""

    def __init__(self, state: WatchState, server: Server) -> None:
        self._state, self._server = state, server
        self._slow_since: float | None = None
        self.handlers: Mapping[str, Handler] = {
            "beat": state.hear,
            "claim": lambda rank, message, now: self._answer(rank),
            "cause": lambda rank, message, now: state.announce_cause(Cause(**message["cause"])),
            "stalled": self._end_frozen_root,
            "bye": self._finish,
        }

    def lose(self, rank: int, now: float) -> None:
        if rank not in self._state.finished:
            self._state.detector.forget(rank)
            self._state.announce_cause(Cause(rank, DISAPPEARED, 1))

    def decide(self, now: float) -> None:
        detector = self._state.detector
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
        group = self._state.group
        return len(self._state.finished) == group.size - 1 > 0 and group.heartbeat.name == TRAIN

    def claim(self) -> None:
        self._answer(self._state.group.rank)

    def _answer(self, rank: int) -> None:
        if self._state.speaker is None:
            self._state.set_speaker(rank)
        self._server.send_to(rank, {"kind": "speaker", "rank": self._state.speaker})

    def _finish(self, rank: int, message: Message, now: float) -> None:
        if rank not in self._state.finished:  # it may say so twice
            self._state.finished.append(rank)
        self._state.detector.forget(rank)

    def _end_frozen_root(self, rank: int, message: Message, now: float) -> None:
        """End this process: it was frozen, and the others have ended because of that."""
        self._state.record_stall(f"the other ranks have ended: {message['text']}")
        end_process(Stalled.exit_code)

    def _warn(self, text: str) -> None:
        in_background(lambda: log.warning(text, extra=SLOW))

    def _stop(self, sentence: str, now: float) -> None:
        self._server.send({"kind": "stop", "text": sentence})
        unready = set(self._server.ranks) - set(self._state.detector.silent_ranks(now))
        hint = "; the stacks of all ranks are in logs/" if self._state.log.name else ""
        to_stderr(f"error: stalled: {sentence}{hint}")
        self._state.record_stall(sentence)
        deadline = time.monotonic() + ANSWER_WITHIN_S
        while unready and time.monotonic() < deadline:
            for rank, message in self._server.poll(0.1):
                if isinstance(message, Lost) or message.get("kind") == "ready":
                    unready.discard(rank)
        self._server.send({"kind": "leave", "text": sentence})
        end_process(Stalled.exit_code)
