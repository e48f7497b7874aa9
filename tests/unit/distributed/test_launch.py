"""Who launched, by what each launcher leaves in the environment; and the ways of starting that cannot work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import horovod.tensorflow as hvd
import pytest
from conftest import rank_environment

from horovod_train.distributed import start
from horovod_train.distributed.launch import launcher
from horovod_train.distributed.launch.launcher import (
    Launch,
    Launcher,
    expand_counts,
    expand_hosts,
    read_launch,
    read_step,
)
from horovod_train.distributed.launch.local import launch_command, start_program, wait_for_all
from horovod_train.errors import FailedElsewhere, UserError

BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": "n1",
}
"""In a batch script, and so under the horovodrun or mpirun that it calls: the batch node's values, for every rank."""


def step(rank: int = 0, size: int = 3) -> dict[str, str]:
    """A step of three tasks: two on n1, one on n2."""
    return BATCH | {
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
    }


def horovodrun(rank: int, size: int, local_size: int | None = None) -> dict[str, str]:
    local = {} if local_size is None else {"HOROVOD_LOCAL_SIZE": str(local_size)}
    return {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size), **local}


def mpirun(rank: int, size: int, local_size: int = 1) -> dict[str, str]:
    said = {"RANK": rank, "SIZE": size, "LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in said.items()} | {"PMIX_RANK": str(rank)}


def mpich(rank: int, size: int) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size)}


@pytest.mark.parametrize(
    ("environment", "launcher", "rank", "size"),
    [
        ({}, "none", 0, 1),
        (BATCH | {"SLURM_JOB_NUM_NODES": "1"}, "none", 0, 1),
        (horovodrun(3, 4), "horovodrun", 3, 4),
        (BATCH | horovodrun(1, 2, 1), "horovodrun", 1, 2),
        (mpirun(0, 2) | horovodrun(1, 2), "horovodrun", 1, 2),
        (mpirun(1, 2), "mpirun", 1, 2),
        (mpich(1, 2), "mpirun", 1, 2),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, "mpirun", 1, 2),
        # mpirun reaches the second host by an srun of one task there.
        (BATCH | {"SLURM_STEP_NUM_TASKS": "1"} | step(0) | mpirun(2, 4), "mpirun", 2, 4),
        (step(2), "srun", 2, 3),
        (step(2) | {"PMIX_RANK": "2"}, "srun-pmix", 2, 3),
        (step(2) | {"PMIX_RANK": "2", "HOROVOD_CONTROLLER": "gloo"}, "srun", 2, 3),
        (step(2) | mpich(2, 3), "srun", 2, 3),  # --mpi=pmi2
    ],
)
def test_the_nearest_launcher_is_read_from_the_environment(
    environment: dict[str, str], launcher: str, rank: int, size: int
) -> None:
    found = read_launch(environment)
    assert (found.launcher, found.rank, found.size, found.fault) == (launcher, rank, size, "")
    assert (found.step is not None) == (launcher == "srun")


ELASTIC = horovodrun(0, 2) | {"HOROVOD_ELASTIC": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [(ELASTIC, True), (ELASTIC | {"HOROVOD_ELASTIC": "0"}, False), (mpirun(0, 2) | {"HOROVOD_ELASTIC": "1"}, False)],
)
def test_only_horovodrun_starts_elastic_ranks(environment: dict[str, str], expected: bool) -> None:
    assert read_launch(environment).is_elastic == expected


