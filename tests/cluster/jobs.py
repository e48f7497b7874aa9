"""Jobs on the virtual cluster: how each launcher is called, what a job came to and how long it took."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import PROJECT, rank_environment
from virtual_cluster import HEAD, VirtualCluster

TRAIN = (sys.executable, "-u", "-m", "horovod_train.main")
ENDED = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY"}
POLL_S = 0.05

WAYS: dict[str, str] = {
    "srun": "srun --mpi=none",
    "srun-pmix": "srun --mpi=pmix",
    "mpirun": "mpirun --bind-to none",
    "horovodrun-gloo": "horovodrun --gloo -np {np} -H {hosts}",
    "horovodrun-mpi": "horovodrun --mpi -np {np} -H {hosts}",
}
"""What stands before `python …` in a batch script."""

Layout = tuple[int, ...]
"""Tasks on n1, n2, …"""


def job_environment() -> dict[str, str]:
    return rank_environment() | {"PATH": f"{rank_environment()['PATH']}:/usr/sbin:/sbin"}


def asked_for(layout: Layout) -> list[str]:
    """What sbatch is to be asked for: full hosts first, so 3 tasks on 2 hosts of 2 CPUs are 2 and 1."""
    return [f"--nodes={len(layout)}", f"--ntasks={sum(layout)}"]


def launch(way: str, layout: Layout) -> str:
    hosts = ",".join(f"n{number}:{tasks}" for number, tasks in enumerate(layout, 1))
    return WAYS[way].format(np=sum(layout), hosts=hosts)


@dataclass
class Job:
    """A batch job, and where its output goes."""

    cluster: VirtualCluster
    number: str
    output: Path
    submitted: float

    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def state(self) -> str:
        return self.cluster.job(self.number).get("JobState", "UNKNOWN")

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = 90) -> float:
        """Returns the seconds since the job was submitted."""
        limit = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > limit:
                state = self.cluster.run(HEAD, ["scontrol", "show", "job", self.number]).stdout
                self.cluster.run(HEAD, ["scancel", self.number])
                pytest.fail(f"{what}: not within {timeout_s} s\n{state}\n{self.said()[-4000:]}")
            time.sleep(POLL_S)
        return time.monotonic() - self.submitted

    def wait_until_said(self, words: str, timeout_s: float = 90) -> float:
        def has_said() -> bool:
            if self.state() in ENDED and words not in self.said():
                pytest.fail(f"the job has ended without {words!r}:\n{self.said()[-4000:]}")
            return words in self.said()

        return self.wait_until(has_said, f"{words!r}", timeout_s)

    def wait(self, timeout_s: float = 120) -> tuple[str, int]:
        """Its state at the end and its exit code."""
        self.wait_until(lambda: self.state() in ENDED, "the end", timeout_s)
        return self.state(), int(self.cluster.job(self.number)["ExitCode"].split(":")[0])


def submit(
    cluster: VirtualCluster,
    words: Sequence[str],
    output: Path,
    *,
    script: str | None = None,
    export: str | None = None,
) -> Job:
    """sbatch with these words; script: its text, unless the words name a file."""
    if script is not None:
        file = output.with_suffix(".sh")
        file.write_text(f"#!/bin/bash\n{script}\n")
        words = [*words, str(file)]
    exported = [] if export is None else [f"--export={export}"]
    began = time.monotonic()
    finished = cluster.run(
        HEAD, ["sbatch", f"--output={output}", *exported, *words], cwd=PROJECT, environment=job_environment()
    )
    found = re.search(r"Submitted batch job (\d+)", finished.stdout)
    assert found, finished.stdout + finished.stderr
    return Job(cluster, found[1], output, began)


class Table:
    """Rows of what was seen, as Markdown, for people."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self.title, self.columns = title, list(columns)
        self.rows: list[list[str]] = []

    def add(self, *cells: object) -> None:
        self.rows.append([f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells])

    def __str__(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return f"{self.title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
