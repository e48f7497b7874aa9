"""Every way to start ranks, on one, two and three hosts: the same result, and nothing left when a rank is killed."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import BIN, summary_of
from jobs import TRAIN, WAYS, Layout, Table, asked_for, launch, submit
from virtual_cluster import VirtualCluster

pytestmark = pytest.mark.cluster

CONFIG = """
data: {{train: {data}/train, global_batch_size: 96}}
model: user_models:small
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
lr_schedule: {{base_lr: 0.1}}
deterministic: true
device: {{intra_op_threads: 1, inter_op_threads: 1}}
train: {{max_steps: 30}}
log: {{every_steps: 10, tensorboard: false}}
"""
LAYOUTS: list[Layout] = [(2,), (1, 1), (2, 1), (1, 1, 1)]
EXCHANGE = {"srun": "gloo", "horovodrun-gloo": "gloo", "srun-pmix": "MPI", "mpirun": "MPI", "horovodrun-mpi": "MPI"}
LAUNCHER = {"horovodrun-gloo": "horovodrun", "horovodrun-mpi": "mpirun"}


@pytest.fixture(scope="session")
def config(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "ways.yaml"
    path.write_text(CONFIG.format(data=digits))
    return path


@pytest.fixture(scope="session")
def ways(cluster_tables: list[object]) -> Iterator[Table]:
    columns = ["way", "tasks on each host", "exchange", "first step after, s", "job done after, s", "weights_sha256"]
    table = Table("Ways to start, on 3 virtual hosts of one machine", columns)
    yield table
    cluster_tables.append(table)


@pytest.fixture(scope="session")
def killed(cluster_tables: list[object]) -> Iterator[Table]:
    columns = ["way", "said", "all ranks gone after, s", "job ended after, s", "state"]
    table = Table("A rank on the second of two hosts is killed (SIGKILL)", columns)
    yield table
    cluster_tables.append(table)


@pytest.fixture(scope="session")
def results() -> dict[int, dict[str, str]]:
    """np → weights_sha256 by way and layout."""
    return {}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[] if layout == (2, 1) else pytest.mark.exhaustive) for layout in LAYOUTS],
    ids=lambda layout: "+".join(map(str, layout)),
)
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_end_with_equal_weights(
    cluster: VirtualCluster,
    config: Path,
    tmp_path: Path,
    ways: Table,
    results: dict[int, dict[str, str]],
    way: str,
    layout: Layout,
) -> None:
    words = [*TRAIN, "--config", str(config), "--output-dir", str(tmp_path / "run")]
    job = submit(cluster, asked_for(layout), tmp_path / "out", script=f"{launch(way, layout)} {shlex.join(words)}")
    first_step_s = job.wait_until_said("train step 10 ")
    assert job.wait() == ("COMPLETED", 0), job.said()
    done_s = time.monotonic() - job.submitted
    np, exchange = sum(layout), EXCHANGE[way]
    launcher = LAUNCHER.get(way, way)
    assert f"{np} rank(s) on {len(layout)} host(s), launcher {launcher}, exchange over {exchange}" in job.said()
    for host, tasks in enumerate(layout, 1):
        assert sum(f"(n{host}) uses" in line for line in job.said().splitlines()) == tasks
    sha = summary_of(tmp_path / "run")["weights_sha256"]
    ways.add(way, "+".join(map(str, layout)), exchange, first_step_s, done_s, sha[:12])
    same = results.setdefault(np, {})
    same[f"{way} {layout}"] = sha
    assert len(set(same.values())) == 1, same


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way == "srun" else pytest.mark.exhaustive) for way in WAYS]
)
def test_a_killed_rank_ends_the_job_soon_and_leaves_nothing(
    cluster: VirtualCluster, config: Path, tmp_path: Path, killed: Table, way: str
) -> None:
    layout = (1, 1)
    words = [*TRAIN, "--config", str(config), "--output-dir", str(tmp_path / "run"), "train.max_steps=10000000"]
    job = submit(cluster, asked_for(layout), tmp_path / "out", script=f"{launch(way, layout)} {shlex.join(words)}")
    job.wait_until_said("train step 10 ")
    ranks = [rank for host in cluster.hosts for rank in cluster.ranks(host)]
    (victim,) = [rank for rank in cluster.ranks("n2") if rank.ppid() != 1 and not rank.children()]
    victim.kill()
    began = time.monotonic()
    _, left = psutil.wait_procs(ranks, timeout=40)
    gone_s = time.monotonic() - began
    state, exit_code = job.wait(60)
    ended_s = time.monotonic() - began
    said = "rank 1 (n2) disappeared" in job.said()
    killed.add(way, "rank 1 (n2) disappeared" if said else "-", gone_s, ended_s, f"{state}, exit code {exit_code}")
    assert not left
    assert state == "FAILED"
    assert exit_code != 0
    assert not [rank for host in cluster.hosts for rank in cluster.ranks(host)]


def test_a_cut_link_ends_the_ranks_on_both_sides_of_it(
    cluster: VirtualCluster, config: Path, tmp_path: Path, killed: Table
) -> None:
    """Nobody closes a connection: silence is all there is. The job itself ends when SLURM reaches the host again."""
    limits = ["watch.warn_after_s=3", "watch.stop_after_s=8", "train.max_steps=10000000"]
    words = [*TRAIN, "--config", str(config), "--output-dir", str(tmp_path / "run"), *limits]
    job = submit(cluster, asked_for((1, 1)), tmp_path / "out", script=f"srun {shlex.join(words)}")
    job.wait_until_said("train step 500 ")  # until the first step has been compiled, longer limits hold
    ranks = [rank for host in cluster.hosts for rank in cluster.ranks(host)]
    began = time.monotonic()
    cluster.cut("n2")
    try:
        _, left = psutil.wait_procs(ranks, timeout=60)
        gone_s = time.monotonic() - began
    finally:
        cluster.mend("n2")
    state, exit_code = job.wait(60)
    said = "rank 1 (n2) has sent no heartbeat" in job.said()
    sentence = "rank 1 (n2) has sent no heartbeat" if said else "-"
    killed.add("srun, link of n2 cut", sentence, gone_s, "when mended", f"{state}, exit code {exit_code}")
    assert not left
    assert said, job.said()
    assert (state, exit_code) == ("FAILED", 87)
    job.wait_until(cluster.is_idle, "all hosts idle")


def test_plain_srun_needs_neither_ssh_nor_mpirun(cluster: VirtualCluster, config: Path, tmp_path: Path) -> None:
    """Each rank runs where both are hidden: an empty file lies over every one of them."""
    hidden = [BIN / "mpirun", BIN / "orterun", BIN / "orted", BIN / "horovodrun", "/usr/bin/ssh", "/usr/bin/scp"]
    covers = "; ".join(f"[ ! -e {path} ] || mount --bind /dev/null {path}" for path in hidden)
    look = "echo found: $(command -v ssh mpirun orted horovodrun)"
    words = shlex.join([*TRAIN, "--config", str(config), "--output-dir", str(tmp_path / "run")])
    alone = tmp_path / "alone.sh"
    alone.write_text(f"{covers}; {look}; exec {words}\n")
    job = submit(cluster, asked_for((1, 1)), tmp_path / "out", script=f"{look}; srun unshare -m sh {alone}")
    assert job.wait() == ("COMPLETED", 0), job.said()
    lines = [line.strip() for line in job.said().splitlines() if line.startswith("found:")]
    assert lines[0] == f"found: /usr/bin/ssh {BIN}/mpirun {BIN}/orted {BIN}/horovodrun"  # the batch script itself
    assert lines[1:] == ["found:", "found:"]
    assert "2 rank(s) on 2 host(s), launcher srun, exchange over gloo" in job.said()


def test_ranks_of_another_host_than_roots_ask_a_relay_on_it(
    cluster: VirtualCluster, config: Path, tmp_path: Path
) -> None:
    words = shlex.join([*TRAIN, "--config", str(config), "--output-dir", str(tmp_path / "run")])
    script = f"export HOROVOD_LOG_LEVEL=debug; srun --label {words}"
    job = submit(cluster, asked_for((2, 2)), tmp_path / "out", script=script)
    assert job.wait() == ("COMPLETED", 0), job.said()
    asked = dict(re.findall(r"^(\d): .*rendezvous server address: ([\d.]+):\d+/", job.said(), re.MULTILINE))
    assert asked.keys() == {"0", "1", "2", "3"}
    assert asked["2"] == asked["3"] == "127.0.0.1"
    assert asked["0"] == asked["1"] != "127.0.0.1"


MISTAKES = {
    "no srun in the batch script": (
        "{train}",
        "has 2 tasks, but this process is one alone. Instead start it with srun",
    ),
    "horovodrun without -H": (
        "horovodrun --gloo -np 2 {train}",
        "horovodrun put all 2 ranks on n1, though the job has 2",
    ),
    "srun starts horovodrun": ("srun horovodrun --gloo -np 1 {train}", "srun started 2 copies of horovodrun"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_processes_that_would_not_find_each_other_write_nothing(
    cluster: VirtualCluster, config: Path, tmp_path: Path, mistake: str
) -> None:
    script, expected = MISTAKES[mistake]
    words = shlex.join([*TRAIN, "--config", str(config), "--output-dir", str(tmp_path / "run")])
    job = submit(cluster, asked_for((1, 1)), tmp_path / "out", script=script.format(train=words))
    ended = job.wait()
    said = [line for line in job.said().splitlines() if "error: " in line and "srun: error" not in line]
    if "horovodrun" in script:  # it ends with 1 whatever its ranks end with, and says what that was
        assert ended == ("FAILED", 1), job.said()
        assert "Exit code: 2\n" in job.said()
    else:
        assert ended == ("FAILED", 2), job.said()
    assert expected in said[0], job.said()
    assert len({line.partition("error: ")[2] for line in said}) == 1
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]


@pytest.mark.exhaustive
def test_an_mpi_that_does_not_know_the_pmix_of_slurm_is_named(
    cluster: VirtualCluster, config: Path, tmp_path: Path
) -> None:
    """Open MPI ends the process by itself, with a text about its insides; ours comes after it."""
    words = shlex.join([*TRAIN, "--config", str(config), "--output-dir", str(tmp_path / "run")])
    script = f"srun --mpi=pmix env OMPI_MCA_pmix=isolated {words}"
    job = submit(cluster, asked_for((1, 1)), tmp_path / "out", script=script)
    assert job.wait() == ("FAILED", 1)
    assert "did not start under srun --mpi=pmix; what it says is above. Start with srun --mpi=none" in job.said()
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
