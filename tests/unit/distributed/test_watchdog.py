"""Root's watchdog survives whatever it hears; one rank of each host prints why a run ends, whichever ranks are dead.

In one process, with the real server and real files.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from horovod_train.config.settings import WatchConfig
from horovod_train.distributed.watchdog import watch_thread, watchdog
from horovod_train.distributed.watchdog.heartbeat import Beat, Heartbeat, intervals
from horovod_train.distributed.watchdog.transport import Connection, Lost, Server, connect
from horovod_train.distributed.watchdog.watch_thread import (
    LEAVE_WITHIN_S,
    Cause,
    Coordinator,
    Watch,
    Watchdog,
    WatchThread,
    Worker,
)
from horovod_train.distributed.watchdog.watchdog import HostClaim, RunEnd, open_host_claim, stall_environment
from horovod_train.errors import AlreadySaid
from horovod_train.output.rank_log import RankLog

SIZE = 3


@dataclass(frozen=True)
class Group:
    """What the watchdog asks of a WorkerGroup; ranks reach the barrier one after the other."""

    rank: int = 0
    hosts: tuple[str, ...] = ("here",) * SIZE
    at_barrier: Callable[[], None] = lambda: None
    launcher: str = "none"
    controller: str = "gloo"
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    @property
    def size(self) -> int:
        return len(self.hosts)

    def broadcast_object(self, value: str) -> str:
        return "0" * len(value)

    def barrier(self) -> None:
        self.at_barrier()

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.hosts[rank]})"


class Counting(Coordinator):
    """Notes when it decides, and can fail at it."""

    fails = False

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self.decisions: list[float] = []

    def decide(self, now: float) -> None:
        self.decisions.append(now)
        if self.fails:
            raise ZeroDivisionError("in the watchdog itself")
        super().decide(now)


LIMITS = WatchConfig(warn_after_s=600, stop_after_s=1200, first_step_after_s=1200)


@dataclass
class Root:
    server: Server
    watch: Counting

    def join(self, rank: int) -> Connection:
        return connect(self.server.address, rank, 300)


@pytest.fixture
def root() -> Iterator[Root]:
    server = Server("127.0.0.1", SIZE)
    watch = Counting(Group(), RankLog(), LIMITS, server)
    WatchThread(watch).start()
    yield Root(server, watch)
    watch.close()


def receive(connection: Connection, kind: str) -> dict[str, Any]:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        for _, message in connection.poll(0.1):
            assert not isinstance(message, Lost)
            if message["kind"] == kind:
                return message
    raise AssertionError(f"no {kind} came")


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    "message", [{"kind": "beat", "beat": {"x": 1}}, {"kind": "cause", "cause": 3}, {"kind": []}, {}]
)
def test_a_message_without_sense_is_reported_and_the_next_is_heard(
    root: Root, capfd: pytest.CaptureFixture[str], message: dict[str, Any]
) -> None:
    first, second = root.join(1), root.join(2)
    first.send(message)
    first.send(message)
    second.send({"kind": "claim"})
    assert receive(second, "speaker") == {"kind": "speaker", "rank": 2}
    first.send({"kind": "claim"})
    assert receive(first, "speaker") == {"kind": "speaker", "rank": 2}
    warnings = capfd.readouterr().err.splitlines()
    expected = ["warning: the watchdog of rank 0 (here) continues after an error: TypeError"]
    makes_sense = message.get("kind") not in ("beat", "cause")  # an unknown kind is passed over
    assert [line[: len(expected[0])] for line in warnings] == ([] if makes_sense else expected)


def test_an_error_in_the_watchdog_itself_is_reported_once_and_it_continues(
    root: Root, capfd: pytest.CaptureFixture[str]
) -> None:
    root.watch.fails = True
    before = len(root.watch.decisions)
    wait_until(lambda: len(root.watch.decisions) >= before + 2)
    connection = root.join(1)
    connection.send({"kind": "claim"})
    receive(connection, "speaker")
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.endswith("continues after an error: ZeroDivisionError: in the watchdog itself")


def test_root_decides_once_a_turn_however_much_it_hears(root: Root) -> None:
    connection, beat = root.join(1), vars(Beat("train", 1, "", 1, 0.0))
    for moves in range(400):
        connection.send({"kind": "beat", "beat": beat | {"moves": moves}})
        time.sleep(0.001)
    connection.send({"kind": "claim"})
    receive(connection, "speaker")
    wait_until(lambda: len(root.watch.decisions) >= 2)
    turn_s = intervals(LIMITS, SIZE).turn_s
    assert min(after - before for before, after in pairwise(root.watch.decisions)) >= 0.999 * turn_s


def test_hundreds_of_ranks_send_heartbeats_less_often() -> None:
    few, many = intervals(WatchConfig(), 256), intervals(WatchConfig(), 2048)
    assert (few.beat_s, many.beat_s) == (1.0, 8.0)
    assert many.turn_s == 1.0
    assert many.silent_after_s >= 4 * many.beat_s


HOSTS = ("here", "here", "here", "there", "there")


class NoTransport:
    def send(self, message: object) -> None: ...


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(watchdog, "_MEMORY", tmp_path)
    return tmp_path


def open_in_all_ranks(rank: int = 0) -> list[HostClaim | None]:
    """Ranks from `rank` on: each is inside the barrier while the next ones open theirs."""
    later: list[HostClaim | None] = []
    if rank == len(HOSTS):
        return later
    claim = open_host_claim(Group(rank, HOSTS, lambda: later.extend(open_in_all_ranks(rank + 1))))  # type: ignore[arg-type]
    return [claim, *later]


def states(claims: list[HostClaim | None]) -> list[Watch]:
    made: list[Watch] = []
    for rank, claim in enumerate(claims):
        group, limits = Group(rank, HOSTS), WatchConfig()
        made.append(Worker(group, RankLog(), limits, NoTransport(), claim))  # type: ignore[arg-type]
    return made


def test_one_rank_of_each_host_takes_it_whichever_asks_first(folder: Path) -> None:
    claims = open_in_all_ranks()
    taken = [claims[rank].take() for rank in (2, 0, 1, 2, 4, 3)]  # type: ignore[union-attr]
    assert taken == [True, False, False, False, True, False]


def test_a_rank_that_dies_with_it_has_taken_it(folder: Path) -> None:
    """It printed the line, and then ended."""
    claims = open_in_all_ranks()
    assert claims[0].take()  # type: ignore[union-attr]
    claims[0] = None
    assert not claims[1].take()  # type: ignore[union-attr]


def test_no_file_is_left(folder: Path) -> None:
    assert all(open_in_all_ranks())
    assert not list(folder.iterdir())


def test_a_later_rank_prints_if_the_first_one_left_does_not(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 has gone, and rank 1, the first that is left, dies before it prints."""
    made = states(open_in_all_ranks())
    for rank in (2, 4):
        with made[rank].changed:
            made[rank].record_cause(Cause(0, "disappeared: killed or out of memory?", 1))
            made[rank].print_once_per_host("stopped: again")
    assert capfd.readouterr().err.splitlines() == ["stopped: rank 0 (here) disappeared: killed or out of memory?"] * 2


