"""The server at which the ranks of a step meet serves those who know its key; and a rank believes root only."""

from __future__ import annotations

import dataclasses
import errno
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import psutil
import pytest
from conftest import HANGS_AFTER_S
from strangers import messages

from horovod_train.distributed.launch import key_value_store, network, rendezvous, rendezvous_server
from horovod_train.distributed.launch.conventions import Meeting
from horovod_train.distributed.launch.launcher import TOKEN
from horovod_train.distributed.launch.rendezvous import (
    Place,
    _address_of_root,
    _answer_key,
    _choose_interface,
    _find_root,
    _is_root,
    _read_arrival,
    _report,
    _wait_for_all,
    find_places,
    root_has_failed,
)
from horovod_train.distributed.launch.rendezvous_server import MAX_VALUE_BYTES, NEWS_BYTES, Relay, StepServer
from horovod_train.errors import FailedElsewhere, RunError

Server = TypeVar("Server", bound=StepServer)


def step_on(hosts: tuple[str, ...], host: int) -> Meeting:
    """A task of a SLURM step with one on each host."""
    return Meeting("srun", host, len(hosts), hosts[0], None, "7.0.0", 0, 1, len(hosts) == 1, hosts, host)


STEP = Meeting("srun", 1, 2, "here", None, "7.0.0", 1, 2, True, ("here",))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepServer]:
    monkeypatch.setenv(TOKEN, "secret")
    monkeypatch.setattr(rendezvous_server, "REQUEST_WITHIN_S", 300.0)
    monkeypatch.setattr(key_value_store, "ANSWER_WITHIN_S", 300.0)
    with serving(StepServer("127.0.0.1", 0, STEP.name, size=2)) as started:
        yield started


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(server: StepServer, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> int:
    """The status of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=300)
    connection.request(method, path, body, headers or {})
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_every_request_needs_the_key(server: StepServer, method: str) -> None:
    server.cache = {"global": {"0": b"address"}}
    key = server.key
    for path in ("/global/0", f"/{'0' * 64}/global/0", f"/{key[:-1]}/global/0", f"/{key}", f"/{key}/global", "/", "//"):
        assert ask(server, method, path, b"other" if method == "PUT" else b"") == 403
    assert server.cache == {"global": {"0": b"address"}}
    assert ask(server, method, f"/{key}/global/0", b"address" if method == "PUT" else b"") == 200
    assert ask(server, method, f"/{key}:20001/global/0", b"address" if method == "PUT" else b"") in (200, 404)


@pytest.mark.parametrize("length", ["-1", "many", str(MAX_VALUE_BYTES + 1), str(1 << 30), "9" * 30])
def test_a_value_has_a_size_and_that_is_bounded(server: StepServer, length: str) -> None:
    assert ask(server, "PUT", f"/{server.key}/global/0", headers={"Content-Length": length}) == 400
    assert server.cache == {key_value_store.NAME: {}}


def test_little_is_read_before_the_key(server: StepServer, capfd: pytest.CaptureFixture[str]) -> None:
    most = rendezvous_server.MAX_HEAD_BYTES
    assert ask(server, "GET", f"/{server.key}/global/0", headers={"a": "b" * (most - 1000)}) == 404
    assert ask(server, "GET", f"/{server.key}/global/0", headers={f"a{n}": "b" * 1000 for n in range(20)}) == 431
    with pytest.raises(OSError):  # noqa: PT011 - closed, or reset because not all was read
        ask(server, "GET", f"/{'0' * most}/global/0")
    assert ask(server, "PUT", f"/{server.key}/global/0", b"v" * 3 * most) == 200  # with the key, values are larger
    assert capfd.readouterr() == ("", "")


def test_ranks_put_and_get_with_the_key_in_the_address(server: StepServer) -> None:
    port = server.server_address[1]
    address = f"127.0.0.1:{port}/{server.key}"
    assert key_value_store.ask(address, port, "GET", "1") is None
    assert key_value_store.ask(address, port, "PUT", "1", b"here" * 1000) == b""
    assert key_value_store.ask(address, port, "GET", "1") == b"here" * 1000
    assert key_value_store.ask("127.0.0.1", port, "GET", "1") is None


def test_root_is_who_knows_the_token_the_step_and_its_own_port(
    server: StepServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = server.server_address[1]
    assert _is_root("127.0.0.1", port, STEP)
    monkeypatch.setattr(server, "step", "8.0.0")
    assert not _is_root("127.0.0.1", port, STEP)
    monkeypatch.setattr(server, "step", STEP.name)
    # A stranger on another port who passes on what root answers.
    relayed = key_value_store.ask("127.0.0.1", port, "GET", f"root.{'0' * 32}")
    assert relayed == rendezvous_server.proof_of_root(STEP.name, port, "0" * 32).encode()
    assert relayed != rendezvous_server.proof_of_root(STEP.name, port + 1, "0" * 32).encode()
    monkeypatch.setenv(TOKEN, "another")
    assert rendezvous_server.proof_of_root(STEP.name, port, "0" * 32).encode() != relayed


@pytest.fixture
def relay(server: StepServer) -> Iterator[Relay]:
    port = server.server_address[1]
    with serving(Relay(f"127.0.0.1:{port}/{server.key}", port, STEP.name, 2)) as started:
        yield started


def asked(server: StepServer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The requests that this server gets from now on: method and path, without the key."""
    requests: list[tuple[str, str]] = []
    admit = rendezvous_server._Handler.parse_request

    def note_and_admit(handler: rendezvous_server._Handler) -> bool:
        is_admitted = admit(handler)
        if handler.server is server and is_admitted:
            requests.append((handler.command, handler.path))
        return is_admitted

    monkeypatch.setattr(rendezvous_server._Handler, "parse_request", note_and_admit)
    return requests


def get(server: StepServer, key: str) -> bytes | None:
    port = server.server_address[1]
    return key_value_store.ask(f"127.0.0.1:{port}/{server.key}", port, "GET", key, scope="global")


def test_the_ranks_of_a_host_ask_root_for_each_value_once(
    server: StepServer, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {str(rank): random.Random(rank).randbytes(70_000) for rank in range(40)}
    server.cache["global"] = dict(values)
    requests = asked(server, monkeypatch)
    found: list[dict[str, bytes | None]] = [{} for _ in range(8)]
    ranks = [
        threading.Thread(target=lambda mine=mine: mine.update({key: get(relay, key) for key in [*values, *values]}))
        for mine in found
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert found == [values] * 8
    in_one = NEWS_BYTES // 70_000
    path = f"/{key_value_store.NAME}/news"
    assert requests == [("GET", f"{path}.{known}.global") for known in range(0, len(values), in_one)]


def test_a_value_that_is_missing_is_asked_for_again_and_found(
    server: StepServer, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.cache["global"] = {"1": b"another address"}
    assert get(relay, "1") == b"another address"
    monkeypatch.setattr(rendezvous_server, "NO_NEWS_FOR_S", 300.0)
    requests = asked(server, monkeypatch)
    assert [get(relay, "0") for _ in range(3)] == [None] * 3
    assert requests == [("GET", f"/{key_value_store.NAME}/news.1.global")]
    server.cache["global"]["0"] = b"address"
    monkeypatch.setattr(rendezvous_server, "NO_NEWS_FOR_S", 0.0)
    assert get(relay, "0") == b"address"


def test_values_of_our_own_are_asked_for_each_time(server: StepServer, relay: Relay) -> None:
    own = server.cache[key_value_store.NAME]
    port = relay.server_address[1]
    for value in (b"first", b"second"):
        own["1"] = value
        assert key_value_store.ask(f"127.0.0.1:{port}/{relay.key}", port, "GET", "1") == value


def test_what_a_rank_sets_and_deletes_is_set_and_deleted_on_root(server: StepServer, relay: Relay) -> None:
    assert ask(relay, "PUT", f"/{relay.key}/global/0", b"address") == 200
    assert server.cache["global"] == {"0": b"address"}
    assert get(relay, "0") == b"address"
    assert ask(relay, "DELETE", f"/{relay.key}/global/0") == 200
    assert "global" not in server.cache
    server.cache["global"] = {"0": b"another address"}  # ranks that meet again in a scope of this name
    assert get(relay, "0") == b"another address"


def test_without_root_a_relay_takes_no_value(server: StepServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's client asks again after an answer that is missing; one that says 200 would lose the value."""
    with socket.socket() as taken:  # and nobody listens there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with serving(Relay(f"127.0.0.1:{port}/key", port, STEP.name, 2)) as relay:
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                ask(relay, "PUT", f"/{relay.key}/global/0", b"address")
            assert get(relay, "0") is None


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_relay_needs_its_own_key(server: StepServer, relay: Relay, method: str) -> None:
    assert relay.key != server.key
    for key in (server.key, "0" * 64):
        assert ask(relay, method, f"/{key}/global/0", b"other" if method == "PUT" else b"") == 403


def wait_until(condition: Callable[[], bool], timeout_s: float = 300) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def handlers() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_strangers_are_bounded_and_ranks_are_served_beside_them(
    server: StepServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    port = server.server_address[1]
    most = 2 + rendezvous_server.SPARE_PENDING
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=300)) for _ in range(150)]
        assert all(stranger.recv(1) == b"" for stranger in idle[:-most])  # the oldest go
        wait_until(lambda: handlers() <= most + 1)
        for message in messages(random.Random(3), 200):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=300) as stranger:
                stranger.sendall(message)
        assert key_value_store.ask(f"127.0.0.1/{server.key}", port, "PUT", "1", b"here") == b""
    monkeypatch.setattr(rendezvous_server, "REQUEST_WITHIN_S", 0.1)
    with socket.create_connection(("127.0.0.1", port), timeout=300) as slow:
        slow.send(b"GET /")
        assert slow.recv(1) == b""
    wait_until(lambda: handlers() == 0)
    assert server.cache == {key_value_store.NAME: {"1": b"here"}}
    assert capfd.readouterr() == ("", "")


def outer_address() -> str:
    """This host's address in its network; loopback where it has none."""
    return next((own for own in map(_ipv4, psutil.net_if_addrs().values()) if own and own != "127.0.0.1"), "127.0.0.1")


def _ipv4(addresses: list[Any]) -> str | None:
    return next((found.address for found in addresses if found.family == socket.AF_INET), None)


ELSEWHERE = "198.51.100.1"
"""An address that no host has (RFC 5737)."""


@pytest.mark.parametrize(
    ("nodes", "node", "address"),
    [
        (("anything",), 0, "127.0.0.1"),  # one host
        ((outer_address(), ELSEWHERE), 0, outer_address()),
        ((ELSEWHERE, outer_address()), 1, ELSEWHERE),  # as the others find it
        (("127.0.1.1", outer_address()), 0, outer_address()),  # Debian's address for a host's own name
        ((ELSEWHERE, outer_address()), 0, outer_address()),  # not an address of this host
    ],
)
def test_root_listens_at_one_address_where_the_others_find_it(nodes: tuple[str, ...], node: int, address: str) -> None:
    assert _address_of_root(step_on(nodes, node)) == address


def test_tasks_of_a_slurm_step_get_their_places_by_its_names_of_hosts() -> None:
    """On one machine, whose own name and boot id all of them have."""
    hosts = ("n1", "n2")
    tasks = [(0, 2, 0), (1, 2, 0), (0, 1, 1)]
    ranks = [
        Meeting("srun", rank, 3, "n1", None, "7.0.0", local_rank, local_size, False, hosts, host)
        for rank, (local_rank, local_size, host) in enumerate(tasks)
    ]
    arrivals = [_read_arrival(_report(rank))[1] for rank in ranks]
    assert find_places(arrivals) == [Place("n1", 0, 2, 0, 2), Place("n1", 1, 2, 0, 1), Place("n2", 0, 1, 1, 2)]


def refuse_route(host: str) -> str:
    raise OSError(errno.ENETUNREACH, "Network is unreachable")


@pytest.mark.parametrize(
    "step",
    [
        step_on(("127.0.1.1", ELSEWHERE), 0),
        step_on((ELSEWHERE, "127.0.1.1"), 1),
        Meeting("torchrun", 1, 2, ELSEWHERE, None, "torchrun/1"),
    ],
)
def test_a_host_without_a_route_to_the_others_is_one_line(step: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "local_address_towards", refuse_route)
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    with pytest.raises(RunError, match=rf"^{socket.gethostname()} has no route to {ELSEWHERE}: Network is unreachable"):
        _choose_interface(step, _address_of_root(step))


def test_a_host_without_a_route_takes_the_interface_that_the_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the error says; on the host of rank 0 too."""
    monkeypatch.setattr(network, "local_address_towards", refuse_route)
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": "127.0.0.1", "ib0": "10.0.0.7"})
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "ib0")
    step = step_on(("127.0.1.1", ELSEWHERE), 0)
    assert _address_of_root(step) == "10.0.0.7"
    assert _choose_interface(step, "10.0.0.7") == "ib0"


def test_whether_root_has_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its pod has no address, for which ranks wait half an hour."""
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "1800")
    monkeypatch.setattr(rendezvous, "prepare_token", lambda step: None)
    asked: list[str] = []

    def unknown(name: str) -> str:
        asked.append(name)
        raise OSError(errno.EAGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert not root_has_failed(Meeting("an Indexed Job", 1, 2, "run-0.run", 29400, "run"))
    assert asked == ["run-0.run"]


def test_a_rank_that_has_arrived_tells_it_to_a_root_that_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the pod that takes the place of rank 0's, which has another address, while ranks wait for the last one."""
    monkeypatch.setenv(TOKEN, "secret")
    monkeypatch.setattr(rendezvous, "REPORT_AGAIN_S", 0.0)
    addresses = ["127.0.0.2"]
    monkeypatch.setattr(socket, "gethostbyname", lambda name: addresses[-1])
    found: list[tuple[str, int, bytes]] = []
    with serving(StepServer("127.0.0.2", 0, "run", size=2)) as first:
        port = first.server_address[1]
        meeting = Meeting("an Indexed Job", 1, 2, "run-0.run", port, "run")
        report, deadline = _report(meeting), time.monotonic() + HANGS_AFTER_S
        rank = threading.Thread(target=lambda: found.append(_find_root("127.0.0.2", meeting, deadline, report)))
        rank.start()
        wait_until(lambda: "1" in first.cache[key_value_store.NAME])
    with serving(StepServer("127.0.0.3", port, "run", size=2)) as second:
        addresses.append("127.0.0.3")
        wait_until(lambda: second.cache[key_value_store.NAME].get("1") == report)
        second.cache[key_value_store.NAME][_answer_key(1, report)] = b"its place"
        rank.join(HANGS_AFTER_S)
        assert found == [(f"127.0.0.3:{port}/{second.key}", port, b"its place")]


def test_ranks_that_are_started_again_after_a_failure_meet_though_one_has_never_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 of 4 fails for a moment, while the pod of rank 3 waits for a node: who comes again is not told of it."""
    monkeypatch.setenv(TOKEN, "secret")
    monkeypatch.setattr(rendezvous, "REPORT_AGAIN_S", 0.0)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.2")
    deadline = time.monotonic() + HANGS_AFTER_S
    meetings = [Meeting("an Indexed Job", rank, 4, "run-0.run", 0, "run") for rank in range(4)]
    ended: dict[str, Any] = {}

    def started(name: str, rank: int, port: int) -> threading.Thread:
        def meet() -> None:
            meeting = dataclasses.replace(meetings[rank], port=port)
            try:
                ended[name] = _find_root("127.0.0.2", meeting, deadline, _report(meeting))[2]
            except FailedElsewhere as error:
                ended[name] = str(error)

        thread = threading.Thread(target=meet)
        thread.start()
        return thread

    def lead(server: StepServer) -> None:
        try:
            ended["root"] = _wait_for_all(server, meetings[0], deadline)
        except FailedElsewhere as error:
            ended["root"] = str(error)

    with serving(StepServer("127.0.0.2", 0, "run", size=4)) as first:
        port = first.server_address[1]
        root, rank_2 = threading.Thread(target=lead, args=[first]), started("2", 2, port)
        root.start()
        _find_root("127.0.0.2", dataclasses.replace(meetings[1], port=port), deadline, b"failed 1 1")
        rank_2.join(HANGS_AFTER_S)
        assert ended == {"2": "rank 1 failed before the ranks met"}
        again = [started("2 again", 2, port)]
        root.join(HANGS_AFTER_S)
        assert ended == {"2": "rank 1 failed before the ranks met", "root": "rank 1 failed before the ranks met"}
    with serving(StepServer("127.0.0.2", port, "run", size=4)) as second:
        again += [started("1", 1, port), started("3", 3, port)]
        lead(second)
        for thread in again:
            thread.join(HANGS_AFTER_S)
    places = [ended["root"], *(Place(*json.loads(ended[name])) for name in ("1", "2 again", "3"))]
    assert [place.local_rank for place in places] == [0, 1, 2, 3]


def test_the_queue_of_ranks_that_connect_is_long() -> None:
    assert StepServer.request_queue_size == 1024


class Answerer:
    """A server that is not ours, and answers any connection with some bytes, again and again."""

    def __init__(self, answer: bytes, pause_s: float) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._answer, self._pause_s = answer, pause_s
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            connected, _ = self._socket.accept()
            while True:
                connected.send(self._answer)
                time.sleep(self._pause_s)

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize(("answer", "pause_s"), [(b"x", 0.01), (b"HTTP/1.0 200 OK\r\n" + b"x" * 50_000, 0.0)])
def test_a_stranger_in_the_place_of_root_keeps_nobody_for_long(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, pause_s: float
) -> None:
    monkeypatch.setattr(key_value_store, "ANSWER_WITHIN_S", 0.2)
    stranger = Answerer(answer, pause_s)
    assert key_value_store.ask("127.0.0.1", stranger.port, "GET", "all") is None  # returns: that is the point
    stranger.close()
