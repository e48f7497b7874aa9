"""What reaches root's watchdog: messages of ranks, and nothing from other connections, whatever they send."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from strangers import messages

from horovod_train.distributed.launch import network
from horovod_train.distributed.launch.network import choose_host, exchange_interfaces
from horovod_train.distributed.watchdog import transport
from horovod_train.distributed.watchdog.transport import ADMITTED, HELLO, Address, Lost, Received, Server, connect


class Polled:
    """A server whose messages a thread collects, as root's watchdog does."""

    def __init__(self, size: int) -> None:
        self.server = Server("127.0.0.1", size)
        self.address = self.server.address
        self.found: Received = []
        self.polls = 0
        self.is_open = True
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while self.is_open:
            self.found += self.server.poll(0.05)
            self.polls += 1

    def wait_for(self, count: int) -> Received:
        wait_until(lambda: len(self.found) >= count)
        return self.found

    def close(self) -> None:
        self.is_open = False
        self._thread.join()
        self.server.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 300) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.fixture
def polled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Polled]:
    monkeypatch.setattr(transport, "HELLO_WITHIN_S", 300.0)
    started = Polled(size=4)
    yield started
    started.close()


FORKS = """
import os, sys, time
from horovod_train.distributed.watchdog.transport import Address, Server, connect
host, port, token = sys.argv[1:]
connected, server = connect(Address(host, int(port), token), 1, 300), Server(host, 1)
if pid := os.fork():
    print(pid, server.address.port, flush=True)
time.sleep(3600)
"""


def test_a_process_that_a_rank_has_forked_does_not_hide_its_death(polled: Polled) -> None:
    """As the workers of a multiprocessing pool, which wait for ever when the rank is killed."""
    words = [sys.executable, "-c", FORKS, *map(str, polled.address)]
    rank = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert rank.stdout is not None
    forked, port = map(int, rank.stdout.readline().split())
    try:
        rank.kill()
        rank.wait()
        assert polled.wait_for(1) == [(1, Lost(closed=True))]
        with pytest.raises(ConnectionRefusedError):  # if it was root's, others see it too
            socket.create_connection(("127.0.0.1", port), timeout=300)
        os.kill(forked, 0)
    finally:
        os.kill(forked, signal.SIGKILL)
        rank.stdout.close()


def call(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=300)


def is_dropped(pending: socket.socket) -> bool:
    """Whether root closes the connection without an answer."""
    try:
        return pending.recv(1) == b""
    except ConnectionResetError:
        return True


def test_messages_go_both_ways_and_an_end_is_noticed(polled: Polled) -> None:
    connection = connect(polled.address, 2, 300)
    connection.send({"kind": "beat"})
    assert polled.wait_for(1) == [(2, {"kind": "beat"})]
    polled.server.send({"kind": "beat", "n": 1})
    assert connection.poll(300) == [(0, {"kind": "beat", "n": 1})]
    connection.close()
    assert polled.wait_for(2)[1:] == [(2, Lost(closed=True))]


def test_a_message_in_pieces_is_one_message(polled: Polled) -> None:
    connection = connect(polled.address, 1, 300)
    for piece in (b'{"kind": ', b'"be', b'at"}\n{"kind"', b': "bye"}\n'):
        polls = polled.polls
        connection.socket.send(piece)
        wait_until(lambda polls=polls: polled.polls > polls + 1)  # type: ignore[misc]
    assert polled.wait_for(2) == [(1, {"kind": "beat"}), (1, {"kind": "bye"})]


def test_a_hello_that_is_replayed_when_its_rank_has_left_is_refused(polled: Polled) -> None:
    connect(polled.address, 3, 300).close()
    assert polled.wait_for(1) == [(3, Lost(closed=True))]
    replayed = call(polled.address)
    replayed.send(HELLO.pack(polled.address.token.encode(), 3) + b'{"kind": "bye"}\n')
    assert is_dropped(replayed)
    assert polled.found == [(3, Lost(closed=True))]


def test_a_rank_that_sends_without_end_does_not_keep_root_from_the_others(polled: Polled) -> None:
    flooding, other = connect(polled.address, 1, 300), connect(polled.address, 2, 300)
    flooding.socket.setblocking(True)
    has_ended = threading.Event()

    def flood() -> None:
        while not has_ended.is_set():
            flooding.socket.sendall(b'{"kind": "beat"}\n' * 10_000)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        wait_until(lambda: bool(polled.found), 60)
        other.send({"kind": "bye"})
        wait_until(lambda: (2, {"kind": "bye"}) in polled.found[:], 60)
    finally:
        has_ended.set()
        thread.join()


HELLO_OF_ANOTHER_RUN = HELLO.pack(b"0" * 32, 1)
A_GIGABYTE_FOLLOWS = (1 << 30).to_bytes(8, "big") * 10


