"""Bring the ranks of a plain `srun` together for gloo, without ssh or MPI.

Rank 0 runs Horovod's own rendezvous server behind a key (see rendezvous_server), on the address of its host, which is
the first of the step; the port follows from the step's name. No rank starts Horovod before all ranks have arrived,
because Horovod waits only for HOROVOD_GLOO_TIMEOUT_SECONDS.
"""

from __future__ import annotations

import hmac
import os
import random
import re
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from horovod_train.distributed.launch import key_value_store, network
from horovod_train.distributed.launch.rendezvous_server import TOKEN, StepServer, key_of, proof_of_root
from horovod_train.distributed.launch.slurm import Step
from horovod_train.errors import FailedElsewhere, RunError, UserError

ARRIVE_WITHIN_S = 300.0
"""How long ranks wait for each other, unless HOROVOD_START_TIMEOUT, horovodrun's own setting, says otherwise.

It is long because hundreds of ranks may load TensorFlow from one file server.
"""

PORTS = range(20_000, 32_000)
"""Below the ports that Linux gives to outgoing connections (ip_local_port_range: 32768 to 60999)."""
PORTS_TRIED = 16


@contextmanager
def open_rendezvous(step: Step) -> Iterator[None]:
    """Collective: set what Horovod needs in the environment and run a server, until the block ends.

    All ranks must have initialised Horovod before root leaves the block. HOROVOD_GLOO_IFACE stays set, because the
    watchdog uses that interface too. With HOROVOD_DYNAMIC_PROCESS_SETS=1 the server and its address stay, because the
    ranks of a process set use them as well.

    Raises UserError if ranks cannot find each other as they were started, RunError if some do not arrive.
    """
    if step.rank == 0 and step.node != 0:
        raise UserError("srun must put rank 0 on the step's first host. Leave out --distribution=arbitrary.")
    until = time.monotonic() + _arrive_within_s(os.environ.get("HOROVOD_START_TIMEOUT"))
    server = _open_server(step) if step.rank == 0 else None
    try:
        if server is None:
            address, port = _find_root(_address_of_root(step), step, until)
        else:
            port = server.server_address[1]
            address = _with_key(server.server_address[0], port, step)
            _wait_for_all(server, step, until)
        if "HOROVOD_GLOO_IFACE" not in os.environ:
            os.environ["HOROVOD_GLOO_IFACE"] = _interface(step)
        variables = _horovod_variables(step, address, port)
        with _environment(variables):
            yield
        if _stays():
            os.environ |= {name: value for name, value in variables.items() if "RENDEZVOUS" in name}
    finally:
        if server is not None and not _stays():
            server.shutdown()
            server.server_close()


def _stays() -> bool:
    """Return whether ranks may look for each other later. Horovod sets this while it starts, too."""
    return os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")


def candidate_ports(name: str) -> list[int]:
    """Return the ports that root tries: the same on every rank of a step, and different ones for every step."""
    return random.Random(name).sample(PORTS, PORTS_TRIED)


def _arrive_within_s(said: str | None) -> float:
    try:
        return ARRIVE_WITHIN_S if said is None else float(said)
    except ValueError as error:
        raise UserError(f"HOROVOD_START_TIMEOUT must be a number of seconds; received {said!r}.") from error


def _open_server(step: Step) -> StepServer:
    address = _address_of_root(step)
    for port in candidate_ports(step.name):
        with suppress(OSError):
            server = StepServer(address, port, step.name, step.size)
            threading.Thread(
                target=server.serve_forever, args=(key_value_store.POLL_S,), name="rendezvous", daemon=True
            ).start()
            return server
    raise RunError(
        f"none of {PORTS_TRIED} ports from {PORTS[0]} to {PORTS[-1]} is free at {address} on {socket.gethostname()}."
    )


def _with_key(address: str, port: int, step: Step) -> str:
    """Return the address with the key. Horovod's client asks for http://ADDRESS:PORT/SCOPE/KEY, so each path has it."""
    return f"{address}:{port}/{key_of(step.name, port)}"


