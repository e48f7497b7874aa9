"""The port where ranks connect to root, and the connections there that have not yet identified themselves as a rank.

Such a connection is a stranger. At most HELLO.size bytes are read from it, compared and not parsed. It is closed if it
is late, or if too many others connect. Strangers therefore cost root a bounded number of descriptors and bytes,
whatever they send. Does not talk with ranks; see transport.
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
SPARE_STRANGERS = 32
"""In addition to one for each rank, because all may connect at the same moment."""
_ACCEPTS_AT_ONCE = 64
_REST_S = 1.0


class Address(NamedTuple):
    """Root's address, and the secret that identifies a rank."""

    host: str
    port: int
    token: str


class Listener:
    """Registers its port and its strangers with `selector`, without data. Pass a socket that is ready to `serve`."""

    def __init__(self, host: str, size: int, selector: selectors.BaseSelector) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._port = socket.create_server((host, 0), family=family, backlog=1024)
        self._port.setblocking(False)
        self.address = Address(host, self._port.getsockname()[1], secrets.token_hex(16))
        self._size, self._selector = size, selector
        self._selector.register(self._port, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, tuple[bytes, float]] = {}
        """What each stranger has sent, and until when it may send more; the oldest first."""
        self._admitted: set[int] = set()
        self._rests_until = 0.0

    def serve(self, ready: object) -> tuple[int, socket.socket] | None:
        """Accept or read from the socket that is ready; return (rank, its connection) once it has identified itself."""
        if ready is self._port:
            self._accept()
        elif isinstance(ready, socket.socket) and ready in self._strangers:
            try:
                return self._hear(ready)
            except OSError:
                self._drop(ready)
        return None

    def tick(self) -> None:
        """Drop strangers that are late, and accept again after a pause. Call this at least about once a second."""
        now = time.monotonic()
        while self._strangers and (oldest := next(iter(self._strangers.items())))[1][1] <= now:
            self._drop(oldest[0])
        if 0 < self._rests_until <= now:
            self._rests_until = 0.0
            self._selector.register(self._port, selectors.EVENT_READ)

    def close(self) -> None:
        for stranger in list(self._strangers):
            self._drop(stranger)
        self._port.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connected, _ = self._port.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:
                # Usually no descriptors are left. The port would stay ready, and each accept would fail again.
                self._selector.unregister(self._port)
                self._rests_until = time.monotonic() + _REST_S
                self._drop_oldest()
                return
            if len(self._strangers) >= self._size + SPARE_STRANGERS:
                self._drop_oldest()
            connected.setblocking(False)
            self._strangers[connected] = (b"", time.monotonic() + HELLO_WITHIN_S)
            self._selector.register(connected, selectors.EVENT_READ)

    def _hear(self, stranger: socket.socket) -> tuple[int, socket.socket] | None:
        heard, until = self._strangers[stranger]
        received = stranger.recv(HELLO.size - len(heard))
        heard += received
        self._strangers[stranger] = (heard, until)  # keeps its place in the order
        if len(heard) < HELLO.size:
            if not received:
                self._drop(stranger)
            return None
        token, rank = HELLO.unpack(heard)
        is_rank = hmac.compare_digest(token, self.address.token.encode())
        if not is_rank or rank >= self._size or rank in self._admitted:
            self._drop(stranger)
            return None
        stranger.send(ADMITTED)
        self._admitted.add(rank)
        self._forget(stranger)
        return rank, stranger

    def _drop_oldest(self) -> None:
        if self._strangers:
            self._drop(next(iter(self._strangers)))

    def _drop(self, stranger: socket.socket) -> None:
        self._forget(stranger)
        stranger.close()

    def _forget(self, stranger: socket.socket) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger)