def test_without_a_place_for_the_file_the_first_rank_left_prints(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for first_rank in (0, 3):
        (folder / f"horovod_train-{'0' * 16}-{first_rank}").mkdir()
    claims = open_in_all_ranks()
    assert claims == [None] * len(HOSTS)
    for rank, state in enumerate(states(claims)):
        state.cause = Cause(0, "", 1)
        state.print_once_per_host(f"stopped: {rank}")
        state.print_once_per_host(f"stopped: {rank}")
    assert capfd.readouterr().err.splitlines() == ["stopped: 1", "stopped: 3"]


class NoCause(Watchdog):
    """Has found that no rank has gone; notes what is announced."""

    def __init__(self) -> None:
        self.announced: list[Cause] = []

    def announce_cause(self, cause: Cause) -> None:
        self.announced.append(cause)


def nccl_error(text: str) -> tf.errors.UnknownError:
    node = "\n\t [[{{node HorovodAllreduce_1}}]]"
    return tf.errors.UnknownError(None, None, f"Graph execution error:\n\n{text}{node} [Op:__inference_step_1]")


NCCL_TEXTS = [
    (
        "ncclCommInitRank failed: unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "ncclCommInitRank failed: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    ),
    ("NCCL async error: internal error", "NCCL async error: internal error; NCCL_DEBUG=WARN says more"),
    (
        "ncclAllReduce failed: remote process exited or there was a network error",
        "ncclAllReduce failed: remote process exited or there was a network error; NCCL_DEBUG=WARN says more",
    ),
]


@pytest.mark.parametrize("name", ["", "logs/rank-1.log"])
@pytest.mark.parametrize(("text", "expected"), NCCL_TEXTS)
def test_an_error_of_nccl_is_shown_where_no_rank_has_gone(
    capfd: pytest.CaptureFixture[str], name: str, text: str, expected: str
) -> None:
    """In a run, which keeps a log, and in a script, which keeps none."""
    log, watchdog = RankLog(), NoCause()
    log.name = name
    with pytest.raises(AlreadySaid) as outcome, RunEnd(Group(rank=1), log, watchdog):  # type: ignore[arg-type]
        raise nccl_error(text)
    assert outcome.value.exit_code == 1
    said = capfd.readouterr().err
    line = re.sub(r" \(at \S+:\d+\)", "", said.splitlines()[-1])
    own = f"UnknownError: {expected}"
    assert line == (f"error: rank 1 (here): {own}; the traceback is in {name}" if name else f"error: {own}")
    assert ("Traceback" in said) == (not name)
    (cause,) = watchdog.announced
    assert cause.what.startswith(f"failed: {own}")


@pytest.mark.parametrize(("text", "_"), NCCL_TEXTS)
def test_where_a_rank_has_gone_no_text_of_nccl_is_the_ranks_own(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, _: str
) -> None:
    watchdog = NoCause()
    monkeypatch.setattr(watchdog, "find_cause", lambda _=1: Cause(0, "disappeared: killed or out of memory?", 1))
    with pytest.raises(AlreadySaid), RunEnd(Group(rank=1), RankLog(), watchdog):  # type: ignore[arg-type]
        raise nccl_error(text)
    assert capfd.readouterr().err == "stopped: rank 0 (here) disappeared: killed or out of memory?\n"
    assert not watchdog.announced


def test_that_horovod_has_been_shut_down_says_nothing_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AlreadySaid), RunEnd(Group(rank=1), RankLog(), NoCause()):  # type: ignore[arg-type]
        raise tf.errors.UnknownError(None, None, "Horovod has been shut down. This was caused by an exception on one …")
    assert capfd.readouterr().err == "stopped: another rank has gone; its message says why\n"


