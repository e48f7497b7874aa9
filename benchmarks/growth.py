"""How the cost of exchanging gradients grows with the ranks of this host: measured, and fitted by α, β and γ.

python benchmarks/growth.py --np 1,2,4,8,16

The time of a step is taken as α · hops + β · bytes + γ · compute:

    hops     messages that follow one another: an exchange takes two collectives, one in which ranks agree which tensors
             all of them have, and the sum itself. In each, a message passes log2 n ranks (MPI, recursive doubling) or
             goes round the ring twice, 2 (n - 1) ranks (gloo). A step counts as one exchange: those of its tensors
             overlap or are fused.
    bytes    that each rank sends: 2 (n - 1) / n of the gradients, the least that any allreduce needs (Patarasuk & Yuan
             2009).
    compute  the same step without exchange, measured with as many ranks on the same cores.

Horovod's core looks for tensors in cycles, so a step that exchanges also waits half a cycle on average. This is known
and not fitted. On one host, n ranks share c cores. Where n > c, ranks that are to take part in an exchange wait for a
core, so hops and bytes count n / c times.

Each number of ranks is launched --rounds times, in turns. The fastest of all windows counts: other work on the machine
can only make one slower. projection.py says what ranks pay for each other on a network.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from exchange import CONTENDERS, CYCLE_MS, Contender, contenders_here, launch
from rank_programs.timing import SYSTEMS

from horovod_train.commands.cli import above_0, count, open_screen, several
from horovod_train.distributed.launch.local import Way

DEFAULT_CONTENDERS = ("MPI, yielding, cycle 0.1 ms", "gloo, cycle 0.1 ms")
"""The first that can run here is measured. Cycles are short, so that steps wait for ranks and not for the clock."""
GOOD_RESIDUAL = 0.15

Topology = Literal["ring", "tree"]
TOPOLOGIES: dict[Way, Topology] = {"mpirun": "tree", "horovodrun": "ring"}
"""How a small message gets round: gloo's allreduce, also of Horovod's own bits, is a ring; MPI's is by doubling."""
COLLECTIVES = 2
"""Of an exchange."""


def hops(topology: Topology, ranks: int) -> int:
    """Return how many messages of one small collective follow one another."""
    return 2 * (ranks - 1) if topology == "ring" else math.ceil(math.log2(ranks))


def sent_bytes(ranks: int, size: float) -> float:
    """Return the bytes that each rank sends in an allreduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


class Point(NamedTuple):
    """A system measured on so many ranks. gradient_bytes: that it exchanges in a step."""

    system: str
    ranks: int
    gradient_bytes: int
    compute_s: float
    """Seconds of a step without exchange, on as many ranks at the same time."""
    step_s: float
    cycle_s: float = 0.0
    """Seconds of a cycle of Horovod's core."""

    @property
    def wait_s(self) -> float:
        """Seconds for which an exchange waits for the next cycle, on average."""
        return self.cycle_s / 2 if self.ranks > 1 else 0.0


class Costs(NamedTuple):
    """α and β in seconds for one hop and one byte if each rank has a core; γ has no unit."""

    hop_s: float
    byte_s: float
    compute: float


class Model(NamedTuple):
    """The costs of ranks on a host with so many cores."""

    topology: Topology
    cores: int
    costs: Costs

    def terms(self, point: Point) -> tuple[float, float, float]:
        """Return what α, β and γ are multiplied by."""
        ranks_per_core = max(1.0, point.ranks / self.cores)
        return (
            ranks_per_core * COLLECTIVES * hops(self.topology, point.ranks),
            ranks_per_core * sent_bytes(point.ranks, point.gradient_bytes),
            point.compute_s,
        )

    def predict(self, point: Point) -> float:
        """Return the seconds of a step as the costs give them."""
        return point.wait_s + float(np.dot(self.costs, self.terms(point)))

    def residual(self, point: Point) -> float:
        """Return (measured - predicted) / measured."""
        return 1 - self.predict(point) / point.step_s


