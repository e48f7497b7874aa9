"""Detect the launcher and this process's rank and size from the environment, before anything is imported.

Does not import horovod or TensorFlow, so it answers immediately; group checks the answer later. The place in a SLURM
step comes from the step's own variables, which are right for each of its tasks; those of the job (SLURM_NTASKS, …) are
not used, because horovodrun and mpirun pass those of the batch node to every rank. Other launchers: see conventions.
"""

from __future__ import annotations

import functools
import os
import re
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from horovod_train.distributed.launch.conventions import Meeting, read_meeting
from horovod_train.errors import UserError

Launcher = str
"""horovodrun: over gloo; `horovodrun --mpi` calls mpirun. srun-pmix: `srun --mpi=pmix`. srun: without any MPI. none:
this process is alone. Or the name of a convention; see conventions.
"""

ROOT_REPORTS_FIRST_S = 2.0
"""How long other ranks wait for root to report what all ranks see. Launchers end the others when root has failed."""

THREADS_END_WITHIN_S = 45.0
"""How long the process of a program that is done waits for threads and processes that the user's code has left, as to
upload something. Less than the 60 s after which srun kills ranks that outlast others, `--wait=60` in our scripts."""

ALONE_END_WITHIN_S = 600.0
"""The same for a process that no launcher has started: nobody waits for it but its user."""

STOP_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGXCPU, signal.SIGHUP),
)
"""Those by which schedulers and terminals announce the end: Grid Engine sends SIGUSR1 and SIGUSR2 before SIGSTOP and
SIGKILL (`qsub -notify`) and SIGXCPU at its soft limits, LSF what `bsub -wa` names, a terminal that closes SIGHUP."""

_SRUN = "start it with srun: srun python -m horovod_train.main …"
_ON_PBS = "start it with mpirun --hostfile $PBS_NODEFILE."


@dataclass(frozen=True)
class Launch:
    """What the launcher says about this process."""

    launcher: Launcher
    rank: int
    size: int
    end_time: float | None = None
    """When the scheduler will end the job, in seconds since 1970; None if it does not say."""

    job: str = ""
    """The scheduler's name for this job."""

    step: Meeting | None = None
    """Where the launcher does not bring the ranks together: where they meet, see rendezvous."""

    is_elastic: bool = False
    """Ranks may be lost, and join, while this process runs; `rank` and `size` are those of its start."""

    fault: str = ""
    """Why a run must not start like this, in one sentence with what to do; empty if all is well."""

    leaves_hosts: bool = False
    """Whether the fault is only that other hosts of the job would have no rank."""

    @property
    def uses_mpi(self) -> bool:
        return self.launcher in ("mpirun", "srun-pmix")

    def check(self, *, may_be_elastic: bool = False, may_leave_hosts: bool = False) -> None:
        """Raise UserError if the processes would not find each other, or are elastic where the program is not."""
        if self.is_elastic and not may_be_elastic:
            raise UserError(
                "horovodrun --min-np starts elastic ranks, and the trainer keeps its number of ranks. Start it with "
                "-np; a run that is started again resumes at any number. For a script: hvd.elastic in docs/migrate.md."
            )
        if self.fault and not (self.leaves_hosts and may_leave_hosts):
            raise UserError(self.fault)


@functools.cache
def detect() -> Launch:
    """Return what the launcher says about this process. Reads the environment once: Horovod changes it when it starts.

    Raises UserError if the variables of one launcher contradict each other.
    """
    _first_parent()
    return read_launch(os.environ)


def parent_has_ended() -> bool:
    """Return whether the process that started this rank has ended before it, as a launcher does after `kill -9`.

    Asked instead of PR_SET_PDEATHSIG, which Linux also sends when only the thread that started a rank has ended. False
    where the parent may end before the rank: a shell that sets the variables of a convention by hand, or no launcher.
    """
    stays = detect().launcher in _STAYING or "TORCHELASTIC_RUN_ID" in os.environ
    return stays and os.getppid() != _first_parent()


