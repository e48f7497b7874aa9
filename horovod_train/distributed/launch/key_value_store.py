"""Let ranks tell each other facts before TensorFlow starts, in a scope of their own on Horovod's rendezvous server.

The server is horovodrun's, or under plain srun that of rank 0; see rendezvous. Over MPI there is none.
"""

from __future__ import annotations

import os
import random
import re
import socket
import time
from collections.abc import Set

from horovod_train.errors import RunError

NAME = "horovod_train"
POLL_S = 0.05
TOLD_WITHIN_S = 30.0
"""How long a rank waits for its neighbours' values: all have just initialised Horovod."""
ANSWER_WITHIN_S = 5.0
MOST_BYTES = 1 << 17
_QUESTIONS_PER_S = 256
"""Of all ranks together, approximately."""


def ask(address: str, port: int, method: str, key: str, body: bytes = b"here") -> bytes | None:
    """Return the server's value for this key of NAME, or its answer to PUT; None if it has none or cannot be reached.

    address: as in HOROVOD_GLOO_RENDEZVOUS_ADDR, so it may contain a prefix of every path; see rendezvous. A stranger
    who answers instead of the server can waste at most ANSWER_WITHIN_S and MOST_BYTES.
    """
    place, slash, prefix = address.partition("/")
    sent = body if method == "PUT" else b""
    request = f"{method} {slash}{prefix}/{NAME}/{key} HTTP/1.0\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent
    try:
        head, _, content = _exchange(place.partition(":")[0], port, request).partition(b"\r\n\r\n")
    except OSError:
        return None
    length = re.search(rb"(?i)\r\ncontent-length: *(\d{1,9})\b", head)
    is_whole = length is not None and int(length[1]) == len(content)
    return content if is_whole and re.match(rb"HTTP/1\.[01] 200 ", head) else None


def _exchange(host: str, port: int, request: bytes) -> bytes:
    """Return the answer: all bytes until the server closes the connection."""
    until, answer = time.monotonic() + ANSWER_WITHIN_S, b""
    with socket.create_connection((host, port), timeout=ANSWER_WITHIN_S) as connection:
        connection.sendall(request)
        while len(answer) < MOST_BYTES:
            connection.settimeout(max(0.001, until - time.monotonic()))
            if not (received := connection.recv(1 << 16)):
                return answer
            answer += received
    raise OSError("an answer that is too long")


def cores_of_host(mine: Set[int], local_rank: int, local_size: int) -> set[int]:
    """Collective among the ranks of a host: return the cores that any of them may use. mine: those of this rank.

    Returns only those of this rank if the environment does not say where the server is.
    """
    address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}") for name in ("ADDR", "PORT"))
    if local_size == 1 or address is None or port is None:
        return set(mine)
    host = os.environ.get("HOROVOD_HOSTNAME", socket.gethostname())
    until = time.monotonic() + TOLD_WITHIN_S
    told = ",".join(map(str, sorted(mine))).encode()
    tries = Tries(local_size, until)
    while ask(address, int(port), "PUT", f"cores.{host}.{local_rank}", told) is None:
        if not tries.pause():
            where = f"{address.partition('/')[0].partition(':')[0]}:{port}"
            raise RunError(f"the rendezvous server at {where} does not answer local rank {local_rank} on {host}.")
    cores: set[int] = set()
    for neighbour in range(local_size):
        while (said := ask(address, int(port), "GET", f"cores.{host}.{neighbour}")) is None:
            if not tries.pause():
                raise RunError(f"local rank {neighbour} on {host} has not said which cores it may use.")
        cores |= _read_cores(said)
    return cores | mine


def _read_cores(said: bytes) -> set[int]:
    """Parse the cores; return none for text that no rank writes, because anyone may write to horovodrun's server."""
    return {int(core) for core in said.split(b",")} if re.fullmatch(rb"\d{1,4}(,\d{1,4}){0,8191}", said) else set()


class Tries:
    """Pauses between requests to one server: each longer than the last, of random length, longer if more ranks ask."""

    def __init__(self, ranks: int, until: float) -> None:
        self._until = until
        self._pause_s, self._longest_s = POLL_S, max(4 * POLL_S, ranks / _QUESTIONS_PER_S)

    def pause(self) -> bool:
        """Pause; return whether there is time for one more try."""
        time.sleep(random.uniform(0.5, 1) * self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, self._longest_s)
        return time.monotonic() < self._until
