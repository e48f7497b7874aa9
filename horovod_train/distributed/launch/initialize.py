"""Initialise Horovod in this process as its launcher has prepared it, and check that it has found the other ranks.

Does not know devices, or what the ranks do afterwards; see group.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import NoReturn

import horovod.tensorflow as hvd
import numpy as np

from horovod_train.distributed.launch import key_value_store, launcher, reconnect
from horovod_train.errors import FailedElsewhere, UserError

_MAX_CORES = 8192
"""Linux's own limit, NR_CPUS."""


def initialise(started_by: launcher.Launch, process_sets: Sequence[hvd.ProcessSet] | None = None) -> set[int]:
    """Collective: start Horovod; return the cores that the ranks of this host may use together.

    process_sets: sets of ranks that exchange among themselves, besides all ranks together.

    A launcher may have bound each rank to different cores. TensorFlow cannot be used for this exchange yet.
    """
    rank_cores = os.sched_getaffinity(0)
    if started_by.launcher == "none":
        # If built with MPI, Horovod would start MPI for this process alone, which needs a working mpirun.
        os.environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
        # gloo wants an address even for one rank, and aborts where the host's own name has none.
        os.environ.setdefault("HOROVOD_GLOO_IFACE", "lo")
    if started_by.is_elastic:
        reconnect.connect()
        return rank_cores  # the ranks of a host do not start together
    if not started_by.uses_mpi:
        reports_abort = started_by.step is not None and started_by.rank == 0
        with _report_abort(_GLOO_FAILED) if reports_abort else nullcontext():
            hvd.init(process_sets=process_sets)
        return key_value_store.cores_of_host(rank_cores, hvd.local_rank(), hvd.local_size())
    return _initialise_over_mpi(started_by, process_sets, rank_cores)


def _initialise_over_mpi(
    started_by: launcher.Launch, process_sets: Sequence[hvd.ProcessSet] | None, rank_cores: set[int]
) -> set[int]:
    """Collective: `initialise` for ranks that find each other by MPI. rank_cores: those of this process."""
    if not hvd.mpi_built():
        _refuse(
            started_by,
            f"{started_by.launcher} started {started_by.size} ranks, but Horovod was built without MPI. Start with "
            f"{_command_without_mpi(started_by)}, or build Horovod with MPI: horovod-train build-horovod --mpi wheel.",
        )
    reports_abort = started_by.launcher == "srun-pmix" and started_by.rank == 0
    with _report_abort(_MPI_FAILED) if reports_abort else nullcontext(), warnings.catch_warnings():
        # check_rank_and_size reports this once, with what to do.
        warnings.filterwarnings("ignore", "suspicious MPI execution environment")
        from mpi4py import MPI

    hvd.init(comm=MPI.COMM_WORLD, process_sets=process_sets)
    host_ranks = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    if (host_ranks.rank, host_ranks.size) != (hvd.local_rank(), hvd.local_size()):
        raise UserError(
            f"{socket.gethostname()}: MPI says local rank {host_ranks.rank} of {host_ranks.size}, Horovod says "
            f"{hvd.local_rank()} of {hvd.local_size()}; both must use one MPI: "
            "MPI=system make install builds Horovod with the one on PATH."
        )
    # A buffer, because mpi4py pickles objects.
    cores = np.zeros(_MAX_CORES, np.uint8)
    cores[sorted(rank_cores)] = 1
    host_ranks.Allreduce(MPI.IN_PLACE, cores, op=MPI.MAX)
    return {int(core) for core in np.flatnonzero(cores)}


def restart_horovod(settings: Mapping[str, str]) -> None:
    """Collective: start Horovod again over MPI, with these environment variables changed. No exchange may be under way.

    Does not work over gloo, where the ranks would find the addresses of the first start.
    """
    from mpi4py import MPI

    hvd.shutdown()
    os.environ |= settings
    hvd.init(comm=MPI.COMM_WORLD)


_GLOO_FAILED = (
    "error: rank 0 ended while Horovod started: the ranks did not find each other over gloo; what it says is above. "
    "See that the hosts of the step reach each other, and start again."
)
_MPI_FAILED = (
    "error: the MPI that Horovod was built with did not start under srun --mpi=pmix; what it says is above. Start with "
    "srun --mpi=none, which needs no MPI."
)


@contextmanager
def _report_abort(message: str) -> Iterator[None]:
    """Print `message` from another process if this one ends inside the block.

    Open MPI ends this process if it finds no PMIx that it supports. Horovod aborts it if the rendezvous fails.
    """
    script = 'read -r done || echo "$1" >&2'
    sentinel = subprocess.Popen(["sh", "-c", script, "sh", message], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        sentinel.communicate(b"done\n")


def check_rank_and_size(started_by: launcher.Launch) -> None:
    """Check rank and size without an exchange, because a process whose size is wrongly 1 cannot reach the others."""
    if started_by.is_elastic or (hvd.rank(), hvd.size()) == (started_by.rank, started_by.size):
        return
    _refuse(
        started_by,
        f"{started_by.launcher} started {started_by.size} ranks, but the MPI that Horovod was built with finds "
        f"{hvd.size()}: they do not belong together. Start with {_command_without_mpi(started_by)}, which needs no "
        "MPI, or build Horovod with the launcher's: MPI=system make install.",
    )


def _command_without_mpi(started_by: launcher.Launch) -> str:
    return "srun --mpi=none" if started_by.launcher == "srun-pmix" else "horovodrun --gloo"


def _refuse(started_by: launcher.Launch, message: str) -> NoReturn:
    """Raise UserError on rank 0 and later FailedElsewhere on the others, which rank 0 cannot reach."""
    if started_by.rank != 0:
        time.sleep(launcher.ROOT_REPORTS_FIRST_S)
        raise FailedElsewhere("rank 0 reports that the ranks do not find each other", UserError.exit_code)
    raise UserError(message)
