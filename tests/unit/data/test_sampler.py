"""Which records each rank reads: every one once an epoch, at any number of ranks, from any step on."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import ids_of

from horovod_train.data.sampler import Buckets, Order, Plan

ORDERS: tuple[Order, ...] = ("shuffled", "lanes", "file")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    records = draw(st.integers(1, 5000))
    largest = draw(st.sampled_from([1, 7, 64, 256]))
    sizes = np.random.default_rng(draw(st.integers(0, 2**32))).integers(1, largest + 1, records)
    blocks = sizes[: int(np.searchsorted(np.cumsum(sizes), records)) + 1]
    blocks[-1] -= blocks.sum() - records
    return Plan(
        blocks.astype(np.int64),
        global_batch_size=draw(st.integers(9, 600)),
        seed=draw(st.integers(0, 2**63)),
        order=draw(st.sampled_from(ORDERS)),
        shuffle_window=draw(st.integers(1, 6000)),
        drop_remainder=draw(st.booleans()),
    )


ranks = st.integers(1, 9)
a_few = settings(max_examples=50)  # examples a property


def taken(plan: Plan, epoch: int, size: int, first_step: int = 0) -> list[np.ndarray]:
    """What all ranks together take in each step, in order of rank and row, without padding."""
    sequence, last = plan.sequence(epoch), plan.steps_per_epoch
    by_rank = [ids_of(plan.rows(sequence, rank, size, first_step, last)) for rank in range(size)]
    steps = np.concatenate(by_rank, axis=1) if last > first_step else np.zeros((0, 0), np.int64)
    return [step[step >= 0] for step in steps]


def faults(plan: Plan, steps: list[np.ndarray]) -> tuple[int, int]:
    """Records that are missing, beyond those that drop_remainder leaves out, and records that came twice."""
    counts = np.bincount(np.concatenate([*steps, np.zeros(0, np.int64)]), minlength=plan.num_records)
    expected = min(plan.num_records, plan.steps_per_epoch * plan.global_batch_size)
    return expected - int((counts > 0).sum()), int((counts > 1).sum())


@a_few
@given(plans(), ranks, st.integers(0, 3))
def test_every_record_exactly_once(plan: Plan, size: int, epoch: int) -> None:
    assert faults(plan, taken(plan, epoch, size)) == (0, 0)


@a_few
@given(plans(), ranks)
def test_a_lost_and_a_doubled_record_would_be_seen(plan: Plan, size: int) -> None:
    steps = taken(plan, 0, size)
    if steps:
        without = [steps[0][1:], *steps[1:]]
        doubled = [*steps, steps[0][:1]]
        assert faults(plan, without) == (1, 0)
        assert faults(plan, doubled) == (0, 1)


@a_few
@given(plans(), ranks)
def test_ranks_take_equal_steps_of_equal_shape(plan: Plan, size: int) -> None:
    sequence = plan.sequence(0)
    shapes = {plan.rows(sequence, rank, size, 0, plan.steps_per_epoch).records.shape for rank in range(size)}
    assert shapes == {(plan.steps_per_epoch, plan.rows_per_rank(size))}


@a_few
@given(plans(), ranks, ranks, st.floats(0, 1))
def test_goes_on_from_any_step_at_any_number_of_ranks(plan: Plan, before: int, after: int, place: float) -> None:
    stop = round(place * plan.steps_per_epoch)
    uninterrupted = taken(plan, 5, 1)
    resumed = taken(plan, 5, before)[:stop] + taken(plan, 5, after, first_step=stop)
    assert len(resumed) == len(uninterrupted)
    for step, expected in zip(resumed, uninterrupted, strict=True):
        assert step.tolist() == expected.tolist()


@a_few
@given(plans())
def test_count_is_what_all_ranks_take(plan: Plan) -> None:
    assert [plan.count(step) for step in range(plan.steps_per_epoch)] == [len(step) for step in taken(plan, 0, 4)]


@a_few
@given(plans(), ranks)
def test_last_partial_step_is_spread_evenly(plan: Plan, size: int) -> None:
    last = plan.steps_per_epoch
    if last:
        sequence = plan.sequence(0)
        rows = [plan.rows(sequence, rank, size, last - 1, last) for rank in range(size)]
        counts = [int(row.real.sum()) for row in rows]
        assert max(counts) - min(counts) <= 2  # one for uneven lanes, one for an uneven rest


@a_few
@given(plans(), ranks)
def test_padding_names_records_that_can_be_read(plan: Plan, size: int) -> None:
    sequence = plan.sequence(0)
    for rank in range(size):
        records = plan.rows(sequence, rank, size, 0, plan.steps_per_epoch).records
        assert records.size == 0 or (records.min() >= 0 and records.max() < plan.num_records)


@a_few
@given(plans())
def test_same_inputs_give_the_same_order(plan: Plan) -> None:
    again = dataclasses.replace(plan, block_counts=plan.block_counts.copy())
    for step, expected in zip(taken(again, 1, 2), taken(plan, 1, 2), strict=True):
        assert step.tolist() == expected.tolist()


@a_few
@given(st.integers(0, 2**40), st.integers(0, 1000))
def test_every_epoch_and_every_seed_has_another_order(seed: int, epoch: int) -> None:
    blocks = np.full(10, 50)

    def order(seed: int, epoch: int) -> list[int]:
        return np.concatenate(taken(Plan(blocks, 64, seed), epoch, 1)).tolist()

    assert order(seed, epoch) != order(seed, epoch + 1)
    assert order(seed, epoch) != order(seed + 1, epoch)


@a_few
@given(plans(), plans())
def test_fingerprints_are_equal_for_equal_orders_only(plan: Plan, other: Plan) -> None:
    same = dataclasses.replace(plan, block_counts=plan.block_counts.copy())
    assert plan.fingerprint == same.fingerprint
    assert plan.fingerprint != dataclasses.replace(plan, seed=plan.seed + 1).fingerprint
    assert (plan.fingerprint == other.fingerprint) == (repr(plan) == repr(other))


OTHERS: dict[str, Any] = {
    "block_counts": np.array([4, 4, 3, 4]),
    "global_batch_size": 5,
    "seed": 8,
    "order": "lanes",
    "shuffle_window": 7,
    "drop_remainder": True,
    "content": "other",
    "buckets": Buckets(("words",), np.zeros((15, 1), np.int32), "words", 2, (9,)),
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_plan_that_differs_in_one_fact_has_another_fingerprint(field: str) -> None:
    plan = Plan(np.array([4, 4, 4, 3]), 4, seed=7, shuffle_window=6)
    assert {*OTHERS} == {each.name for each in dataclasses.fields(plan)}
    assert dataclasses.replace(plan, **{field: OTHERS[field]}).fingerprint != plan.fingerprint


def test_windows_of_several_blocks_are_the_same_on_every_machine() -> None:
    plan = Plan(np.array([1, 2, 3, 1, 2, 2, 3, 2]), 4, seed=7, shuffle_window=13)
    order = plan.sequence(2).records(np.arange(16)).tolist()
    assert order == [13, 11, 6, 12, 0, 7, 2, 8, 1, 4, 15, 3, 14, 5, 10, 9]


@a_few
@given(plans(), ranks, st.floats(0, 1), st.booleans())
def test_what_a_rank_reads_in_some_steps_is_in_the_blocks_that_it_keeps(
    plan: Plan, size: int, place: float, bucketed: bool
) -> None:
    lengths = (np.arange(plan.num_records, dtype=np.int32) * 7919 % 31)[:, None]
    if bucketed:
        plan = dataclasses.replace(plan, order="shuffled", buckets=Buckets(("words",), lengths, "words", 3, (31,)))
    first = round(place * plan.steps_per_epoch)
    last, sequence = min(first + 2, plan.steps_per_epoch), plan.sequence(1)
    block_of = np.repeat(np.arange(len(plan.block_counts)), plan.block_counts)
    for rank in range(size) if last > first else ():
        read = block_of[plan.rows(sequence, rank, size, first, last).records]
        assert {*read.ravel().tolist()} <= {*plan.blocks_near(sequence, rank, size, first, last).tolist()}


def test_order_is_the_same_on_every_machine() -> None:
    plan = Plan(np.array([4, 4, 4, 3]), 4, seed=7, shuffle_window=6)
    assert [step.tolist() for step in taken(plan, 2, 1)] == [[14, 3, 4, 11], [13, 0, 7, 10], [12, 2, 5, 9], [1, 6, 8]]


def test_file_order_is_file_order() -> None:
    plan = Plan(np.array([5, 6]), 4, order="file")
    assert [step.tolist() for step in taken(plan, 3, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_in_lanes_each_rank_reads_one_stretch() -> None:
    plan = Plan(np.full(10, 100), 40, order="lanes")
    for rank in range(4):
        ids = ids_of(plan.rows(plan.sequence(0), rank, 4, 0, plan.steps_per_epoch))
        assert sorted(ids.ravel()) == list(range(rank * 250, rank * 250 + 250))


@pytest.mark.parametrize("size", [1, 4])
def test_reads_stay_within_few_blocks(size: int) -> None:
    plan = Plan(np.full(400, 250), 20, shuffle_window=5000)  # 100 000 records; a lane's window is one block
    block_of = np.repeat(np.arange(400), 250)
    for rank in range(size):
        for first in range(0, plan.steps_per_epoch, 250):
            rows = plan.rows(plan.sequence(0), rank, size, first, first + 250)
            assert len(np.unique(block_of[rows.records])) <= 2 * 20 / size + 1


def test_a_window_over_everything_mixes_everything() -> None:
    plan = Plan(np.full(40, 250), 10, shuffle_window=10_000)
    order = np.concatenate(taken(plan, 0, 1))
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    neighbours = np.abs(np.diff(order))
    assert 3000 < neighbours.mean() < 3700  # of random pairs: 10 000 / 3


def test_a_batch_draws_from_all_over_the_files() -> None:
    """Files sorted by label are the usual trap: here each label is one stretch of ten."""
    plan = Plan(np.full(400, 250), 100)
    label = np.arange(100_000) // 10_000
    found = np.array([np.bincount(label[step], minlength=10) for step in taken(plan, 0, 1)])
    assert (found > 0).all()


def test_hundred_million_records_plan_in_little_memory() -> None:
    program = """
