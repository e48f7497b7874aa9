"""Horovod's rendezvous server for the ranks of one step: it answers only requests with the step's key.

The key is the first part of every path, before Horovod's scope and key. The key and root's proof follow from a token
that all ranks have, in their environment or in a private file: root proves that it knows the token before a rank sends
it the key. Does not know when ranks may start; see rendezvous.

gloo's start asks for n² values of 140 n bytes. Therefore the ranks of a host ask a relay on it, which asks root for
all new values together, and for each of them once.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import http.client
import itertools
import json
import os
import re
import secrets
import socket
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from horovod.runner.http.http_server import BAD_REQUEST, RendezvousHandler, RendezvousHTTPServer

from horovod_train.distributed.launch import key_value_store
from horovod_train.distributed.launch.conventions import Meeting
from horovod_train.distributed.launch.launcher import TOKEN, TOKEN_FILE
from horovod_train.distributed.launch.local import users_folder
from horovod_train.errors import UserError

MAX_VALUE_BYTES = 4 << 20
"""The limit of one value. gloo's values are about 140 bytes for each rank."""
MAX_HEAD_BYTES = 16 << 10
"""How much of a connection is read before it has shown the key: the request and its headers."""
REQUEST_WITHIN_S = 5.0
SPARE_PENDING = 32
NEWS_BYTES = 1 << 20
"""How much root sends a relay in one answer, approximately; and at least one value."""
NO_NEWS_FOR_S = 0.05
"""How long a relay takes a value for missing without asking root again: each rank asks 100 times a second."""
_OK, _FORBIDDEN = 200, 403

_private_token = ""
"""What ranks on one host have taken from a file of their user's, because nothing else gave them a token."""


def key_of(step: str, port: int) -> str:
    return _compute_hmac(f"key {step} {port}")


def proof_of_root(step: str, port: int, nonce: str) -> str:
    """Return root's proof. It includes the port, so a process on another port cannot reuse root's answer."""
    return _compute_hmac(f"root {step} {port} {nonce}")


def _compute_hmac(text: str) -> str:
    return hmac.new(token().encode(), text.encode(), hashlib.sha256).hexdigest()


def token() -> str:
    """Return the secret of the ranks; "" if they have none: the key then follows from the step's name."""
    return os.environ.get(TOKEN, "") or _private_token


def prepare_token(step: Meeting) -> None:
    """Read the token if the environment names a file, or if ranks on one host have none. Raises UserError."""
    global _private_token
    if name := os.environ.get(TOKEN_FILE):
        try:
            _private_token = Path(name).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise UserError(
                f"{TOKEN_FILE}={name}: cannot be read: {reason}. It must hold the ranks' secret."
            ) from error
        if not _private_token:
            raise UserError(f"{TOKEN_FILE}={name}: is empty; it must hold the secret that all ranks have.")
        if os.environ.get(TOKEN, _private_token) != _private_token:
            raise UserError(f"{TOKEN} and the file {TOKEN_FILE}={name} hold different secrets. Unset one of them.")
    elif step.is_one_host and not step.is_slurm_step and step.size > 1 and not os.environ.get(TOKEN):
        _private_token = own_token(users_folder())


def own_token(folder: Path) -> str:
    """Return a secret that this user's processes on this host share. The first of them makes it.

    Raises UserError if others could read it or could have written it.
    """
    path = folder / "token"
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise UserError(
                f"{folder} must be a folder that only you can read. Remove it, or set {TOKEN} for all ranks."
            )
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if text := file.read().strip():
                return text
            text = secrets.token_hex(16)
            file.write(text)
            return text
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}. Set {TOKEN} for all ranks instead.") from error


