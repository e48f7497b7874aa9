"""Bring ranks together for gloo, without ssh or MPI: those of a plain `srun`, and of conventions.

Rank 0 runs Horovod's own rendezvous server behind a key (see rendezvous_server), on the address of its host; the port
follows from the step's name, or is the one that the launcher reserved. No rank starts Horovod before all ranks have
arrived, because Horovod waits only for HOROVOD_GLOO_TIMEOUT_SECONDS. The ranks tell root their hosts, and root answers
with their places among the ranks of a host.
"""

from __future__ import annotations

import hmac
import json
import os
import random
import re
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

from horovod_train.distributed.launch import key_value_store, network
from horovod_train.distributed.launch.conventions import Meeting, is_loopback
from horovod_train.distributed.launch.launcher import TOKEN
from horovod_train.distributed.launch.rendezvous_server import (
    Relay,
    StepServer,
    key_of,
    prepare_token,
    proof_of_root,
    token,
)
from horovod_train.errors import FailedElsewhere, RunError, UserError
from horovod_train.host import answer_of, boot_id, environment_kept
from horovod_train.output.console import to_stderr
from horovod_train.shown_text import listed

ARRIVE_WITHIN_S = 300.0
"""How long ranks wait for each other, unless HOROVOD_START_TIMEOUT, horovodrun's own setting, says otherwise.

It is long because hundreds of ranks may load TensorFlow from one file server.
"""

PORTS = range(20_000, 32_000)
"""Below the ports that Linux gives to outgoing connections (ip_local_port_range: 32768 to 60999)."""
PORTS_TRIED = 16

REPORT_AGAIN_S, REPORTS_PER_S = 10.0, 25
"""After how long a rank that waits for the others looks for root again, which may have been started again meanwhile;
and how many of all ranks do so a second, at most."""

RESOLVE_WITHIN_S = 60.0
"""How long a rank asks for the address of rank 0's host: the name of a pod is known only once the pod has started."""

_ALL = "0.0.0.0"
"""All addresses of this host."""

_FAILED = "failed {rank} {exit_code}"
"""What a rank reports if it has failed, and root then answers the others."""
_TOLD = "told."
"""The beginning of the key under which a rank says that it knows of a failure; its value is what it has reported."""
_FAILURE = "failure"
"""The key under which root publishes a failure also for ranks that have not arrived."""

_has_arrived = False
"""Whether this process has taken part in a rendezvous, so that other ranks no longer wait for it."""
_meetings = 0
"""The number of times that this process has met the others: they meet again after hvd.shutdown and hvd.init."""
_kept: list[StepServer] = []
"""Servers and relays that outlive their block."""


class Place(NamedTuple):
    """Where a rank is among the ranks of its host, and its host among those with this local rank: Horovod's cross."""

    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@contextmanager
def open_rendezvous(step: Meeting) -> Iterator[None]:
    """Collective: set what Horovod needs in the environment and run a server, until the block ends.

    All ranks must have initialised Horovod before root leaves the block. HOROVOD_GLOO_IFACE stays set, because the
    watchdog uses that interface too. With HOROVOD_DYNAMIC_PROCESS_SETS=1 the server and its address stay, because the
    ranks of a process set use them as well, until `close_kept`.

    Raises UserError if ranks cannot find each other as they were started, RunError if some do not arrive, and
    FailedElsewhere if one has called `report_failure`.
    """
    global _has_arrived, _meetings
    if step.rank == 0 and step.host != 0:
        raise UserError("srun must put rank 0 on the step's first host. Leave out --distribution=arbitrary.")
    deadline = time.monotonic() + _start_timeout_s()
    prepare_token(step)
    root = _address_of_root(step)
    # A rank that meets the others again must not take root's last server, which may still run, for the new one.
    step = replace(step, name=f"{step.name}/{_meetings}") if _meetings else step
    _meetings += 1
    relay = None
    interface = _choose_interface(step, root)  # before this rank arrives: later failures leave the others waiting
    server = _open_server(step, root) if step.rank == 0 else None
    _has_arrived = True
    try:
        if server is None:
            address, port, answer = _find_root(root, step, deadline, _report(step))
            place = Place(*json.loads(answer))
        else:
            port = server.server_address[1]
            address = _with_key(root if server.server_address[0] == _ALL else server.server_address[0], port, step)
            place = _wait_for_all(server, step, deadline)
        address, port, relay = _where_to_ask(step, place, address, port)
        os.environ["HOROVOD_GLOO_IFACE"] = interface
        variables = _horovod_variables(step, place, address, port) | _log_level(step)
        # Afterwards they would make this start look like horovodrun's.
        with environment_kept(lambda name: name in variables):
            os.environ |= variables
            yield
        if _keeps_server():
            os.environ |= {name: value for name, value in variables.items() if "RENDEZVOUS" in name}
    finally:
        opened = [each for each in (server, relay) if each is not None]
        if _keeps_server():
            _kept.extend(opened)
        else:
            _close(opened)


