"""What the programs share: their arguments, the images, and how the speed is measured. Needs NumPy only.

Each program trains the convnet of models/convnet.py with Nesterov momentum on images in main memory, uint8, shuffled,
64 a rank, and scales them in the step. All ranks time the same steps; each writes images per second over all of them,
and a digest of its weights, which must be the same on all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

BATCH = 64
"""Images of one rank in a step."""
LEARNING_RATE, MOMENTUM = 0.01, 0.9
STEPS_PER_CALL = 10
SCALE, OFFSET = 1 / 255, -0.5
"""Pixels become SCALE · pixel + OFFSET."""


class Task(NamedTuple):
    """images: uint8 [n, 28, 28, 1]; labels: int64 [n]; threads: that a rank computes with."""

    images: np.ndarray
    labels: np.ndarray
    steps: int
    out: Path
    """A folder for what ranks find."""
    threads: int


def read_task() -> Task:
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    arguments = parser.parse_args()
    with np.load(arguments.images) as file:
        images, labels = file["images"], file["labels"]
    threads = max(1, len(os.sched_getaffinity(0)) // arguments.ranks)
    return Task(images, labels, arguments.steps, arguments.out, threads)


def measure(call: Callable[[], object], steps: int, size: int) -> float:
    """Call it until so many steps are done; return images per second over all ranks, without the first fifth.

    call: STEPS_PER_CALL steps, which are done when it returns.
    """
    skipped = max(1, steps // STEPS_PER_CALL // 5)
    for _ in range(skipped):
        call()
    counted = max(1, steps // STEPS_PER_CALL - skipped)
    began = time.perf_counter()
    for _ in range(counted):
        call()
    return BATCH * size * STEPS_PER_CALL * counted / (time.perf_counter() - began)


def write(out: Path, rank: int, images_per_s: float, weights: Iterable[np.ndarray]) -> None:
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(weight).tobytes() for weight in weights)).hexdigest()
    with (out / f"rank-{rank}.json").open("x", encoding="utf-8") as file:
        json.dump({"images_per_s": images_per_s, "weights_sha256": digest}, file)
