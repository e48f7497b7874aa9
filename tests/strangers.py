"""Those who come to a port of ours and are no ranks: what they send, and many of them at once."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from horovod_train.distributed.watchdog.transport import HELLO

_WORDS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /horovod_train/all HTTP/1.0\r\n\r\n",
    b"GET /horovod_train/root. HTTP/1.0\r\n\r\n",
    b"GET /%s/horovod_train/all HTTP/1.0\r\n\r\n" % (b"0" * 64),
    b"PUT /horovod_train/1 HTTP/1.0\r\nContent-Length: 4\r\n\r\nhere",
    b"PUT /global/0 HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\nx",
    b"PUT /global/0 HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"PUT /global/0 HTTP/1.1\r\nContent-Length: many\r\n\r\n",
    b"PUT /global/0 HTTP/1.1\r\n\r\n",
    b"DELETE /horovod_train/1 HTTP/1.0\r\n\r\n",
    b"GET " + b"/" * 70_000 + b" HTTP/1.0\r\n\r\n",
    b"X: y\r\n" * 300,
    b'{"rank": 1, "token": "\\ud800"}\n',
    b'{"kind": "cause", "cause": {"rank": 0, "what": "x", "exit_code": 0}}\n',
    b"[" * 60_000 + b"\n",
    b"\n" * 5000,
    b"\x16\x03\x01\x02\x00\x01\x00",  # TLS
    b"\x80\x04\x95" + bytes(8),  # pickle
]


def messages(rng: random.Random, count: int, token: str = "0" * 32) -> Iterator[bytes]:
    """Random, cut and huge ones. token: with the right one, only hellos that are no rank's are made with it."""
    for _ in range(count):
        kind = rng.randrange(8)
        if kind == 0:
            yield HELLO.pack(token.encode(), rng.choice([1 << 20, 2**32 - 1]))
        elif kind == 1:
            yield HELLO.pack(rng.randbytes(32), rng.randrange(4))
        elif kind == 2:
            whole = HELLO.pack(token.encode(), 1)
            yield whole[: rng.randrange(len(whole))]
        elif kind == 3 and rng.random() < 0.05:
            yield rng.randbytes(1 << 20)
        elif kind <= 5:
            yield rng.randbytes(rng.randrange(400))
        else:
            yield rng.choice(_WORDS)


class Siege:
    """Idle connections for as long as the context lasts, and messages by the thousand from `send`."""

    def __init__(self, host: str, port: int, idle: int) -> None:
        self._place, self._idle, self._stack = (host, port), idle, ExitStack()
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __enter__(self) -> Siege:
        for _ in range(self._idle):
            self._stack.enter_context(socket.create_connection(self._place, timeout=30))
        self.counts["idle"] = self._idle
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def send(self, count: int, seed: int = 1, at_once: int = 8) -> None:
        """One connection for each message; one in fifty is sent byte after byte."""
        rng = random.Random(seed)
        with ThreadPoolExecutor(at_once) as pool:
            for _ in pool.map(self._send, messages(rng, count), (rng.random() < 0.02 for _ in range(count))):
                pass

    def _send(self, message: bytes, slowly: bool) -> None:
        answered = "cut off"
        try:
            with socket.create_connection(self._place, timeout=30) as connection:
                if slowly:
                    for byte in message[:40]:
                        connection.send(bytes([byte]))
                        time.sleep(0.005)
                else:
                    connection.sendall(message)
                answered = "taken"
        except OSError:
            pass
        with self._lock:
            self.counts["slow" if slowly else "quick"] += 1
            self.counts[answered] += 1
