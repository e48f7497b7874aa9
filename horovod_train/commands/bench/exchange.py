"""`bench exchange`: steps per second of ranks on this host, by the way in which they exchange gradients.

python -m horovod_train.main bench exchange --np 2

Each contender is launched separately, because Horovod reads its settings when it starts. They take turns, so that other
load on the machine affects all of them; the medians over the rounds are shown. The ceiling trains without any exchange.

python -m horovod_train.main bench exchange --np 1,2,4,8,16

With several numbers of ranks, one contender shows how the cost of exchanging grows with the ranks; see growth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from horovod_train.commands.bench import growth
from horovod_train.commands.bench.exchange_run import Contender, contenders, launch
from horovod_train.commands.cli import above_0, build_table, count, open_screen, several
from horovod_train.distributed.launch.local import mpi_problem
from horovod_train.errors import UserError

CEILING = "no exchange"
SYSTEMS = {
    "convnet": "convnet: 3.3 million weights, 64 images a rank",
    "mlp": "mlp: 71 weights, 100 records a rank",
}
OLD_NAMES = {"s6": "convnet", "s1": "mlp"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    numbers = "ranks; several numbers: how the cost grows; default 2"
    parser.add_argument("--np", type=several(count), default=[2], metavar="N[,N]", help=numbers)
    parser.add_argument("--rounds", type=count, default=3, help="launches of each; default %(default)s")
    parser.add_argument("--seconds", type=above_0, default=4.0, help="measured in each launch; default %(default)s")
    parser.add_argument(
        "--system",
        type=lambda name: OLD_NAMES.get(name, name),
        choices=SYSTEMS,
        action="append",
        help="one of them alone; default: all",
    )
    parser.add_argument("--only", metavar="TEXT", action="append", help="contenders whose names hold this")
    parser.add_argument("--json", action="store_true", help="print the figures of every launch as one JSON object")
    growth.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    numbers = growth.read_numbers(arguments)
    projected = growth.read_projected(arguments, has_several_sizes=len(numbers) > 1)
    known = _known(arguments.only)
    if len(numbers) > 1:
        name = growth.choose(list(known), arguments.only)
        return growth.run(name, known[name], numbers, projected, arguments)
    return _compare({CEILING: _ceiling(known), **known}, numbers[0], arguments)


def _compare(chosen: dict[str, Contender], ranks: int, arguments: argparse.Namespace) -> int:
    systems = arguments.system or list(SYSTEMS)
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for _ in range(arguments.rounds):
        for name, contender in chosen.items():
            by_system = launch(name, contender, ranks, systems, arguments.seconds)
            measured = {system: _records_per_s(row) * ranks for system, row in by_system.items()}
            rates[name].append(measured)
            figures = ", ".join(f"{system} {rate:,.0f} records/s" for system, rate in measured.items())
            print(f"{name}: {figures}", file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps({"np": ranks, "records_per_s": rates}, indent=2))
    else:
        for system in systems:
            _show(system, ranks, {name: [row[system] for row in rows] for name, rows in rates.items()})
    return 0


def _records_per_s(row: dict[str, Any]) -> float:
    return statistics.median(row["steps_per_s"] or row["alone_per_s"]) * float(row["rows"])


def _known(only: list[str] | None) -> dict[str, Contender]:
    """Return the contenders that can run here and that `only` asks for."""
    problem = mpi_problem()
    known = contenders()
    if problem:
        print(f"without MPI: {problem}", file=sys.stderr)
        known = {name: contender for name, contender in known.items() if contender.way != "mpirun"}
    chosen = {name: contender for name, contender in known.items() if not only or any(text in name for text in only)}
    if not chosen:
        raise UserError(f"bench exchange: --only {only}: no contender's name holds it; there are {', '.join(known)}.")
    return chosen


def _ceiling(known: dict[str, Contender]) -> Contender:
    return Contender(next(iter(known.values())).way, {"OMPI_MCA_mpi_yield_when_idle": "1"}, kinds="alone")


def _show(system: str, ranks: int, rates: dict[str, list[float]]) -> None:
    console = open_screen()
    console.print(f"{SYSTEMS[system]}; {ranks} ranks", markup=False)
    ceiling = statistics.median(rates[CEILING])
    rows = []
    for name, launches in sorted(rates.items(), key=lambda item: -statistics.median(item[1])):
        median = statistics.median(launches)
        figures = [f"{value:,.0f}" for value in (median, min(launches), max(launches))]
        rows.append((name, *figures, f"{median / ceiling:.2f}"))
    console.print(build_table(("", "records/s", "slowest", "fastest", "of the ceiling"), rows, left=("",)))