@pytest.mark.parametrize(
    "message",
    [b"[" * 60_000 + b"\n", "\ud800".encode(errors="surrogatepass") * 100, HELLO_OF_ANOTHER_RUN, A_GIGABYTE_FOLLOWS],
)
def test_a_connection_is_dropped_after_as_many_wrong_bytes_as_a_hello_has(polled: Polled, message: bytes) -> None:
    pending = call(polled.address)
    pending.sendall(message[: HELLO.size - 1])
    polls = polled.polls
    wait_until(lambda: polled.polls > polls + 1)
    pending.setblocking(False)
    with pytest.raises(BlockingIOError):
        pending.recv(1)  # still heard
    pending.settimeout(300)
    pending.send(message[HELLO.size - 1 :])
    assert is_dropped(pending)
    assert polled.found == []


@pytest.mark.parametrize("rank", [4, 2**32 - 1])
def test_the_token_admits_ranks_of_this_run_only(polled: Polled, rank: int) -> None:
    pending = call(polled.address)
    pending.send(HELLO.pack(polled.address.token.encode(), rank))
    assert is_dropped(pending)


def test_a_rank_is_admitted_once(polled: Polled) -> None:
    first, second = call(polled.address), call(polled.address)
    hello = HELLO.pack(polled.address.token.encode(), 3)
    first.send(hello)
    assert first.recv(1) == ADMITTED
    second.send(hello)
    assert is_dropped(second)


def test_a_rank_that_root_does_not_admit_is_told_so(polled: Polled, monkeypatch: pytest.MonkeyPatch) -> None:
    # It tries twice, and waits for each answer as long as it takes.
    moments, this_thread = iter([0, 0, 300, 300, 601]), threading.current_thread()

    def monotonic() -> float:
        return next(moments) if threading.current_thread() is this_thread else time.monotonic()  # root has a real clock

    clock = SimpleNamespace(monotonic=monotonic, sleep=lambda seconds: None)
    monkeypatch.setattr(transport, "time", clock)
    with pytest.raises(OSError, match="it does not admit this rank"):
        connect(polled.address._replace(token="0" * 32), 1, 600)
    assert not list(moments)


def test_a_connection_that_fails_at_first_is_tried_again(polled: Polled, monkeypatch: pytest.MonkeyPatch) -> None:
    failures, create = [OSError(errno.EHOSTUNREACH, "No route to host")] * 2, socket.create_connection

    def failing(*given: object, **named: object) -> socket.socket:
        if failures:
            raise failures.pop()
        return create(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "create_connection", failing)
    connect(polled.address, 1, 300).close()
    failures += [OSError(errno.EHOSTUNREACH, "No route to host")] * 99
    with pytest.raises(OSError, match="No route to host"):
        connect(polled.address, 2, 0.2)


