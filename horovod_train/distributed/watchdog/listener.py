"""The port where ranks connect to root, and the pending connections there: not yet identified as a rank.

At most HELLO.size bytes are read from a pending connection, compared and not parsed. It is closed if it is too slow, or
if too many others connect. Pending connections therefore cost root a bounded number of descriptors and bytes, whatever
they send. asyncio's streams would be less code, but they accept and buffer data before a limit applies: 900 connections
with 200 kB each cost 900 descriptors and 200 MB. Does not exchange messages with ranks; see transport.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import time
from typing import NamedTuple

HELLO = struct.Struct("!32sI")
"""What a rank sends first: the token and its number."""
ADMITTED = b"+"
"""What root answers. A rank counts as connected only after this."""

HELLO_WITHIN_S = 10.0
SPARE_PENDING = 32
"""In addition to one for each rank, because all may connect at the same moment."""
_ACCEPTS_PER_TURN = 64
_PAUSE_S = 1.0


class Address(NamedTuple):
    """Root's address, and the secret that identifies a rank."""

    host: str
    port: int
    token: str


class Listener:
    """Registers its port and its pending connections with `selector`, without data.

    Pass a socket that is ready to `serve`.
    """

    def __init__(self, host: str, size: int, selector: selectors.BaseSelector) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._port = socket.create_server((host, 0), family=family, backlog=1024)
        self._port.setblocking(False)
        self.address = Address(host, self._port.getsockname()[1], secrets.token_hex(16))
        self._size, self._selector = size, selector
        self._selector.register(self._port, selectors.EVENT_READ)
        self._pending: dict[socket.socket, tuple[bytes, float]] = {}
        """What each pending connection has sent, and its deadline; the oldest first."""
        self._admitted: set[int] = set()
        self._pauses_until = 0.0

    def serve(self, ready: object) -> tuple[int, socket.socket] | None:
        """Accept or read from the socket that is ready; return (rank, its connection) once it has identified itself."""
        if ready is self._port:
            self._accept()
        elif isinstance(ready, socket.socket) and ready in self._pending:
            try:
                return self._authenticate(ready)
            except OSError:
                self._drop(ready)
        return None

    def tick(self) -> None:
        """Drop pending connections after their deadline; accept again after a pause. Call this about once a second."""
        now = time.monotonic()
        while self._pending and (oldest := next(iter(self._pending.items())))[1][1] <= now:
            self._drop(oldest[0])
        if 0 < self._pauses_until <= now:
            self._pauses_until = 0.0
            self._selector.register(self._port, selectors.EVENT_READ)

    def close(self) -> None:
        for connection in list(self._pending):
            self._drop(connection)
        self._port.close()

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
            self._pending[connection] = (b"", time.monotonic() + HELLO_WITHIN_S)
            self._selector.register(connection, selectors.EVENT_READ)

    def _authenticate(self, connection: socket.socket) -> tuple[int, socket.socket] | None:
        hello, deadline = self._pending[connection]
        received = connection.recv(HELLO.size - len(hello))
        hello += received
        self._pending[connection] = (hello, deadline)  # keeps its place in the order
        if len(hello) < HELLO.size:
            if not received:
                self._drop(connection)
            return None
        token, rank = HELLO.unpack(hello)
        is_rank = hmac.compare_digest(token, self.address.token.encode())
        if not is_rank or rank >= self._size or rank in self._admitted:
            self._drop(connection)
            return None
        connection.send(ADMITTED)
        self._admitted.add(rank)
        self._forget(connection)
        return rank, connection

    def _drop_oldest(self) -> None:
        if self._pending:
            self._drop(next(iter(self._pending)))

    def _drop(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._selector.unregister(connection)
