"""Small messages between root and each rank over TCP, outside Horovod: they arrive even if every exchange is stuck.

A message is a JSON object with `kind`, one per line. Does not know what the messages mean. Never blocks for long: a
rank that does not read loses messages, and the others lose no time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from horovod_train.distributed.watchdog.listener import ADMITTED, HELLO, Address, Listener

Message = dict[str, Any]

_LONGEST_LINE = 1 << 16
_SIOCGIFADDR = 0x8915


class Lost(NamedTuple):
    """The end of a connection. closed: whether the process at the other end, or its host's kernel for it, closed it."""

    closed: bool


class Line:
    """One connection. Send from any thread, under the caller's lock; receive from one thread."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self._received = b""
        self._is_open = True

    def send(self, message: Message) -> None:
        """Send if that is possible now. Errors appear when receiving."""
        data = json.dumps(message).encode() + b"\n"
        if self._is_open:
            with contextlib.suppress(OSError):
                if self.socket.send(data) < len(data):
                    # Half a line is sent, so the receiver could not parse what follows. It finds the end instead.
                    self.socket.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[Message | Lost]:
        """Return what has arrived, without waiting; Lost at the end."""
        found: list[Message | Lost] = []
        try:
            while self._is_open and (data := self.socket.recv(_LONGEST_LINE)):
                self._received += data
                *lines, self._received = self._received.split(b"\n")
                found += map(_parse, lines)
                if len(self._received) > _LONGEST_LINE:
                    raise ValueError("a line without an end")
        except BlockingIOError:
            return found
        except (OSError, ValueError, RecursionError) as error:
            self.close()
            return [*found, Lost(closed=isinstance(error, ConnectionError))]
        self.close()
        return [*found, Lost(closed=True)]

    def wait(self, timeout_s: float) -> list[Message | Lost]:
        """Return what has arrived, as soon as there is something or the time is up."""
        if not self._is_open:
            time.sleep(timeout_s)
            return []
        ready = select.poll()  # select.select takes no descriptor above 1023
        ready.register(self.socket, select.POLLIN)
        return self.receive() if ready.poll(timeout_s * 1000) else []

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.socket.close()


def _parse(line: bytes) -> Message:
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("a message is a JSON object")
    return message


class Server:
    """Root's end: a Line for each rank that its Listener has admitted. size: the number of ranks."""

    def __init__(self, host: str, size: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = Listener(host, size, self._selector)
        self.address = self._listener.address
        self._lines: dict[int, Line] = {}

    def poll(self, timeout_s: float) -> list[tuple[int, Message | Lost]]:
        """Return what the ranks have sent: (rank, message). Waits until something arrives or the time is up."""
        found: list[tuple[int, Message | Lost]] = []
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, int):
                found += self._receive(key.data)
            elif admitted := self._listener.serve(key.fileobj):
                rank, connected = admitted
                self._lines[rank] = Line(connected)
                self._selector.register(connected, selectors.EVENT_READ, rank)
        self._listener.tick()
        return found

    @property
    def ranks(self) -> list[int]:
        """The ranks that are connected."""
        return sorted(self._lines)

    def send(self, rank: int, message: Message) -> None:
        if rank in self._lines:
            self._lines[rank].send(message)

    def send_all(self, message: Message) -> None:
        for line in list(self._lines.values()):
            line.send(message)

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._listener.close()
        self._selector.close()

    def _receive(self, rank: int) -> list[tuple[int, Message | Lost]]:
        line = self._lines[rank]
        received = line.receive()
        if received and isinstance(received[-1], Lost):
            self._selector.unregister(line.socket)
            del self._lines[rank]
        return [(rank, message) for message in received]


def connect(address: Address, rank: int, timeout_s: float) -> Line:
    """Return once root has admitted this rank. Raises OSError if root cannot be reached, or does not answer."""
    until = time.monotonic() + timeout_s
    while True:
        left_s = max(0.1, until - time.monotonic())
        connected = socket.create_connection((address.host, address.port), timeout=left_s)
        with contextlib.suppress(ConnectionError):
            connected.sendall(HELLO.pack(address.token.encode(), rank))
            if connected.recv(1) == ADMITTED:
                return Line(connected)
        # Root drops the oldest if too many connect at the same moment.
        connected.close()
        if time.monotonic() > until:
            raise ConnectionRefusedError("it does not admit this rank")
        time.sleep(random.uniform(0.05, 0.2))


def choose_host(hosts: Sequence[str], interface: str | None) -> str:
    """Return the address at which the ranks on `hosts` reach this one; loopback if all are on one host.

    interface: the network interface of the exchanges, if known.
    """
    if len(set(hosts)) == 1:
        return "127.0.0.1"
    if interface:
        with contextlib.suppress(OSError):
            return _address_of(interface)
    own = socket.gethostname()
    for host in hosts:
        # Connecting a UDP socket sends nothing: it asks the routing table for the address that `host` would see.
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            if host != own:
                probe.connect((host, 9))
                return str(probe.getsockname()[0])
    return socket.gethostbyname(own)


def exchange_interface() -> str | None:
    """Return the interface that horovodrun has chosen for gloo."""
    return os.environ.get("HOROVOD_GLOO_IFACE")


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24])
