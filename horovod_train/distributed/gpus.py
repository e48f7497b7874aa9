"""Find the host's name for a GPU from the number by which a process calls it.

Does not choose GPUs; see device.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence


def host_keys(
    mine: Sequence[int], seen: int, local_rank: int, visible: str | None, listed: Sequence[str]
) -> tuple[str, ...]:
    """Return names of the GPUs that this process calls `mine`; ranks of a host that share a GPU get a common name.

    seen: how many GPUs the process sees. visible: its CUDA_VISIBLE_DEVICES. listed: from list_gpus. The name is the
    UUID if there is one. A number is ambiguous if the process sees only its own GPUs: when the scheduler hides the
    others (SLURM's ConstrainDevices), every task counts from 0. The name then contains local_rank.
    """
    names = [name.strip() for name in visible.split(",")] if visible else []
    keys = []
    for index in mine:
        name = names[index] if index < len(names) else str(index)
        key = find_uuid(name, listed) or name
        keys.append(f"{key} of local rank {local_rank}" if key.isdigit() and seen == len(mine) else key)
    return tuple(keys)


def find_uuid(name: str, listed: Sequence[str]) -> str | None:
    """Return the UUID for an index, a UUID or the beginning of one; None if the driver lists no such GPU."""
    if name.isdigit():
        return listed[int(name)] if int(name) < len(listed) else None
    full = [uuid for uuid in listed if uuid.startswith(name)]
    return full[0] if len(full) == 1 else None


def list_gpus() -> list[str]:
    """Return the UUIDs of the host's GPUs that this process may use, in the driver's order; none without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(finished.stdout) if finished.returncode == 0 else []


def parse_gpus(text: str) -> list[str]:
    """Parse nvidia-smi's lines `0, GPU-5a…` into UUIDs by index."""
    rows = [line.split(",") for line in text.splitlines() if line.count(",") == 1]
    return [uuid.strip() for _, uuid in sorted(rows, key=lambda row: int(row[0]))]
