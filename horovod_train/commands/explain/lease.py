"""For `explain`: whether a run still has a valid lease on its directory, on any host. Changes nothing there."""

from __future__ import annotations

import time
from pathlib import Path

from horovod_train.output.console import to_stderr
from horovod_train.output.lease import POLL_S, REFRESH_S, read_lease
from horovod_train.output.lease_holder import UNNAMED

WATCH_S = 2 * REFRESH_S


def find_running(run_dir: Path, watch_s: float) -> str | None:
    """Return which run has the directory and how that shows, in words; None if no run has it.

    A lease refreshed within watch_s is valid. A lease that looks older is watched for that long, because the clock that
    stamps it may differ from ours.
    """
    try:
        holder, first, runs_here = read_lease(run_dir)
    except OSError:
        return None
    name = str(holder or UNNAMED)
    if runs_here is not None:
        return f"{name}, a process on this host" if runs_here else None
    if 0 <= time.time() - first <= watch_s:
        return f"{name}, whose lease was refreshed {time.time() - first:.0f} s ago"
    to_stderr(f"{run_dir}: is held by {name}. Watching its lease for {watch_s:.0f} s …")
    end = time.monotonic() + watch_s
    while time.monotonic() < end:
        time.sleep(POLL_S)
        try:
            holder, now, _ = read_lease(run_dir)
        except OSError:
            return None
        if now != first:
            return f"{name if holder is None else holder}, whose lease was refreshed just now"
    return None
