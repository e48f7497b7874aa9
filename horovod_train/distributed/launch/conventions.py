"""Read this process's rank, the number of ranks and where they meet from the variables of many launchers.

CONVENTIONS lists them: a launcher is added by a line there. TF_CONFIG is JSON, so `_read_tf_config` reads it. Does not
read the variables of horovodrun, mpirun and srun; see launcher. Does not connect; see rendezvous.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from horovod_train.errors import UserError

RANK, LOCAL_RANK, SIZE, ROOT, PORT, JOB = (
    f"HOROVOD_TRAIN_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "ROOT", "PORT", "JOB")
)
"""Variables of ours. The first two are those of `launch`; the others also serve launchers that do not say it: the
number of ranks, the host of rank 0, a port there, and a name that no other job has at the same time."""


class Convention(NamedTuple):
    """The variables of one launcher, alternatives in order. `rank` and one of `shows_by` show that it is the launcher.

    A process that has none of `shows_by` was started by something else: RANK alone may be a user's own variable.
    """

    launcher: str
    shows_by: tuple[str, ...]
    rank: tuple[str, ...]
    size: tuple[str, ...]
    root: tuple[str, ...] = (ROOT,)
    port: tuple[str, ...] = (PORT,)
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    """The number of hosts."""
    job: tuple[str, ...] = ()
    """What tells this job from others that run at the same time."""


CONVENTIONS = (
    # `horovod-train launch`, and any launcher that sets these six.
    Convention(
        launcher="launch",
        shows_by=(RANK,),
        rank=(RANK,),
        size=(SIZE,),
        local_rank=(LOCAL_RANK,),
        job=(JOB,),
    ),
    # https://docs.pytorch.org/docs/stable/elastic/run.html, Environment Variables. Without TORCHELASTIC_RUN_ID:
    # Kubeflow's PyTorchJob, SageMaker, Azure ML, and scripts that call init_method="env://".
    Convention(
        launcher="torchrun",
        shows_by=("RANK", "WORLD_SIZE"),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        root=("MASTER_ADDR",),
        port=("MASTER_PORT",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        job=("TORCHELASTIC_RUN_ID",),
    ),
    # https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication: the index is Kubernetes', the rest is
    # written into the manifest. An Indexed Job without it is a set of separate runs.
    Convention(
        launcher="indexed-job",
        shows_by=(SIZE, ROOT),
        rank=("JOB_COMPLETION_INDEX",),
        size=(SIZE,),
        job=(JOB,),
    ),
    # IBM's jsrun. PMIX_NAMESPACE is different for each jsrun of a job.
    Convention(
        launcher="jsrun",
        shows_by=("JSM_NAMESPACE_RANK",),
        rank=("JSM_NAMESPACE_RANK",),
        size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
        job=("LSB_JOBID", "PMIX_NAMESPACE", JOB),
    ),
    # `man flux-run`, and flux-core's src/shell/task.c
    Convention(
        launcher="flux",
        shows_by=("FLUX_TASK_RANK",),
        rank=("FLUX_TASK_RANK",),
        size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        hosts=("FLUX_JOB_NNODES",),
        job=("FLUX_JOB_ID", JOB),
    ),
    # HPE's PALS (mpiexec, aprun): it gives the size to MPI only.
    Convention(
        launcher="pals",
        shows_by=("PALS_RANKID",),
        rank=("PALS_RANKID",),
        size=("PMI_SIZE", SIZE),
        local_rank=("PALS_LOCAL_RANKID",),
        local_size=("PALS_LOCAL_SIZE",),
        job=("PALS_APID", JOB),
    ),
)

_ONE_HOST = "localhost"
_CHIEF = ("chief", "master")
"""`master` is what TensorFlow 1 called the chief."""


@dataclass(frozen=True)
class Meeting:
    """A rank, and where all ranks meet; see rendezvous."""

    launcher: str
    rank: int
    size: int
    root: str
    """Host name or IPv4 address of rank 0's host, as the other hosts see it."""
    port: int | None
    """A port that is reserved for rank 0 there; None: it may take any."""
    name: str
    """Unique to this job, and the same on all its ranks."""
    local_rank: int | None = None
    local_size: int | None = None
    is_one_host: bool = False
    """Whether the environment shows that all ranks are on one host."""
    hosts: tuple[str, ...] = ()
    """Those of a SLURM step, by the names that SLURM has for them; others tell theirs when they meet."""
    host: int = 0
    """Of `hosts`, which is this rank's."""

    @property
    def is_slurm_step(self) -> bool:
        """Whether SLURM brought the tasks to their hosts, and knows the addresses of these."""
        return bool(self.hosts)

    @property
    def root_is_looked_up(self) -> bool:
        """Whether the address of root's host is what its name resolves to: it is not loopback, and not SLURM's."""
        return not self.is_one_host and not self.is_slurm_step

    @property
    def here(self) -> str:
        """The name of this rank's host."""
        return self.hosts[self.host] if self.hosts else socket.gethostname()

    @property
    def is_one_a_host(self) -> bool:
        """Whether each host may have one process of it, as far as the environment shows."""
        return self.size == 1 or not (self.is_one_host or self.local_rank or (self.local_size or 1) > 1)


