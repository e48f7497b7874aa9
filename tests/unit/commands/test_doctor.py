"""What doctor makes of what it finds: each check once as it should be, and once with each thing that can be wrong."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from horovod_train.commands import doctor_checks
from horovod_train.commands.doctor_checks import (
    judge_averaging,
    judge_clocks,
    judge_counts,
    judge_devices,
    judge_file_system,
    judge_network,
    judge_sight,
    judge_speed,
    judge_threads,
)
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.horovod_info import Speed, scheduler_tasks

ALL = {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("rows", "level", "text"),
    [
        ([("a", (), 0), ("b", (), 0)], "ok", "all ranks compute on CPU"),
        ([("a", ("GPU-aa",), 2), ("a", ("GPU-bb",), 2)], "ok", "2 ranks, each with its own GPU"),
        ([("a", ("GPU-aa",), 1), ("b", ("GPU-bb",), 1)], "ok", "each with its own GPU"),
        ([("a", ("GPU-aa",), 4)], "warning", "idle: {'a': 3}"),
        ([("a", ("GPU-aa", "GPU-bb"), 4), ("a", ("GPU-cc", "GPU-dd"), 4)], "ok", "with its own GPU"),
        ([("a", ("0",), 0), ("b", ("0",), 0)], "ok", "with its own GPU"),  # no UUIDs: two GPUs 0
        ([("a", ("GPU-aa",), 1), ("b", (), 0)], "fail", "1 ranks compute on GPUs, 1 on CPU, rank 1 (b)"),
    ],
)
def test_one_gpu_for_each_rank(rows: list[tuple[str, tuple[str, ...], int]], level: str, text: str) -> None:
    found = judge_devices(rows)
    assert (found.level, text in found.text) == (level, True), found
    assert bool(found.do) == (level != "ok")


@pytest.mark.parametrize(
    ("rows", "warns"),
    [
        ([("a", ("GPU-aa",), 1), ("a", ("GPU-bb",), 1)], True),
        ([("a", ("GPU-aa", "GPU-bb"), 2), ("a", ("GPU-cc", "GPU-dd"), 2)], True),
        ([("a", ("GPU-aa",), 2), ("a", ("GPU-bb",), 2)], False),
        ([("a", ("GPU-aa",), 1), ("b", ("GPU-bb",), 1)], False),
        ([("a", (), 0), ("a", (), 0)], False),
        ([("a", ("MIG-aa",), 1), ("a", ("MIG-bb",), 1)], False),  # the driver lists whole GPUs
    ],
)
def test_ranks_that_do_not_see_each_others_gpus_may_go_without_nvlink(
    rows: list[tuple[str, tuple[str, ...], int]], warns: bool
) -> None:
    found = judge_sight(rows)
    assert (found is not None) == warns
    if found:
        assert found.level == "warning"
        assert "--gpu-bind=none" in found.do


@pytest.mark.parametrize(
    ("counts", "mpi_ranks", "level", "text"),
    [
        ({"Horovod": 2}, [0, 1], "ok", ""),
        ({"Horovod": 2, "MPI": 2, "SLURM": 2}, [0, 1], "ok", ""),
        ({"Horovod": 1, "SLURM": 4}, [0], "fail", "but SLURM has started 4 tasks"),
        ({"Horovod": 2, "SLURM": 4}, [0, 1], "warning", "SLURM counts 4"),
        ({"Horovod": 2, "MPI": 1}, [0, 0], "fail", "MPI counts 1"),
        ({"Horovod": 2, "MPI": 2}, [1, 0], "fail", ""),
    ],
)
def test_all_must_count_the_ranks_alike(counts: dict[str, int], mpi_ranks: list[int], level: str, text: str) -> None:
    found = judge_counts("started", counts, mpi_ranks, {})
    assert (found.level, text in found.text) == (level, True), found


def test_the_scheduler_is_asked_for_the_step_before_the_job() -> None:
    assert scheduler_tasks({}) is None
    assert scheduler_tasks({"SLURM_NTASKS": "8"}) == ("SLURM", 8)
    assert scheduler_tasks({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"}) == ("SLURM", 2)


@pytest.mark.parametrize(
    ("rows", "level", "text"),
    [
        ([("a", 2, ALL, 4, math.inf), ("a", 2, ALL, 4, math.inf)], "ok", "2 of 4 cores; 2 rank(s) on a host"),
        ([("a", 2, {0}, 4, math.inf)], "warning", "2 threads bound to 1 of 4 cores"),
        ([("a", 4, ALL, 4, math.inf)] * 2, "warning", "2 ranks with 8 threads share 4 cores"),
        ([("a", 4, ALL, 4, 1.5)], "warning", "share 1.5 cores"),
        ([("a", 4, ALL, 4, math.inf), ("b", 4, ALL, 4, math.inf)], "ok", "1 rank(s) on a host"),
        ([("a", 2, {0, 1}, 4, math.inf), ("a", 2, {2, 3}, 4, math.inf)], "ok", "2 of 4 cores"),  # each its own
        ([("a", 1, {0, 1}, 4, math.inf), ("a", 1, {2, 3}, 4, math.inf)], "warning", "rank 0 (a) has 1 threads, though"),
        ([("a", 1, ALL, 4, math.inf)], "warning", "its share of the host's cores is 4"),
        ([("a", 1, ALL, 4, 1.0)], "ok", "1 of 1 cores"),  # the quota allows no more
        ([("a", 1, {0}, 4, math.inf), ("b", 1, {0}, 4, math.inf)], "ok", "1 of 4 cores"),  # nor does the binding
    ],
)
def test_threads_have_cores_to_run_on_and_leave_few_idle(
    rows: list[tuple[str, int, set[int], int, float]], level: str, text: str
) -> None:
    found = judge_threads(rows)
    assert (found.level, text in found.text) == (level, True), found


def test_mean_over_ranks_is_proved() -> None:
    own = [np.array([0.0, 2.0], np.float32), np.array([2.0, 4.0], np.float32)]
    mean = np.array([1.0, 3.0], np.float32)
    assert judge_averaging(own, [mean, mean], "3").level == "ok"
    assert judge_averaging(own, own, "3").level == "fail"  # nobody averages
    assert judge_averaging(own, [mean * 2, mean * 2], "3").level == "fail"  # a sum
    assert judge_averaging(own, [mean, mean + np.float32(1e-7)], "3").level == "fail"  # nearly equal is not equal
    assert judge_averaging(own, [mean * np.nan] * 2, "3").level == "fail"
    assert judge_averaging([mean, mean], [mean, mean], "3").level == "fail"  # the same data would prove nothing


@pytest.mark.parametrize(("ranks", "seconds", "level"), [(2, 0.004, "ok"), (2, 0.4, "warning"), (1, 0.4, "ok")])
def test_an_exchange_slower_than_a_slow_network_is_said(ranks: int, seconds: float, level: str) -> None:
    found = judge_speed([Speed(4, 1e-4, None), Speed(16 << 20, seconds, None)], ranks, 1)
    assert found.level == level
    assert len(found.rows) == 3


def test_speed_of_mpi_alone_stands_beside() -> None:
    assert "MPI alone" in judge_speed([Speed(4, 1e-4, 2e-5)], 2, 1).rows[0]
    assert "MPI alone" not in judge_speed([Speed(4, 1e-4, None)], 2, 1).rows[0]


LO, ETH = ("127.0.0.1", 0), ("10.0.0.1", 10_000)
ALONE, ETH0, IB0 = {"lo": LO}, {"lo": LO, "eth0": ETH}, {"lo": LO, "ib0": ETH}


@pytest.mark.parametrize(
    ("rows", "level", "text"),
    [
        ([("a", ALONE, [])], "ok", "left to Horovod and MPI"),
        ([("a", ALONE, ["lo"]), ("a", ALONE, ["lo"])], "ok", "used: lo"),
        ([("a", ETH0, ["eth0"]), ("b", ETH0, ["eth0"])], "ok", "10 Gbit/s"),
        (
            [("a", ETH0, ["eth0"]), ("b", IB0, ["ib0"])],
            "ok",
            "used: eth0, ib0",
        ),  # plain srun: each host has its own name
        ([("a", ETH0, ["eth0"]), ("b", IB0, ["eth0"])], "fail", "eth0 is not up on b"),  # horovodrun: one name for all
        ([("a", ETH0, ["eth0"]), ("b", IB0, [])], "ok", "used: eth0"),
        ([("a", ETH0, ["lo"]), ("b", ETH0, ["lo"])], "fail", "cannot meet over lo"),
        ([("a", ETH0, ["eth0"]), ("b", ETH0, ["lo"])], "fail", "cannot meet over lo"),
        ([("a", ALONE, []), ("b", ALONE, [])], "fail", ""),
    ],
)
def test_each_host_must_have_the_interface_that_its_ranks_use(
    rows: list[tuple[str, dict[str, tuple[str, int]], list[str]]], level: str, text: str
) -> None:
    found = judge_network(rows)
    assert (found.level, text in found.text) == (level, True), found


def test_nothing_is_left_where_root_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a disk is full."""

    def write(path: Path, _: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(doctor_checks, "_write", write)
    group: Any = SimpleNamespace(broadcast_object=lambda it: it, is_root=True)
    found = doctor_checks.check_file_system(group, tmp_path)
    assert (found.level, "No space left on device" in found.text) == ("fail", True)
    assert list(tmp_path.iterdir()) == []


def test_file_system_that_is_slow_or_full_is_said(tmp_path: Path) -> None:
    assert judge_file_system(tmp_path, [], 0.01, 0.01, 10**11).level == "ok"
    assert judge_file_system(tmp_path, [], 5.0, 0.01, 10**11).level == "warning"
    assert judge_file_system(tmp_path, [], 0.01, 0.01, 10**6).level == "warning"
    found = judge_file_system(tmp_path, ["rank 1 (b) does not see root's file", "x"], 0.01, 10.0, 10**11)
    assert found.level == "fail"
    assert found.text.endswith("rank 1 (b) does not see root's file and 1 more")


@pytest.mark.parametrize(
    ("offsets_s", "hosts", "level", "text"),
    [
        ([0.0, -0.4], "ab", "ok", "within 400.0 ms of one another"),
        ([0.0, 0.4, -0.4], "abc", "ok", "within 800.0 ms of one another"),
        ([0.0, 0.9, -0.9], "abc", "warning", "b is +0.9 s from the median of the hosts' clocks"),
        ([0.0, 0.1, -7.0], "abc", "warning", "c is -7.0 s from the median of the hosts' clocks"),
        ([0.0, 7.0, 7.1], "abc", "warning", "a is -7.0 s from the median of the hosts' clocks"),  # root's is wrong
        ([0.0, -100.0], "ab", "warning", "a and b are 100.0 s apart"),  # nothing shows which one is right
        ([0.0, 0.1, 0.1, -100.0], "aaab", "warning", "a and b are 100.0 s apart"),  # hosts count, not ranks
        ([0.0, 0.0, -100.0, -100.1], "abcd", "warning", "a and d are 100.1 s apart"),
    ],
)
def test_clocks_apart_are_said(offsets_s: list[float], hosts: str, level: str, text: str) -> None:
    found = judge_clocks(offsets_s, hosts)
    assert (found.level, found.text) == (level, text)


NOT_NAMED = "names none of the 4 GPUs here"


@pytest.mark.parametrize(
    ("visible", "level", "text"),
    [
        ("", "ok", "no GPU here"),
        ("-1", "ok", "no GPU here"),
        ("NoDevFiles", "ok", "no GPU here"),  # by SLURM, for a job without GPUs
        ("7", "fail", f"rank 0 (n1): CUDA_VISIBLE_DEVICES=7 {NOT_NAMED}"),
        ("7,0", "fail", f"rank 0 (n1): CUDA_VISIBLE_DEVICES=7,0 {NOT_NAMED}"),  # CUDA reads no further
        ("GPU-e", "fail", f"rank 0 (n1): CUDA_VISIBLE_DEVICES=GPU-e {NOT_NAMED}"),
        ("MIG-e0", "fail", f"rank 0 (n1): CUDA_VISIBLE_DEVICES=MIG-e0 {NOT_NAMED}"),
        ("MIG-d0", "fail", "rank 0 (n1): TensorFlow sees none of the 1 GPU"),
        ("0,7,1", "fail", "rank 0 (n1): TensorFlow sees none of the 1 GPU"),
        ("GPU-b", "fail", "rank 0 (n1): TensorFlow sees none of the 1 GPU"),
        (None, "fail", "rank 0 (n1): TensorFlow sees none of the 4 GPUs"),
    ],
)
@pytest.mark.usefixtures("driver_of_four")
def test_gpus_that_are_hidden_on_purpose_are_not_missed(
    visible: str | None, level: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow sees none of them here."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    here = SimpleNamespace(gpu_keys=())
    group = SimpleNamespace(rank=0, hosts=("n1",), devices=(here,), gather=lambda value: [value])
    found = doctor_checks.check_devices(cast(WorkerGroup, group))
    assert (found.level, text in found.text) == (level, True), found
