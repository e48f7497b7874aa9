"""What Horovod has opened is shut when elastic ranks part, and nothing else is."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from horovod.common.exceptions import HorovodInternalError

from horovod_train.distributed import start


class LeavesOpen:
    """Stands for Horovod after a loss: opens a connection when it starts, and never closes it."""

    def __init__(self) -> None:
        self.own, self.other = socket.socket(), socket.socket()

    def init(self) -> None:
        self.own, self.other = connected()

    def shutdown(self) -> None: ...


def connected() -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        own = socket.create_connection(listening.getsockname())
        return own, listening.accept()[0]


def is_at_its_end(connection: socket.socket) -> bool:
    """Whether the other end has been shut, so that whoever waits here notices."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch) -> Iterator[LeavesOpen]:
    with ExitStack() as ends:
        stands_for = LeavesOpen()
        ends.callback(lambda: [end.close() for end in (stands_for.own, stands_for.other)])
        monkeypatch.setattr(start, "hvd", stands_for)
        yield stands_for


def test_those_who_wait_for_this_rank_notice_that_it_has_left(horovod: LeavesOpen) -> None:
    before, peer = connected()
    start.connect()
    assert not is_at_its_end(horovod.other)
    start.disconnect()
    assert is_at_its_end(horovod.other)
    assert not is_at_its_end(peer)  # not Horovod's
    before.close()
    peer.close()


def test_a_descriptor_that_now_is_another_socket_is_left_alone(horovod: LeavesOpen) -> None:
    start.connect()
    ours, peer = connected()
    os.dup2(ours.fileno(), horovod.own.fileno())
    start.disconnect()
    assert not is_at_its_end(peer)
    ours.close()
    peer.close()


def test_ranks_that_do_not_meet_are_a_loss(horovod: LeavesOpen, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ValueError("Horovod initialization failed")

    monkeypatch.setattr(horovod, "init", fails)
    with pytest.raises(HorovodInternalError, match="did not meet"):
        start.connect()
