"""Which records each rank reads in each step of an epoch. Arithmetic only: no files, no TensorFlow, no communication.

The *sequence* of an epoch is every record once: blocks in an order drawn from (seed, epoch), neighbouring blocks
grouped into *windows*, and the records of a window in an order drawn from (seed, epoch) as well. The sequence is cut
into `global_batch_size` *lanes* of equal length (to within one record), and step s takes the s-th record of every lane:

    sequence | window | window | window | window | window | window |      lanes = 3, N = 16
    lanes    |  lane 0        |  lane 1        |  lane 2             |    step 0 takes the first of each lane, …

A rank owns several neighbouring lanes. What a step consumes therefore does not depend on the number of ranks, every
rank takes the same number of steps, and each rank reads a different stretch of the sequence, block after block. Only
the last step can miss records, at most one per lane, spread evenly over the lanes and so over the ranks; missing ones
are padding.

With *buckets*, records whose lists are about equally long come together: each lane sorts its own records of some
neighbouring steps, a *pool*, by length, so that a step gets the k-th shortest record of every lane, and the steps of a
pool come in an order drawn from (seed, epoch). A lane still gives each of its records once.

A record is a number: its position in file order. A run's position in an epoch is a number of records over all ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from horovod_train.data import counter_rng

Order = Literal["shuffled", "lanes", "file"]

_BLOCKS, _RECORDS, _POOLS = 1, 2, 4  # so that the three orders are independent
_STEPS_MEASURED = 256


class Rows(NamedTuple):
    """What one rank reads: `records` int64 [steps, rows] to read, `real` bool [steps, rows], False for padding.

    A padding row contains a neighbour's record, so that it can be read like any other; its weight is then 0.
    """

    records: np.ndarray
    real: np.ndarray


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
    max_lengths: tuple[int, ...]
    """Of each list."""

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two Buckets that give the same order."""
        column = np.ascontiguousarray(self.lengths[:, self.names.index(self.by)], "<i4")
        digest = hashlib.sha256(f"{self.by} {self.steps} ".encode())
        digest.update(column.data)
        return digest.hexdigest()

    @cached_property
    def digest(self) -> str:
        """Equal for two Buckets of the same lengths of all lists: only then do ranks cut them alike."""
        digest = hashlib.sha256(repr(self.names).encode())
        digest.update(np.ascontiguousarray(self.lengths, "<i4").data)  # no copy: it may be a mapped file
        return digest.hexdigest()

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
        """Return how long the lists of each step are once cut, at least 1: int64 [steps, names].

        That is as long as the longest one of those with the same max_length. Words and their tags stay of one length,
        where tags end in values that equal padding.

        records: of all lanes, int64 [steps, lanes]; real: bool, False for padding.
        """
        longest = np.where(real[:, :, None], self.lengths[records], 0).max(axis=1)
        go_together = np.equal.outer(self.max_lengths, self.max_lengths)
        return np.where(go_together, longest[:, None], 1).max(axis=2).clip(1).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Plan:
    """The order of one dataset. `block_counts` int64 [blocks]: the records of each block, in file order.

    order "shuffled": as above. "lanes": the same lanes over the records in file order, each rank reading one stretch.
    "file": step s takes the next `global_batch_size` records of the files, each rank a slice of them. content: a digest
    of what the records hold; the order does not depend on it. buckets: how lanes are sorted by length.
    """

    block_counts: np.ndarray
    global_batch_size: int
    seed: int = 0
    order: Order = "shuffled"
    shuffle_window: int = 10_000
    drop_remainder: bool = False
    content: str = ""
    buckets: Buckets | None = None

    @cached_property
    def num_records(self) -> int:
        return int(self.block_counts.sum())

    @property
    def steps_per_epoch(self) -> int:
        full_steps, remainder = divmod(self.num_records, self.global_batch_size)
        return full_steps + (remainder > 0 and not self.drop_remainder)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for plans of the same order and content, in which a position in an epoch means the same records."""
        facts = (self.global_batch_size, self.seed, self.order, self.shuffle_window, self.drop_remainder, self.content)
        text = repr(facts) + (self.buckets.fingerprint if self.buckets else "")
        return hashlib.sha256(self.block_counts.astype("<i8").tobytes() + text.encode()).hexdigest()

    def count(self, step: int) -> int:
        """Return the number of records that `step` of an epoch consumes over all ranks."""
        return min(self.global_batch_size, self.num_records - step * self.global_batch_size)

    def rows_per_rank(self, size: int) -> int:
        """Return the rows of one rank's batch, padding included; the same on every rank."""
        return -(-self.global_batch_size // size)

    def sequence(self, epoch: int) -> EpochSequence:
        """Return the order of all records in an epoch."""
        if self.order != "shuffled":
            window = None
        elif self.shuffle_window >= self.num_records:
            window = self.num_records
        else:
            window = -(-self.shuffle_window // self.global_batch_size)  # of one lane; all lanes are open together
        return EpochSequence(self.block_counts, self.seed, epoch, window)

    def rows(self, sequence: EpochSequence, rank: int, size: int, first_step: int, last_step: int) -> Rows:
        """Return what a rank reads in [first_step, last_step) of the epoch of `sequence`."""
        positions, real = self.positions(rank, size, first_step, last_step)
        if self.buckets is None:
            return Rows(sequence.records(positions), real)
        records, full_steps = np.empty_like(positions), self.num_records // self.global_batch_size
        step = first_step
        while step < last_step:
            first, last = self.buckets.pool(step, full_steps)
            if step < last:
                pool_records = sequence.records(self.positions(rank, size, first, last)[0])
                sorted_by_length = self.buckets.sort(pool_records, self.seed, sequence.epoch, first)
                end = min(last, last_step)
                records[step - first_step : end - first_step] = sorted_by_length[step - first : end - first]
            else:
                end = last_step
                records[step - first_step :] = sequence.records(positions[step - first_step :])
            step = end
        return Rows(records, real)

    def blocks_near(self, sequence: EpochSequence, rank: int, size: int, first_step: int, last_step: int) -> np.ndarray:
        """Return the blocks to keep while a rank reads these steps: those of every window that a lane is in."""
        if self.buckets is not None:
            pool = self.buckets.steps
            first_step, last_step = first_step // pool * pool, min(-(-last_step // pool) * pool, self.steps_per_epoch)
        return sequence.blocks_near(self.positions(rank, size, first_step, last_step)[0])

    def widths(self, sequence: EpochSequence, first_step: int, last_step: int) -> np.ndarray:
        """Return how long the lists of each step are over all ranks: int64 [steps, lists]; without buckets no lists."""
        if self.buckets is None:
            return np.zeros((last_step - first_step, 0), np.int64)
        return self.buckets.widths(*self.rows(sequence, 0, 1, first_step, last_step))

    def positions(self, rank: int, size: int, first_step: int, last_step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a rank's positions in a sequence in [first_step, last_step): int64 and bool `real`, [steps, rows]."""
        lanes, records = self.global_batch_size, self.num_records
        first, last = rank * lanes // size, (rank + 1) * lanes // size
        lane = np.arange(first, first + self.rows_per_rank(size))
        owned = lane < last
        lane = np.minimum(lane, max(last - 1, 0))
        steps = np.arange(first_step, last_step)[:, None]
        if self.order == "file":
            count = np.minimum(lanes, records - steps * lanes)
            start, end = lane * count // lanes, (lane + 1) * count // lanes  # a full step: lane and lane + 1
            positions, ends = steps * lanes + start, steps * lanes + end
        else:
            positions, ends = lane * records // lanes + steps, (lane + 1) * records // lanes
        real = owned & (positions < ends)
        return np.clip(positions, 0, np.maximum(ends - 1, 0)), real


class EpochSequence:
    """All records of one epoch in order. Caches the order inside the windows that were last asked for."""

    def __init__(self, block_counts: np.ndarray, seed: int, epoch: int, window: int | None) -> None:
        """`window`: how many records are mixed with one another, at least a block; None: file order."""
        self.blocks = np.arange(len(block_counts))
        if window is not None:
            self.blocks = counter_rng.permutation(counter_rng.key(seed, epoch, _BLOCKS), self.blocks)
        self.epoch = epoch
        self._key = counter_rng.key(seed, epoch, _RECORDS)
        self._shuffled = window is not None
        self._are_single = self._shuffled and window == 1 and bool((block_counts == 1).all())
        self._first_record = _running_sum(block_counts)[:-1][self.blocks]  # each block's first record, in file order
        starts = _running_sum(block_counts[self.blocks])  # the position at which each block starts
        changes = np.diff(starts[:-1] // (window or 1), prepend=-1)
        self._window_blocks = np.append(np.flatnonzero(changes), len(self.blocks))
        self._window_starts = starts[self._window_blocks]
        self._starts = starts
        self._orders: dict[int, np.ndarray] = {}

    def records(self, positions: np.ndarray) -> np.ndarray:
        """Return the record at each position: int64 of the same shape."""
        if not self._shuffled or not positions.size:
            return positions
        if self._are_single:
            return self.blocks[positions]
        flat = positions.ravel()
        windows = self._windows_of(flat)
        by_window = np.argsort(windows, kind="stable")
        needed, first = np.unique(windows[by_window], return_index=True)
        self._orders = {w: self._orders[w] if w in self._orders else self._shuffle_window(w) for w in needed.tolist()}
        records = np.empty_like(flat)
        for window, members in zip(needed.tolist(), np.split(by_window, first[1:]), strict=True):
            records[members] = self._orders[window][flat[members] - self._window_starts[window]]
        return records.reshape(positions.shape)

    def blocks_near(self, positions: np.ndarray) -> np.ndarray:
        """Return the blocks of every window that contains a position: those to keep while a lane is there."""
        if self._are_single:
            return self.blocks[positions.ravel()]
        windows = np.unique(self._windows_of(positions.ravel()))
        first, last = self._window_blocks[windows], self._window_blocks[windows + 1]
        return np.concatenate([self.blocks[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)])

    def _windows_of(self, positions: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._window_starts, positions, side="right") - 1

    def _shuffle_window(self, window: int) -> np.ndarray:
        first, last = self._window_blocks[window], self._window_blocks[window + 1]
        counts = np.diff(self._starts[first : last + 1])
        offset = self._first_record[first:last] - (self._starts[first:last] - self._starts[first])
        records = np.repeat(offset, counts) + np.arange(counts.sum())
        return records[counter_rng.permutation(self._key, records)]


def _running_sum(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def padding_share(plan: Plan) -> dict[str, float]:
    """Return by name the share of each list that is padding, over the first steps; {} without buckets."""
    if plan.buckets is None:
        return {}
    steps, sequence = min(plan.steps_per_epoch, _STEPS_MEASURED), plan.sequence(0)
    rows = plan.rows(sequence, 0, 1, 0, steps)
    items = plan.widths(sequence, 0, steps) * rows.real.sum(axis=1, keepdims=True)
    used = plan.buckets.lengths[rows.records][rows.real].sum(axis=0)
    return dict(zip(plan.buckets.names, (1 - used / items.sum(axis=0)).tolist(), strict=True))
