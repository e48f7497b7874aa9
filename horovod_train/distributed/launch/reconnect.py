"""Connect elastic ranks, and disconnect them so that all notice.

After a lost rank Horovod 0.28.1 leaves its connections open until the process ends. A rank that waits for data on one
of them, from a rank that has seen the loss and has left, would wait until gloo's time limit.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

import horovod.tensorflow as hvd
from horovod.common.exceptions import HorovodInternalError

_connections: dict[int, str] = {}
"""File descriptors of Horovod's connections, and which socket each was: the number may serve for another one later."""


def connect() -> None:
    """Collective: start Horovod. Raises HorovodInternalError if a rank is lost meanwhile."""
    sys.stdout.flush()  # a rank whose host was taken from the list ends inside hvd.init
    before = _sockets()
    try:
        hvd.init()
    except ValueError as error:  # Horovod says no more; its log does
        raise HorovodInternalError("the ranks did not meet") from error
    _connections.clear()
    _connections.update({number: found for number, found in _sockets().items() if before.get(number) != found})


def disconnect() -> None:
    """Stop Horovod, and let ranks that wait for this one notice. The ranks may do so at different times."""
    hvd.shutdown()
    still_open = _sockets()
    for number, found in _connections.items():
        if still_open.get(number) == found:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    _connections.clear()


def _sockets() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found
