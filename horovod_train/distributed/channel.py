"""Small messages between root and each rank over TCP, beside Horovod: they pass while every exchange stands still.

A message is a JSON object with `kind`; a line each. Does not know what the messages mean. Never blocks for long: a
rank that does not read loses messages, not the others their time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]

_LONGEST_LINE = 1 << 16
_HELLO_WITHIN_S = 10.0
_SIOCGIFADDR = 0x8915


class Address(NamedTuple):
    """Where root listens, and the word that opens the door."""

    host: str
    port: int
    token: str


class Lost(NamedTuple):
    """A connection has ended. closed: by the process at its other end, or by the kernel of its host for it."""

    closed: bool


class Line:
    """One connection. Sends from any thread, under the caller's lock; receives from one."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self._received = b""
        self._is_open = True

    def send(self, message: Message) -> None:
        """Sends if it can be sent now. What goes wrong shows when receiving."""
        data = json.dumps(message).encode() + b"\n"
        if self._is_open:
            with contextlib.suppress(OSError):
                if self.socket.send(data) < len(data):
                    # Half a line is out: nothing after it would be understood. The receiver finds the end.
                    self.socket.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[Message | Lost]:
        """What has come, without waiting; Lost at the end."""
        found: list[Message | Lost] = []
        try:
            while self._is_open and (data := self.socket.recv(_LONGEST_LINE)):
                self._received += data
                *lines, self._received = self._received.split(b"\n")
                found += [json.loads(line) for line in lines]
                if len(self._received) > _LONGEST_LINE:
                    raise ValueError("a line without an end")
        except BlockingIOError:
            return found
        except (OSError, ValueError) as error:
            self.close()
            return [*found, Lost(closed=isinstance(error, ConnectionError))]
        self.close()
        return [*found, Lost(closed=True)]

    def wait(self, timeout_s: float) -> list[Message | Lost]:
        """What has come, as soon as something has, or the time is up."""
        if not self._is_open:
            time.sleep(timeout_s)
            return []
        return self.receive() if select.select([self.socket], [], [], timeout_s)[0] else []

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.socket.close()


class Server:
    """Root's end: one Line for each rank that has said the token."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._door = socket.create_server((host, 0), family=family, backlog=512)
        self._door.setblocking(False)
        self.address = Address(host, self._door.getsockname()[1], secrets.token_hex(16))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._lines: dict[int, Line] = {}
        self._strangers: dict[Line, float] = {}

    def poll(self, timeout_s: float) -> list[tuple[int, Message | Lost]]:
        """What the ranks have sent: (rank, message). Waits until something comes or the time is up."""
        found: list[tuple[int, Message | Lost]] = []
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._door:
                self._open_door()
            else:
                found += self._receive(key.data)
        for line, since in list(self._strangers.items()):
            if time.monotonic() - since > _HELLO_WITHIN_S:
                self._drop(line)
        return found

    @property
    def ranks(self) -> list[int]:
        """Those that are connected."""
        return sorted(self._lines)

    def send(self, rank: int, message: Message) -> None:
        if rank in self._lines:
            self._lines[rank].send(message)

    def send_all(self, message: Message) -> None:
        for line in list(self._lines.values()):
            line.send(message)

    def close(self) -> None:
        for line in [*self._lines.values(), *self._strangers]:
            line.close()
        self._selector.close()
        self._door.close()

    def _open_door(self) -> None:
        with contextlib.suppress(OSError):
            connected, _ = self._door.accept()
            line = Line(connected)
            self._strangers[line] = time.monotonic()
            self._selector.register(connected, selectors.EVENT_READ, line)

    def _receive(self, line: Line) -> list[tuple[int, Message | Lost]]:
        received = line.receive()
        if received and line in self._strangers and not self._let_in(line, received.pop(0)):
            self._drop(line)
            return []
        rank = next((rank for rank, known in self._lines.items() if known is line), None)
        if received and isinstance(received[-1], Lost):
            self._drop(line)
        return [] if rank is None else [(rank, message) for message in received]

    def _let_in(self, line: Line, hello: Any) -> bool:
        """Whether a stranger's first message is its rank and the token."""
        rank, token = (hello.get("rank"), hello.get("token")) if isinstance(hello, dict) else (None, None)
        if not isinstance(rank, int) or not hmac.compare_digest(str(token).encode(), self.address.token.encode()):
            return False
        del self._strangers[line]
        self._lines[rank] = line
        return True

    def _drop(self, line: Line) -> None:
        self._selector.unregister(line.socket)
        self._strangers.pop(line, None)
        self._lines = {rank: known for rank, known in self._lines.items() if known is not line}
        line.close()


def connect(address: Address, rank: int, timeout_s: float) -> Line:
    """Raises OSError where root cannot be reached."""
    line = Line(socket.create_connection((address.host, address.port), timeout=timeout_s))
    line.send({"kind": "hello", "rank": rank, "token": address.token})
    return line


def choose_host(hosts: Sequence[str], interface: str | None) -> str:
    """The address at which the ranks on `hosts` reach this one; loopback where all are on one host.

    interface: the network interface that the ranks exchange over, if that is known.
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
    """The interface that horovodrun has chosen for gloo."""
    return os.environ.get("HOROVOD_GLOO_IFACE")


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24])
