"""`bench exchange`: steps per second of ranks on this host, by the way in which they exchange gradients.

python -m horovod_train.main bench exchange --np 2

Each contender is launched separately, because Horovod reads its settings when it starts. They take turns, so that other
load on the machine affects all of them; the medians over the rounds are shown. The ceiling trains without any exchange.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from horovod_train.commands.tables import build_table, open_screen
from horovod_train.distributed.launch.local import Way, mpi_problem, run_ranks
from horovod_train.errors import RunError, UserError

CEILING = "no exchange"
SYSTEMS = {
    "convnet": "convnet: 3.3 million weights, 64 images a rank",
    "mlp": "mlp: 71 weights, 100 records a rank",
}
OLD_NAMES = {"s6": "convnet", "s1": "mlp"}


class Contender(NamedTuple):
    way: Way
    environment: Mapping[str, str]
    alone: bool = False


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--np", type=int, default=2, metavar="N", help="ranks; default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each; default %(default)s")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured in each launch; default %(default)s")
    parser.add_argument(
        "--system",
        type=lambda name: OLD_NAMES.get(name, name),
        choices=SYSTEMS,
        action="append",
        help="one of them alone; default: all",
    )
    parser.add_argument("--only", metavar="TEXT", action="append", help="contenders whose names hold this")
    parser.add_argument("--json", action="store_true", help="print the figures of every launch as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if min(arguments.np, arguments.rounds) < 1 or arguments.seconds <= 0:
        raise UserError("bench exchange: --np and --rounds must be at least 1, --seconds above 0.")
    chosen = _choose(arguments.only)
    systems = arguments.system or list(SYSTEMS)
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for _ in range(arguments.rounds):
        for name, contender in chosen.items():
            measured = _measure(name, contender, arguments.np, systems, arguments.seconds)
            rates[name].append(measured)
            figures = ", ".join(f"{system} {rate:,.0f} records/s" for system, rate in measured.items())
            print(f"{name}: {figures}", file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps({"np": arguments.np, "records_per_s": rates}, indent=2))
    else:
        for system in systems:
            _show(system, arguments.np, {name: [row[system] for row in rows] for name, rows in rates.items()})
    return 0


def _choose(only: list[str] | None) -> dict[str, Contender]:
    problem = mpi_problem()
    known = contenders()
    if problem:
        print(f"without MPI: {problem}", file=sys.stderr)
        known = {name: contender for name, contender in known.items() if contender.way != "mpirun"}
    found = {name: contender for name, contender in known.items() if not only or any(text in name for text in only)}
    if not found:
        raise UserError(f"bench exchange: --only {only}: no contender's name holds it; there are {', '.join(known)}.")
    ceiling = Contender(next(iter(found.values())).way, {"OMPI_MCA_mpi_yield_when_idle": "1"}, alone=True)
    return {CEILING: ceiling, **found}


def _measure(name: str, contender: Contender, ranks: int, systems: list[str], seconds: float) -> dict[str, float]:
    """Return records per second over all ranks, by system."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rates.json")
        words = [sys.executable, "-m", "horovod_train.commands.bench.exchange_rank", str(out), "--systems", *systems]
        words += ["--seconds", str(seconds), *(["--alone"] if contender.alone else [])]
        limit_s = 120 + 4 * seconds * len(systems)
        try:
            finished = run_ranks(contender.way, ranks, words, contender.environment, limit_s)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"bench exchange: {name}: not done after {limit_s:.0f} s.") from error
        if finished.returncode or not out.exists():
            raise RunError(f"bench exchange: {name}: exit code {finished.returncode}: {finished.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
    return {system: row["steps_per_s"] * row["rows"] * ranks for system, row in found["systems"].items()}


def _show(system: str, ranks: int, rates: dict[str, list[float]]) -> None:
    console = open_screen()
    console.print(f"{SYSTEMS[system]}; {ranks} ranks", markup=False)
    ceiling = statistics.median(rates[CEILING])
    rows = []
    for name, found in sorted(rates.items(), key=lambda item: -statistics.median(item[1])):
        median = statistics.median(found)
        figures = [f"{value:,.0f}" for value in (median, min(found), max(found))]
        rows.append((name, *figures, f"{median / ceiling:.2f}"))
    console.print(build_table(("", "records/s", "slowest", "fastest", "of the ceiling"), rows, left=("",)))
