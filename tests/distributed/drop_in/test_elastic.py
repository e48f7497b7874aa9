"""Ranks are killed and join while a script trains, on three names of this host: to Horovod each name is a host."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
from conftest import PROGRAMS, PROJECT, rank_environment, warm_python
from elastic_job import ElasticJob, elastic_words

HOSTS = ("127.0.0.1", "127.0.1", "127.1")


@contextmanager
def job_of(out: Path, mode: str, *options: str) -> Iterator[ElasticJob]:
    program = [*warm_python(), str(PROGRAMS / "elastic_rank.py"), str(out), mode]
    with (out / "said").open("wb") as said:
        process = subprocess.Popen(
            [*elastic_words(out, HOSTS, "--network-interface", "lo", *options), *program],
            cwd=PROJECT,
            env=rank_environment(),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    try:
        yield ElasticJob(out, process, HOSTS)
    finally:
        if process.poll() is None:
            for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                child.kill()
        process.wait()


def lose_and_regain(job: ElasticJob, lost: int) -> list[dict[str, Any]]:
    """One of three hosts is killed, two train on, it comes back. Returns what the three found."""
    job.wait_until_trains(HOSTS)
    job.kill(HOSTS[lost])
    # By what was said, and `sizes` below: the host may be back before the two have trained for long.
    job.wait_until(lambda: "2 ranks train, after " in job.said(), "two ranks train")
    job.wait_until_trains(HOSTS)
    facts = job.finish()
    assert len({fact["weights"] for fact in facts}) == 1
    assert all(fact["sizes"] == facts[0]["sizes"] for fact in facts)
    assert facts[0]["sizes"].count(2) > 0
    said = job.said()
    assert said.count("elastic: ranks were lost, back to the last commit; 2 ranks train, after ") == 1
    assert said.count("elastic: the hosts have changed; 3 ranks train, after ") == 1
    return facts


@pytest.mark.exhaustive  # tests/cluster loses hosts of a loop too
@pytest.mark.parametrize("lost", [0, 2])
def test_a_loop_uses_each_record_once_an_epoch_whoever_is_lost(tmp_path: Path, lost: int) -> None:
    with job_of(tmp_path, "loop") as job:
        facts = lose_and_regain(job, lost)
    for fact in facts:
        assert fact["used"] == [fact["epoch"]]
        assert fact["iterations"] == len(fact["sizes"])


@pytest.mark.exhaustive
def test_fit_takes_each_step_of_an_epoch_once(tmp_path: Path) -> None:
    with job_of(tmp_path, "fit") as job:
        facts = lose_and_regain(job, 1)
    for fact in facts:
        assert fact["iterations"] == len(fact["sizes"]) == 9 * fact["epoch"]
        assert fact["batch"] == 0


@pytest.mark.exhaustive
def test_a_host_taken_from_the_list_leaves_in_order_and_may_come_back(tmp_path: Path) -> None:
    with job_of(tmp_path, "loop") as job:
        job.wait_until_trains(HOSTS)
        removed = psutil.Process(job.at(HOSTS[1])[0])
        job.list_hosts([HOSTS[0], HOSTS[2]])
        job.wait_until_trains([HOSTS[0], HOSTS[2]])
        job.wait_until(lambda: not removed.is_running(), "the rank of the removed host ends")
        job.list_hosts(HOSTS)
        job.wait_until_trains(HOSTS)
        facts = job.finish()
    said = job.said()
    assert f"{HOSTS[1]}[0] has been removed from elastic job" in said
    assert "terminate called" not in said
    assert len({fact["weights"] for fact in facts}) == 1
    assert all(fact["used"] == [fact["epoch"]] for fact in facts)


@pytest.mark.exhaustive
def test_a_host_that_comes_back_and_fails_to_start_does_not_end_the_others(tmp_path: Path) -> None:
    with job_of(tmp_path, "loop", "--gloo-timeout-seconds", "15") as job:
        job.wait_until_trains(HOSTS)
        job.fail_next_start(HOSTS[1])
        job.kill(HOSTS[1])
        job.wait_until(lambda: job.has_failed_to_start(HOSTS[1]), "a failed start")
        job.wait_until_trains(HOSTS)
        facts = job.finish()
    assert "The ranks did not meet" in job.said()
    assert len({fact["weights"] for fact in facts}) == 1
    assert all(fact["used"] == [fact["epoch"]] for fact in facts)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("place", ["commit", "sync"])
def test_a_rank_that_is_lost_in_a_commit_or_a_sync_costs_no_record(
    tmp_path: Path, place: Literal["commit", "sync"], lost: int
) -> None:
    """In a sync between variables and objects: of what root gave, none may stay alone."""
    with job_of(tmp_path, "loop") as job:
        job.wait_until_trains(HOSTS)
        job.die_in(place, HOSTS[lost])
        if place == "sync":  # which only ranks do that meet again
            job.kill(HOSTS[2])
        job.wait_until(lambda: job.has_died(HOSTS[lost]), "a rank is lost")
        job.wait_until_trains(HOSTS)
        facts = job.finish()
    assert len({fact["weights"] for fact in facts}) == 1
    for fact in facts:
        assert fact["used"] == [fact["epoch"]]
        assert fact["iterations"] == len(fact["sizes"])