def fit(points: Sequence[Point], topology: Topology, cores: int) -> Model:
    """Return the costs, none negative, with the least sum of squares of the relative residuals.

    At least three points, of which two have more than one rank and different gradients.
    """
    model = Model(topology, cores, Costs(0.0, 0.0, 0.0))
    # Each row divided by its time, so that a step of a millisecond counts as much as one of a second.
    rows = np.array([model.terms(point) for point in points]) / np.array([[point.step_s] for point in points])
    expected = np.array([1 - point.wait_s / point.step_s for point in points])
    scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(float).tiny)
    best, least_error = np.zeros(3), math.inf
    # With three costs, trying every choice of those that are not zero is the whole of non-negative least squares.
    for used in itertools.chain.from_iterable(itertools.combinations(range(3), number) for number in (1, 2, 3)):
        costs = np.zeros(3)
        costs[list(used)] = np.linalg.lstsq((rows / scale)[:, list(used)], expected, rcond=None)[0]
        error = float(np.sum((rows / scale @ costs - expected) ** 2))
        if (costs >= 0).all() and error < least_error:
            best, least_error = costs, error
    return model._replace(costs=Costs(*(best / scale).tolist()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ranks = "numbers of ranks; default 1,2,4"
    parser.add_argument("--np", type=several(count), default=[1, 2, 4], metavar="N,N", help=ranks)
    parser.add_argument("--rounds", type=count, default=3, help="launches of each; default %(default)s")
    parser.add_argument("--seconds", type=above_0, default=4.0, help="measured in each launch; default %(default)s")
    parser.add_argument("--contender", choices=CONTENDERS, metavar="NAME", help='such as "gloo, cycle 1 ms"')
    parser.add_argument("--json", action="store_true", help="print points and costs as one JSON object")
    arguments = parser.parse_args()
    numbers = sorted(set(arguments.np))
    if sum(number > 1 for number in numbers) < 2:
        parser.error("--np: a fit needs two numbers above 1, such as 1,2,4; received fewer.")
    known = contenders_here()
    name = arguments.contender or next(name for name in DEFAULT_CONTENDERS if name in known)
    if name not in known:
        parser.error(f"--contender {name}: cannot run here; there are {'; '.join(known)}.")
    points = measure(known[name], numbers, arguments.rounds, arguments.seconds)
    model = fit(points, TOPOLOGIES[known[name].way], len(os.sched_getaffinity(0)))
    if arguments.json:
        rows = [point._asdict() | {"residual": model.residual(point)} for point in points]
        found = {"contender": name, "cores": model.cores, "costs": model.costs._asdict(), "points": rows}
        print(json.dumps(found, indent=2))
        return
    title = f"{name}; {model.cores} cores; the fastest windows of {arguments.rounds} launches\n"
    open_screen().print(title, *fit_lines(points, model), sep="\n", markup=False)


def measure(contender: Contender, numbers: Sequence[int], rounds: int, seconds: float) -> list[Point]:
    """Return a point for each number of ranks and system."""
    launches: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}
    for turn, number in itertools.product(range(rounds), numbers):
        launches[number].append(launch(contender, number, seconds, list(SYSTEMS), ["exchange", "alone"]))
        print(f"round {turn + 1}: {number} ranks measured", file=sys.stderr, flush=True)
    points, cycle_s = [], float(contender.environment[CYCLE_MS]) / 1e3
    for number, system in itertools.product(numbers, SYSTEMS):
        rows = [measured[system] for measured in launches[number]]
        alone_s, step_s = (1 / max(max(row[kind]) for row in rows) for kind in ("alone", "exchange"))
        points.append(Point(system, number, rows[0]["gradient_bytes"], alone_s, step_s, cycle_s))
    return points


def fit_lines(points: Sequence[Point], model: Model) -> Iterator[str]:
    """Yield a Markdown table of what was measured and what the fit gives, and the fit."""
    yield "| | ranks | hops | ms a step alone | ms a step | fitted | residual |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for point in points:
        cells = [point.system, str(point.ranks), str(hops(model.topology, point.ranks))]
        cells += [f"{1e3 * seconds:.3g}" for seconds in (point.compute_s, point.step_s, model.predict(point))]
        yield f"| {' | '.join(cells)} | {100 * model.residual(point):+.0f} % |"
    worst = max(abs(model.residual(point)) for point in points)
    verdict = "within" if worst <= GOOD_RESIDUAL else "beyond"
    costs, cores = model.costs, model.cores
    yield ""
    yield f"α {1e6 * costs.hop_s:.3g} µs a hop, β {1e9 * costs.byte_s:.3g} s/GB, γ {costs.compute:.2f}"
    yield f"fitted includes {1e3 * points[-1].wait_s:.3g} ms with several ranks, half a cycle of Horovod's core"
    yield f"the largest residual is {100 * worst:.0f} %, {verdict} the {GOOD_RESIDUAL:.0%} at which the fit is good"
    if any(point.ranks > cores for point in points):
        yield f"with more than {cores} ranks, hops and bytes count ranks / {cores} times: so many ranks share a core"


if __name__ == "__main__":
    main()
