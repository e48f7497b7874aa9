"""Jobs of the shipped scripts that are disturbed go on, and end with the weights of a job that was not."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from conftest import PROJECT, summary_of
from jobs import Job, Table, submit
from virtual_cluster import HEAD, VirtualCluster, running

pytestmark = pytest.mark.cluster

CONFIG = """
data: {{train: {data}/train, global_batch_size: 96}}
model: user_models:long_run
loss: {{name: sparse_categorical_crossentropy, options: {{from_logits: true}}}}
optimizer: adam
lr_schedule: {{base_lr: 0.01, decay: {{name: cosine}}}}
deterministic: true
device: {{intra_op_threads: 1, inter_op_threads: 1}}
train: {{epochs: 80, steps_per_call: 5, ema_decay: 0.99}}
log: {{every_steps: 45, tensorboard: false}}
checkpoint: {{every_steps: 150, every_epochs: null}}
"""
STEPS = 1200
EXPORT = f"VENV={sys.prefix},PYTHONPATH={PROJECT / 'tests'},TF_CPP_MIN_LOG_LEVEL=3,OMPI_ALLOW_RUN_AS_ROOT=1"
EXPORT += ",OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
TWO_HOSTS = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--time=00:10:00")


@pytest.fixture(scope="session")
def config(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "requeue.yaml"
    path.write_text(CONFIG.format(data=digits))
    return path


@pytest.fixture(scope="session")
def table(cluster_tables: list[object]) -> Iterator[Table]:
    columns = ["job", "disturbed by", "asked to stop → ranks gone, s", "starts", "weights_sha256"]
    table = Table("Jobs of scripts/slurm/train.sbatch on two hosts", columns)
    yield table
    cluster_tables.append(table)


def submit_shipped(
    cluster: VirtualCluster, config: Path, folder: Path, words: Sequence[str] = (), launch: str = "srun"
) -> Job:
    script = folder / "job.sbatch"
    text = (PROJECT / "scripts" / "slurm" / "train.sbatch").read_text()
    script.write_text(text.replace("\nLAUNCH=srun\n", f"\nLAUNCH={launch}\n"))
    rest = ["--config", str(config), "--output-dir", str(folder / "run")]
    return submit(cluster, [*TWO_HOSTS, *words, str(script), *rest], folder / "out", export=EXPORT)


def ranks(cluster: VirtualCluster) -> list[psutil.Process]:
    return [rank for host in cluster.hosts for rank in cluster.ranks(host)]


def wait_for_restart(cluster: VirtualCluster, job: Job) -> int:
    assert job.wait(180) == ("COMPLETED", 0), job.said()
    assert "resumed from" in job.said()
    return int(cluster.job(job.number)["Restarts"])


@pytest.fixture(scope="session")
def undisturbed(cluster: VirtualCluster, config: Path, tmp_path_factory: pytest.TempPathFactory, table: Table) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = submit_shipped(cluster, config, folder)
    assert job.wait() == ("COMPLETED", 0), job.said()
    assert "2 rank(s) on 2 host(s), launcher srun, exchange over gloo" in job.said()
    assert summary_of(folder / "run")["steps"] == STEPS
    sha = str(summary_of(folder / "run")["weights_sha256"])
    table.add("srun", "nothing", "-", 1, sha[:12])
    return sha


@pytest.mark.parametrize(
    "launch",
    [
        "srun",
        pytest.param("srun-pmix", marks=pytest.mark.exhaustive),
        pytest.param("mpirun", marks=pytest.mark.exhaustive),
    ],
)
def test_a_job_whose_time_runs_out_saves_and_goes_on_to_the_same_weights(
    cluster: VirtualCluster, config: Path, tmp_path: Path, undisturbed: str, table: Table, launch: str
) -> None:
    job = submit_shipped(cluster, config, tmp_path, launch=launch)
    job.wait_until_said("train step 45 ")
    before, began = ranks(cluster), time.monotonic()
    cluster.run(HEAD, ["scancel", "--batch", "--signal=USR1", job.number])
    _, left = psutil.wait_procs(before, timeout=30)
    gone_s = time.monotonic() - began
    assert not left
    starts = 1 + wait_for_restart(cluster, job)
    sha = summary_of(tmp_path / "run")["weights_sha256"]
    table.add(launch, "USR1 before its time is over", gone_s, starts, sha[:12])
    assert starts == 2
    assert "(SIGUSR1); saved; to resume, start it again" in job.said()
    assert "requeued: exit code 75" in job.said()
    assert sha == undisturbed


def test_a_preempted_job_saves_and_goes_on_to_the_same_weights(
    cluster: VirtualCluster, config: Path, tmp_path: Path, undisturbed: str, table: Table
) -> None:
    job = submit_shipped(cluster, config, tmp_path)
    job.wait_until_said("train step 45 ")
    before, began = ranks(cluster), time.monotonic()
    urgent = ["--partition=urgent", "--nodes=3", "--exclusive"]
    other = submit(cluster, urgent, tmp_path / "urgent", script="sleep 1")
    _, left = psutil.wait_procs(before, timeout=30)
    gone_s = time.monotonic() - began
    assert not left
    assert other.wait() == ("COMPLETED", 0)
    starts = 1 + wait_for_restart(cluster, job)
    sha = summary_of(tmp_path / "run")["weights_sha256"]
    table.add("srun", "a job of a partition with more priority", gone_s, starts, sha[:12])
    assert "saved; to resume, start it again" in job.said()
    assert starts == 2
    assert sha == undisturbed


@pytest.mark.exhaustive
def test_a_cancelled_job_stays_cancelled(cluster: VirtualCluster, config: Path, tmp_path: Path) -> None:
    """The negative of the above: what the user ends does not come again."""
    job = submit_shipped(cluster, config, tmp_path)
    job.wait_until_said("train step 45 ")
    cluster.run(HEAD, ["scancel", job.number])
    assert job.wait()[0] == "CANCELLED"
    job.wait_until(cluster.is_idle, "all hosts idle")
    time.sleep(2)
    assert (job.state(), cluster.job(job.number)["Restarts"]) == ("CANCELLED", "0")


@pytest.mark.exhaustive
@pytest.mark.parametrize("launch", ["srun", "horovodrun"])
def test_a_stop_file_does_not_send_a_job_round_in_circles(
    cluster: VirtualCluster, config: Path, tmp_path: Path, launch: str
) -> None:
    """horovodrun has an exit code of its own; the job has that of its ranks."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    job = submit_shipped(cluster, config, tmp_path, launch=launch)
    assert job.wait() == ("FAILED", 76), job.said()
    assert "requeued: " not in job.said()


