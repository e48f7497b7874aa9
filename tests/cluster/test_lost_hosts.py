"""Elastic training over hosts: one of three is lost, two train on, it comes back. ROUNDS=20 does so so many times."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PROGRAMS, PROJECT
from elastic_job import ElasticJob, elastic_words
from jobs import Table, job_environment
from virtual_cluster import HEAD, VirtualCluster

ROUNDS = int(os.environ.get("ROUNDS", "1"))
GLOO_TIMEOUT_S = 20
"""How long ranks wait for one whose host has vanished without a word; also for one that starts."""


@pytest.fixture(scope="session")
def table(cluster_tables: list[object]) -> Iterator[Table]:
    made = Table(
        "Elastic: seconds until the next steps", ["host", "how", "lost, 2 train on", "back, 3 train", "epochs"]
    )
    yield made
    cluster_tables.append(made)


@pytest.mark.parametrize("how", ["killed", pytest.param("cut off", marks=pytest.mark.exhaustive)])
def test_a_lost_host_costs_no_record_and_may_come_back(
    cluster: VirtualCluster, table: Table, tmp_path: Path, how: str
) -> None:
    for number in range(ROUNDS):
        lost, out = cluster.hosts[number % 3], tmp_path / str(number)
        out.mkdir()
        options = ("--network-interface", "eth0", "--gloo-timeout-seconds", str(GLOO_TIMEOUT_S))
        program = [sys.executable, str(PROGRAMS / "elastic_rank.py"), str(out), "loop"]
        words = cluster.command(HEAD, [*elastic_words(out, cluster.hosts, *options), *program], cwd=PROJECT)
        with (out / "said").open("wb") as said:
            process = subprocess.Popen(words, env=job_environment(), stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            job = ElasticJob(out, process, cluster.hosts)
            job.wait_until_trains(cluster.hosts)
            if how == "cut off":
                cluster.cut(lost)
            job.kill(lost)
            gone = job.wait_until_trains([host for host in cluster.hosts if host != lost], more=1)
            cluster.mend(lost)
            back = job.wait_until_trains(cluster.hosts, more=1)
            facts = job.finish()
        finally:
            cluster.mend(lost)
            process.kill()
            process.wait()
            for host in cluster.hosts:
                for left in cluster.processes(host):
                    if "elastic_rank.py" in " ".join(left.cmdline()):
                        left.kill()
        assert len({fact["weights"] for fact in facts}) == 1
        for fact in facts:
            assert fact["used"] == [fact["epoch"]]
            assert fact["iterations"] == len(fact["sizes"])
        table.add(lost, how, gone, back, facts[0]["epoch"])
