"""Root's watchdog: hears all ranks, detects stalls, and passes on to all ranks what one of them reports.

A stalled run ends in two turns: root sends `stop`, the ranks write their stacks and answer `ready`, root sends `leave`.
A launcher kills all ranks when the first has ended, so no rank ends before all have written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from horovod_train.distributed.watchdog.heartbeat import Beat
from horovod_train.distributed.watchdog.role import (
    ANSWER_WITHIN_S,
    DISAPPEARED,
    Cause,
    Role,
    end_process,
    in_background,
)
from horovod_train.distributed.watchdog.stall_detector import StallLimits
from horovod_train.distributed.watchdog.transport import Lost, Message, Server
from horovod_train.errors import Stalled
from horovod_train.output.console import to_stderr
from horovod_train.output.rank_log import NullRankLog

if TYPE_CHECKING:  # The watchdog itself needs no TensorFlow.
    from horovod_train.distributed.group import WorkerGroup


class Coordinator(Role):
    """say: shows a warning to the user."""

    def __init__(
        self, group: WorkerGroup, log: NullRankLog, limits: StallLimits, server: Server, say: Callable[[str], None]
    ) -> None:
        super().__init__(group, log, limits, judged=list(range(group.size)))
        self._server, self._say = server, say
        self._done: set[int] = set()
        self._stands_since: float | None = None

    def poll(self, timeout_s: float) -> list[tuple[int, Message | Lost]]:
        return self._server.poll(timeout_s)

    def receive(self, rank: int, message: Message, now: float) -> None:
        match message:
            case {"kind": "beat", "beat": beat}:
                self.stall_detector.hear(rank, Beat(**beat), now)
            case {"kind": "claim"}:
                self._answer(rank)
            case {"kind": "cause", "cause": cause}:
                self.tell(Cause(**cause))
            case {"kind": "bye"}:
                self._done.add(rank)
                self.stall_detector.forget(rank)
            case {"kind": "stalled", "text": text}:  # The others have ended, because this process was frozen.
                self.record_stall(f"the other ranks have ended: {text}")
                end_process(Stalled.exit_code)

    def lose(self, rank: int, lost: Lost, now: float) -> None:
        if rank in self._done or not lost.closed:
            return
        self.stall_detector.forget(rank)
        self.tell(Cause(rank, DISAPPEARED, 1))

    def beat(self, beat: Beat, now: float) -> None:
        self.stall_detector.hear(self.group.rank, beat, now)
        self.send({"kind": "beat", "beat": vars(beat)})

    def decide(self, now: float) -> None:
        idle_s = self.stall_detector.idle_s(now)
        if idle_s >= self.stall_detector.stop_after_s():
            self._stop(self.stall_detector.sentence(now), now)
        elif idle_s >= self.stall_detector.warn_after_s() and self._stands_since is None:
            self._stands_since = now - idle_s
            self._warn(self.stall_detector.sentence(now))
        elif idle_s < self.stall_detector.warn_after_s() and self._stands_since is not None:
            self._warn(f"the ranks go on, after {now - idle_s - self._stands_since:.0f} s")
            self._stands_since = None

    def claim(self) -> None:
        self._answer(self.group.rank)

    def tell(self, cause: Cause) -> None:
        if self.cause is None and not self.is_closed:
            self.send({"kind": "cause", "cause": vars(cause)})
        self.know(cause)

    def send(self, message: Message) -> None:
        self._server.send_all(message)

    def close_connections(self) -> None:
        self._server.close()

    def _answer(self, rank: int) -> None:
        if self.speaker is None:
            self.speaker = rank
            self.changed.notify_all()
        self._server.send(rank, {"kind": "speaker", "rank": self.speaker})

    def _warn(self, text: str) -> None:
        self._say(f"warning: {text}")
        in_background(lambda: self.log.write("slow", text))

    def _stop(self, sentence: str, now: float) -> None:
        self.send({"kind": "stop", "text": sentence})
        waiting = set(self._server.ranks) - set(self.stall_detector.silent(now))
        see = "; the stacks of all ranks are in logs/" if self.log.name else ""
        to_stderr(f"error: stalled: {sentence}{see}")
        self.record_stall(sentence)
        until = time.monotonic() + ANSWER_WITHIN_S
        while waiting and time.monotonic() < until:
            for rank, message in self._server.poll(0.1):
                if isinstance(message, Lost) or message.get("kind") == "ready":
                    waiting.discard(rank)
        self.send({"kind": "leave"})
        end_process(Stalled.exit_code)