def read_meeting(environment: Mapping[str, str]) -> Meeting | None:
    """Return what the environment says by one of the conventions; None if it says nothing.

    Raises UserError if variables are missing, or if two conventions disagree on rank or size.
    """
    used = [convention for convention in CONVENTIONS if _is_used(convention, environment)]
    # The first one has what its launcher gave to this process alone; the pod that it runs in has an index of its own.
    if used and (used[0].launcher == "launch" or "TORCHELASTIC_RUN_ID" in environment):
        return _read(used[0], environment)
    found = [_read(convention, environment) for convention in used]
    if environment.get("TF_CONFIG", "").strip():
        found += filter(None, [_read_tf_config(environment["TF_CONFIG"])])
    if not found:
        return None
    first = found[0]
    for other in found[1:]:
        if (other.rank, other.size) != (first.rank, first.size):
            raise UserError(
                f"the variables of {first.launcher} say rank {first.rank} of {first.size}, those of {other.launcher} "
                f"say rank {other.rank} of {other.size}: unset those that are left over from elsewhere."
            )
    return first


def _is_used(convention: Convention, environment: Mapping[str, str]) -> bool:
    if convention.launcher == "indexed-job" and not any(name in environment for name in convention.rank):
        return False
    if convention.launcher == "flux" and environment.get("FLUX_JOB_SIZE") == "1":  # also in the script of a batch job
        return False
    return any(name in environment for name in convention.shows_by)


def _read(convention: Convention, environment: Mapping[str, str]) -> Meeting:
    def number(names: tuple[str, ...], what: str, least: int = 0, most: float = math.inf) -> int | None:
        name = next((name for name in names if environment.get(name)), None)
        if name is None:
            return None
        text = environment[name].strip()
        if not text.isascii() or not text.isdecimal() or not least <= int(text) <= most:
            raise UserError(f"{name} must be {what}; received {text!r}. It comes from {convention.launcher}.")
        return int(text)

    rank = number(convention.rank, "a rank, from 0")
    size = number(convention.size, "the number of ranks, at least 1", 1)
    if rank is None or size is None:
        missing, there = convention.rank if rank is None else convention.size, convention.shows_by
        if rank is None:
            there = tuple(name for name in convention.size if name in environment) or there
        given = next(name for name in (*there, *convention.rank) if name in environment)
        raise UserError(
            f"{given} is set, but not {' or '.join(missing)}, which {convention.launcher} and what is like it set for "
            f"every rank. Set it, or unset {given} to train alone."
        )
    if rank >= size:
        raise UserError(
            f"{_first(convention.rank, environment)} must be a rank below {_first(convention.size, environment)}; "
            f"received {rank} and {size}."
        )
    port = number(convention.port, "a port from 1 to 65535", 1, 65_535)
    local_rank = number(convention.local_rank, "the rank among those of this host, from 0")
    local_size = number(convention.local_size, "the number of ranks on this host, at least 1", 1)
    hosts = number(convention.hosts, "the number of hosts, at least 1", 1)
    if local_size is not None and not (local_rank or 0) < local_size <= size:
        raise UserError(
            f"{_first(convention.local_size, environment)} must be more than the local rank, {local_rank}, and at most "
            f"the number of ranks, {size}; received {local_size}."
        )
    root = next((environment[name].strip() for name in convention.root if environment.get(name, "").strip()), "")
    is_one_host = local_size == size or hosts == 1 or size == 1 or (bool(root) and is_loopback(root))
    if not is_one_host and not root:
        raise UserError(
            f"{convention.launcher} started {size} ranks on several hosts, and nothing names the host of rank 0. Set "
            f"{' or '.join(convention.root)} to its name for all ranks."
        )
    is_taken = "TORCHELASTIC_RUN_ID" in environment and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    names = [environment[name] for name in convention.job if name in environment]
    return Meeting(
        launcher=convention.launcher,
        rank=rank,
        size=size,
        root=_ONE_HOST if is_one_host else root,
        port=None if is_taken else port,  # torchrun itself listens there
        name="/".join([convention.launcher, *names, root, str(port or ""), str(size)]),
        local_rank=local_rank,
        local_size=local_size,
        is_one_host=is_one_host,
    )


