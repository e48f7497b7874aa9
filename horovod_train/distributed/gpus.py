"""The host's names for GPUs: which one is behind the number that a process calls it by.

Does not choose any; see device.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence


def host_keys(
    mine: Sequence[int], seen: int, local_rank: int, visible: str | None, listed: Sequence[str]
) -> tuple[str, ...]:
    """Names of the GPUs that this process calls `mine`: two ranks of a host that share one have one in common.

    seen: how many GPUs the process sees. visible: its CUDA_VISIBLE_DEVICES. listed: as list_gpus.
    By UUID where there is one. Numbers say nothing in a process that sees its own GPUs only: a scheduler that hides
    the others (SLURM's ConstrainDevices) has every task count from 0. There they are told apart by local_rank.
    """
    names = [name.strip() for name in visible.split(",")] if visible else []
    keys = []
    for index in mine:
        name = names[index] if index < len(names) else str(index)
        key = find_uuid(name, listed) or name
        keys.append(f"{key} of local rank {local_rank}" if key.isdigit() and seen == len(mine) else key)
    return tuple(keys)


def find_uuid(name: str, listed: Sequence[str]) -> str | None:
    """The UUID behind an index, a UUID or the beginning of one; None where the driver lists none such."""
    if name.isdigit():
        return listed[int(name)] if int(name) < len(listed) else None
    full = [uuid for uuid in listed if uuid.startswith(name)]
    return full[0] if len(full) == 1 else None


def list_gpus() -> list[str]:
    """UUIDs of the host's GPUs that this process may use, in the driver's order; none where nvidia-smi does not say."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(finished.stdout) if finished.returncode == 0 else []


def parse_gpus(text: str) -> list[str]:
    """nvidia-smi's lines `0, GPU-5a…` → UUIDs by index."""
    rows = [line.split(",") for line in text.splitlines() if line.count(",") == 1]
    return [uuid.strip() for _, uuid in sorted(rows, key=lambda row: int(row[0]))]
