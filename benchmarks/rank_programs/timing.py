"""What the rank programs share: what they train, their arguments, the records, and how speed is measured.

Needs NumPy only, so that a program loads no other framework than its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

SEARCH_PATH = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
}
"""The environment in which `python -m rank_programs.NAME` works."""
SCALE, OFFSET = 1 / 255, -0.5
"""Pixels become SCALE · pixel + OFFSET."""


class System(NamedTuple):
    """batch: records of one rank in a step. momentum: Nesterov's, 0 for none."""

    batch: int
    steps_per_call: int
    learning_rate: float
    momentum: float


SYSTEMS = {"convnet": System(64, 10, 0.01, 0.9), "mlp": System(100, 200, 0.001, 0.0)}
"""The models of models/convnet.py, on images uint8 [28, 28, 1], and models/mlp.py, on five numbers."""


class Task(NamedTuple):
    """inputs, targets: of all ranks. way: one that the program offers. threads: that a rank computes with."""

    way: str
    name: str
    inputs: np.ndarray
    targets: np.ndarray
    steps: int
    out: Path
    """A folder for what ranks find."""
    threads: int

    @property
    def system(self) -> System:
        return SYSTEMS[self.name]


def read_task(ways: Collection[str]) -> Task:
    """Read the command line, as peers.py writes it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=ways)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("records", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("ranks", type=int)
    words = parser.parse_args()
    with np.load(words.records) as file:
        inputs, targets = file["inputs"], file["targets"]
    threads = max(1, len(os.sched_getaffinity(0)) // words.ranks)
    return Task(words.way, words.system, inputs, targets, words.steps, words.out, threads)


def measure(call: Callable[[], object], system: System, steps: int, size: int) -> float:
    """Call it until so many steps are done; return records per second over all ranks, without the first fifth.

    call: system.steps_per_call steps, which are done when it returns.
    """
    skipped = max(1, steps // system.steps_per_call // 5)
    for _ in range(skipped):
        call()
    counted = max(1, steps // system.steps_per_call - skipped)
    began = time.perf_counter()
    for _ in range(counted):
        call()
    return system.batch * size * system.steps_per_call * counted / (time.perf_counter() - began)


def write(out: Path, rank: int, records_per_s: float, weights: Iterable[np.ndarray]) -> None:
    """Write the speed and a digest of the weights, which must be the same on all ranks."""
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(weight).tobytes() for weight in weights)).hexdigest()
    with (out / f"rank-{rank}.json").open("x", encoding="utf-8") as file:
        json.dump({"records_per_s": records_per_s, "weights_sha256": digest}, file)