def test_a_pending_connection_that_is_late_is_dropped(polled: Polled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HELLO_WITHIN_S", 0.1)
    pending = call(polled.address)
    pending.send(b"slow")
    assert is_dropped(pending)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_idle_connections_cost_a_bounded_number_of_descriptors(polled: Polled) -> None:
    connection = connect(polled.address, 0, 300)
    before = descriptors()
    with ExitStack() as stack:
        idle = [stack.enter_context(call(polled.address)) for _ in range(200)]
        most = 4 + transport.SPARE_PENDING
        assert all(map(is_dropped, idle[:-most]))  # the oldest go
        assert descriptors() <= before + len(idle) + most
        connect(polled.address, 1, 300).close()  # a rank still comes in
    connection.send({"kind": "beat"})
    wait_until(lambda: (0, {"kind": "beat"}) in polled.found)


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    opened = []
    try:
        with suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in opened:
            os.close(descriptor)


def test_without_descriptors_root_pauses_and_then_accepts_again(polled: Polled) -> None:
    connection = connect(polled.address, 0, 300)
    late = [socket.socket() for _ in range(3)]
    with no_more_descriptors():
        for pending in late:
            pending.connect((polled.address.host, polled.address.port))
        polls = polled.polls
        connection.send({"kind": "beat"})
        polled.wait_for(1)
        wait_until(lambda: polled.polls > polls + 10)
        assert polled.polls < polls + 10_000
    late[0].settimeout(300)
    late[0].send(HELLO.pack(polled.address.token.encode(), 1))
    assert late[0].recv(1) == ADMITTED


@pytest.mark.parametrize("words", [b"[" * 60_000, b"[1]", b"\xff", b"x" * 70_000])
def test_what_a_rank_garbles_ends_only_its_connection(polled: Polled, words: bytes) -> None:
    garbling, other = connect(polled.address, 1, 300), connect(polled.address, 2, 300)
    garbling.socket.setblocking(True)
    with suppress(ConnectionError):  # root may hang up as soon as the line is too long
        garbling.socket.sendall(words + b"\n")
    assert polled.wait_for(1) == [(1, Lost(closed=False))]
    other.send({"kind": "beat"})
    assert polled.wait_for(2)[1:] == [(2, {"kind": "beat"})]


def test_a_connection_receives_beyond_a_thousand_open_files(polled: Polled) -> None:
    """select.select takes no descriptor above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        connection = connect(polled.address, 1, 300)
        assert connection.socket.fileno() > 1023
        connection.send({"kind": "beat"})
        assert polled.wait_for(1) == [(1, {"kind": "beat"})]  # now root has the connection, and can answer on it
        polled.server.send({"kind": "beat"})
        assert connection.poll(300) == [(0, {"kind": "beat"})]
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_pending_connections_that_send_anything_change_nothing(polled: Polled) -> None:
    """The whole, on a run that trains, is in tests/distributed/ends/test_strangers.py."""
    connection = connect(polled.address, 0, 300)
    with ExitStack() as stack:
        for number, message in enumerate(messages(random.Random(7), 300, polled.address.token)):
            pending = stack.enter_context(call(polled.address))
            with suppress(ConnectionError):
                pending.sendall(message)
            if number % 2:  # the others stay
                pending.close()
        connection.send({"kind": "beat"})
        assert polled.wait_for(1) == [(0, {"kind": "beat"})]


def test_ranks_of_one_host_connect_on_loopback() -> None:
    assert choose_host(["a", "a"], ["eth0"]) == "127.0.0.1"


def test_ranks_of_several_hosts_connect_where_they_exchange() -> None:
    assert choose_host(["a", "b"], ["ib0", "lo"]) == "127.0.0.1"
    # Without a known interface: the address from which this host reaches another.
    assert choose_host([socket.gethostname(), "127.0.0.2"], []) == "127.0.0.1"


def test_of_several_interfaces_the_one_that_leads_to_the_others_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with NCCL_SOCKET_IFNAME=^docker0: the first may lead nowhere."""
    routed = {"a": "10.0.0.1", "b": "10.0.0.1"}
    monkeypatch.setattr(network, "interfaces", lambda: {"usb0": "169.254.3.1", "eth0": "10.0.0.1"})
    monkeypatch.setattr(network, "local_address_towards", routed.__getitem__)
    assert choose_host(["a", "b"], ["usb0", "eth0"]) == "10.0.0.1"
    routed["a"] = "172.17.0.1"  # of an interface that is to be avoided
    assert choose_host(["a", "b"], ["usb0", "eth0"]) == "169.254.3.1"


KNOWN = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.1.0.1", "docker0": "172.17.0.1", "ib0": "10.2.0.1"}


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("eth0", ["eth0"]),
        ("eth", ["eth0", "eth1"]),
        ("ib,eth1", ["eth1", "ib0"]),
        ("=eth", ["eth"]),  # which no host has
        ("=eth0,ib0", ["eth0", "ib0"]),
        ("^docker0,lo", ["eth0", "eth1", "ib0"]),
        ("^eth", ["docker0", "ib0"]),
        ("^=eth", ["eth0", "eth1", "docker0", "ib0"]),
        ("bond0", ["bond0"]),
        ("", []),
    ],
)
def test_interfaces_are_named_as_nccl_reads_them(given: str, used: list[str]) -> None:
    assert exchange_interfaces({"NCCL_SOCKET_IFNAME": given}, KNOWN) == used
    assert exchange_interfaces({"NCCL_SOCKET_IFNAME": given, "HOROVOD_GLOO_IFACE": "lo"}, KNOWN) == ["lo"]
    assert exchange_interfaces({"NCCL_SOCKET_IFNAME": given}, KNOWN, over_nccl=False) == []


def test_a_host_whose_own_name_is_a_loopback_address_is_reached_from_outside(tmp_path: Path) -> None:
    """As Debian's installer leaves it, and where the names of the others are not known."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 debian\n")
    code = "from horovod_train.distributed.launch import network; print(network.choose_host(['debian', 'other'], []))"
    link = "ip link set lo up; ip link add eth0 type bridge; ip addr add 10.1.2.3/24 dev eth0; ip link set eth0 up"
    script = f'hostname debian; mount --bind {tmp_path}/hosts /etc/hosts; {link}; exec {sys.executable} -c "{code}"'
    found = subprocess.run(
        ["unshare", "-n", "-m", "-u", "sh", "-ec", script], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip(f"a network of its own needs root: {found.stderr.strip()}")
    assert found.stdout == "10.1.2.3\n"
