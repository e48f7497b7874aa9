"""Connect elastic ranks, and disconnect them so that all notice.

After a lost rank Horovod 0.28.1 leaves its connections open until the process ends. A rank that waits for data on one
of them would wait until gloo's time limit if the sender has noticed the loss and left.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

import horovod.tensorflow as hvd
from horovod.common.exceptions import HorovodInternalError

_connections: dict[int, str] = {}
"""File descriptors of Horovod's connections, and the socket of each: a descriptor may be reused for another socket."""


def connect() -> None:
    """Collective: start Horovod. Raises HorovodInternalError if a rank is lost meanwhile."""
    sys.stdout.flush()  # a rank whose host has left the list of hosts ends inside hvd.init
    before = _sockets()
    try:
        hvd.init()
    except ValueError as error:  # the reason is only in Horovod's log
        raise HorovodInternalError("the ranks did not meet") from error
    _connections.clear()
    _connections.update(_sockets().items() - before.items())


def disconnect() -> None:
    """Stop Horovod, so that ranks waiting for this one notice. The ranks may call this at different times."""
    hvd.shutdown()
    still_open = _sockets()
    for descriptor, target in _connections.items():
        if still_open.get(descriptor) == target:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    _connections.clear()


def _sockets() -> dict[int, str]:
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                sockets[int(name)] = target
    return sockets
