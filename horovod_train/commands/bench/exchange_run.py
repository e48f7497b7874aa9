"""For `bench exchange`: the ways to exchange, and one launch of ranks that measures one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from horovod_train.distributed.launch.local import Way, run_ranks
from horovod_train.errors import RunError

Kinds = Literal["exchange", "alone", "both"]
"""Steps that exchange, steps without any exchange, or both in turns."""


class Contender(NamedTuple):
    way: Way
    environment: Mapping[str, str]
    kinds: Kinds = "exchange"


def contenders() -> dict[str, Contender]:
    """Return the contenders by name. Settings that are not named are Horovod's or MPI's own defaults."""

    def mpi(cycle_ms: str, yields: str = "1") -> Contender:
        return Contender("mpirun", {"HOROVOD_CYCLE_TIME": cycle_ms, "OMPI_MCA_mpi_yield_when_idle": yields})

    def gloo(cycle_ms: str) -> Contender:
        return Contender("horovodrun", {"HOROVOD_CYCLE_TIME": cycle_ms})

    return {
        "MPI, yielding, cycle 0 ms": mpi("0"),
        "MPI, yielding, cycle 0.1 ms": mpi("0.1"),
        "MPI, yielding, cycle 0.5 ms": mpi("0.5"),
        "MPI, yielding, cycle 1 ms": mpi("1"),
        "MPI, yielding, cycle 2.5 ms": mpi("2.5"),
        "MPI, busy waiting, cycle 1 ms": mpi("1", yields="0"),
        "gloo, cycle 0.1 ms": gloo("0.1"),
        "gloo, cycle 0.5 ms": gloo("0.5"),
        "gloo, cycle 1 ms": gloo("1"),
        "gloo, cycle 2.5 ms": gloo("2.5"),
        "gloo, cycle 5 ms": gloo("5"),
    }


def launch(name: str, contender: Contender, ranks: int, systems: Sequence[str], seconds: float) -> dict[str, Any]:
    """Launch ranks once; return what exchange_rank measured, by system. Raises RunError if they fail."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rates.json")
        command = [sys.executable, "-m", "horovod_train.commands.bench.exchange_rank", str(out), "--systems", *systems]
        command += ["--seconds", str(seconds), *([] if contender.kinds == "exchange" else [f"--{contender.kinds}"])]
        limit_s = 120 + 8 * seconds * len(systems) + 60 * ranks / len(os.sched_getaffinity(0))
        try:
            finished = run_ranks(contender.way, ranks, command, contender.environment, limit_s)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"bench exchange: {name}: not done after {limit_s:.0f} s.") from error
        if finished.returncode or not out.exists():
            raise RunError(f"bench exchange: {name}: exit code {finished.returncode}: {finished.stderr[-2000:]}")
        measured: dict[str, Any] = json.loads(out.read_text())["systems"]
    return measured
