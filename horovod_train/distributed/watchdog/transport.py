"""Small messages between root and each rank over TCP, outside Horovod: they arrive even if every exchange is stuck.

A message is a JSON object with `kind`, one per line. Does not know what the messages mean. Never blocks for long: a
rank that does not read loses messages, and does not delay the others.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import random
import secrets
import select
import selectors
import socket
import struct
import time
from typing import Any, NamedTuple
from weakref import WeakSet

Message = dict[str, Any]

_LONGEST_LINE = 1 << 16
_READS_PER_TURN = 16
"""So that a rank that sends without end neither fills root's memory nor keeps it from the others."""

HELLO = struct.Struct("!32sI")
"""What a rank sends first: the token and its number."""
ADMITTED = b"+"
"""What root answers. A rank counts as connected only after this."""

HELLO_WITHIN_S = 10.0
SPARE_PENDING = 32
"""In addition to one for each rank, because all may connect at the same moment."""
_ACCEPTS_PER_TURN = 64
_PAUSE_S = 1.0


_sockets: WeakSet[socket.socket] = WeakSet()
"""Those of this process. A process that it forks, as multiprocessing's pools do, would keep them open, so that the
kernel would not close them when this one is killed."""


def _leave_to_parent() -> None:
    for each in _sockets:
        each.close()


os.register_at_fork(after_in_child=_leave_to_parent)


class Address(NamedTuple):
    """Root's address, and the secret that identifies a rank."""

    host: str
    port: int
    token: str


class Lost(NamedTuple):
    """The end of a connection. closed: whether the process at the other end, or its host's kernel for it, closed it."""

    closed: bool


Received = list[tuple[int, Message | Lost]]
"""Messages, each with the rank that sent it."""


class Connection:
    """One connection: the Transport of every rank but root. peer: the rank at the other end.

    `send` may be called from any thread, under the caller's lock; `poll` and `receive` from one thread.
    """

    def __init__(self, connected: socket.socket, peer: int) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _sockets.add(connected)
        self.socket = connected
        self._peer = peer
        self._unfinished = b""
        self._is_open = True

    def send(self, message: Message) -> None:
        """Send, if this is possible now. Errors appear when receiving."""
        self.send_line(_line(message))

    def send_line(self, line: bytes) -> None:
        if self._is_open:
            with contextlib.suppress(OSError):
                if self.socket.send(line) < len(line):
                    # The line is cut, so the receiver could not parse what follows. Let it read the end instead.
                    self.socket.shutdown(socket.SHUT_RDWR)

    def receive(self) -> Received:
        """Return what has arrived, or the first megabyte of it, without waiting; Lost at the end."""
        received: Received = []
        try:
            for _ in range(_READS_PER_TURN):
                if not (data := self.socket.recv(_LONGEST_LINE)):
                    break
                *lines, self._unfinished = (self._unfinished + data).split(b"\n")
                received.extend((self._peer, _parse(line)) for line in lines)
                if len(self._unfinished) > _LONGEST_LINE:
                    raise ValueError("a line without an end")
            else:
                return received
        except BlockingIOError:
            return received
        except (OSError, ValueError, RecursionError) as error:
            self.close()
            return [*received, (self._peer, Lost(closed=isinstance(error, ConnectionError)))]
        self.close()
        return [*received, (self._peer, Lost(closed=True))]

    def poll(self, timeout_s: float) -> Received:
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


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _parse(line: bytes) -> Message:
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("a message is a JSON object")
    return message