PLANNED = {"SLURM_TASKS_PER_NODE": "2(x2)"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            BATCH | {"SLURM_NTASKS": "3"},
            "SLURM job 7 has 3 tasks, but this process is one alone. Instead start it with",
        ),
        (
            BATCH,
            "SLURM job 7 has 2 hosts, but this process is one alone. Instead",
        ),
        ({"PMIX_RANK": "1"}, "this is rank 1 of a launcher that does not say how many there are"),
        (step(1) | horovodrun(0, 1), "srun started 3 copies of horovodrun, and each would be a separate run with 1"),
        (step(1) | horovodrun(1, 2), "srun started 3 copies of horovodrun"),
        (step(1) | mpirun(0, 1), "srun started 3 copies of mpirun"),
        (BATCH | PLANNED | horovodrun(0, 4, 4), "horovodrun put all 4 ranks on n1, though the job has 2 hosts"),
        (BATCH | PLANNED | mpirun(0, 4, 4), "mpirun put all 4 ranks on n1"),
        (ELASTIC | {"HOROVOD_CYCLE_TIME": "1"}, "elastic ranks cannot meet again with HOROVOD_CYCLE_TIME set"),
        (ELASTIC | {"HOROVOD_FUSION_THRESHOLD": "0"}, "with HOROVOD_FUSION_THRESHOLD set, .* Unset it."),
        (ELASTIC | {"HOROVOD_AUTOTUNE": "1"}, "with HOROVOD_AUTOTUNE set"),
    ],
)
def test_processes_that_would_not_find_each_other_are_told_what_to_do(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_launch(environment).check(may_be_elastic=True)


@pytest.mark.parametrize(
    ("environment", "may"), [(BATCH, True), ({"PMIX_RANK": "1"}, False), (BATCH | {"SLURM_NTASKS": "2"}, False)]
)
def test_launch_may_leave_hosts_of_a_job_without_a_rank_and_no_other_process_alone(
    environment: dict[str, str], may: bool
) -> None:
    found = read_launch(environment)
    assert found.leaves_hosts == may
    with nullcontext() if may else pytest.raises(UserError):
        found.check(may_leave_hosts=True)
    with pytest.raises(UserError, match=r"one alone|rank 1 of a launcher"):
        found.check()


@pytest.mark.parametrize(
    ("slots", "environment", "words"),
    [
        ("a a b b", {}, "PBS job 7 has 2 hosts, but this process is one alone"),
        ("a a b b", mpirun(0, 4, 4), "mpirun put all 4 ranks on one host, though the job has 2 hosts"),
        ("a b", mpich(0, 2) | {"MPI_LOCALNRANKS": "2"}, "mpirun put all 2 ranks on one host"),
        ("a a b b", mpirun(0, 4, 2), ""),
        ("a a b b", mpirun(0, 2, 2), ""),  # a part of the job
        ("a a", {}, ""),  # two slots, for threads
        ("a a b b", mpich(0, 4) | {"MPI_LOCALNRANKS": "2"}, ""),
    ],
)
def test_in_a_job_of_pbs_the_ranks_are_on_the_hosts_of_its_file(
    tmp_path: Path, slots: str, environment: dict[str, str], words: str
) -> None:
    (tmp_path / "nodes").write_text("".join(f"{host}\n" for host in slots.split()))
    fault = read_launch(environment | {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "7"}).fault
    assert fault.startswith(words)
    assert bool(fault) == bool(words)


@pytest.mark.parametrize(
    "environment",
    [
        BATCH | {"SLURM_NTASKS": "1"},
        {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"},
        BATCH | {"SLURM_JOB_END_TIME": "", "SLURM_TASKS_PER_NODE": ""} | horovodrun(0, 4, 4),
        BATCH | PLANNED | horovodrun(0, 4, 2),  # two on each host
        BATCH | PLANNED | horovodrun(0, 2, 2),  # a part of the job, as planned for this host
        ELASTIC | {"HOROVOD_AUTOTUNE": "0"},
        step(0) | horovodrun(0, 3, 2),  # a script of the user's has set for Horovod what srun says
    ],
)
def test_what_is_only_like_it_is_let_through(environment: dict[str, str]) -> None:
    assert read_launch(environment).fault == ""


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HOROVOD_RANK": "1"}, "HOROVOD_RANK and HOROVOD_SIZE must be .* received '1' and None"),
        (mpirun(2, 2), "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE must be .* received '2' and '2'"),
        (mpich(0, 2) | {"PMI_RANK": "x"}, "PMI_RANK and PMI_SIZE must be .* received 'x' and '2'"),
        (step(5), "SLURM's variables of this step do not fit together"),
        (step(0, size=4), "SLURM's variables of this step do not fit together"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM's variables of this step do not fit together: 'SLURM_PROCID'"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_launch(environment)


def test_the_end_of_the_job_is_known_under_every_launcher() -> None:
    for started_by in ({}, horovodrun(0, 1), mpirun(0, 1), step(0)):
        environment = started_by | {"SLURM_JOB_END_TIME": "1800000000", "SLURM_JOB_ID": "7"}
        found = read_launch(environment)
        assert isinstance(found, Launch)
        assert (found.end_time, found.job) == (1.8e9, "7")
        del environment["SLURM_JOB_ID"]  # then it is left over
        assert read_launch(environment).end_time is None


def test_lists_of_hosts_and_counts_are_read_as_slurm_writes_them() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_hosts("n1") == ["n1"]
    assert expand_hosts("a,n[08-10,12],gpu-[1-2]b") == ["a", "n08", "n09", "n10", "n12", "gpu-1b", "gpu-2b"]
    assert expand_hosts("r[1-2]n[3-4]") == ["r1n3", "r1n4", "r2n3", "r2n4"]


def test_a_step_says_which_ranks_share_a_host() -> None:
    places = [read_step(step(rank)) for rank in range(3)]
    found = [(place.here, place.local_rank, place.local_size) for place in places if place]
    assert found == [("n1", 0, 2), ("n1", 1, 2), ("n2", 0, 1)]


@pytest.mark.parametrize(("how", "instead"), [("mpirun", "horovodrun --gloo"), ("srun-pmix", "srun --mpi=none")])
def test_ranks_of_mpi_are_refused_by_a_horovod_without_mpi(
    monkeypatch: pytest.MonkeyPatch, how: Launcher, instead: str
) -> None:
    monkeypatch.setattr(hvd, "mpi_built", lambda: False)
    monkeypatch.setattr(launcher, "ROOT_REPORTS_FIRST_S", 0.0)
    with pytest.raises(UserError, match=f"{how} started 2 ranks, but Horovod was built without MPI.*{instead}, or"):
        start.initialise(Launch(how, 0, 2))
    with pytest.raises(FailedElsewhere):
        start.initialise(Launch(how, 1, 2))


# --- programs that are started together ---------------------------------------------------------------------------


def test_when_one_program_fails_the_others_do_not_wait_for_it() -> None:
    def python(code: str) -> subprocess.Popen[str]:
        return start_program([sys.executable, "-c", code], {})

    waits, fails = python("import time; time.sleep(3600)"), python("import sys; sys.exit('no rank 2')")
    assert wait_for_all([waits, fails], 300) == "exit code 1: no rank 2\n"
    assert waits.returncode is not None
    assert wait_for_all([python("input"), python("input")], 300) is None
    waits = python("import time; time.sleep(3600)")
    assert wait_for_all([waits], 0.1) == "not done after 0 s"
    assert waits.wait(300)


@pytest.mark.parametrize(
    ("environment", "is_told"),
    [
        (step(0, 3), True),
        (horovodrun(0, 2), True),
        ({"TORCHELASTIC_RUN_ID": "7", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, False),  # set by hand in a shell that may end
        ({}, False),
    ],
)
def test_the_end_of_the_parent_counts_where_the_launcher_stays(environment: dict[str, str], is_told: bool) -> None:
    rank = (
        "import os, sys\n"
        "from horovod_train.distributed.launch import launcher\n"
        "launcher.detect(); parent, before = os.getppid(), launcher.parent_has_ended()\n"
        "print('ready', flush=True)\n"
        "while os.getppid() == parent: pass\n"
        "print(before, launcher.parent_has_ended(), file=sys.stderr)\n"
    )
    parent = (
        "import subprocess, sys\n"
        "rank = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE)\n"
        "rank.stdout.readline()\n"
    )
    # The rank shares standard error, so this returns when the rank has ended.
    command = [sys.executable, "-W", "ignore", "-c", parent, rank]
    finished = subprocess.run(command, env=rank_environment() | environment, capture_output=True, text=True, timeout=60)
    assert finished.stderr == f"False {is_told}\n"


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv to be another user"
)
def test_mpirun_works_for_a_user_without_a_home_and_a_passwd_entry() -> None:
    may_read = [
        "--securebits",
        "+no_setuid_fixup",
        "--inh-caps",
        "+dac_read_search",
        "--ambient-caps",
        "+dac_read_search",
    ]
    user = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", *may_read, "env", "-u", "HOME"]
    program = (
        "import os, subprocess\n"
        "from horovod_train.distributed.launch import local\n"
        "os.chdir('/')\n"
        "print(os.path.expanduser('~'), subprocess.run([*local.launch_command('mpirun', 1), 'true']).returncode)\n"
    )
    command = [*user, sys.executable, "-c", program]
    finished = subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=60)
    assert finished.stdout == "~ 0\n", finished.stderr


def test_the_commands_of_launchers_are_given_no_home_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert launch_command("horovodrun", 2)[0] == "horovodrun"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert launch_command("horovodrun", 2)[:3] == [
        "env",
        f"HOME={tempfile.gettempdir()}/horovod_train-{os.geteuid()}",
        "horovodrun",
    ]
