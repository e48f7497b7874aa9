"""`bench exchange --np 1,2,4,8,16`: how the cost of exchanging grows with the ranks, here and on a network.

Each number of ranks is launched as often as --rounds says, in turns; each launch measures steps with and without
exchange, also in turns. The fastest of all windows counts: other work on the machine can only make one slower. See
cost_model for the model, and projection for what it gives at hundreds of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from horovod_train.commands.bench.cost_model import (
    TOPOLOGIES,
    Costs,
    Point,
    Topology,
    fit,
    hops,
    predict,
    residual,
)
from horovod_train.commands.bench.exchange_run import Contender, launch
from horovod_train.commands.bench.peer_programs.timing import SYSTEMS
from horovod_train.commands.cli import above_0, count, open_screen, several
from horovod_train.errors import UserError
from horovod_train.output import logs

if TYPE_CHECKING:
    from horovod_train.commands.bench.projection import Network, Part

DEFAULT_CONTENDERS = ("MPI, yielding, cycle 0.1 ms", "gloo, cycle 0.1 ms")
"""The first that can run here is measured. Cycles are short, so that steps wait for ranks and not for the clock."""
GOOD_RESIDUAL = 0.15


class Projected(NamedTuple):
    """What the cost is projected to: numbers of ranks, Gbit/s of a rank's link, seconds of a message and of a step."""

    ranks: list[int]
    gbits: list[float]
    hop_s: float
    step_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with several numbers of ranks")
    group.add_argument("--to", type=several(count), metavar="N,N", help="ranks to project to; default 64,512")
    group.add_argument(
        "--gbit", type=several(above_0), metavar="G,G", help="Gbit/s of a rank's link; default 10,25,100"
    )
    group.add_argument("--hop-us", type=above_0, metavar="US", help="µs for a small message between hosts; default 20")
    group.add_argument("--step-ms", type=above_0, metavar="MS", help="ms of a step of ResNet-50 alone; default 100")


def read_numbers(arguments: argparse.Namespace) -> list[int]:
    numbers = sorted(set(arguments.np))
    if len(numbers) > 1 and sum(number > 1 for number in numbers) < 2:
        raise UserError("bench exchange: --np: a fit needs two numbers above 1, such as 1,2,4; received fewer.")
    if len(numbers) > 1 and arguments.system:
        raise UserError("bench exchange: with several --np, all systems are measured; leave out --system.")
    return numbers


def read_projected(arguments: argparse.Namespace, *, has_several_sizes: bool) -> Projected:
    """Raises UserError also for options that have no effect with one number of ranks."""
    options = {"--to": arguments.to, "--gbit": arguments.gbit, "--hop-us": arguments.hop_us}
    options |= {"--step-ms": arguments.step_ms}
    for option, value in options.items():
        if value is not None and not has_several_sizes:
            raise UserError(f"bench exchange: {option} needs several numbers of ranks, such as --np 1,2,4,8.")
    ranks, gbits = arguments.to or [64, 512], arguments.gbit or [10, 25, 100]
    if min(ranks) < 2:
        raise UserError(f"bench exchange: --to: expected numbers of at least 2 ranks; received {min(ranks)}.")
    return Projected(ranks, gbits, (arguments.hop_us or 20.0) / 1e6, (arguments.step_ms or 100.0) / 1e3)


def choose(known: Sequence[str], only: Sequence[str] | None) -> str:
    """Return the contender to measure: the only one that --only leaves, or a default."""
    if only is None:
        return next(name for name in DEFAULT_CONTENDERS if name in known)
    if len(known) > 1:
        raise UserError(
            f"bench exchange: with several --np, --only must leave one contender; it leaves {'; '.join(known)}."
        )
    return known[0]


def run(
    name: str, contender: Contender, numbers: Sequence[int], projected: Projected, arguments: argparse.Namespace
) -> int:
    both = contender._replace(kinds="both")
    by_ranks: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}
    for turn in range(arguments.rounds):
        for number, launches in by_ranks.items():
            launches.append(launch(name, both, number, list(SYSTEMS), arguments.seconds))
            print(
                f"round {turn + 1}, {number} ranks: {_line(_points(contender, number, launches[-1:]))}", file=sys.stderr
            )
    points = [point for number, launches in by_ranks.items() for point in _points(contender, number, launches)]
    topology, cores = TOPOLOGIES[contender.way], len(os.sched_getaffinity(0))
    costs = fit(points, topology, cores)
    if arguments.json:
        rows = [point._asdict() | {"residual": residual(costs, point, topology, cores)} for point in points]
        print(json.dumps({"contender": name, "cores": cores, "costs": costs._asdict(), "points": rows}, indent=2))
        return 0
    screen = open_screen()
    screen.print(f"{name}; {cores} cores; the fastest windows of {arguments.rounds} launches\n", markup=False)
    screen.print(*fit_lines(points, costs, topology, cores), sep="\n", markup=False)
    screen.print("", *_projection(projected, topology), sep="\n", markup=False)
    return 0