class FromRust(BaseException):
    """As the PanicException of libraries written in Rust."""


@pytest.mark.parametrize("error", [FromRust("no such file"), asyncio.CancelledError("no such file")])
def test_what_is_no_exception_to_python_is_a_failure_too(
    capfd: pytest.CaptureFixture[str], error: BaseException
) -> None:
    log, watchdog = RankLog(), NoCause()
    log.name = "logs/rank-1.log"
    with pytest.raises(AlreadySaid), RunEnd(Group(rank=1), log, watchdog):  # type: ignore[arg-type]
        raise error
    assert f"{type(error).__name__}: no such file" in capfd.readouterr().err
    (cause,) = watchdog.announced
    assert cause.what.startswith(f"failed: {type(error).__name__}: no such file")


def test_the_lines_of_an_error_are_one_up_to_where_it_happened(capfd: pytest.CaptureFixture[str]) -> None:
    text = "Graph execution error:\n\nDetected at node PyFunc\nValueError: bad row\nin file a.csv\n\nTraceback (most …"
    log = RankLog()
    log.name = "logs/rank-1.log"
    with pytest.raises(AlreadySaid), RunEnd(Group(rank=1), log, NoCause()):  # type: ignore[arg-type]
        raise tf.errors.UnknownError(None, None, text)
    assert "UnknownError: ValueError: bad row in file a.csv (at " in capfd.readouterr().err


def test_a_search_for_the_cause_leaves_time_to_say_that_there_is_none(root: Root) -> None:
    state = root.watch
    connections = [root.join(1), root.join(2)]

    def beat() -> None:
        while not state.is_closed:
            for connection in connections:
                connection.send({"kind": "beat", "beat": vars(Beat("train", 1, "", 1, 0.0))})
            time.sleep(0.2)

    threading.Thread(target=beat, daemon=True).start()
    began = time.monotonic()
    assert state.find_cause() is None
    assert state.exits_since is not None
    assert state.exits_since - began > LEAVE_WITHIN_S / 2  # it ends LEAVE_WITHIN_S after that


def gone() -> tf.errors.UnknownError:
    """What each rank gets of Horovod when any rank has gone, or gloo has waited for longer than its limit."""
    return tf.errors.UnknownError(None, None, "Horovod has been shut down. This was caused by an exception on one …")


@pytest.fixture
def ranks(root: Root, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watch, Watch]]:
    """The watchdogs of ranks 0 and 1."""
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "34")
    watch = Worker(Group(rank=1), RankLog(), LIMITS, root.join(1))  # type: ignore[arg-type]
    WatchThread(watch).start()
    yield root.watch, watch
    watch.close()


