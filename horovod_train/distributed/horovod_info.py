"""What Horovod, MPI and the scheduler report about themselves, and how fast an exchange is. doctor judges it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_train.distributed.group import WorkerGroup


class Build(NamedTuple):
    """What Horovod was compiled with, and what this process uses of it."""

    built: tuple[str, ...]
    controller: str
    exchange: str
    """The library that exchanges between this process's devices and those of the others."""


class Speed(NamedTuple):
    """One allreduce of `bytes` of float32: its median time in seconds. `mpi_s`: by MPI alone, if MPI runs."""

    bytes: int
    seconds: float
    mpi_s: float | None

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.seconds / 1e9


def horovod_build(group: WorkerGroup) -> Build:
    parts = {
        "gloo": hvd.gloo_built(),
        "MPI": hvd.mpi_built(),
        "NCCL": bool(hvd.nccl_built()),
        "CUDA": hvd.cuda_built(),
        "ROCm": hvd.rocm_built(),
        "DDL": hvd.ddl_built(),
        "oneCCL": hvd.ccl_built(),
    }
    controller = "MPI" if hvd.mpi_enabled() else "gloo"
    return Build(tuple(name for name, is_built in parts.items() if is_built), controller, group.exchange)


def mpi_place(group: WorkerGroup) -> tuple[int, int, str] | None:
    """Return rank, size and library as MPI reports them; None if the ranks exchange over gloo.

    Under gloo each process would be the only rank of its own MPI job, so MPI is not asked.
    """
    if not hvd.mpi_enabled() or group.launcher == "none":
        return None
    from mpi4py import MPI

    library = MPI.Get_library_version().split(",")[0].strip()
    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), library


def scheduler_tasks(environment: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return the scheduler and the number of tasks in its job or step; None if the environment does not say."""
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        if environment.get(name, "").isdigit():
            return "SLURM", int(environment[name])
    if environment.get("PBS_NP", "").isdigit():
        return "PBS", int(environment["PBS_NP"])
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


def clock_offsets_s(group: WorkerGroup, rounds: int = 5) -> list[float]:
    """Collective: return each rank's clock minus root's, in seconds. The exchange itself adds about a millisecond.

    Of several rounds, the one in which the ranks' times are closest is used.
    """
    closest: list[float] = []
    for _ in range(rounds):
        group.barrier()
        times = group.gather(time.time())
        offsets = [moment - times[0] for moment in times]
        if not closest or max(map(abs, offsets)) < max(map(abs, closest)):
            closest = offsets
    return closest
