"""Addresses and interfaces of this host, as the ranks use them to reach each other. Connects to no other host."""

from __future__ import annotations

import itertools
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

_UNUSED_ADDRESS = "192.0.2.1"
"""An address that no host has (RFC 5737), so it is reached by the default route."""


def exchange_interfaces(
    environment: Mapping[str, str] = os.environ, addresses: Mapping[str, str] | None = None, *, over_nccl: bool = True
) -> list[str]:
    """Return the interfaces that the ranks were told to use for exchanges; none if they were not told.

    HOROVOD_GLOO_IFACE is one name. NCCL_SOCKET_IFNAME is a list of prefixes of names; after `=`, of full names; after
    `^`, of those to avoid. Names that this host does not have are returned too. addresses: by the name of each
    interface, instead of this host's. over_nccl: whether NCCL's counts, which a cluster's module may set for all.
    """
    if gloo := environment.get("HOROVOD_GLOO_IFACE"):
        return [gloo]
    nccl_names = environment.get("NCCL_SOCKET_IFNAME", "") if over_nccl else ""
    addresses = interfaces() if addresses is None else addresses
    names, is_whole = [name for name in nccl_names.lstrip("^=").split(",") if name], "=" in nccl_names[:2]
    matches = [
        known for known in addresses if any(known == name if is_whole else known.startswith(name) for name in names)
    ]
    if nccl_names.startswith("^"):
        return [name for name, address in addresses.items() if name not in matches and not address.startswith("127.")]
    return matches or names


def local_address_towards(host: str) -> str:
    """Return the IPv4 address of this host that `host` would see. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it asks the routing table
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the interface of this host that has this address."""
    for name, entries in psutil.net_if_addrs().items():
        if address in [entry.address for entry in entries]:
            return str(name)
    return None


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface of this host that is up and has one."""
    entries, states = psutil.net_if_addrs(), psutil.net_if_stats()
    ipv4 = {name: [entry.address for entry in entries[name] if entry.family == socket.AF_INET] for name in entries}
    up = [name for name in ipv4 if ipv4[name] and name in states and states[name].isup]
    return {str(name): str(ipv4[name][0]) for name in up}


def host_names(hosts: Sequence[tuple[str, str]]) -> list[str]:
    """Return a name for the host of each rank, and another one for each host: cloned machines may have one name.

    hosts: by rank, the name that the host has itself, and its boot id.
    """
    clones = Counter(name for name, _ in set(hosts))
    names, taken = dict[tuple[str, str], str](), set(clones)
    for host in dict.fromkeys(hosts):
        name = host[0]
        numbered = (f"{name}-{number}" for number in itertools.count(1))
        names[host] = name if clones[name] == 1 else next(new for new in numbered if new not in taken)
        taken.add(names[host])
    return [names[host] for host in hosts]


def choose_host(hosts: Sequence[str], interface_names: Sequence[str]) -> str:
    """Return the address at which the ranks on `hosts` reach this one; loopback if all are on one host.

    interface_names: of the exchanges, if known. Raises OSError if this host has no address.
    """
    if len(set(hosts)) == 1:
        return "127.0.0.1"
    known = interfaces()
    named = [known[name] for name in interface_names if name in known]
    if len(named) == 1:
        return named[0]
    # Of several, such as all but those that NCCL is to avoid, the one that leads to the others.
    routed = _routed_address(hosts)
    return routed if not named or routed in named else named[0]


def _routed_address(hosts: Sequence[str]) -> str:
    hostname = socket.gethostname()
    for host in dict.fromkeys(hosts):
        if host != hostname:
            with suppress(OSError):
                return local_address_towards(host)
    return outside_address()


def outside_address() -> str:
    """Return an address of this host for others: that of its default route, else any. Raises OSError."""
    with suppress(OSError):
        return local_address_towards(_UNUSED_ADDRESS)
    # Not the address of this host's name: many hosts resolve it to a loopback address.
    outside = [address for address in interfaces().values() if not address.startswith("127.")]
    return outside[0] if outside else socket.gethostbyname(socket.gethostname())
