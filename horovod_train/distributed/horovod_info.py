"""What Horovod, MPI and the scheduler report about themselves; how fast an exchange is, and whether its sums are right.

The commands and the start of a rank judge it.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_train.distributed.group import WorkerGroup
from horovod_train.errors import UserError

GROUP_SIZES = (3, 1000, 40_000)
"""Numbers in the tensors of sums_of_group: less and more than a block of a GPU's threads."""
PRESCALES = (1.0, 0.5)
"""Horovod copies tensors by one kernel, and copies and scales them by another."""


class Speed(NamedTuple):
    """One allreduce of `bytes` of float32: its median time in seconds. `mpi_s`: by MPI alone, if MPI runs."""

    bytes: int
    seconds: float
    mpi_s: float | None

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.seconds / 1e9


def horovod_build() -> list[str]:
    """Return what Horovod was compiled with."""
    parts = {
        "gloo": hvd.gloo_built(),
        "MPI": hvd.mpi_built(),
        "NCCL": bool(hvd.nccl_built()),
        "CUDA": hvd.cuda_built(),
        "ROCm": hvd.rocm_built(),
        "DDL": hvd.ddl_built(),
        "oneCCL": hvd.ccl_built(),
    }
    return [name for name, is_built in parts.items() if is_built]


def mpi_place(group: WorkerGroup) -> tuple[int, int, str] | None:
    """Return rank, size and library as MPI reports them; None if the ranks exchange over gloo.

    Under gloo each process would be the only rank of its own MPI job, so MPI is not asked.
    """
    if group.controller != "MPI" or group.launcher == "none":
        return None
    from mpi4py import MPI

    library = MPI.Get_library_version().split(",")[0].strip()
    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), library