@functools.cache
def _first_parent() -> int:
    return os.getppid()


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Read what each launcher tells the processes that it starts. The launcher nearest to the process wins.

    `launch` and torchrun come first, because nothing else is started by their ranks. Other conventions come last, but
    Flux before SLURM, whose srun may have started Flux itself. The variables of an MPI win over those of jsrun and
    PALS, which set both; HOROVOD_CONTROLLER=gloo changes that. Flux sets PMI_RANK even for programs without MPI.

    horovodrun (gloo) sets HOROVOD_RANK, also inside an MPI job. mpirun sets OMPI_COMM_WORLD_RANK (Open MPI) or PMI_RANK
    (MPICH and its relatives), also if it has used srun to reach the hosts. `srun --mpi=pmix` sets PMIX_RANK and leaves
    the size to SLURM's step. A step with none of these is plain srun; so is `--mpi=pmi2`, whose ranks are the step's.
    HOROVOD_CONTROLLER=gloo turns any step into plain srun. SLURM_JOB_END_TIME is the same for all processes of a job;
    without a job it is left over.
    `horovodrun --min-np` sets HOROVOD_ELASTIC.

    Raises UserError if the variables of one launcher contradict each other.
    """
    job = environment.get("SLURM_JOB_ID", "")
    end_time = _read_number(environment, END_TIME) if job else None
    if any(name in environment for name in ("HOROVOD_TRAIN_RANK", "TORCHELASTIC_RUN_ID")):
        return _launch_at(read_meeting(environment), environment, end_time, job)
    without_mpi = _meets_without_mpi(environment)
    for launcher, prefix in _RANK_PREFIXES:
        if f"{prefix}RANK" in environment:
            if launcher == "mpirun" and without_mpi:
                break
            rank, size, local_size = _read_place(environment, prefix)
            step = read_step(environment)
            if prefix == "PMI_" and step is not None and (rank, size) == (step.rank, step.size):
                break
            is_elastic = launcher == "horovodrun" and environment.get("HOROVOD_ELASTIC", "0") != "0"
            fault = (
                _fault_of_copies(launcher, rank, size, step)
                or _fault_of_one_host(launcher, size, local_size, environment)
                or (_fault_of_elastic_settings(environment) if is_elastic else "")
            )
            return Launch(launcher, rank, size, end_time, job, is_elastic=is_elastic, fault=fault)
    step = None if environment.get("FLUX_JOB_SIZE", "1") != "1" else read_step(environment)
    if step is None and (meeting := read_meeting(environment)) is not None:
        return _launch_at(meeting, environment, end_time, job)
    if step is None:
        fault, left = _fault_of_lone_process(environment), _fault_of_hosts_left(environment)
        return Launch("none", 0, 1, end_time, job, fault=fault or left, leaves_hosts=bool(left) and not fault)
    if "PMIX_RANK" in environment and environment.get("HOROVOD_CONTROLLER") != "gloo":
        return Launch("srun-pmix", step.rank, step.size, end_time, job)
    return Launch("srun", step.rank, step.size, end_time, job, step=step)


END_TIME = "SLURM_JOB_END_TIME"
"""The variable in which SLURM says when the job's time is over."""

_RANK_PREFIXES: tuple[tuple[Launcher, str], ...] = (
    ("horovodrun", "HOROVOD_"),
    ("mpirun", "OMPI_COMM_WORLD_"),
    ("mpirun", "PMI_"),
    ("mpirun", "MV2_COMM_WORLD_"),
)
"""Launchers that give each process PREFIX + RANK and PREFIX + SIZE."""

_STAYING = ("horovodrun", "mpirun", "srun", "srun-pmix", "jsrun", "flux", "pals")
"""Launchers that, or whose processes on each host, start the ranks and wait for their ends."""

TOKEN, TOKEN_FILE, WITHOUT_TOKEN = (f"HOROVOD_TRAIN_{name}" for name in ("TOKEN", "TOKEN_FILE", "WITHOUT_TOKEN"))
"""Variables: a secret that all ranks have; a file that holds it; 1 allows ranks on several hosts to meet without it."""


def _meets_without_mpi(environment: Mapping[str, str]) -> bool:
    """Return whether to pass over variables of an MPI, because a convention says all, and MPI is not wanted."""
    if environment.get("HOROVOD_CONTROLLER") == "gloo":
        return any(name in environment for name in ("JSM_NAMESPACE_RANK", "FLUX_TASK_RANK", "PALS_RANKID"))
    flux, pmi = (
        (environment.get(rank), environment.get(size))
        for rank, size in (("FLUX_TASK_RANK", "FLUX_JOB_SIZE"), ("PMI_RANK", "PMI_SIZE"))
    )
    return flux[0] is not None and flux == pmi


