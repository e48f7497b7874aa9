"""The process that holds a lease, distinguishable from a later process with the same host name and pid.

lease takes and refreshes leases.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import dataclass, fields
from datetime import datetime, timezone

from horovod_train.output.process import boot_id, is_running, start_ticks

UNNAMED = "an unnamed process"
"""In messages: the holder of a lease that names none, as in the instant after its creation."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease. machine and started distinguish processes with the same host name and pid."""

    host: str
    pid: int
    job: str
    since: str
    machine: str
    started: str
    token: str

    def is_running(self) -> bool:
        """Return whether the process runs, if it is of this machine; True if it cannot be checked."""
        return is_running(self.pid, self.started)

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"pid {self.pid} on {self.host}{job}, since {self.since}"


def describe_me(job: str) -> Holder:
    """Return this process as a holder. job: the scheduler's name for its job."""
    pid = os.getpid()
    return Holder(
        host=socket.gethostname(),
        pid=pid,
        job=job,
        since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        # Containers on one host number their processes separately.
        machine=f"{boot_id()} {os.stat('/proc/self/ns/pid').st_ino}",
        started=start_ticks(pid) or "",
        token=secrets.token_hex(8),
    )


def parse(text: bytes) -> Holder | None:
    """Return the holder that a lease names; None for any other content."""
    try:
        content = json.loads(text)
        return Holder(**{field.name: content[field.name] for field in fields(Holder)})
    except (ValueError, KeyError, TypeError):
        return None