def _wait_for_all(server: StepServer, step: Step, until: float) -> None:
    """Wait on root until all ranks have arrived."""
    awaited = set(range(1, step.size))
    while awaited:
        with server.cache_lock:
            awaited -= {int(key) for key in server.cache[key_value_store.NAME] if key.isdecimal()}
        if awaited and time.monotonic() > until:
            names = ", ".join(map(str, sorted(awaited)[:8])) + (", …" if len(awaited) > 8 else "")
            raise RunError(
                f"{len(awaited)} of {step.size} ranks have not reached {step.nodes[0]} in time: {names}. Their output "
                "may say why; where they are only slow, raise HOROVOD_START_TIMEOUT (seconds)."
            )
        time.sleep(key_value_store.POLL_S / 5 if awaited else 0)
    with server.cache_lock:
        server.cache[key_value_store.NAME]["all"] = b"here"


def _find_root(host: str, step: Step, until: float) -> tuple[str, int]:
    """Return root's address with the key, and its port, once all ranks have arrived. For ranks other than root."""
    port, ports, address, tries = None, candidate_ports(step.name), "", key_value_store.Tries(step.size, until)
    while tries.pause():
        if port is None:
            port = next((port for port in ports if _is_root(host, port, step)), None)
            address = "" if port is None else _with_key(host, port, step)
            if port is not None and key_value_store.ask(address, port, "PUT", str(step.rank)) is None:
                port = None
        elif key_value_store.ask(address, port, "GET", "all") is not None:
            return address, port
    if port is None and step.rank == 1:
        raise UserError(
            f"rank 0 on {step.nodes[0]} ({host}) does not answer rank 1 on {step.nodes[step.node]} at port "
            f"{ports[0]}. Its output may say why; otherwise see whether a firewall stands between these hosts, and "
            f"whether {TOKEN} is the same for all tasks."
        )
    raise FailedElsewhere("rank 0 reports which ranks are missing, or rank 1 that rank 0 does not answer")


def _is_root(host: str, port: int, step: Step) -> bool:
    nonce = secrets.token_hex(16)
    said = key_value_store.ask(host, port, "GET", f"root.{nonce}")
    return said is not None and hmac.compare_digest(said, proof_of_root(step.name, port, nonce).encode())


def _address_of_root(step: Step) -> str:
    """Return where root listens: loopback on one host, else the address of the first host as the others see it."""
    if len(step.nodes) == 1:
        return "127.0.0.1"
    named = _address_of(step.nodes[0])
    if step.node == 0 and (named.startswith("127.") or network.interface_of(named) is None):
        # Many hosts resolve their own name to a loopback address.
        return network.own_address_towards(_address_of(step.nodes[1]))
    return named


def _address_of(host: str) -> str:
    """Return the IPv4 address of a host by its SLURM name, which the resolver need not know."""
    with suppress(OSError):
        return socket.gethostbyname(host)
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["scontrol", "-o", "show", "node", host], capture_output=True, text=True, timeout=20)
        if found := re.search(r"NodeAddr=(\S+)", said.stdout):
            return socket.gethostbyname(found[1])
    raise RunError(f"{host}, the first host of this step, has no address that this host can find.")


def _interface(step: Step) -> str:
    """Return the network interface through which this rank reaches the other hosts; loopback if there is one host only.

    gloo would take the address of the host's own name, which is a loopback address on many Debian hosts.
    """
    there = "127.0.0.1" if len(step.nodes) == 1 else _address_of(step.nodes[1 if step.node == 0 else 0])
    own = network.own_address_towards(there)
    if (name := network.interface_of(own)) is None:
        raise RunError(f"{own}, by which this host reaches {there}, is on no interface of it: set HOROVOD_GLOO_IFACE.")
    return name


def _horovod_variables(step: Step, address: str, port: int) -> dict[str, str]:
    """Return what horovodrun sets: horovod/runner/gloo_run.py and common/gloo/gloo_context.cc of Horovod 0.28.1."""
    cross_rank, cross_size = step.cross
    numbers = {
        "RANK": step.rank,
        "SIZE": step.size,
        "LOCAL_RANK": step.local_rank,
        "LOCAL_SIZE": step.local_size,
        "CROSS_RANK": cross_rank,
        "CROSS_SIZE": cross_size,
        "GLOO_RENDEZVOUS_PORT": port,
    }
    words = {
        "HOSTNAME": step.nodes[step.node],
        "GLOO_RENDEZVOUS_ADDR": address,
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
    }
    return {f"HOROVOD_{name}": str(value) for name, value in (numbers | words).items()}


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables inside the block only. If they stayed, a run that srun has started would look like horovodrun's."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
