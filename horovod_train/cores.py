"""How many cores this process may keep busy. Does not bind it to any, nor share them among ranks; see device."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path


def cpu_quota(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many cores' worth of time the container may use; infinite without a limit."""
    with suppress(OSError, ValueError):  # of cgroup version 2
        quota, period = (folder / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):  # of version 1, in which -1 is no limit
        quota, period = ((folder / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return math.inf if int(quota) < 0 else int(quota) / int(period)
    return math.inf


def usable_cores(cores: int | None = None) -> int:
    """Return how many of so many cores the container may keep busy together; default: those that this process has."""
    return max(1, math.ceil(min(cores or len(os.sched_getaffinity(0)), cpu_quota())))