class Server:
    """Root's Transport: a Connection for each rank, and the port where ranks connect. size: the number of ranks.

    A pending connection is not yet identified as a rank. At most HELLO.size bytes are read from it, compared and not
    parsed. It is closed if it is too slow, or if too many others connect. Pending connections therefore cost root a
    bounded number of descriptors and bytes, whatever they send. asyncio's streams would be less code, but they accept
    and buffer data before a limit applies: 900 connections with 200 kB each cost 900 descriptors and 200 MB.
    """

    def __init__(self, host: str, size: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._port = socket.create_server((host, 0), family=family, backlog=1024)
        self._port.setblocking(False)
        _sockets.add(self._port)
        self.address = Address(host, self._port.getsockname()[1], secrets.token_hex(16))
        self._size = size
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._port, selectors.EVENT_READ)
        self._pending: dict[socket.socket, tuple[bytes, float]] = {}
        """What each pending connection has sent, and its deadline; the oldest first."""
        self._connections: dict[int, Connection] = {}
        self._admitted: set[int] = set()
        """The ranks that have connected; none may do so again."""
        self._pauses_until = 0.0

    def poll(self, timeout_s: float) -> Received:
        received: Received = []
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, int):
                received += self._receive(key.data)
            elif key.fileobj is self._port:
                self._accept()
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._pending:
                try:
                    self._authenticate(key.fileobj)
                except OSError:
                    self._drop(key.fileobj)
        self._end_waits()
        return received

    @property
    def ranks(self) -> list[int]:
        """The ranks that are connected."""
        return sorted(self._connections)

    def send(self, message: Message) -> None:
        """Send to every connected rank to which this is possible now."""
        line = _line(message)
        for connection in list(self._connections.values()):
            connection.send_line(line)

    def send_to(self, rank: int, message: Message) -> None:
        if rank in self._connections:
            self._connections[rank].send(message)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        for pending in list(self._pending):
            self._drop(pending)
        self._port.close()
        self._selector.close()

    def _receive(self, rank: int) -> Received:
        connection = self._connections[rank]
        received = connection.receive()
        if received and isinstance(received[-1][1], Lost):
            self._selector.unregister(connection.socket)
            del self._connections[rank]
        return received

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, _ = self._port.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:
                # Usually no descriptors are left. The port would stay ready, and each accept would fail again.
                self._selector.unregister(self._port)
                self._pauses_until = time.monotonic() + _PAUSE_S
                self._drop_oldest()
                return
            if len(self._pending) >= self._size + SPARE_PENDING:
                self._drop_oldest()
            connection.setblocking(False)
            _sockets.add(connection)
            self._pending[connection] = (b"", time.monotonic() + HELLO_WITHIN_S)
            self._selector.register(connection, selectors.EVENT_READ)

    def _authenticate(self, connection: socket.socket) -> None:
        """Read from a pending connection; admit it as a rank once it has identified itself as one."""
        hello, deadline = self._pending[connection]
        received = connection.recv(HELLO.size - len(hello))
        hello += received
        self._pending[connection] = (hello, deadline)  # keeps its place in the order
        if len(hello) < HELLO.size:
            if not received:
                self._drop(connection)
            return
        token, rank = HELLO.unpack(hello)
        is_rank = hmac.compare_digest(token, self.address.token.encode())
        if not is_rank or rank >= self._size or rank in self._admitted:
            self._drop(connection)
            return
        connection.send(ADMITTED)
        self._admitted.add(rank)
        del self._pending[connection]
        self._connections[rank] = Connection(connection, rank)
        self._selector.modify(connection, selectors.EVENT_READ, rank)

    def _drop_oldest(self) -> None:
        if self._pending:
            self._drop(next(iter(self._pending)))

    def _drop(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._selector.unregister(connection)
        connection.close()

    def _end_waits(self) -> None:
        """Drop pending connections after their deadline; accept again after a pause."""
        now = time.monotonic()
        while self._pending and (oldest := next(iter(self._pending.items())))[1][1] <= now:
            self._drop(oldest[0])
        if 0 < self._pauses_until <= now:
            self._pauses_until = 0.0
            self._selector.register(self._port, selectors.EVENT_READ)


Transport = Connection | Server
"""This rank's connections."""


def connect(address: Address, rank: int, timeout_s: float) -> Connection:
    """Return once root has admitted this rank. Raises OSError if root cannot be reached, or does not answer."""
    deadline = time.monotonic() + timeout_s
    while True:
        remaining_s = max(0.1, deadline - time.monotonic())
        connection: socket.socket | None = None
        failure: OSError = ConnectionRefusedError("it does not admit this rank")
        try:
            connection = socket.create_connection((address.host, address.port), timeout=remaining_s)
            connection.sendall(HELLO.pack(address.token.encode(), rank))
            if connection.recv(1) == ADMITTED:
                return Connection(connection, peer=0)
        except OSError as error:
            failure = error if connection is None or not isinstance(error, ConnectionError) else failure
        # Root drops the oldest if too many connect at the same moment, and a network may fail once. Without a second
        # attempt, this rank would not be watched during the whole run.
        if connection is not None:
            connection.close()
        if time.monotonic() > deadline:
            raise failure
        time.sleep(random.uniform(0.05, 0.2))