def scheduler_tasks(environment: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return the scheduler and the number of tasks in its job or step; None if the environment does not say."""
    for name, scheduler in (("SLURM_STEP_NUM_TASKS", "SLURM"), ("SLURM_NTASKS", "SLURM"), ("PBS_NP", "PBS")):
        if environment.get(name, "").isdigit():
            return scheduler, int(environment[name])
    return None


def measure_allreduce(group: WorkerGroup, sizes: Sequence[int], seconds: float) -> list[Speed]:
    """Collective: return the time of an allreduce by bytes, on the device that the rank computes on.

    Each size is repeated for about its part of `seconds`, equally often on every rank.
    """
    return [_measure(group, size, seconds / len(sizes)) for size in sizes]


def _measure(group: WorkerGroup, size: int, seconds: float) -> Speed:
    values = tf.ones([max(1, size // 4)])
    exchange = tf.function(lambda: hvd.allreduce(values, op=hvd.Sum, name=f"probe.{size}"), autograph=False)
    horovod_s = _median_seconds(group, lambda: exchange().numpy(), seconds)
    mpi_s = None
    if mpi_place(group) is not None:
        from mpi4py import MPI

        sent, received = values.numpy(), np.empty_like(values.numpy())
        mpi_s = _median_seconds(group, lambda: MPI.COMM_WORLD.Allreduce(sent, received), seconds / 2)
    return Speed(int(values.shape[0]) * 4, horovod_s, mpi_s)


def _median_seconds(group: WorkerGroup, exchange: Callable[[], object], seconds: float) -> float:
    """Collective: return the median of root's times. Each starts when all ranks are ready, as after a backward pass."""
    exchange()
    began = time.perf_counter()
    exchange()
    one_exchange_s = time.perf_counter() - began
    repetitions = group.broadcast_object(int(min(100, max(3, seconds / max(one_exchange_s, 1e-6)))))
    durations = []
    for _ in range(repetitions):
        began = time.perf_counter()
        exchange()
        durations.append(time.perf_counter() - began)
    return group.broadcast_object(statistics.median(durations))


def clock_offsets_s(group: WorkerGroup) -> list[float]:
    """Collective: return each rank's clock minus root's, in seconds. The exchange itself adds about a millisecond.

    Of five rounds, the one in which the ranks' times are closest is used.
    """
    closest: list[float] = []
    for _ in range(5):
        group.barrier()
        times = group.gather(time.time())
        offsets = [moment - times[0] for moment in times]
        if not closest or max(map(abs, offsets)) < max(map(abs, closest)):
            closest = offsets
    return closest


def group_values(rank: int) -> list[np.ndarray]:
    """Return a rank's tensors for sums_of_group: whole numbers, whose sums float32 holds exactly."""
    factor = rank % 7 + 1
    return [
        (factor * (np.arange(size) % 61 + number + 1)).astype(np.float32) for number, size in enumerate(GROUP_SIZES)
    ]


def sums_of_group(rank: int) -> list[list[np.ndarray]]:
    """Collective: return the sums over the ranks of tensors that Horovod exchanges together, for each of PRESCALES.

    On the device that the rank computes on. Horovod packs such tensors, and scales them, with CUDA kernels of its own,
    and does not see that a GPU has not run one, because they were compiled for others.
    """
    values = [tf.constant(value) for value in group_values(rank)]
    sums = [
        hvd.grouped_allreduce(values, op=hvd.Sum, prescale_factor=prescale, name=f"probe.group.{prescale}")
        for prescale in PRESCALES
    ]
    return [[total.numpy() for total in totals] for totals in sums]


def are_sums_of_group(sums: Sequence[Sequence[np.ndarray]], size: int) -> bool:
    """Return whether these are what sums_of_group returns on each of `size` ranks."""
    factor = sum(rank % 7 + 1 for rank in range(size))
    expected = [[prescale * factor * value for value in group_values(0)] for prescale in PRESCALES]
    return all(map(np.array_equal, itertools.chain(*sums), itertools.chain(*expected)))


def compute_capabilities() -> list[str]:
    """Return those of the GPUs that this process computes on, such as "9.0"."""
    gpus = tf.config.get_visible_devices("GPU")
    found = [tf.config.experimental.get_device_details(gpu).get("compute_capability") for gpu in gpus]
    return [".".join(map(str, each)) for each in found if each]


def group_problem(group: WorkerGroup) -> tuple[str, str] | None:
    """Collective: sum tensors that Horovod exchanges together; return what judge_group does, alike on all ranks.

    It may be the first exchange between devices, which hangs where they do not reach each other: the watchdog must run.
    """
    with group.heartbeat.phase("exchange"):
        is_right = are_sums_of_group(sums_of_group(group.rank), group.size)
    return judge_group(group.gather((is_right, compute_capabilities())))


def check_sums(group: WorkerGroup) -> None:
    """Collective, on GPUs: raise UserError if Horovod's own kernels do not run on them, which it would not notice."""
    if group.size > 1 and hvd.cuda_built() and any(device.gpu_keys for device in group.devices):
        problem = group_problem(group)
        with group.raise_together():
            if problem:
                raise UserError(". ".join(problem))


def judge_group(rows: Sequence[tuple[bool, Sequence[str]]]) -> tuple[str, str] | None:
    """Return what is wrong with the sums of a group, if anything, and what to do.

    rows: for each rank whether its sums are right, and the compute capabilities of its GPUs.
    """
    wrong = [rank for rank, (is_right, _) in enumerate(rows) if not is_right]
    if not wrong:
        return None
    text = f"sums of tensors that Horovod exchanges together are wrong on {len(wrong)} of {len(rows)} ranks"
    capabilities = sorted({each for _, of_rank in rows for each in of_rank}, key=lambda each: (len(each), each))
    if not capabilities:
        return text, "Do not train here: install again with make install, and report this."
    compiled_for = ",".join(each.replace(".", "") for each in capabilities)
    here = f"of compute capability {' or '.join(capabilities)}"
    build = f"HOROVOD_BUILD_CUDA_CC_LIST={compiled_for} horovod-train build-horovod --gpu-operations NCCL"
    version, why = "", ""
    if any(tuple(map(int, each.split("."))) < (7, 5) for each in capabilities):
        version, why = " 12", ": CUDA 13 compiles for 7.5 or later"
    do = f"Build it again: {build}, with the nvcc of CUDA{version} on PATH or in HOROVOD_CUDA_HOME{why}."
    return f"{text}: Horovod's CUDA kernels are not compiled for a GPU here, {here}", do