@pytest.mark.exhaustive
def test_tasks_of_a_job_array_have_run_directories_and_restarts_of_their_own(
    cluster: VirtualCluster, config: Path, tmp_path: Path
) -> None:
    words = ["--array=1-2", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=1", f"--output={tmp_path}/out-%a"]
    script = str(PROJECT / "scripts" / "slurm" / "train.sbatch")
    rest = ["--config", str(config), "seed=%a", "--output-dir", f"{tmp_path}/sweep-%a"]
    array = submit(cluster, [*words, script, *rest], tmp_path / "unused", export=EXPORT)
    # The last task to start has the number of the whole array as its job's.
    first, last = (replace(array, number=f"{array.number}_{task}", output=tmp_path / f"out-{task}") for task in (1, 2))
    for job in (first, last):
        job.wait_until_said("train step 45 ")
    assert cluster.job(last.number)["JobId"] == array.number
    cluster.run(HEAD, ["scancel", "--batch", "--signal=USR1", last.number])
    assert wait_for_restart(cluster, last) == 1
    assert first.wait() == ("COMPLETED", 0), first.said()
    assert cluster.job(first.number)["Restarts"] == "0"
    assert "resumed from" not in first.said()
    found = [summary_of(tmp_path / f"sweep-{task}") for task in (1, 2)]
    assert [summary["config"]["seed"] for summary in found] == [1, 2]
    assert found[0]["weights_sha256"] != found[1]["weights_sha256"]


@pytest.mark.exhaustive
def test_a_lost_host_is_replaced_and_the_weights_are_the_same(
    config: Path, tmp_path: Path, undisturbed: str, table: Table
) -> None:
    """The host is switched off: nobody there says goodbye, and SLURM learns of it after SlurmdTimeout."""
    with running(hosts=3, cpus=2, slurmd_timeout_s=10) as cluster:
        job = submit_shipped(cluster, config, tmp_path, ["--nodelist=n1"])
        job.wait_until_said("train step 180 ")  # after a checkpoint: there is nobody to save now
        before, began = ranks(cluster), time.monotonic()
        cluster.lose("n2")
        _, left = psutil.wait_procs(before, timeout=90)
        gone_s = time.monotonic() - began
        assert not left
        starts = 1 + wait_for_restart(cluster, job)
        assert "(n3) uses" in job.said()
    sha = summary_of(tmp_path / "run")["weights_sha256"]
    table.add("srun", "n2 is switched off", gone_s, starts, sha[:12])
    assert sha == undisturbed
