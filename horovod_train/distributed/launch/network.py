"""Addresses and interfaces of this host, as the ranks use them to reach each other. Connects to no other host."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

_ELSEWHERE = "192.0.2.1"
"""An address on no host (RFC 5737): the way to it is the default route."""


def exchange_interface(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the network interfaces that the ranks were told to use for exchanges, as the launcher or user wrote it."""
    return environment.get("HOROVOD_GLOO_IFACE") or environment.get("NCCL_SOCKET_IFNAME")


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
    """Return the IPv4 address of each interface of this host that has one."""
    found = psutil.net_if_addrs()
    return {
        str(name): str(each.address) for name in found for each in found[name][::-1] if each.family == socket.AF_INET
    }


def address_of_interface(name: str) -> str | None:
    return interfaces().get(name)


def choose_host(hosts: Sequence[str], interface: str | None) -> str:
    """Return the address at which the ranks on `hosts` reach this one; loopback if all are on one host.

    interface: the network interface of the exchanges, if known. Raises OSError if this host has no address.
    """
    if len(set(hosts)) == 1:
        return "127.0.0.1"
    if interface and (address := address_of_interface(interface)):
        return address
    own = socket.gethostname()
    for host in [*hosts, _ELSEWHERE]:
        if host != own:
            with suppress(OSError):
                return own_address_towards(host)
    # Not that of the host's own name, which many hosts resolve to a loopback address.
    outside = [address for address in interfaces().values() if not address.startswith("127.")]
    return outside[0] if outside else socket.gethostbyname(own)
