"""Elastic ranks shut what Horovod has opened, and nothing else; where the timeline of a start is written."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from horovod_train.distributed import start
from horovod_train.distributed.launch.launcher import Launch
from horovod_train.distributed.start import forget_timeline, timeline_environment
from horovod_train.errors import UserError


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


def test_each_start_has_a_file_of_its_own(tmp_path: Path) -> None:
    paths = []
    for _ in range(3):
        (path,) = map(Path, timeline_environment(tmp_path / "run", is_root=True).values())
        path.touch(exist_ok=False)
        paths.append(path)
    assert sorted((tmp_path / "run" / "timeline").iterdir()) == sorted(paths)


def test_ranks_other_than_root_name_no_file(tmp_path: Path) -> None:
    assert timeline_environment(tmp_path / "run", is_root=False) == {"HOROVOD_TIMELINE": "DYNAMIC"}
    assert not (tmp_path / "run").exists()


def test_a_file_that_the_environment_names_is_not_replaced_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", "/tmp/mine.json")
    with pytest.raises(UserError, match=r"^horovod\.timeline: the environment has HOROVOD_TIMELINE=/tmp/mine\.j"):
        timeline_environment(tmp_path, is_root=True)
    forget_timeline()
    assert timeline_environment(tmp_path, is_root=True).keys() == {"HOROVOD_TIMELINE"}


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("")
    with pytest.raises(UserError, match=r"output_dir: cannot write .*timeline: File exists"):
        timeline_environment(tmp_path, is_root=True)


@pytest.fixture
def few_files() -> Iterator[int]:
    """A soft limit of 600 open files; the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("ranks", "then"), [(8, 600), (100, 912)])
def test_a_rank_may_hold_a_connection_to_each_other(few_files: int, ranks: int, then: int) -> None:
    start._allow_open_files(Launch("mpirun", 0, ranks))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (then, few_files)


def test_a_hard_limit_that_is_too_low_for_the_ranks_is_said(few_files: int, caplog: pytest.LogCaptureFixture) -> None:
    assert few_files < 10**12
    start._allow_open_files(Launch("mpirun", 1, 10**12))
    assert not caplog.messages, "one rank says so"
    start._allow_open_files(Launch("mpirun", 0, 10**12))
    assert re.search(rf"may open {few_files} files \(ulimit -Hn\); 10+ ranks need 40+512 for", caplog.text)


def test_a_traced_adasum_forks_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork(method: str) -> None:
        raise AssertionError(f"a process is to be started by {method}")

    monkeypatch.setattr("horovod.common.util.multiprocessing.get_context", fork)
    with start.horovod_alone():
        exchange = tf.function(lambda values: hvd.allreduce(values, op=hvd.Adasum, name="adasum"))
        assert exchange.get_concrete_function(tf.TensorSpec([3], tf.float32)).output_shapes == [3]
