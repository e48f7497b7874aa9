"""For `bench peers`: one run of a program in peer_programs, whose ranks a launcher starts or this process."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from horovod_train.distributed.launch.local import Way, launch_command, start_program, wait_for_all
from horovod_train.errors import RunError

_TIMEOUT_S = 1800.0


class Contender(NamedTuple):
    """A way to train."""

    program: str | None = None
    """One of peer_programs; None: this project."""
    way: Way | None = None
    """What launches the ranks; None: each is started alone. So are the ranks of this project that exchange nothing."""
    options: Sequence[str] = ()
    environment: Mapping[str, str] | None = None


class Workload(NamedTuple):
    """What the programs train. system: one of timing.SYSTEMS. records: an .npz file of inputs and targets."""

    system: str
    records: Path
    steps: int


def run(contender: Contender, workload: Workload, ranks: int) -> float:
    """Return records per second over all ranks. Raises RunError."""
    module = f"horovod_train.commands.bench.peer_programs.{contender.program}"
    with tempfile.TemporaryDirectory() as folder:
        task = [workload.system, str(workload.records), folder, "--steps", str(workload.steps)]
        command = [sys.executable, "-m", module, *task, "--ranks", str(ranks), *contender.options]
        if contender.way is None:
            ports = _free_ports(ranks)
            processes = [start_program(command, _environment(rank, ports)) for rank in range(ranks)]
        else:
            processes = [start_program([*launch_command(contender.way, ranks), *command], contender.environment)]
        if problem := wait_for_all(processes, _TIMEOUT_S):
            raise RunError(f"bench peers: {contender.program}: {problem}.")
        return _read(str(contender.program), Path(folder), ranks)


def _environment(rank: int, ports: Sequence[int]) -> dict[str, str]:
    """Return what MultiWorkerMirroredStrategy and PyTorch read."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(ports)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]),
    }


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _read(program: str, folder: Path, ranks: int) -> float:
    """Return what the ranks have measured. Raises RunError if they have not trained one model."""
    results = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    if len({each["weights_sha256"] for each in results}) > 1:
        raise RunError(
            f"bench peers: {program}: its ranks have ended with different weights: they train {ranks} models."
        )
    return float(results[0]["records_per_s"])
