"""Whether a process of this host still runs: the same process, not a later one with its pid.

By hand and not with psutil, for two reasons: psutil counts another user's process as gone where /proc is mounted with
hidepid=2, and its start times move when the host's clock is set.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def boot_id() -> str:
    """Return an identifier of this host that lasts until it boots again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; None for one that has ended (also a zombie).

    Fields 3 and 22 of proc_pid_stat(5); field 2, the name, is in parentheses and may itself contain any. Raises OSError
    if they cannot be read.
    """
    fields_from_3 = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None if fields_from_3[0] in "ZX" else fields_from_3[19]


def is_running(pid: int, started: str) -> bool:
    """Return whether the process that started at these ticks runs; True if it cannot be checked."""
    try:
        os.kill(pid, 0)
        return start_ticks(pid) == started
    except ProcessLookupError:
        return False
    except OSError:
        return True


def has_run_since(pid: int, moment: float) -> bool:
    """Return whether a process runs that started before `moment`, in seconds since 1970."""
    try:
        started = start_ticks(pid)
    except OSError:
        return False
    if started is None:
        return False
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s <= moment + 1
