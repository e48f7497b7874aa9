"""Find the host's name for a GPU from its index in a process.

Does not choose GPUs; see device.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence


def host_keys(
    indices: Sequence[int],
    visible_count: int,
    local_rank: int,
    cuda_visible_devices: str | None,
    uuids: Mapping[int, str],
) -> tuple[str, ...]:
    """Return names of the GPUs that have `indices` in this process. Ranks of a host that share a GPU get a common name.

    visible_count: how many GPUs the process sees. uuids: from list_gpus. The name is the UUID if there is one. A number
    is ambiguous if the process sees only its own GPUs: when the scheduler hides the others (SLURM's ConstrainDevices),
    every task counts from 0. The name then contains local_rank.
    """
    visible_names = [name.strip() for name in cuda_visible_devices.split(",")] if cuda_visible_devices else []
    keys = []
    for index in indices:
        name = visible_names[index] if index < len(visible_names) else str(index)
        key = find_uuid(name, uuids) or name
        keys.append(f"{key} of local rank {local_rank}" if key.isdigit() and visible_count == len(indices) else key)
    return tuple(keys)


def find_uuid(name: str, uuids: Mapping[int, str]) -> str | None:
    """Return the UUID for an index, a UUID or the beginning of one; None if the driver lists no such GPU."""
    if name.isdigit():
        return uuids.get(int(name))
    matches = [uuid for uuid in uuids.values() if uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None


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
