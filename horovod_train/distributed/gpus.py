"""Find the host's name for a GPU from the number by which a process calls it.

Does not choose GPUs; see device.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence


def host_keys(
    mine: Sequence[int], seen: int, local_rank: int, visible: str | None, listed: Mapping[int, str]
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


def find_uuid(name: str, listed: Mapping[int, str]) -> str | None:
    """Return the UUID for an index, a UUID or the beginning of one; None if the driver lists no such GPU."""
    if name.isdigit():
        return listed.get(int(name))
    full = [uuid for uuid in listed.values() if uuid.startswith(name)]
    return full[0] if len(full) == 1 else None


def list_gpus() -> dict[int, str]:
    """Return the UUIDs of the host's GPUs that this process may use, by the driver's index; none without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_gpus(finished.stdout) if finished.returncode == 0 else {}


def parse_gpus(text: str) -> dict[int, str]:
    """Parse nvidia-smi's lines `0, GPU-5a…` into UUIDs by index; leave out others, such as those of a lost GPU."""
    rows = re.findall(r"^\s*(\d+)\s*,\s*(GPU-\S+)\s*$", text, re.MULTILINE)
    return {int(index): uuid for index, uuid in rows}