def _first(names: tuple[str, ...], environment: Mapping[str, str]) -> str:
    return next(name for name in names if name in environment)


def is_loopback(host: str) -> bool:
    return host in ("localhost", "localhost.localdomain", "::1") or host.startswith("127.")


def _read_tf_config(text: str) -> Meeting | None:
    """Read https://www.tensorflow.org/guide/distributed_training: a chief is rank 0, workers follow; None if alone.

    TensorFlow also takes a TF_CONFIG without a cluster for a process alone.
    """

    def refuse(problem: str) -> UserError:
        return UserError(
            f"TF_CONFIG must name the hosts of all workers, and which of them this is; {problem}. It comes from the "
            "launcher; unset it to train alone."
        )

    try:
        config = json.loads(text)
    except ValueError as error:
        raise refuse(f"received {text!r}, which is not JSON") from error
    if not isinstance(config, dict):
        raise refuse(f"received {text!r}")
    cluster, task = config.get("cluster") or {}, config.get("task") or {}
    if not cluster:
        return None
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise refuse("cluster and task must be mappings")
    kind = task.get("type")
    for other, why in (("ps", "ranks average gradients, without servers"), ("evaluator", "the ranks evaluate")):
        if kind == other or cluster.get(other):
            raise UserError(
                f"TF_CONFIG names a task of type {other}; horovod_train has none: {why}. Start only workers, and "
                "one chief if you like."
            )
    chiefs = [name for name in _CHIEF if cluster.get(name)]
    if len(chiefs) > 1:
        raise refuse("it names a chief and a master")
    tasks = [(name, number, host) for name in (*chiefs, "worker") for number, host in enumerate(_hosts(cluster, name))]
    if not tasks or not all(isinstance(host, str) and host for _, _, host in tasks):
        raise refuse("cluster must have worker: [HOST:PORT, …]")
    if chiefs and len(_hosts(cluster, chiefs[0])) != 1:
        raise refuse(f"cluster must have one {chiefs[0]}")
    if len({host for _, _, host in tasks}) != len(tasks):
        raise refuse("two tasks have the same HOST:PORT")
    rank = _rank_of(task, tasks)
    if rank is None:
        raise refuse(f"task {json.dumps(task)} is none of the cluster's {len(tasks)}")
    places = [host.rpartition(":") for _, _, host in tasks]
    if not all(host and port.isascii() and port.isdecimal() and 0 < int(port) < 65_536 for host, _, port in places):
        raise refuse("each host must be HOST:PORT")
    hosts = {host for host, _, _ in places}
    is_one_host = len(hosts) == 1
    if not is_one_host and any(map(is_loopback, hosts)):
        raise refuse("a host of several is localhost, which is another host for each of them")
    root, _, port = places[0]
    return Meeting(
        launcher="tf-config",
        rank=rank,
        size=len(tasks),
        root=_ONE_HOST if is_one_host else root,
        port=int(port),
        name="/".join(["tf-config", *(host for _, _, host in tasks)]),
        is_one_host=is_one_host,
    )


def _hosts(cluster: Mapping[str, Any], name: str) -> list[Any]:
    hosts = cluster.get(name) or []
    if isinstance(hosts, dict):  # TensorFlow's sparse form: number → host
        hosts = [hosts[key] for key in sorted(hosts, key=int)] if all(str(key).isdecimal() for key in hosts) else [None]
    return hosts if isinstance(hosts, list) else [None]


def _rank_of(task: Mapping[str, Any], tasks: list[tuple[str, int, Any]]) -> int | None:
    index = str(task.get("index", 0))  # some services write it as text
    found = [rank for rank, (name, number, _) in enumerate(tasks) if (name, str(number)) == (task.get("type"), index)]
    return found[0] if found else None
