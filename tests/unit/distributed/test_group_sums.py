"""Wrong sums of tensors that Horovod exchanges together are noticed, before a run trains on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest

from horovod_train.commands import doctor_checks
from horovod_train.distributed import horovod_info, objects, start
from horovod_train.distributed.device import Device
from horovod_train.distributed.horovod_info import PRESCALES, are_sums_of_group, group_values, judge_group
from horovod_train.errors import UserError

Sums = list[list[np.ndarray]]


def right_sums(size: int) -> Sums:
    by_rank = [group_values(rank) for rank in range(size)]
    return [
        [np.float32(prescale) * np.sum(parts, axis=0) for parts in zip(*by_rank, strict=True)] for prescale in PRESCALES
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 300])
def test_right_sums_are_taken_for_right(size: int) -> None:
    assert are_sums_of_group(right_sums(size), size)


@pytest.mark.parametrize("prescale", [0, 1])
@pytest.mark.parametrize("tensor", [0, 1, 2])
@pytest.mark.parametrize("falsify", [np.zeros_like, lambda right: right + np.eye(1, len(right), dtype=np.float32)[0]])
def test_one_wrong_tensor_is_noticed(prescale: int, tensor: int, falsify: Any) -> None:
    sums = right_sums(2)
    sums[prescale][tensor] = falsify(sums[prescale][tensor])
    assert not are_sums_of_group(sums, 2)


def test_what_is_copied_but_not_scaled_is_noticed() -> None:
    plain, scaled = right_sums(2)
    assert not are_sums_of_group([plain, plain], 2)
    assert not are_sums_of_group([group_values(0), scaled], 2)  # what this rank has sent itself


def test_the_gpus_are_named_and_how_to_compile_for_them() -> None:
    assert judge_group([(True, ["9.0"]), (True, [])]) is None
    assert judge_group([(False, ["12.0"]), (False, ["8.0", "8.0"]), (True, ["9.0"])]) == (
        "sums of tensors that Horovod exchanges together are wrong on 2 of 3 ranks: Horovod's CUDA kernels are not "
        "compiled for a GPU here, of compute capability 8.0 or 9.0 or 12.0",
        "Build it again: HOROVOD_BUILD_CUDA_CC_LIST=80,90,120 horovod-train build-horovod --gpu-operations NCCL, with "
        "the nvcc of CUDA on PATH or in HOROVOD_CUDA_HOME.",
    )
    problem = judge_group([(False, ["7.0"]), (False, ["12.0"])])
    assert problem
    assert problem[1] == (
        "Build it again: HOROVOD_BUILD_CUDA_CC_LIST=70,120 horovod-train build-horovod --gpu-operations NCCL, with the "
        "nvcc of CUDA 12 on PATH or in HOROVOD_CUDA_HOME: CUDA 13 compiles for 7.5 or later."
    )
    problem = judge_group([(False, [])])
    assert problem
    assert problem[0].endswith("on 1 of 1 ranks")
    assert problem[1] == "Do not train here: install again with make install, and report this."


def test_a_run_on_gpus_with_wrong_sums_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def gather(value: Any, name: str) -> list[Any]:
        if name != "group.start":
            return [value, value]
        host, boot, fields = value
        return [value, (host, boot, (*fields[:2], tuple(f"{key}-other" for key in fields[2]), fields[3]))]

    def problem(group: Any) -> tuple[str, str]:
        asked.append(group.exchange)
        return "sums are wrong", "Build it again."

    for name, value in {"rank": 0, "size": 2, "local_rank": 0, "local_size": 2, "mpi_enabled": False}.items():
        monkeypatch.setattr(hvd, name, lambda value=value: value)
    monkeypatch.setattr(hvd, "nccl_built", lambda: 23203)
    monkeypatch.setattr(objects, "gather", gather)
    monkeypatch.setattr(hvd, "cuda_built", lambda: True)
    monkeypatch.setattr(horovod_info, "group_problem", problem)
    started: Any = SimpleNamespace(started_by=SimpleNamespace(launcher="srun"), settings=(), has_run_before=False)
    group = start.form_group(started, Device("GPU 0", "", ("GPU-aa",), ("GPU:0",)))
    assert not asked  # it may hang: not before the watchdog runs
    with pytest.raises(UserError, match=r"^sums are wrong\. Build it again\.$"):
        horovod_info.check_sums(group)
    horovod_info.check_sums(start.form_group(started, Device("CPU", "", (), ("CPU:0",))))
    assert asked == ["NCCL"]  # ranks on CPUs start without


@pytest.mark.parametrize(
    ("problem", "level", "do"),
    [(None, "ok", ""), (("sums are wrong on 1", "Build it again."), "fail", "Build it again.")],
)
def test_doctor_says_so(monkeypatch: pytest.MonkeyPatch, problem: tuple[str, str] | None, level: str, do: str) -> None:
    monkeypatch.setattr(doctor_checks, "group_problem", lambda group: problem)
    group: Any = None
    found = doctor_checks.check_group(group)
    assert (found.level, found.do) == (level, do)
