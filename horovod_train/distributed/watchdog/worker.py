"""The watchdog of every rank but root: sends heartbeats, does what root says, and checks that root is not silent."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from horovod_train.distributed.watchdog.heartbeat import Beat
from horovod_train.distributed.watchdog.role import ANSWER_WITHIN_S, DISAPPEARED, Cause, Role, end_process
from horovod_train.distributed.watchdog.stall_detector import StallDetector, StallLimits
from horovod_train.distributed.watchdog.transport import Line, Lost, Message
from horovod_train.errors import Stalled
from horovod_train.output.console import to_stderr
from horovod_train.output.rank_log import NullRankLog

if TYPE_CHECKING:  # The watchdog itself needs no TensorFlow.
    from horovod_train.distributed.group import WorkerGroup

_OTHERS_WRITE_S = 2.0


class Worker(Role):
    """line: the connection to root."""

    def __init__(self, group: WorkerGroup, log: NullRankLog, limits: StallLimits, line: Line) -> None:
        super().__init__(group, log, limits, judged=[0])
        self._line = line
        self._own = StallDetector(self.names, [group.rank], self.limits)
        self._root_is_done = False

    def poll(self, timeout_s: float) -> list[tuple[int, Message | Lost]]:
        return [(0, message) for message in self._line.wait(timeout_s)]

    def receive(self, rank: int, message: Message, now: float) -> None:
        match message:
            case {"kind": "beat", "beat": beat}:
                self.stall_detector.hear(rank, Beat(**beat), now)
            case {"kind": "speaker", "rank": speaker}:
                self.speaker = speaker
                self.changed.notify_all()
            case {"kind": "cause", "cause": cause}:
                self.know(Cause(**cause))
            case {"kind": "bye"}:
                self._root_is_done = True
                self.stall_detector.forget(rank)
            case {"kind": "stop", "text": text}:
                self.record_stall(text)
                self.send({"kind": "ready"})
                until = time.monotonic() + ANSWER_WITHIN_S
                while time.monotonic() < until and not self._line.wait(0.1):
                    pass  # Any message ends the wait: root sends `leave`, or has gone.
                end_process(Stalled.exit_code)

    def lose(self, rank: int, lost: Lost, now: float) -> None:
        if self._root_is_done or not lost.closed:
            return
        self.stall_detector.forget(rank)
        if now < self.away_until and self.cause is None:
            self.record_stall("this process was frozen, and the others have ended meanwhile")
            end_process(Stalled.exit_code)
        self.know(Cause(rank, DISAPPEARED, 1))

    def beat(self, beat: Beat, now: float) -> None:
        self._own.hear(self.group.rank, beat, now)
        self.send({"kind": "beat", "beat": vars(beat)})

    def decide(self, now: float) -> None:
        idle_s = min(self.stall_detector.idle_s(now), self._own.idle_s(now))
        limit_s = max(self.stall_detector.stop_after_s(), self._own.stop_after_s())
        if not self.stall_detector.silent(now) or idle_s < limit_s:
            return
        sentence = self.stall_detector.sentence(now)
        self.send({"kind": "stalled", "text": sentence})
        # All remaining ranks reach this at about the same time and cannot ask each other who reports. The first rank
        # that is not on root's host reports, because that host may be what failed.
        elsewhere = [rank for rank, host in enumerate(self.group.hosts) if host != self.group.hosts[0]]
        if self.group.rank == min(elsewhere, default=1):
            to_stderr(f"error: stalled: {sentence}; the stacks of the other ranks are in logs/")
        self.record_stall(sentence)
        time.sleep(_OTHERS_WRITE_S)
        end_process(Stalled.exit_code)

    def claim(self) -> None:
        self.send({"kind": "claim"})

    def tell(self, cause: Cause) -> None:
        self.send({"kind": "cause", "cause": vars(cause)})
        self.know(cause)

    def send(self, message: Message) -> None:
        self._line.send(message)

    def close_connections(self) -> None:
        self._line.close()