def _launch_at(meeting: Meeting | None, environment: Mapping[str, str], end_time: float | None, job: str) -> Launch:
    """Return the launch of a rank by a convention; of a process alone if the convention says so."""
    if meeting is None:
        return Launch("none", 0, 1, end_time, job)
    has_token = bool(environment.get(TOKEN) or environment.get(TOKEN_FILE))
    if meeting.is_one_host or has_token or environment.get(WITHOUT_TOKEN, "0") not in ("", "0"):
        return Launch(meeting.launcher, meeting.rank, meeting.size, end_time, job, step=meeting)
    fault = (
        f"ranks on several hosts need a secret to know each other by. Give all {meeting.size} ranks the same {TOKEN} "
        f"(such as the output of: openssl rand -hex 16) or {TOKEN_FILE}. {WITHOUT_TOKEN}=1 lets anyone take a rank's "
        "place who can reach these hosts."
    )
    return Launch(meeting.launcher, meeting.rank, meeting.size, end_time, job, fault=fault)


def _read_place(environment: Mapping[str, str], prefix: str) -> tuple[int, int, int]:
    """Return rank, size and the number of ranks on this host (0: unknown)."""
    texts = {name: environment.get(prefix + name) for name in ("RANK", "SIZE", "LOCAL_SIZE")}
    texts["LOCAL_SIZE"] = texts["LOCAL_SIZE"] or environment.get("MPI_LOCALNRANKS")  # MPICH's and Intel's mpiexec
    try:
        rank, size, local_size = int(texts["RANK"] or ""), int(texts["SIZE"] or ""), int(texts["LOCAL_SIZE"] or 0)
    except ValueError:
        rank, size, local_size = -1, 0, 0
    if not 0 <= rank < size:
        raise UserError(
            f"{prefix}RANK and {prefix}SIZE must be a rank and the number of ranks; received {texts['RANK']!r} and "
            f"{texts['SIZE']!r}. They come from a launcher: start it with one, or unset them."
        )
    return rank, size, local_size


def _fault_of_copies(launcher: Launcher, rank: int, size: int, step: Meeting | None) -> str:
    """Return the fault of a step in which srun has started several copies of the launcher itself.

    mpirun starts its own srun to reach the hosts of a job, so there only size 1 proves the mistake.
    """
    if step is None or step.size == 1 or (rank, size) == (step.rank, step.size):
        return ""
    if launcher == "mpirun" and size > 1:
        return ""
    return (
        f"srun started {step.size} copies of {launcher}, and each would be a separate run with {size} rank(s). "
        f"Leave {launcher} out and {_SRUN}"
    )


def _fault_of_one_host(launcher: Launcher, size: int, local_size: int, environment: Mapping[str, str]) -> str:
    """Return the fault of a job with several hosts that has all ranks on one, and more than is planned there."""
    hosts, tasks_per_node = _read_number(environment, "SLURM_JOB_NUM_NODES"), environment.get("SLURM_TASKS_PER_NODE")
    host, advice = environment.get("SLURMD_NODENAME", "one host"), _SRUN
    if slots := _pbs_slots(environment):
        hosts, advice = len(slots), _ON_PBS
    elif hosts is not None and tasks_per_node:
        slots = expand_counts(tasks_per_node)
    if hosts in (None, 1) or not slots or not local_size == size > max(slots):
        return ""
    return (
        f"{launcher} put all {size} ranks on {host}, though the job has {hosts:g} hosts. Name them to it "
        f"(-H {host}:N,…), or {advice}"
    )


def _pbs_slots(environment: Mapping[str, str]) -> list[int]:
    """Return the number of ranks that PBS plans for each host of the job; [] outside a PBS job."""
    try:
        return list(Counter(Path(environment["PBS_NODEFILE"]).read_text().split()).values())
    except (KeyError, OSError):
        return []


def _read_number(environment: Mapping[str, str], name: str) -> float | None:
    """Return a number that the scheduler may have set; None if it has not."""
    try:
        return float(environment[name])
    except (KeyError, ValueError):
        return None


