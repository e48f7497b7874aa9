"""Read this process's place in the SLURM step that `srun` started, from the step's own variables.

Does not ask SLURM: the variables of a step are right for each of its tasks. Those of the job (SLURM_NTASKS, …) are not
used, because horovodrun and mpirun pass those of the batch node to every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from horovod_train.errors import UserError


@dataclass(frozen=True)
class Step:
    """A task and its place among the tasks of its step. Names as in `man srun`, OUTPUT ENVIRONMENT VARIABLES."""

    rank: int
    size: int
    local_rank: int
    node: int
    """Index of this task's host in `nodes`."""
    nodes: tuple[str, ...]
    tasks_per_node: tuple[int, ...]
    name: str
    """job.step.restart: unique to this step."""

    @property
    def local_size(self) -> int:
        return self.tasks_per_node[self.node]

    @property
    def cross(self) -> tuple[int, int]:
        """Rank and size among the tasks with this local rank, one on each host that has one: Horovod's cross."""
        hosts = [node for node, tasks in enumerate(self.tasks_per_node) if tasks > self.local_rank]
        return hosts.index(self.node), len(hosts)


def read_step(environment: Mapping[str, str]) -> Step | None:
    """Return the step; None in a batch script or shell and without SLURM. Raises UserError if it contradicts itself."""
    if "SLURM_STEP_NUM_TASKS" not in environment:
        return None
    try:
        step = Step(
            rank=int(environment["SLURM_PROCID"]),
            size=int(environment["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(environment["SLURM_LOCALID"]),
            node=int(environment["SLURM_NODEID"]),
            nodes=tuple(expand_hosts(environment["SLURM_STEP_NODELIST"])),
            tasks_per_node=tuple(expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])),
            name=".".join(
                environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
            ),
        )
        fits = sum(step.tasks_per_node) == step.size and len(step.nodes) == len(step.tasks_per_node)
        if not (fits and 0 <= step.rank < step.size and 0 <= step.local_rank < step.local_size):
            raise ValueError(f"they say {step}")
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"SLURM's variables of this step do not fit together: {error}. Start it by srun itself, and submit "
            "with --export=NONE so that none is left over from another job."
        ) from error
    return step


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
