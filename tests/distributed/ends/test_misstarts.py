"""Ranks that plain srun has started meet by themselves; processes that would not find each other are told so."""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    HANGS_AFTER_S,
    PROGRAMS,
    PROJECT,
    launcher_command,
    rank_environment,
    run_process,
    train,
    without_tensorflow,
)
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from horovod_train.distributed.launch.rendezvous import candidate_ports

SRUN = launcher_command("srun", 2)


def meet(out: Path, ranks: list[str] | None = None, **environment: str) -> list[dict[str, Any]]:
    """The facts of those that were started."""
    out.mkdir()
    command = [*SRUN[:-1], *(ranks or []), "--", sys.executable, str(PROGRAMS / "meet.py"), str(out)]
    finished = run_process(command, environment=rank_environment() | environment)
    assert finished.returncode == 0, finished.text
    return [json.loads(file.read_text()) for file in sorted(out.iterdir())]


def job_with_free_ports() -> tuple[str, int, int]:
    """A job's number and the first two ports that its root would try, which no process on this host has."""
    while True:
        job = str(random.randrange(1_000_000, 9_000_000))
        first, second, *_ = candidate_ports(f"{job}.0.0")
        with suppress(OSError):
            for port in (first, second):
                socket.create_server(("", port)).close()
            return job, first, second


def test_ranks_meet_beside_a_stranger_on_their_port(tmp_path: Path) -> None:
    """Another job's rendezvous server is no rank 0 of ours; and nothing of the meeting stays for child processes."""
    job, first, second = job_with_free_ports()
    stranger = RendezvousHTTPServer(("", first), RendezvousHandler, 0)
    stranger.cache = {"horovod_train": {"step": b"7.0.0"}}
    threading.Thread(target=stranger.serve_forever, args=(0.05,), daemon=True).start()
    try:
        root, other = meet(tmp_path / "out", SLURM_JOB_ID=job)
    finally:
        stranger.shutdown()
        stranger.server_close()
    assert root["inside"]["HOROVOD_GLOO_RENDEZVOUS_PORT"] == str(second)
    assert other["inside"]["HOROVOD_GLOO_RENDEZVOUS_PORT"] == str(second)
    assert other["inside"]["HOROVOD_LOCAL_RANK"] == "1"
    assert root["launcher_after"] == other["launcher_after"] == "srun"


@pytest.mark.long
def test_horovods_log_does_not_have_the_key_of_the_rendezvous(tmp_path: Path) -> None:
    """Horovod writes the address, which has the key, at these levels; and reads its level once."""
    secret: dict[str, Any] = {"HOROVOD_TRAIN_TOKEN": "secret"}
    for facts in meet(tmp_path / "secret", HOROVOD_LOG_LEVEL="trace", **secret):
        assert facts["inside"]["HOROVOD_LOG_LEVEL"] == "info"
    for facts in meet(tmp_path / "no secret", HOROVOD_LOG_LEVEL="trace"):
        assert facts["inside"]["HOROVOD_LOG_LEVEL"] == "trace"


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    (facts,) = meet(tmp_path / "out", ["0"], HOROVOD_START_TIMEOUT="1")
    assert "1 of 2 ranks have not reached localhost in time: 1." in facts["error"]


@pytest.mark.long
def test_a_root_that_does_not_answer_is_named(tmp_path: Path) -> None:
    (facts,) = meet(tmp_path / "out", ["1"], HOROVOD_START_TIMEOUT="1")
    assert "rank 0 on localhost (127.0.0.1) does not answer rank 1 on localhost at port" in facts["error"]
    assert facts["exit_code"] == 1  # so that it is started again: the host may be lost


ALONE = 'exec "$@" $([ $SLURM_PROCID = 0 ] || echo nonsense=1)'
NO_INTERFACE = 'HOROVOD_GLOO_IFACE=$([ $SLURM_PROCID = 0 ] && echo lo || echo ib7) exec "$@"'