def _fault_of_elastic_settings(environment: Mapping[str, str]) -> str:
    """Return the fault of a setting that elastic ranks cannot have.

    When Horovod 0.28.1 starts again in the same process, it confuses the first of these settings with another one
    (ParameterManager::BayesianParameter::SetValue). Ranks that stay then split their exchanges differently from ranks
    that join, and end with `gloo::EnforceNotMet`. With both set, Horovod ends by a segmentation fault.
    """
    names = [name for name in ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD") if name in environment]
    names += ["HOROVOD_AUTOTUNE"] if environment.get("HOROVOD_AUTOTUNE", "0") != "0" else []
    return f"elastic ranks cannot meet again with {names[0]} set, a defect of Horovod. Unset it." if names else ""


def _fault_of_lone_process(environment: Mapping[str, str]) -> str:
    """Return the fault of a process that runs alone although a launcher or the scheduler announces several."""
    if "PMIX_RANK" in environment:
        return (
            f"this is rank {environment['PMIX_RANK']} of a launcher that does not say how many there are (PMIX_RANK is "
            "set, and nothing else). Start it with srun, mpirun or horovodrun; or unset PMIX_RANK if it is left over."
        )
    if len(slots := _pbs_slots(environment)) > 1:
        return (
            f"PBS job {environment.get('PBS_JOBID')} has {len(slots)} hosts, but this process is one alone. Instead "
            f"{_ON_PBS}"
        )
    tasks = environment.get("SLURM_NTASKS", "1")
    return "" if tasks == "1" else _fault_in_slurm(environment, f"{tasks} tasks")


def _fault_of_hosts_left(environment: Mapping[str, str]) -> str:
    """Return the fault of a lone process in a job of several hosts for which no number of tasks was asked."""
    hosts = environment.get("SLURM_JOB_NUM_NODES", "1")
    return "" if hosts == "1" or "SLURM_NTASKS" in environment else _fault_in_slurm(environment, f"{hosts} hosts")


def _fault_in_slurm(environment: Mapping[str, str], has: str) -> str:
    return f"SLURM job {environment.get('SLURM_JOB_ID')} has {has}, but this process is one alone. Instead {_SRUN}"


def read_step(environment: Mapping[str, str]) -> Meeting | None:
    """Return the place in a step; None in a batch script or shell and without SLURM.

    The variables: `man srun`, OUTPUT ENVIRONMENT VARIABLES. Raises UserError if they contradict each other.
    """
    if "SLURM_STEP_NUM_TASKS" not in environment:
        return None
    try:
        rank, size, local_rank, host = (
            int(environment[name]) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
        )
        hosts = tuple(expand_hosts(environment["SLURM_STEP_NODELIST"]))
        tasks = expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
        fits = sum(tasks) == size and len(hosts) == len(tasks)
        if not (fits and 0 <= rank < size and 0 <= local_rank < tasks[host]):
            raise ValueError(f"they say rank {rank} of {size}, {local_rank} on host {host} of {hosts} with {tasks}")
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"SLURM's variables of this step do not fit together: {error}. Start it by srun itself, and submit "
            "with --export=NONE so that none is left over from another job."
        ) from error
    ids = [environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    is_one_host = len(hosts) == 1
    return Meeting("srun", rank, size, hosts[0], None, ".".join(ids), local_rank, tasks[host], is_one_host, hosts, host)


def expand_counts(counts: str) -> list[int]:
    """Expand SLURM's "2(x3),1" → [2, 2, 2, 1]."""
    expanded: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"not a list of counts: {counts!r}")
        expanded += [int(match[1])] * int(match[2] or 1)
    return expanded


def expand_hosts(hosts: str) -> list[str]:
    """Expand SLURM's "a,n[1-2,07]" → ["a", "n1", "n2", "n07"]; leading zeros stay, several brackets multiply."""
    expanded: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts):
        names = [""]
        for text, numbers in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            endings = [text] if text else [number for span in numbers.split(",") for number in _expand_span(span)]
            names = [name + ending for name in names for ending in endings]
        expanded += names
    return expanded


def _expand_span(span: str) -> list[str]:
    first, _, last = span.partition("-")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