import json, pathlib, re
import numpy as np
from horovod_train.data.sampler import Plan
plan = Plan(np.full(390_625, 256), 4096, seed=1)
sequence = plan.sequence(0)
steps = [plan.rows(sequence, 3, 8, step, step + 8).records.shape for step in (0, 12_000, plan.steps_per_epoch - 8)]
# Not getrusage: its peak is that of the process which forked this one, too.
memory = int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps([plan.num_records, memory]))
"""
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=300).stdout
    records, memory = json.loads(output)
    assert records == 100_000_000
    assert memory < 4e8  # eight bytes a record would be twice that: nothing is made for each of them


def test_blocks_of_one_record_are_a_permutation_of_all_that_needs_no_window() -> None:
    single = Plan(np.ones(3000, np.int64), 32, seed=1, shuffle_window=1)
    orders = [single.sequence(epoch).records(np.arange(3000)) for epoch in range(2)]
    assert sorted(orders[0].tolist()) == sorted(orders[1].tolist()) == list(range(3000))
    assert np.mean(orders[0] == orders[1]) < 0.01
    assert np.mean(np.abs(np.diff(orders[0]))) > 800  # of a third of 3000, as neighbours of a uniform order are
    sequence = single.sequence(0)
    assert sequence.blocks_near(np.array([5, 7])).tolist() == orders[0][[5, 7]].tolist()
