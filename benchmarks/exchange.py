"""Records per second of ranks on this host, by the way in which they exchange gradients, taking turns.

python benchmarks/exchange.py --np 2 --rounds 3

Each contender is launched separately, because Horovod reads its settings when it starts; medians over the rounds are
shown. The ceiling trains without any exchange. growth.py says how the cost of an exchange grows with the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rank_programs.timing import SEARCH_PATH, SYSTEMS

from horovod_train.commands.cli import above_0, build_table, count, open_screen
from horovod_train.distributed.launch.local import Way, mpi_problem, run_ranks


class Contender(NamedTuple):
    """Settings that `environment` does not name are Horovod's or MPI's own defaults."""

    way: Way
    environment: Mapping[str, str]


CYCLE_MS, YIELDS = "HOROVOD_CYCLE_TIME", "OMPI_MCA_mpi_yield_when_idle"
CONTENDERS = {
    **{
        f"MPI, yielding, cycle {ms} ms": Contender("mpirun", {CYCLE_MS: ms, YIELDS: "1"})
        for ms in ("0", "0.1", "0.5", "1", "2.5")
    },
    "MPI, busy waiting, cycle 1 ms": Contender("mpirun", {CYCLE_MS: "1", YIELDS: "0"}),
    **{f"gloo, cycle {ms} ms": Contender("horovodrun", {CYCLE_MS: ms}) for ms in ("0.1", "0.5", "1", "2.5", "5")},
}
CEILING = "no exchange"
TITLES = {
    "convnet": "convnet: 3.3 million weights, 64 images a rank",
    "mlp": "mlp: 71 weights, 100 records a rank",
}


def contenders_here() -> dict[str, Contender]:
    problem = mpi_problem()
    if problem:
        print(f"without MPI: {problem}", file=sys.stderr)
    return {name: each for name, each in CONTENDERS.items() if not problem or each.way != "mpirun"}


def launch(
    contender: Contender, ranks: int, seconds: float, systems: Sequence[str], kinds: Sequence[str]
) -> dict[str, Any]:
    """Launch ranks once; return by system what rank_programs/exchange_steps.py measured. Exits if they fail.

    seconds: of each system and kind. kinds: "exchange", "alone" (steps without any exchange) or both, in turns.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rates.json")
        program = [sys.executable, "-m", "rank_programs.exchange_steps", str(out), str(seconds)]
        environment = {**SEARCH_PATH, **contender.environment}
        limit_s = 120 + 8 * seconds * len(systems) + 60 * ranks / len(os.sched_getaffinity(0))
        command = [*program, "--systems", *systems, "--kinds", *kinds]
        try:
            finished = run_ranks(contender.way, ranks, command, environment, limit_s)
        except subprocess.TimeoutExpired:
            sys.exit(f"error: {ranks} ranks by {contender.way}: not done after {limit_s:.0f} s")
        if finished.returncode or not out.exists():
            sys.exit(f"error: {contender.way}: exit code {finished.returncode}: {finished.stderr[-2000:]}")
        measured: dict[str, Any] = json.loads(out.read_text())
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=count, default=2, metavar="N", help="ranks; default %(default)s")
    parser.add_argument("--rounds", type=count, default=3, help="launches of each; default %(default)s")
    parser.add_argument("--seconds", type=above_0, default=4.0, help="measured in each launch; default %(default)s")
    parser.add_argument("--system", choices=SYSTEMS, help="one of them alone; default: all")
    parser.add_argument("--only", metavar="TEXT", default="", help="contenders whose names hold this")
    arguments = parser.parse_args()
    known = contenders_here()
    chosen = {name: contender for name, contender in known.items() if arguments.only in name}
    if not chosen:
        parser.error(f"--only {arguments.only}: no contender's name holds it; there are {'; '.join(known)}.")
    first = next(iter(chosen.values()))
    chosen = {CEILING: first._replace(environment={YIELDS: "1"}), **chosen}
    systems = [arguments.system] if arguments.system else list(SYSTEMS)
    rates: dict[str, dict[str, list[float]]] = {system: {name: [] for name in chosen} for system in systems}
    for _ in range(arguments.rounds):
        for name, contender in chosen.items():
            kind = "alone" if name == CEILING else "exchange"
            measured = launch(contender, arguments.np, arguments.seconds, systems, [kind])
            for system, found in measured.items():
                records_per_step = arguments.np * SYSTEMS[system].batch
                rates[system][name].append(records_per_step * statistics.median(found[kind]))
                print(f"{name}: {system} {rates[system][name][-1]:,.0f} records/s", file=sys.stderr, flush=True)
    for system in systems:
        show(f"{TITLES[system]}; {arguments.np} ranks", rates[system])


def show(title: str, rates: Mapping[str, Sequence[float]]) -> None:
    medians = {name: statistics.median(launches) for name, launches in rates.items()}
    rows = []
    for name in sorted(medians, key=lambda name: -medians[name]):
        figures = [f"{value:,.0f}" for value in (medians[name], min(rates[name]), max(rates[name]))]
        rows.append((name, *figures, f"{medians[name] / medians[CEILING]:.2f}"))
    screen = open_screen()
    screen.print(title, markup=False)
    screen.print(build_table(("", "records/s", "slowest", "fastest", "of the ceiling"), rows, left=("",)))


if __name__ == "__main__":
    main()