@pytest.mark.parametrize(
    ("shell", "output_dir", "said"),
    [
        pytest.param(ALONE, "run", r"error: rank 1 \(.*\): command line: nonsense: unknown key", id="a rank"),
        pytest.param(
            'exec "$@"', "config/run", "error: output_dir: cannot write", id="root", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            NO_INTERFACE,
            "run",
            "error: HOROVOD_GLOO_IFACE must be .* received 'ib7', which rank 1 on localhost has not. It has .*lo",
            id="interface",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_rank_that_fails_alone_before_the_ranks_meet_ends_all(
    digits: Path, tmp_path: Path, shell: str, output_dir: str, said: str
) -> None:
    """srun lets the others wait for it. Without knowing, root would report it as missing after 120 s."""
    config = tmp_path / "config"
    config.write_text(f"data: {{train: {digits}/train, global_batch_size: 96}}\ntrain: {{max_steps: 2}}\n")
    program = [sys.executable, "-m", "horovod_train.main", "--config", str(config)]
    command = [*SRUN, "bash", "-c", shell, "-", *program, "--output-dir", str(tmp_path / output_dir)]
    finished = run_process(command, environment=rank_environment() | {"HOROVOD_START_TIMEOUT": "120"})
    assert finished.returncode == 2, finished.text
    (line,) = finished.stderr.splitlines()
    assert re.match(said, line), finished.text


@pytest.mark.exhaustive
def test_ranks_that_mpi_does_not_bring_together_end_with_one_sentence(digits: Path, tmp_path: Path) -> None:
    """As under the mpirun of another MPI: two processes, and each is the only one in the MPI of Horovod."""
    config = tmp_path / "config.yaml"
    config.write_text(f"data: {{train: {digits}/train, global_batch_size: 96}}\ntrain: {{max_steps: 2}}\n")
    command = [
        sys.executable,
        "-m",
        "horovod_train.main",
        "--config",
        str(config),
        "--output-dir",
        str(tmp_path / "run"),
    ]
    ranks = [
        subprocess.Popen(
            command,
            cwd=PROJECT,
            env=rank_environment() | {"PMI_RANK": str(rank), "PMI_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=HANGS_AFTER_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert said[1] == ""
    (line,) = said[0].splitlines()
    assert line.startswith("error: mpirun started 2 ranks, but the MPI that Horovod was built with finds 1:")
    assert not list((tmp_path / "run").rglob("*"))


def test_a_lonely_process_of_a_job_with_several_tasks_is_refused_before_tensorflow_is_loaded(tmp_path: Path) -> None:
    environment = without_tensorflow(tmp_path) | {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
    finished = train(["--config", "nowhere.yaml", "--output-dir", tmp_path / "run"], environment=environment)
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: SLURM job 7 has 2 tasks, but this process is one alone.")
    assert not (tmp_path / "run").exists()


LEFT_OVER = {
    "HOROVOD_GLOO_IFACE": "ib7",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_CROSS_SIZE": "2",
    "SLURM_JOB_END_TIME": "1700000000",
}


def test_a_single_process_takes_nothing_that_is_left_over_of_another_launch(digits: Path, tmp_path: Path) -> None:
    """Of a job it says that its time is over already, and does not end by it."""
    words = ["--config", PROJECT / "configs" / "digits_convnet.yaml", f"data.train={digits}/train", "data.eval=[]"]
    words += ["train.max_steps=3", "eval.every_epochs=null", "early_stopping=null"]
    for job in ({}, {"SLURM_JOB_ID": "7"}):
        environment = rank_environment() | LEFT_OVER | job
        run = tmp_path / f"run {len(job)}"
        finished = train([*words, "--output-dir", run], environment=environment, fresh=False)
        assert finished.returncode == 0, finished.text
        assert json.loads((run / "summary.json").read_text())["steps"] == 3
        assert ("warning: SLURM_JOB_END_TIME lies " in finished.text) == bool(job)


@pytest.mark.long
def test_the_trainer_is_not_elastic_and_writes_nothing(digits: Path, tmp_path: Path) -> None:
    elastic = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_ELASTIC": "1"}
    arguments = ["--config", PROJECT / "configs" / "digits_convnet.yaml", "--output-dir", tmp_path / "run"]
    finished = train(
        [*arguments, f"data.train={digits}/train", f"data.eval={digits}/eval"], environment=rank_environment() | elastic
    )
    assert finished.returncode == 2, finished.text
    assert "the trainer keeps its number of ranks. Start it with -np" in finished.stderr
    assert not (tmp_path / "run").exists()
