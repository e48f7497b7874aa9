"""Exchange small values between ranks before TensorFlow starts, in a separate scope on Horovod's rendezvous server.

horovodrun runs the server; under plain srun rank 0 does, see rendezvous. Over MPI there is none.
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
VALUES_WITHIN_S = 30.0
"""How long a rank waits for its neighbours' values: all have just initialised Horovod."""
ANSWER_WITHIN_S = 5.0
MAX_ANSWER_BYTES = 1 << 17
_REQUESTS_PER_S = 256
"""Of all ranks together, approximately."""


def ask(
    address: str,
    port: int,
    method: str,
    key: str,
    body: bytes = b"",
    *,
    scope: str = NAME,
    max_bytes: int = MAX_ANSWER_BYTES,
) -> bytes | None:
    """Return the server's value for this key, or its answer to PUT; None if it has none or cannot be reached.

    address: as in HOROVOD_GLOO_RENDEZVOUS_ADDR, so it may contain a prefix of every path; see rendezvous. Another
    process that answers instead of the server costs at most ANSWER_WITHIN_S and max_bytes.
    """
    server, slash, prefix = address.partition("/")
    header = f"{method} {slash}{prefix}/{scope}/{key} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        answer = _exchange(server.partition(":")[0], port, header.encode() + body, max_bytes)
        head, _, content = answer.partition(b"\r\n\r\n")
    except OSError:
        return None
    length = re.search(rb"(?i)\r\ncontent-length: *(\d{1,9})\b", head)
    is_whole = length is not None and int(length[1]) == len(content)
    return content if is_whole and re.match(rb"HTTP/1\.[01] 200 ", head) else None


def _exchange(host: str, port: int, request: bytes, max_bytes: int) -> bytes:
    """Return the answer: all bytes until the server closes the connection."""
    deadline, answer = time.monotonic() + ANSWER_WITHIN_S, b""
    with socket.create_connection((host, port), timeout=ANSWER_WITHIN_S) as connection:
        connection.sendall(request)
        while len(answer) < max_bytes:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            if not (received := connection.recv(1 << 16)):
                return answer
            answer += received
    raise OSError("an answer that is too long")


def cores_of_host(rank_cores: Set[int], local_rank: int, local_size: int) -> set[int]:
    """Collective among the ranks of a host: return the cores that any of them may use. rank_cores: those of this rank.

    Returns only those of this rank if the environment does not say where the server is.
    """
    address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}") for name in ("ADDR", "PORT"))
    if local_size == 1 or address is None or port is None:
        return set(rank_cores)
    host = os.environ.get("HOROVOD_HOSTNAME", socket.gethostname())
    deadline = time.monotonic() + VALUES_WITHIN_S
    encoded_cores = ",".join(map(str, sorted(rank_cores))).encode()
    backoff = Backoff(local_size, deadline)
    while ask(address, int(port), "PUT", f"cores.{host}.{local_rank}", encoded_cores) is None:
        if not backoff.pause():
            where = f"{address.partition('/')[0].partition(':')[0]}:{port}"
            raise RunError(f"the rendezvous server at {where} does not answer local rank {local_rank} on {host}.")
    cores: set[int] = set()
    for neighbour in range(local_size):
        while (answer := ask(address, int(port), "GET", f"cores.{host}.{neighbour}")) is None:
            if not backoff.pause():
                raise RunError(f"local rank {neighbour} on {host} has not said which cores it may use.")
        cores |= _parse_cores(answer)
    return cores | rank_cores


def _parse_cores(text: bytes) -> set[int]:
    """Return the cores in a rank's text; none if no rank wrote it: any process can write to horovodrun's server."""
    return {int(core) for core in text.split(b",")} if re.fullmatch(rb"\d{1,4}(,\d{1,4}){0,8191}", text) else set()


class Backoff:
    """Pauses between requests to one server: of random length, each longer than the last, longer for more ranks."""

    def __init__(self, ranks: int, deadline: float) -> None:
        self._deadline = deadline
        self._pause_s, self._max_pause_s = POLL_S, max(4 * POLL_S, ranks / _REQUESTS_PER_S)

    def pause(self) -> bool:
        """Pause; return whether there is time for one more try."""
        time.sleep(random.uniform(0.5, 1) * self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, self._max_pause_s)
        return time.monotonic() < self._deadline