def close_kept() -> None:
    """Close the servers that ranks of process sets have needed, once Horovod is shut down."""
    _close(_kept)
    _kept.clear()


def _close(servers: Sequence[StepServer]) -> None:
    for server in servers:
        server.shutdown()
        server.server_close()


def report_failure(step: Meeting, exit_code: int) -> None:
    """Report to the other ranks that this one has failed before the rendezvous, because they would wait for it.

    Returns when root knows it, and on root when `_tell_failure` does. Does not raise.
    """
    if _has_arrived or step.size == 1:
        return
    failure = _FAILED.format(rank=step.rank, exit_code=exit_code).encode()
    with suppress(RunError):
        deadline = time.monotonic() + _start_timeout_s()
        prepare_token(step)
        root = _address_of_root(step)
        if step.rank != 0:
            _find_root(root, step, deadline, failure)
            return
        server = _open_server(step, root)
        _tell_failure(server, step, deadline, failure)
        _close([server])


def root_has_failed(step: Meeting) -> bool:
    """Return whether root says now, by `report_failure`, that it has failed. For ranks other than root."""
    with suppress(RunError):
        deadline = time.monotonic() + key_value_store.ANSWER_WITHIN_S
        prepare_token(step)
        root = _address_of_root(step, within_s=0.0)
        for port in _ports(step):
            if _is_root(root, port, step):
                answer = key_value_store.ask(_with_key(root, port, step), port, "GET", _FAILURE)
                return answer is not None and answer.startswith(b"failed 0 ")
            if time.monotonic() > deadline:
                break
    return False


def _keeps_server() -> bool:
    """Return whether ranks may need the server after the start. Horovod sets the variable while it starts, too."""
    return os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")


def candidate_ports(name: str) -> list[int]:
    """Return the ports that root tries: the same on every rank of a step, and different ones for every step."""
    return random.Random(name).sample(PORTS, PORTS_TRIED)


def _ports(step: Meeting) -> list[int]:
    return [*([] if step.port is None else [step.port]), *candidate_ports(step.name)]


def _start_timeout_s(default_s: float = ARRIVE_WITHIN_S) -> float:
    setting = os.environ.get("HOROVOD_START_TIMEOUT")
    try:
        return default_s if setting is None else float(setting)
    except ValueError as error:
        raise UserError(f"HOROVOD_START_TIMEOUT must be a number of seconds; received {setting!r}.") from error


def _open_server(step: Meeting, address: str) -> StepServer:
    """Return a running server at `address`, or at all of this host's if others reach it by one that it does not have.

    A host behind a translated address has another one, and one whose name resolves to a loopback address, too. Of a
    SLURM step `address` is its own in any case.
    """
    if step.root_is_looked_up:
        is_own = not is_loopback(address) and network.interface_of(address) is not None
        address = address if is_own else _ALL
    for port in _ports(step):
        with suppress(OSError):
            server = StepServer(address, port, step.name, step.size)
            _serve(server)
            return server
    raise RunError(
        f"none of {PORTS_TRIED} ports from {PORTS[0]} to {PORTS[-1]} is free at {address} on {socket.gethostname()}."
    )


def _serve(server: StepServer) -> None:
    """Let the server answer, in a thread of its own, until it is shut down."""
    threading.Thread(
        target=server.serve_forever, args=(key_value_store.POLL_S,), name="rendezvous", daemon=True
    ).start()


def _where_to_ask(step: Meeting, place: Place, address: str, port: int) -> tuple[str, int, Relay | None]:
    """Return the address, with the key, and the port at which a rank asks, and the relay that it runs for others.

    The first rank of a host runs one if the host has more ranks and is not root's, which is the first of those with any
    local rank. A host on which none can be opened asks root: address, port.
    """
    if place.local_size == 1 or place.cross_rank == 0:
        return address, port, None
    relay, key = None, f"relay.{place.host}.{boot_id()}"
    if place.local_rank == 0:
        with suppress(OSError):
            relay = Relay(address, port, step.name, place.local_size)
            _serve(relay)
        relay_port = relay.server_address[1] if relay else 0
        key_value_store.ask(address, port, "PUT", key, str(relay_port).encode())
    else:
        backoff = key_value_store.Backoff(place.local_size, time.monotonic() + key_value_store.VALUES_WITHIN_S)
        while (answer := key_value_store.ask(address, port, "GET", key)) is None and backoff.pause():
            pass
        relay_port = int(answer or 0)
    return (_with_key("127.0.0.1", relay_port, step), relay_port, relay) if relay_port else (address, port, relay)


