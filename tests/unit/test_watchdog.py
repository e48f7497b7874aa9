"""Root's watch hears and judges whatever comes; in one process, with the real server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from horovod_train.distributed.watchdog.coordinator import Coordinator
from horovod_train.distributed.watchdog.heartbeat import Beat, Heartbeat
from horovod_train.distributed.watchdog.stall_detector import StallLimits
from horovod_train.distributed.watchdog.transport import Line, Lost, Server, connect
from horovod_train.output.rank_log import NullRankLog

SIZE = 3


@dataclass(frozen=True)
class Group:
    """What the watch asks of a WorkerGroup."""

    rank: int = 0
    size: int = SIZE
    launcher: str = "none"
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    def name(self, rank: int) -> str:
        return f"rank {rank} (here)"


class Counting(Coordinator):
    """A root's guard that counts how often it judges, and can fail at it."""

    decisions = 0
    fails = False

    def decide(self, now: float) -> None:
        self.decisions += 1
        if self.fails:
            raise ZeroDivisionError("in the watch itself")
        super().decide(now)


@pytest.fixture
def guard() -> Iterator[Counting]:
    server = Server("127.0.0.1", SIZE)
    started = Counting(Group(), NullRankLog(), StallLimits(8, 600, 600), server, print)  # type: ignore[arg-type]
    started.start()
    yield started
    started.is_closed = True


def join(guard: Counting, rank: int) -> Line:
    return connect(guard._server.address, rank, 10)


def receive(line: Line, kind: str) -> dict[str, Any]:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for message in line.wait(0.1):
            assert not isinstance(message, Lost)
            if message["kind"] == kind:
                return message
    raise AssertionError(f"no {kind} came")


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    "message", [{"kind": "beat", "beat": {"x": 1}}, {"kind": "cause", "cause": 3}, {"kind": []}, {}]
)
def test_a_message_of_no_sense_is_said_and_the_watch_hears_the_next(
    guard: Counting, capfd: pytest.CaptureFixture[str], message: dict[str, Any]
) -> None:
    first, second = join(guard, 1), join(guard, 2)
    first.send(message)
    first.send(message)
    second.send({"kind": "claim"})
    assert receive(second, "speaker") == {"kind": "speaker", "rank": 2}
    first.send({"kind": "claim"})
    assert receive(first, "speaker") == {"kind": "speaker", "rank": 2}
    warnings = capfd.readouterr().err.splitlines()
    expected = ["warning: the watch of rank 0 (here) met an error and continues: TypeError"]
    makes_sense = message.get("kind") not in ("beat", "cause")  # an unknown kind is passed over
    assert [line[: len(expected[0])] for line in warnings] == ([] if makes_sense else expected)


def test_a_failure_of_the_watch_itself_is_said_once_and_the_watch_continues(
    guard: Counting, capfd: pytest.CaptureFixture[str]
) -> None:
    guard.fails = True
    before = guard.decisions
    wait_until(lambda: guard.decisions >= before + 2)
    line = join(guard, 1)
    line.send({"kind": "claim"})
    receive(line, "speaker")
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.endswith("met an error and continues: ZeroDivisionError: in the watch itself")


def test_root_judges_once_in_a_while_however_much_it_hears(guard: Counting) -> None:
    line, beat = join(guard, 1), vars(Beat("train", 1, "", 1, 0.0))
    began, before = time.monotonic(), guard.decisions
    for moves in range(400):
        line.send({"kind": "beat", "beat": beat | {"moves": moves}})
        time.sleep(0.001)
    line.send({"kind": "claim"})
    receive(line, "speaker")
    assert guard.decisions - before <= (time.monotonic() - began) / guard.limits.turn_s + 1


def test_hundreds_of_ranks_give_signs_of_life_less_often() -> None:
    few, many = StallLimits(ranks=256), StallLimits(ranks=2048)
    assert (few.beat_s, many.beat_s) == (1.0, 8.0)
    assert many.turn_s == 1.0
    assert many.silent_after_s >= 4 * many.beat_s
