"""How the time of a training step grows with the ranks: α · hops + β · bytes + γ · compute, fitted to measurements.

    hops     messages that follow one another: an exchange takes two collectives, one in which ranks agree which tensors
             all of them have, and the sum itself. In each, a message passes log2 n ranks (MPI, recursive doubling) or
             goes round the ring twice, 2 (n - 1) ranks (gloo). A step counts as one exchange: those of its tensors
             overlap or are fused.
    bytes    that each rank sends: 2 (n - 1) / n of the gradients, the least that any allreduce needs (Patarasuk & Yuan
             2009).
    compute  the same step without exchange, measured with as many ranks on the same cores.

Horovod's core looks for tensors in cycles, so a step that exchanges also waits half a cycle on average. This is known
and not fitted. On one host, n ranks share c cores. Where n > c, ranks that are to take part in an exchange wait for a
core, so hops and bytes count n / c times. Measures nothing; see growth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from horovod_train.distributed.launch.local import Way


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


def cores_shared(ranks: int, cores: int) -> float:
    """Return how many ranks there are to a core of the host, at least 1."""
    return max(1.0, ranks / cores)


def terms(point: Point, topology: Topology, cores: int) -> tuple[float, float, float]:
    """Return what α, β and γ are multiplied by."""
    shared = cores_shared(point.ranks, cores)
    return (
        shared * COLLECTIVES * hops(topology, point.ranks),
        shared * sent_bytes(point.ranks, point.gradient_bytes),
        point.compute_s,
    )


def fit(points: Sequence[Point], topology: Topology, cores: int) -> Costs:
    """Return the costs, none negative, with the least sum of squares of the relative residuals.

    At least three points, of which two have more than one rank and different gradients.
    """
    # Each row divided by its time, so that a step of a millisecond counts as much as one of a second.
    rows = np.array([terms(point, topology, cores) for point in points])
    rows /= np.array([[point.step_s] for point in points])
    expected = np.array([1 - point.wait_s / point.step_s for point in points])
    scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(float).tiny)
    best, least_error = np.zeros(3), math.inf
    # With three costs, trying every choice of those that are not zero is the whole of non-negative least squares.
    for used in itertools.chain.from_iterable(itertools.combinations(range(3), count) for count in (1, 2, 3)):
        costs = np.zeros(3)
        costs[list(used)] = np.linalg.lstsq((rows / scale)[:, list(used)], expected, rcond=None)[0]
        error = float(np.sum((rows / scale @ costs - expected) ** 2))
        if (costs >= 0).all() and error < least_error:
            best, least_error = costs, error
    return Costs(*(best / scale).tolist())


def predict(costs: Costs, point: Point, topology: Topology, cores: int) -> float:
    """Return the seconds of a step as the costs give them."""
    return point.wait_s + float(np.dot(costs, terms(point, topology, cores)))


def residual(costs: Costs, point: Point, topology: Topology, cores: int) -> float:
    """Return (measured - predicted) / measured."""
    return 1 - predict(costs, point, topology, cores) / point.step_s
