"""Settings by how ranks exchange, and how ranks are started on a host."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import HANGS_AFTER_S

from horovod_train.config.settings import HorovodConfig
from horovod_train.distributed.launch import local
from horovod_train.distributed.launch.local import (
    best_way,
    horovod_library,
    is_linked_with_mpi,
    launch_command,
    mpi_problem,
    run_ranks,
)
from horovod_train.distributed.launch.tuning import CYCLE_MS, choose

CYCLE, FUSION, YIELD = "HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD", "OMPI_MCA_mpi_yield_when_idle"
TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
WAITS = {TIMEOUT: ("630", "default")}


def found(config: HorovodConfig | None = None, environment: dict[str, str] | None = None, **how: object) -> dict:
    how = {"library": "gloo", "has_gpu": False} | how
    settings = choose(config or HorovodConfig(), environment or {}, **how)  # type: ignore[arg-type]
    return {setting.name: (setting.value, setting.origin) for setting in settings}


def test_each_library_has_its_defaults() -> None:
    assert found() == {CYCLE: (CYCLE_MS["gloo"], "default")} | WAITS
    assert found(library="MPI") == {YIELD: ("1", "default"), CYCLE: (CYCLE_MS["MPI"], "default")}
    assert found(library="alone") == {CYCLE: (CYCLE_MS["alone"], "default")}
    assert found(has_gpu=True) == WAITS  # NCCL: Horovod's own
    assert found(has_gpu=True, library="MPI") == {YIELD: ("1", "default")}


def test_gloo_waits_longer_than_its_own_30_s_with_the_watch_and_without() -> None:
    assert int(found()[TIMEOUT][0]) > 600
    settings = choose(HorovodConfig(), {}, library="gloo", has_gpu=False, extra_defaults={TIMEOUT: "90"})
    assert {setting.name: setting.value for setting in settings}[TIMEOUT] == "90"


def test_elastic_ranks_get_no_setting_with_which_horovod_could_not_start_again() -> None:
    (timeout,) = choose(HorovodConfig(), {}, library="elastic", has_gpu=False)
    assert (timeout.name, timeout.value) == ("HOROVOD_GLOO_TIMEOUT_SECONDS", "60")


def test_environment_wins_over_defaults_and_config_over_both() -> None:
    environment = {CYCLE: "7", "HOME": "/"}
    assert found(environment=environment) == {CYCLE: ("7", "environment")} | WAITS
    config = HorovodConfig(cycle_time_ms=3, fusion_threshold_mb=2)
    assert found(config, environment) == {CYCLE: ("3", "config"), FUSION: (str(2 << 20), "config")} | WAITS


def test_deterministic_runs_of_adasum_fuse_nothing() -> None:
    adasum = HorovodConfig(op="adasum")
    assert found(adasum, {FUSION: "5"}, deterministic=True)[FUSION] == ("0", "config")
    assert FUSION not in found(adasum) | found(deterministic=True)


def test_further_defaults_give_way_to_the_environment() -> None:
    more = {"A": "1", "B": "2"}
    settings = choose(HorovodConfig(), {"A": "mine"}, library="alone", has_gpu=True, extra_defaults=more)
    assert [(setting.name, setting.value) for setting in settings] == [("A", "mine"), ("B", "2")]


def test_mpi_is_taken_where_it_works() -> None:
    """It does here: the project installs it."""
    assert mpi_problem() is None
    assert best_way()[0] == "mpirun"


def fake_mpirun(folder: Path, body: str) -> None:
    (folder / "mpirun").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "mpirun").chmod(0o755)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (None, "there is no mpirun on PATH"),
        ("echo 'no slots here' >&2; exit 1", "mpirun cannot start two processes: no slots here"),
        # Another MPI's mpirun starts two processes, and neither hears of the other.
        ('while [ "$1" != -np ]; do shift; done; shift 2; "$@"; "$@"', "mpirun and mpi4py are of different MPIs"),
    ],
)
def test_gloo_is_taken_where_mpi_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str | None, problem: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if body:
        fake_mpirun(tmp_path, body)
    way, why = best_way()
    assert way == "horovodrun"
    assert problem in why


def test_an_mpirun_that_hangs_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With -m, bash gives each process a group of its own, as mpirun does."""
    pids = tmp_path / "pids"
    fake_mpirun(tmp_path, f"exec bash -mc 'for i in 1 2; do sleep 600 & echo $! >> {pids}; done; wait'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    ranks: list[psutil.Process] = []
    communicate = subprocess.Popen.communicate

    def until_started(process: subprocess.Popen[str], *given: Any, timeout: float | None = None) -> Any:
        """The time is up once both are there."""
        if timeout is None:
            return communicate(process, *given)
        while not (pids.exists() and pids.read_text().count("\n") == 2):
            assert process.poll() is None
            time.sleep(0.01)
        ranks.extend(psutil.Process(int(pid)) for pid in pids.read_text().split())
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", until_started)
    assert mpi_problem() == "mpirun did not start two processes within 20 s"
    assert len(ranks) == 2
    _, left = psutil.wait_procs(ranks, timeout=HANGS_AFTER_S)
    for process in left:
        process.kill()
    assert not left


def test_mpirun_that_does_not_end_when_told_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpirun(tmp_path, "trap '' TERM; while true; do sleep 1; done")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(local, "_TRY_WITHIN_S", 1.0)
    monkeypatch.setattr(local, "_END_WITHIN_S", 0.5)
    assert mpi_problem() == "mpirun did not start two processes within 1 s"


def test_ranks_of_an_environment_that_is_a_link_meet(tmp_path: Path) -> None:
    """Open MPI hangs where mpirun and its ranks name the folder of the one environment differently."""
    environment = tmp_path / "environment"
    environment.symlink_to(Path(sys.prefix).resolve())
    finished = run_ranks("mpirun", 2, [str(environment / "bin/python"), "-c", local._PRINT_SIZE], {}, HANGS_AFTER_S)
    assert finished.stdout.replace("\n", "") == "size=2;size=2;", finished.stderr


@pytest.mark.parametrize("on_all_interfaces", [False, True])
def test_ranks_of_one_host_listen_nowhere_beyond_loopback(
    monkeypatch: pytest.MonkeyPatch, *, on_all_interfaces: bool
) -> None:
    listening = """
import sys, psutil
from mpi4py import MPI
MPI.COMM_WORLD.allreduce(1)
found = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
sys.stdout.write("".join(f"{ip};" for ip in found))
"""
    command = launch_command("mpirun", 2)
    if on_all_interfaces:  # as mpirun does by itself
        at = command.index("--mca")
        command[at : at + 3] = []
    monkeypatch.setattr(local, "launch_command", lambda way, ranks: command)
    finished = run_ranks("mpirun", 2, [sys.executable, "-c", listening], {}, HANGS_AFTER_S)
    assert finished.returncode == 0, finished.stderr
    outside = {ip for ip in finished.stdout.replace("\n", "").split(";") if ip} - {"127.0.0.1", "::1"}
    assert bool(outside) == on_all_interfaces


def test_a_horovod_without_mpi_is_recognised(tmp_path: Path) -> None:
    library = horovod_library()
    assert library is not None
    assert is_linked_with_mpi(library)
    other = tmp_path / "other.so"
    other.write_bytes(b"libgloo.so" * 100)
    assert not is_linked_with_mpi(other)
