"""Computes what each rank would read in an epoch, from the plan. Reads no records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_train.data.order.sampler import Plan
from horovod_train.data.source import Blocks

_STEPS = 256  # at a time


@dataclass
class RankShare:
    """One rank in one epoch."""

    rank: int
    records: int = 0
    padding: int = 0
    """Rows with weight 0."""
    blocks: int = 0
    bytes: int = 0
    """The total size of those blocks: the rank reads at least this."""
    first: tuple[int, ...] = ()
    """The first records that it reads."""


def padding_share(plan: Plan) -> dict[str, float]:
    """Return by name the share of each list that is padding, over the first steps; {} without buckets."""
    if plan.buckets is None:
        return {}
    steps, sequence = min(plan.steps_per_epoch, _STEPS), plan.sequence(0)
    rows = plan.rows(sequence, 0, 1, 0, steps)
    items = plan.widths(sequence, 0, steps) * rows.real.sum(axis=1, keepdims=True)
    used = plan.buckets.lengths[rows.records][rows.real].sum(axis=0)
    return dict(zip(plan.buckets.names, (1 - used / items.sum(axis=0)).tolist(), strict=True))


def epoch_shares(plan: Plan, blocks: Blocks, epoch: int, size: int) -> tuple[list[RankShare], np.ndarray]:
    """Return the share of each of `size` ranks, and how often all ranks together read each record: int64 [records]."""
    sequence, counts, shares = plan.sequence(epoch), np.zeros(plan.num_records, np.int64), []
    for rank in range(size):
        share, is_block_read = RankShare(rank), np.zeros(len(blocks.records), bool)
        for first in range(0, plan.steps_per_epoch, _STEPS):
            rows = plan.rows(sequence, rank, size, first, min(first + _STEPS, plan.steps_per_epoch))
            records = rows.records[rows.real]
            np.add.at(counts, records, 1)
            is_block_read[blocks.containing(records)] = True
            share.records += len(records)
            share.padding += rows.real.size - len(records)
            share.first = share.first or tuple(records[:4].tolist())
        share.blocks, share.bytes = int(is_block_read.sum()), int(blocks.bytes[is_block_read].sum())
        shares.append(share)
    return shares, counts