class _Head:
    """A connection of which only the first MAX_HEAD_BYTES are read."""

    def __init__(self, file: Any) -> None:
        self.file, self._left = file, MAX_HEAD_BYTES
        self.close = file.close

    def readline(self, size: int) -> bytes:
        line: bytes = self.file.readline(min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("head")
        return line


class _Handler(RendezvousHandler):
    """Sends head and content together: after a head alone Horovod's client reads an empty value and aborts the rank."""

    server: StepServer
    path: str
    rfile: Any
    wbufsize = 1 << 18

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if proof_request := re.fullmatch(rf"/{key_value_store.NAME}/root\.([0-9a-f]{{32}})", self.path):
            self._send_proof(proof_request[1])
            return False
        # Horovod's client appends :PORT to the address.
        match = re.fullmatch(r"/([0-9a-f]{64})(?::\d+)?(/[^/]+/[^/]+)", self.path)
        if match is None or not hmac.compare_digest(match[1], self.server.key):
            self.send_status_code(_FORBIDDEN)
            return False
        self.server.admit(self.connection)
        self.path, self.rfile = match[2], self.rfile.file
        length = self.headers.get("Content-Length", "0")
        if not re.fullmatch(r"\d{1,9}", length) or int(length) > MAX_VALUE_BYTES:
            self.send_status_code(BAD_REQUEST)
            return False
        return True

    def _get_value(self, scope: str, key: str) -> bytes | None:
        if scope == key_value_store.NAME and (news := re.fullmatch(r"news\.(\d{1,9})\.(.+)", key)):
            return self.server.news(news[2], int(news[1]))
        value: bytes | None = super()._get_value(scope, key)
        return value

    def _send_proof(self, nonce: str) -> None:
        port = self.server.server_address[1]
        proof = proof_of_root(self.server.step, port, nonce).encode()
        self.send_response(_OK)
        self.send_header("Content-Length", str(len(proof)))
        self.end_headers()
        self.wfile.write(proof)


class StepServer(RendezvousHTTPServer):
    """Closes a connection that sends no request in time, and the oldest when too many wait. 1024 more may queue."""

    handler: type[RendezvousHandler] = _Handler

    request_queue_size = 1024
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, step: str, size: int) -> None:
        super().__init__((host, port), self.handler, 0)
        self.step, self.key = step, key_of(step, self.server_address[1])
        self.cache: dict[str, dict[str, bytes]] = {key_value_store.NAME: {}}
        self._max_pending = size + SPARE_PENDING
        self._pending: dict[socket.socket, float] = {}
        """The time by which each connection must have sent a request with the key; the oldest first."""
        self._lock = threading.Lock()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            # Usually no descriptors are left. The port stays ready, so without a pause this would be called in a loop.
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._pending[request] = time.monotonic() + REQUEST_WITHIN_S
            while len(self._pending) > self._max_pending:
                self._shut_down(next(iter(self._pending)))
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        super().service_actions()
        now = time.monotonic()
        with self._lock:
            while self._pending and (oldest := next(iter(self._pending.items())))[1] <= now:
                self._shut_down(oldest[0])

    def _shut_down(self, request: socket.socket) -> None:
        """Shut a pending connection down. The thread that reads from it then reaches the end and closes it."""
        del self._pending[request]
        with suppress(OSError):  # closed already
            request.shutdown(socket.SHUT_RDWR)

    def admit(self, request: socket.socket) -> None:
        with self._lock:
            self._pending.pop(request, None)

    def news(self, scope: str, known: int) -> bytes | None:
        """Return the values of a scope from the known-th on, in the order in which they came; None if there are none.

        A line of JSON, [[key, bytes], …], then the values.
        """
        sizes: list[tuple[str, int]] = []
        values: list[bytes] = []
        total = 0
        with self.cache_lock:
            for key, value in itertools.islice(self.cache.get(scope, {}).items(), known, None):
                if values and total + len(value) > NEWS_BYTES:
                    break
                sizes.append((key, len(value)))
                values.append(value)
                total += len(value)
        return b"\n".join([json.dumps(sizes).encode(), b"".join(values)]) if values else None

    def shutdown_request(self, request: Any) -> None:
        self.admit(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a bad request ends only its connection, and does not concern the user."""


class _RelayHandler(_Handler):
    server: Relay

    def _get_value(self, scope: str, key: str) -> bytes | None:
        return self.server.value(scope, key)

    def _put_value(self, scope: str, key: str, value: bytes) -> None:
        if self.server.ask_root("PUT", scope, key, value) is None:
            raise ConnectionError("root has not taken a value")  # without an answer, Horovod's client tries again

    def do_DELETE(self) -> None:
        """Pass it on. A rank deletes its value when all have met: nobody asks for the others of this meeting again."""
        _, scope, key = self.path.split("/")
        self.server.ask_root("DELETE", scope, key)
        self.server.forget(scope)
        self.send_status_code(_OK)


class Relay(StepServer):
    """Answers the ranks of a host, on its loopback address, with root's values.

    It keeps those of a scope until a rank deletes its own there. address, port: of root's server, with its key.
    """

    handler = _RelayHandler

    def __init__(self, address: str, port: int, step: str, local_size: int) -> None:
        super().__init__("127.0.0.1", 0, step, local_size)
        self._root = address, port
        self._asked_at: dict[str, float] = {}
        self._asking = threading.Lock()

    def ask_root(self, method: str, scope: str, key: str, body: bytes = b"") -> bytes | None:
        most = MAX_VALUE_BYTES + NEWS_BYTES
        return key_value_store.ask(*self._root, method, key, body, scope=scope, max_bytes=most)

    def value(self, scope: str, key: str) -> bytes | None:
        """Return root's value, if it has one. Ranks that miss values at once wait for one answer of root's."""
        if scope == key_value_store.NAME:  # whose values change
            return self.ask_root("GET", scope, key)
        with self._asking:
            values = self.cache.setdefault(scope, {})
            while key not in values and time.monotonic() >= self._asked_at.get(scope, 0.0) + NO_NEWS_FOR_S:
                news = _unpack(self.ask_root("GET", key_value_store.NAME, f"news.{len(values)}.{scope}"))
                if not news.keys() - values.keys():
                    self._asked_at[scope] = time.monotonic()
                values |= news
            return values.get(key)

    def forget(self, scope: str) -> None:
        with self._asking:
            self.cache.pop(scope, None)


def _unpack(news: bytes | None) -> dict[str, bytes]:
    sizes, _, content = (news or b"[]\n").partition(b"\n")
    values, at = {}, 0
    for key, size in json.loads(sizes):
        values[key] = content[at : at + size]
        at += size
    return values