def _points(contender: Contender, ranks: int, launches: Sequence[dict[str, Any]]) -> list[Point]:
    """Return a point for each system: the fastest windows of these launches."""
    points, cycle_s = [], float(contender.environment["HOROVOD_CYCLE_TIME"]) / 1e3
    for system in SYSTEMS:
        rows = [measured[system] for measured in launches]
        alone, together = (1 / max(max(row[key]) for row in rows) for key in ("alone_per_s", "steps_per_s"))
        points.append(Point(system, ranks, rows[0]["gradient_bytes"], alone, together, cycle_s))
    return points


def _line(points: Sequence[Point]) -> str:
    return ", ".join(f"{p.system} {1e3 * p.step_s:.3g} ms a step, alone {1e3 * p.compute_s:.3g} ms" for p in points)


def fit_lines(points: Sequence[Point], costs: Costs, topology: Topology, cores: int) -> Iterator[str]:
    """Yield a Markdown table of what was measured and what the fit gives, and the fit."""
    yield "| | ranks | hops | ms a step alone | ms a step | fitted | residual |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for point in points:
        fitted, off = predict(costs, point, topology, cores), residual(costs, point, topology, cores)
        cells = [point.system, str(point.ranks), str(hops(topology, point.ranks))]
        cells += [f"{1e3 * seconds:.3g}" for seconds in (point.compute_s, point.step_s, fitted)]
        yield f"| {' | '.join(cells)} | {100 * off:+.0f} % |"
    worst = max(abs(residual(costs, point, topology, cores)) for point in points)
    yield ""
    yield f"α {1e6 * costs.hop_s:.3g} µs a hop, β {1e9 * costs.byte_s:.3g} s/GB, γ {costs.compute:.2f}"
    yield f"fitted includes {1e3 * points[-1].wait_s:.3g} ms with several ranks, half a cycle of Horovod's core"
    verdict = "within" if worst <= GOOD_RESIDUAL else "beyond"
    yield f"the largest residual is {100 * worst:.0f} %, {verdict} the {GOOD_RESIDUAL:.0%} at which the fit is good"
    if any(point.ranks > cores for point in points):
        yield f"with more than {cores} ranks, hops and bytes count ranks / {cores} times: so many ranks share a core"


def _projection(projected: Projected, topology: Topology) -> Iterator[str]:
    """Yield a Markdown table for ResNet-50 on a network."""
    # Imported here, because they load TensorFlow and Horovod.
    logs.load_tensorflow()
    from horovod_train.commands.bench import projection, rank_costs

    parts = projection.build_parts(rank_costs.measure(max(projected.ranks)), projected.step_s)
    networks = [projection.Network(1e9 * gbit, projected.hop_s, topology) for gbit in projected.gbits]
    links = " / ".join(f"{gbit:g}" for gbit in projected.gbits)
    way = "round a ring, as gloo sends it" if topology == "ring" else "by doubling, as MPI sends it"
    yield (
        f"ResNet-50 at {links} Gbit/s a rank, {1e6 * projected.hop_s:g} µs a message, {way}, "
        f"{1e3 * projected.step_s:g} ms a step alone; without overlap:"
    )
    yield ""
    yield f"| | when | {' | '.join(f'{ranks} ranks' for ranks in projected.ranks)} | 1 % of the time from |"
    yield f"|---|---|{'--:|' * (len(projected.ranks) + 1)}"
    for part in parts:
        cells = [_alternatives([_seconds(part, ranks, each) for each in networks]) for ranks in projected.ranks]
        since = ["—" if part.interval_s is None else _since(part, each) for each in networks]
        yield f"| {part.name} | {part.when} | {' | '.join(cells)} | {_alternatives(since)} |"


def _seconds(part: Part, ranks: int, network: Network) -> str:
    seconds = part.seconds(ranks, network)
    duration = f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
    return duration if part.interval_s is None else f"{duration} ({100 * part.share(ranks, network):.2g} %)"


def _since(part: Part, network: Network) -> str:
    from horovod_train.commands.bench.projection import MOST_RANKS, find_rank_limit

    ranks = find_rank_limit(part, network)
    return f"more than {MOST_RANKS:,}" if ranks is None else f"{ranks:,}"


def _alternatives(texts: Sequence[str]) -> str:
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)