def _with_key(address: str, port: int, step: Meeting) -> str:
    """Return the address with the key. Horovod's client asks for http://ADDRESS:PORT/SCOPE/KEY, so each path has it."""
    return f"{address}:{port}/{key_of(step.name, port)}"


def _read_reports(server: StepServer) -> dict[int, bytes]:
    """Return the reports of the ranks that have arrived."""
    with server.cache_lock:
        return {int(key): report for key, report in server.cache[key_value_store.NAME].items() if key.isdecimal()}


def _read_told(server: StepServer) -> dict[int, bytes]:
    """Return of each rank that knows of a failure the report of the arrival at which it was told."""
    with server.cache_lock:
        values = list(server.cache[key_value_store.NAME].items())
    return {int(key.removeprefix(_TOLD)): report for key, report in values if key.startswith(_TOLD)}


def _has_failed(report: bytes) -> bool:
    return report.startswith(b"failed ")


def _wait_for_all(server: StepServer, step: Meeting, deadline: float) -> Place:
    """Wait on root until all ranks have arrived and tell them their places; return root's.

    Raises FailedElsewhere if one has failed, once the others know it. A process that takes the place of one that has
    arrived, after all have, gets no answer: the start fails, and the next one is theirs.
    """
    while missing := set(range(1, step.size)) - (reports := _read_reports(server)).keys():
        if any(map(_has_failed, reports.values())):
            break
        if time.monotonic() > deadline:
            raise RunError(
                f"{len(missing)} of {step.size} ranks have not reached {step.root} in time: "
                f"{listed(sorted(missing), 8)}. Their output may say why; where they are only slow, raise "
                "HOROVOD_START_TIMEOUT (seconds)."
            )
        time.sleep(key_value_store.POLL_S / 5)
    if failure := next(filter(_has_failed, reports.values()), None):
        _tell_failure(server, step, deadline, failure)
        raise _failed_elsewhere(failure)
    arrivals = [_report(step), *(reports[rank] for rank in range(1, step.size))]
    try:
        places = find_places([_read_arrival(arrival)[1] for arrival in arrivals])
    except UserError:
        _tell_failure(server, step, deadline, _FAILED.format(rank=0, exit_code=UserError.exit_code).encode())
        raise
    pairs = zip(arrivals, places, strict=True)
    answers = {_answer_key(rank, arrival): json.dumps(place) for rank, (arrival, place) in enumerate(pairs)}
    _publish(server, {key: answer.encode() for key, answer in answers.items()})
    return places[0]


def _publish(server: StepServer, values: dict[str, bytes]) -> None:
    with server.cache_lock:
        server.cache[key_value_store.NAME].update(values)


def _tell_failure(server: StepServer, step: Meeting, deadline: float, failure: bytes) -> None:
    """Tell the other ranks of a failure, on root, also those that arrive later.

    Returns when all know it, or when one that knows it is back: it has been started again, and so is root to be. That
    one is not told, as it would fail once more for nothing; it looks for root again.
    """
    _publish(server, {_FAILURE: failure})
    failed: set[int] = set()
    while time.monotonic() < deadline:
        reports, told = _read_reports(server), _read_told(server)
        failed |= {rank for rank, report in reports.items() if _has_failed(report)}
        waiting = {rank: report for rank, report in reports.items() if not _has_failed(report)}
        are_back = (rank in failed or told.get(rank, report) != report for rank, report in waiting.items())
        if len(failed | told.keys()) == step.size - 1 or any(are_back):
            return
        _publish(server, {_answer_key(rank, report): failure for rank, report in waiting.items()})
        time.sleep(key_value_store.POLL_S)


def _failed_elsewhere(failure: bytes) -> FailedElsewhere:
    _, rank, exit_code = failure.split()
    return FailedElsewhere(f"rank {int(rank)} failed before the ranks met", int(exit_code))


def _report(step: Meeting) -> bytes:
    """Return what a rank reports when it arrives: a number of this arrival, and where it is."""
    return f"here {secrets.token_hex(8)} {json.dumps([step.here, boot_id(), step.local_rank])}".encode()


def _read_arrival(report: bytes) -> tuple[str, tuple[str, str, int | None]]:
    """Return the number of an arrival, and where the rank is, as `find_places` takes it."""
    _, number, where = report.decode().split(" ", 2)
    return number, json.loads(where)


