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
from pathlib import Path


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

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"pid {self.pid} on {self.host}{job}, since {self.since}"


def describe_me(job: str) -> Holder:
    """Return this process as a holder. job: the scheduler's name for its job."""
    pid = os.getpid()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Holder(
        host=socket.gethostname(),
        pid=pid,
        job=job,
        since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        # Containers on one host number their processes separately.
        machine=f"{boot} {os.stat('/proc/self/ns/pid').st_ino}",
        started=start_time(pid) or "",
        token=secrets.token_hex(8),
    )


def is_alive(holder: Holder) -> bool:
    """Return whether the process of a holder on this machine lives; True if it cannot be checked."""
    try:
        os.kill(holder.pid, 0)
        return start_time(holder.pid) == holder.started
    except ProcessLookupError:
        return False
    except OSError:
        return True


def start_time(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; None for one that has ended (also a zombie).

    Fields 3 and 22 of proc_pid_stat(5); field 2, the name, is in parentheses and may itself contain any.
    """
    fields_from_3 = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None if fields_from_3[0] in "ZX" else fields_from_3[19]


def parse(text: bytes) -> Holder | None:
    """Return the holder that a lease names; None for any other content."""
    try:
        content = json.loads(text)
        return Holder(**{field.name: content[field.name] for field in fields(Holder)})
    except (ValueError, KeyError, TypeError):
        return None
