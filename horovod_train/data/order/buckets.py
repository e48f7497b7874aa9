"""Batches of records whose lists are about equally long: the order of a lane's records, and the length of lists in each
step. Arithmetic only; see lengths for where the lengths come from, and sampler for lanes.

A lane's records of `steps` neighbouring steps are a *pool*. Each lane sorts its own pool by length, so that a step gets
the k-th shortest record of every lane, and the steps of a pool come in an order drawn from (seed, epoch). A lane still
gives each of its records once, and a step's records do not depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from horovod_train.data.order import counter_rng

_POOLS = 4  # so that the order of a pool's steps is independent of other draws; see sampler


@dataclass(frozen=True, eq=False)
class Buckets:
    """The lengths of all records' lists, and how they are used."""

    names: tuple[str, ...]
    """The features that are lists."""
    lengths: np.ndarray
    """int32 [records, names]: how long each list is, without what equals its padding at the end."""
    by: str
    """The feature by whose length records are sorted."""
    steps: int
    """The number of steps in a pool."""

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two Buckets that give the same order."""
        column = np.ascontiguousarray(self.lengths[:, self.names.index(self.by)], "<i4")
        return hashlib.sha256(f"{self.by} {self.steps} ".encode() + column.tobytes()).hexdigest()

    def pool(self, step: int, full_steps: int) -> tuple[int, int]:
        """Return the steps [first, last) of the pool that a step is in; a partial last step is in none."""
        first = step // self.steps * self.steps
        return first, min(first + self.steps, full_steps)

    def sort(self, records: np.ndarray, seed: int, epoch: int, first_step: int) -> np.ndarray:
        """Return the records of a pool, int64 [steps, lanes], in order of use. first_step: the first of the pool."""
        lengths = self.lengths[:, self.names.index(self.by)][records]
        by_length = np.argsort(lengths, axis=0, kind="stable")
        key = counter_rng.key(seed, epoch, _POOLS)
        step_order = counter_rng.permutation(key, np.arange(first_step, first_step + len(records)))
        return np.take_along_axis(records, by_length[step_order], axis=0)

    def widths(self, records: np.ndarray, real: np.ndarray) -> np.ndarray:
        """Return how long the longest list of each step is, at least 1: int64 [steps, names].

        records: of all lanes, int64 [steps, lanes]; real: bool, False for padding.
        """
        lengths = np.where(real[:, :, None], self.lengths[records], 0)
        return np.maximum(lengths.max(axis=1), 1).astype(np.int64)
