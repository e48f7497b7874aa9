"""Who started this process, and its place among the others, read from the environment before anything is imported.

Does not import horovod or TensorFlow, so it answers at once; the group says later what is really so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Launcher = Literal["horovodrun", "mpirun", "none"]


@dataclass(frozen=True)
class Launch:
    """The launcher's word on this process."""

    launcher: Launcher
    rank: int
    size: int
    end_time: float | None = None
    """When the scheduler will end the job, in seconds since 1970, where it says so."""

    job: str = ""
    """The scheduler's name for this job."""

    @property
    def uses_mpi(self) -> bool:
        return self.launcher == "mpirun"


def detect(environment: Mapping[str, str] = os.environ) -> Launch:
    """Reads what horovodrun (gloo) or mpirun, which `horovodrun --mpi` calls, tell each process they start.

    HOROVOD_RANK wins: under gloo inside an MPI job it is Horovod that will be asked. SLURM_JOB_END_TIME is the same
    for all processes of a job.
    """
    end = float(environment["SLURM_JOB_END_TIME"]) if "SLURM_JOB_END_TIME" in environment else None
    job = environment.get("SLURM_JOB_ID", "")
    if "HOROVOD_RANK" in environment:
        return Launch("horovodrun", int(environment["HOROVOD_RANK"]), int(environment.get("HOROVOD_SIZE", 1)), end, job)
    if "OMPI_COMM_WORLD_RANK" in environment:
        rank, size = environment["OMPI_COMM_WORLD_RANK"], environment.get("OMPI_COMM_WORLD_SIZE", "1")
        return Launch("mpirun", int(rank), int(size), end, job)
    return Launch("none", 0, 1, end, job)
