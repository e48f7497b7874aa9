"""Which rank of a host prints a line that all of its ranks know: the first that asks. A rank that died cannot ask.

The ranks of a host share an empty file. It loses its name when all have opened it, so that nothing is left from then
on, however they end. It lies in memory, not on a disk, which may hang when a run fails: a rank that asks must not wait.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from horovod_train.output.removal import Artifact, remove

if TYPE_CHECKING:  # The watchdog itself needs no TensorFlow.
    from horovod_train.distributed.group import WorkerGroup

_FILE = Artifact("a file that the ranks of a host share", r"horovod_train-[0-9a-f]{16}-\d+")
_MEMORY = Path("/dev/shm")


class HostClaim:
    """Open in each rank of a host. path: the same file in all of them. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        weakref.finalize(self, os.close, self._descriptor)

    def take(self) -> bool:
        """Return whether this is the first call among the ranks of the host. Does not wait. Raises OSError."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # another rank is taking it at this moment
        try:
            if os.fstat(self._descriptor).st_size:
                return False
            os.write(self._descriptor, b"taken")
            return True
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def open_host_claim(group: WorkerGroup) -> HostClaim | None:
    """Collective: open the claim that the ranks of this host share; None if there is no place for it."""
    host = group.hosts[group.rank]
    folder = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
    run_name = group.broadcast_object(secrets.token_hex(8))
    path = folder / f"horovod_train-{run_name}-{group.hosts.index(host)}"
    claim = None
    with suppress(OSError):
        claim = HostClaim(path)
    group.barrier()  # All ranks of the host have opened the file before it loses its name.
    with suppress(OSError):  # Another rank may remove it at the same time.
        remove(path, _FILE)
    return claim
