"""One rank of each host prints why a run ends, whichever ranks are dead; in one process, with real files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from horovod_train.config.settings import WatchConfig
from horovod_train.distributed.watchdog import state as watch_state
from horovod_train.distributed.watchdog.heartbeat import Heartbeat
from horovod_train.distributed.watchdog.state import Cause, HostClaim, WatchState, open_host_claim
from horovod_train.output.rank_log import RankLog

HOSTS = ("here", "here", "here", "there", "there")


@dataclass(frozen=True)
class Group:
    """What a claim asks of a WorkerGroup, on ranks that reach the barrier one after the other."""

    rank: int
    at_barrier: Callable[[], None] = lambda: None
    hosts: tuple[str, ...] = HOSTS
    size: int = len(HOSTS)
    launcher: str = "none"
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    def broadcast_object(self, value: str) -> str:
        return "0" * len(value)

    def barrier(self) -> None:
        self.at_barrier()

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.hosts[rank]})"


class NoTransport:
    def send(self, message: object) -> None: ...


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(watch_state, "_MEMORY", tmp_path)
    return tmp_path


def open_in_all_ranks(rank: int = 0) -> list[HostClaim | None]:
    """Ranks from `rank` on: each is inside the barrier while the next ones open theirs."""
    later: list[HostClaim | None] = []
    if rank == len(HOSTS):
        return later
    claim = open_host_claim(Group(rank, lambda: later.extend(open_in_all_ranks(rank + 1))))  # type: ignore[arg-type]
    return [claim, *later]


def states(claims: list[HostClaim | None]) -> list[WatchState]:
    made = []
    for rank, claim in enumerate(claims):
        group, limits = Group(rank), WatchConfig()
        state = WatchState(group, RankLog(), limits, NoTransport(), [0, rank], claim)  # type: ignore[arg-type]
        made.append(state)
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