def end_of(watch: Watch, error: BaseException) -> None:
    with pytest.raises(AlreadySaid), RunEnd(watch.group, watch.log, watch):
        raise error


@pytest.mark.long
def test_a_rank_that_has_failed_for_another_is_not_said_to_have_ended_by_itself(
    ranks: tuple[Watch, Watch], capfd: pytest.CaptureFixture[str]
) -> None:
    root, other = ranks
    end_of(other, gone())  # it does not know why
    wait_until(lambda: 1 in root.finished)
    other.close()  # a script's end tells it again
    end_of(root, gone())
    assert root.cause is None
    assert "ended by itself" not in capfd.readouterr().err


def test_a_rank_that_ends_by_itself_is_named(ranks: tuple[Watch, Watch], capfd: pytest.CaptureFixture[str]) -> None:
    root, other = ranks
    other.close()
    wait_until(lambda: 1 in root.finished)
    end_of(root, gone())
    assert capfd.readouterr().err.startswith("stopped: rank 1 (here) ended by itself, by sys.exit or")


@pytest.mark.parametrize(
    ("seconds", "controller", "is_cause"), [(45, "gloo", True), (20, "gloo", False), (45, "MPI", False)]
)
def test_a_suspension_that_gloo_does_not_survive_is_named(
    ranks: tuple[Watch, Watch],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    seconds: float,
    controller: str,
    is_cause: bool,
    tmp_path: Path,
) -> None:
    """All ranks are: none is silent, none has ended, and gloo tells each one that it waited too long."""
    state, _ = ranks
    monkeypatch.setattr(state, "group", dataclasses.replace(state.group, controller=controller))
    monkeypatch.setattr(state, "_host_claim", HostClaim(tmp_path / "claim"))
    with state.changed:
        for paused_s in (seconds, 3.0):  # then the ranks wake, and lack CPU
            state.discount_pause(paused_s, time.monotonic())
    ends: list[tuple[Any, ...]] = []
    monkeypatch.setattr(state.log, "end", lambda ended, code, *, error, **facts: ends.append((ended, code, error)))
    end_of(state, gone())
    (line,) = capfd.readouterr().err.splitlines()
    suspended = (
        "stopped: rank 0 (here) was suspended for 45 s, longer than gloo waits (HOROVOD_GLOO_TIMEOUT_SECONDS: 34)"
    )
    assert line == (suspended if is_cause else "stopped: another rank has gone; its message says why")
    own = ("failed", 1, suspended.removeprefix("stopped: rank 0 (here) "))
    assert ends == [own if is_cause else ("followed", 1, line)]


def test_a_process_that_writes_a_checkpoint_in_the_background_gets_the_time_of_a_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(watch_thread, "end_process", ended.append)
    state = Worker(Group(launcher="srun"), RankLog(), LIMITS, None)  # type: ignore[arg-type]
    thread = WatchThread(state)
    state.exit_code = 1
    state.group.heartbeat.is_saving = lambda: True
    thread._end_if_overdue(LEAVE_WITHIN_S + 1)
    assert not ended
    thread._end_if_overdue(LIMITS.stop_after_s + 1)
    state.group.heartbeat.is_saving = lambda: False
    thread._end_if_overdue(LEAVE_WITHIN_S + 1)
    assert ended == [1, 1]


def test_where_no_thread_can_be_started_a_process_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ended: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(watch_thread, "end_process", ended.append)
    state = Worker(Group(launcher="srun"), RankLog(), LIMITS, None)  # type: ignore[arg-type]
    state.exit_code = 1
    WatchThread(state)._end_if_overdue(LEAVE_WITHIN_S + 1)
    assert ended == [1]


FULL_PIPE = """
import sys, threading
from horovod_train.distributed.watchdog.watch_thread import end_process
blocked = threading.Thread(target=lambda: print("x" * (1 << 20)), daemon=True)
blocked.start()  # holds the lock of the stream, as the main thread of a rank would
sys.stdin.read(1)
end_process(5)
"""


def test_a_process_is_ended_though_nobody_reads_what_it_prints() -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", FULL_PIPE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=buffered) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read(1) == b"x"  # the rest does not fit
        process.stdin.write(b"f")
        process.stdin.flush()
        assert process.wait(300) == 5


def test_limits_beyond_32_bits_are_the_longest_that_gloo_takes() -> None:
    limits = stall_environment(WatchConfig(stop_after_s=3e9, first_step_after_s=1e18))
    assert {int(seconds) for seconds in limits.values()} == {2**31 - 1}
