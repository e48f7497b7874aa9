"""Addresses and interfaces of this host, as the ranks use them to reach each other. Connects to no other host."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

_ELSEWHERE = "192.0.2.1"
"""An address on no host (RFC 5737): the way to it is the default route."""


def exchange_interfaces(
    environment: Mapping[str, str] = os.environ, known: Mapping[str, str] | None = None
) -> list[str]:
    """Return the interfaces that the ranks were told to use for exchanges; none if they were not told.

    HOROVOD_GLOO_IFACE is one name. NCCL_SOCKET_IFNAME is a list of beginnings of names; after `=` of whole names; after
    `^` of those not to use. Names that this host has not are returned too. known: instead of this host's interfaces.
    """
    if gloo := environment.get("HOROVOD_GLOO_IFACE"):
        return [gloo]
    given, known = environment.get("NCCL_SOCKET_IFNAME", ""), interfaces() if known is None else known
    names, is_whole = [name for name in given.lstrip("^=").split(",") if name], "=" in given[:2]
    fitting = [one for one in known if any(one == name if is_whole else one.startswith(name) for name in names)]
    if given.startswith("^"):
        return [name for name, address in known.items() if name not in fitting and not address.startswith("127.")]
    return fitting or names


def own_address_towards(there: str) -> str:
    """Return the IPv4 address of this host that the host `there` would see. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((there, 9))  # sends nothing: it asks the routing table
        return str(probe.getsockname()[0])


def interface_of(own: str) -> str | None:
    """Return the interface of this host that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if own in [found.address for found in addresses]:
            return str(name)
    return None


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface of this host that is up and has one."""
    found, states = psutil.net_if_addrs(), psutil.net_if_stats()
    ipv4 = {name: [each.address for each in found[name] if each.family == socket.AF_INET] for name in found}
    return {str(name): str(own[0]) for name, own in ipv4.items() if own and name in states and states[name].isup}


def address_of_interface(name: str) -> str | None:
    return interfaces().get(name)


def choose_host(hosts: Sequence[str], used: Sequence[str]) -> str:
    """Return the address at which the ranks on `hosts` reach this one; loopback if all are on one host.

    used: the network interfaces of the exchanges, if known. Raises OSError if this host has no address.
    """
    if len(set(hosts)) == 1:
        return "127.0.0.1"
    for address in filter(None, map(address_of_interface, used)):
        return address
    own = socket.gethostname()
    for host in [*hosts, _ELSEWHERE]:
        if host != own:
            with suppress(OSError):
                return own_address_towards(host)
    # Not that of the host's own name, which many hosts resolve to a loopback address.
    outside = [address for address in interfaces().values() if not address.startswith("127.")]
    return outside[0] if outside else socket.gethostbyname(own)
