"""For `bench peers`: one run of a program in peer_programs, whose ranks a launcher starts or this process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from horovod_train.distributed.launch.local import Way, launch_words, start_program, wait_for_all
from horovod_train.errors import RunError

_AT_MOST_S = 1800.0


class Given(NamedTuple):
    """What the programs train. system: one of timing.SYSTEMS. records: an .npz file of inputs and targets."""

    system: str
    records: Path
    steps: int


def run_launched(
    way: Way,
    ranks: int,
    program: str,
    given: Given,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> float:
    """Return records per second over all ranks, which one launcher starts. Raises RunError."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*launch_words(way, ranks), *_words(program, given, folder, ranks), *options]
        _wait(program, [start_program(words, environment)])
        return _read(program, Path(folder), ranks)


def run_apart(ranks: int, program: str, given: Given) -> float:
    """Return records per second over all ranks, each of which is a process that knows its rank. Raises RunError."""
    with tempfile.TemporaryDirectory() as folder:
        words, ports = _words(program, given, folder, ranks), _free_ports(ranks)
        _wait(program, [start_program(words, _environment(rank, ports)) for rank in range(ranks)])
        return _read(program, Path(folder), ranks)


def _words(program: str, given: Given, out: str, ranks: int) -> list[str]:
    module = f"horovod_train.commands.bench.peer_programs.{program}"
    counts = ["--steps", str(given.steps), "--ranks", str(ranks)]
    return [sys.executable, "-m", module, given.system, str(given.records), out, *counts]


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


def _wait(program: str, processes: Sequence[subprocess.Popen[str]]) -> None:
    if problem := wait_for_all(processes, _AT_MOST_S):
        raise RunError(f"bench peers: {program}: {problem}.")


def _read(program: str, folder: Path, ranks: int) -> float:
    """Return what the ranks have measured. Raises RunError if they have not trained one model."""
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    if len({each["weights_sha256"] for each in found}) > 1:
        raise RunError(
            f"bench peers: {program}: its ranks have ended with different weights: they train {ranks} models."
        )
    return float(found[0]["records_per_s"])