def _answer_key(rank: int, report: bytes) -> str:
    """Return the key of root's answer to an arrival; a rank that is started again gets another one."""
    return f"answer.{rank}.{_read_arrival(report)[0]}"


def find_places(arrivals: Sequence[tuple[str, str, int | None]]) -> list[Place]:
    """Return the place of each rank. arrivals: of each rank the name of its host, that host's boot id and local rank.

    The local rank is None if the launcher has not given one; it is then counted. Raises UserError if those of a host
    are not 0, 1, …
    """
    # gloo keeps the addresses of a host's ranks under this name, by their local ranks.
    names = network.host_names([(name, boot) for name, boot, _ in arrivals])
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    places: dict[int, Place] = {}
    for number, (name, ranks) in enumerate(hosts.items()):
        given = [local for rank in ranks if (local := arrivals[rank][2]) is not None]
        if len(given) < len(ranks):
            given = list(range(len(ranks)))
        if sorted(given) != list(range(len(ranks))):
            raise UserError(
                f"the launcher gave the local ranks {', '.join(map(str, given))} to ranks "
                f"{', '.join(map(str, ranks))} on {name}; expected 0 to {len(ranks) - 1}, each once. Start the ranks "
                "of a host by one launcher."
            )
        for rank, local in zip(ranks, given, strict=True):
            others = [at for at, host_ranks in enumerate(hosts.values()) if len(host_ranks) > local]
            places[rank] = Place(name, local, len(ranks), others.index(number), len(others))
    return [places[rank] for rank in range(len(arrivals))]


def _find_root(host: str, step: Meeting, deadline: float, report: bytes) -> tuple[str, int, bytes]:
    """Return root's address with the key, its port, and its answer once all ranks have arrived. Not for root.

    report: of this rank, its arrival or its failure. A failure has no answer: b"".
    """
    port, ports, address, backoff = None, _ports(step), "", key_value_store.Backoff(step.size, deadline)
    report_again_at, has_answered = 0.0, False
    while backoff.pause():
        if port is None:
            host = _address_now(step, host)
            port = next((port for port in ports if _is_root(host, port, step)), None)
            address = "" if port is None else _with_key(host, port, step)
            report_again_at = time.monotonic() + max(REPORT_AGAIN_S, step.size / REPORTS_PER_S)
            if port is not None and key_value_store.ask(address, port, "PUT", str(step.rank), report) is None:
                port = None
            elif port is not None and _has_failed(report):
                return address, port, b""
            has_answered = has_answered or port is not None
        elif (answer := key_value_store.ask(address, port, "GET", _answer_key(step.rank, report))) is not None:
            if not _has_failed(answer):
                return address, port, answer
            key_value_store.ask(address, port, "PUT", f"{_TOLD}{step.rank}", report)  # root waits until all know it
            raise _failed_elsewhere(answer)
        elif time.monotonic() > report_again_at:
            port = None  # a server that was started again, perhaps at another address, knows nothing of this rank
    if port is None and step.rank == 1:  # 1, not 2, so that it is tried again: its host may be lost
        where = f"rank 1 on {step.here} at port {ports[0]}"
        if has_answered:
            raise RunError(f"rank 0 on {step.root} ({host}) no longer answers {where}. Its output may say why.")
        raise RunError(
            f"rank 0 on {step.root} ({host}) does not answer {where}. Its output may say why; otherwise see whether a "
            f"firewall stands between these hosts, and whether {TOKEN} is the same for all ranks."
        )
    raise FailedElsewhere("rank 0 reports which ranks are missing, or rank 1 that rank 0 does not answer")


def _is_root(host: str, port: int, step: Meeting) -> bool:
    nonce = secrets.token_hex(16)
    proof = key_value_store.ask(host, port, "GET", f"root.{nonce}")
    return proof is not None and hmac.compare_digest(proof, proof_of_root(step.name, port, nonce).encode())


def _address_of_root(step: Meeting, within_s: float | None = None) -> str:
    """Return where root listens: loopback on one host, else the address of the first host as the others see it.

    within_s: how long its name may be unknown; default: HOROVOD_START_TIMEOUT, or RESOLVE_WITHIN_S.
    """
    if step.is_one_host:
        return "127.0.0.1"
    if step.root_is_looked_up:
        # A pod that waits for a node, perhaps for minutes, has no address yet: the manifest sets the variable.
        return _resolve(step.root, step, _start_timeout_s(RESOLVE_WITHIN_S) if within_s is None else within_s)
    address = _address_of(step.root)
    if step.host == 0 and (address.startswith("127.") or network.interface_of(address) is None):
        # Many hosts resolve their own name to a loopback address.
        try:
            return _own_address_towards(_address_of(step.hosts[1]))
        except RunError:
            if (own := network.interfaces().get(os.environ.get("HOROVOD_GLOO_IFACE", ""))) is None:
                raise
            return own
    return address


