"""What ranks tell each other before TensorFlow starts, on a shelf of ours at Horovod's rendezvous server.

The server is horovodrun's, or under plain srun that of rank 0; see rendezvous. Over MPI there is none.
"""

from __future__ import annotations

import http.client
import os
import socket
import time
from collections.abc import Set

from horovod_train.errors import RunError

NAME = "horovod_train"
POLL_S = 0.05
TOLD_WITHIN_S = 30.0
"""How long a rank waits for its neighbours' word: they have all just initialised Horovod."""


def ask(address: str, port: int, method: str, key: str, body: bytes = b"here") -> bytes | None:
    """What the server has under this key of our shelf, or its answer to PUT; None where there is nothing, or nobody."""
    connection = http.client.HTTPConnection(address, port, timeout=5)
    try:
        connection.request(method, f"/{NAME}/{key}", body=body if method == "PUT" else None)
        answer = connection.getresponse()
        content = answer.read()
        return content if answer.status == http.client.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def cores_of_host(mine: Set[int], local_rank: int, local_size: int) -> set[int]:
    """Collective among the ranks of a host: the cores that any of them may use. mine: those of this one.

    Those of this rank alone where the launcher has not said in the environment where the server is.
    """
    address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}") for name in ("ADDR", "PORT"))
    if local_size == 1 or address is None or port is None:
        return set(mine)
    host = os.environ.get("HOROVOD_HOSTNAME", socket.gethostname())
    until = time.monotonic() + TOLD_WITHIN_S
    told = ",".join(map(str, sorted(mine))).encode()
    while ask(address, int(port), "PUT", f"cores.{host}.{local_rank}", told) is None:
        _pause(until, f"the rendezvous server at {address}:{port} does not answer local rank {local_rank} on {host}.")
    cores: set[int] = set()
    for neighbour in range(local_size):
        while (said := ask(address, int(port), "GET", f"cores.{host}.{neighbour}")) is None:
            _pause(until, f"local rank {neighbour} on {host} has not said which cores it may use.")
        cores |= {int(core) for core in said.split(b",")}
    return cores


def _pause(until: float, problem: str) -> None:
    if time.monotonic() > until:
        raise RunError(problem)
    time.sleep(POLL_S)