def _own_address_towards(peer: str) -> str:
    try:
        return network.local_address_towards(peer)
    except OSError as error:
        raise RunError(
            f"{socket.gethostname()} has no route to {peer}: {error.strerror}. See its network, or set "
            "HOROVOD_GLOO_IFACE to the interface that reaches it."
        ) from error


def _resolve(host: str, step: Meeting, within_s: float) -> str:
    """Return the IPv4 address of a host that may be known only in a while."""
    backoff = key_value_store.Backoff(step.size, time.monotonic() + within_s)
    while True:
        try:
            return socket.gethostbyname(host)
        except OSError as error:
            if not backoff.pause():
                reason = error.strerror or type(error).__name__
                raise RunError(  # 1, not 2, so that it is tried again: the host may be on its way
                    f"{host}, by {step.launcher} the host of rank 0, has no IPv4 address that {socket.gethostname()} "
                    f"can find: {reason}. In Kubernetes it needs a headless service that publishes addresses early."
                ) from error


def _address_now(step: Meeting, address: str) -> str:
    """Return the address of root's host as it is now; `address`, which it was, if nothing else is known.

    A pod that Kubernetes replaces has another one, which is known only in a while.
    """
    if step.root_is_looked_up:
        with suppress(OSError):
            return socket.gethostbyname(step.root)
    return address


def _address_of(host: str) -> str:
    """Return the IPv4 address of a host by its SLURM name, which the resolver need not know."""
    with suppress(OSError):
        return socket.gethostbyname(host)
    with suppress(OSError, subprocess.SubprocessError):
        scontrol = answer_of(["scontrol", "-o", "show", "node", host], within_s=20)
        if match := re.search(r"NodeAddr=(\S+)", scontrol.stdout):
            return socket.gethostbyname(match[1])
    raise RunError(f"{host}, the first host of this step, has no address that this host can find.")


def _choose_interface(step: Meeting, root: str) -> str:
    """Return the user's interface, or that through which this rank reaches other hosts; loopback without other hosts.

    root: the address of rank 0's host.

    gloo would use the address of the host's name, which is a loopback address on many Debian hosts.
    """
    if interface := os.environ.get("HOROVOD_GLOO_IFACE"):
        if interface not in (known := network.interfaces()):
            raise UserError(
                f"HOROVOD_GLOO_IFACE must be an interface with an IPv4 address; received {interface!r}, which "
                f"rank {step.rank} on {step.here} has not. It has {', '.join(known)}."
            )
        return interface
    peer = root
    if len(step.hosts) > 1:
        peer = _address_of(step.hosts[1 if step.host == 0 else 0])
    address = _own_address_towards(peer)
    # The address of this host's own name, as in Debian's /etc/hosts.
    if is_loopback(address) and step.root_is_looked_up:
        address = network.outside_address()
    if (name := network.interface_of(address)) is None:
        raise RunError(
            f"{address}, by which this host reaches {peer}, is on no interface of it: set HOROVOD_GLOO_IFACE."
        )
    return name


def _horovod_variables(step: Meeting, place: Place, address: str, port: int) -> dict[str, str]:
    """Return what horovodrun sets: horovod/runner/gloo_run.py and common/gloo/gloo_context.cc of Horovod 0.28.1."""
    variables: dict[str, object] = {
        "RANK": step.rank,
        "SIZE": step.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_SIZE": place.local_size,
        "CROSS_RANK": place.cross_rank,
        "CROSS_SIZE": place.cross_size,
        "HOSTNAME": place.host,
        "GLOO_RENDEZVOUS_ADDR": address,
        "GLOO_RENDEZVOUS_PORT": port,
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
    }
    return {f"HOROVOD_{name}": str(value) for name, value in variables.items()}


def _log_level(step: Meeting) -> dict[str, str]:
    """Return a log level that keeps the address with its key out of the log. Without a token the key is no secret."""
    level = os.environ.get("HOROVOD_LOG_LEVEL", "").lower()
    if level not in ("trace", "debug") or not token():
        return {}
    if step.rank == 0:
        reason = f"HOROVOD_LOG_LEVEL={level} would write the rendezvous key into the log"
        to_stderr(f"warning: {reason}; info is used instead. Unset {TOKEN} to log everything.")
    return {"HOROVOD_LOG_LEVEL": "info"}
