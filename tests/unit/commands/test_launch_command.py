"""The command launch: what follows a start, by exit codes and checkpoints. Its ranks are programs of the shell."""

from __future__ import annotations

import errno
import json
import math
import mmap
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import psutil
import pytest
from conftest import HANGS_AFTER_S, PROJECT, Finished, rank_environment, run_process

from horovod_train.commands import launch as launch_module
from horovod_train.commands.launch import (
    NotEnough,
    Plan,
    Program,
    Supervisor,
    _plan_of_member,
    _plan_of_this_host,
    _program,
)
from horovod_train.distributed.launch import hosts
from horovod_train.distributed.launch.conventions import Meeting
from horovod_train.distributed.launch.launcher import STOP_SIGNALS
from horovod_train.distributed.launch.local import launch_command
from horovod_train.distributed.launch.started_ranks import NOTHING_STARTED, Ended, Kind, StartedRanks, judge
from horovod_train.errors import SAVED, UserError
from horovod_train.main import main

LAUNCH = [sys.executable, "-m", "horovod_train.main", "launch"]


def launch(*words: object) -> Finished:
    return run_process([*LAUNCH, *map(str, words)])


@pytest.mark.parametrize(
    ("codes", "asked_by", "follows", "code"),
    [
        ([0, 0], 0, "done", 0),
        ([0, 0], signal.SIGTERM, "done", 0),
        ([2, 2], 0, "stop", 2),
        ([1, 2], 0, "stop", 2),
        ([86, 1], 0, "stop", 86),
        ([75, 75], 0, "stop", 75),
        ([75, 0], signal.SIGUSR1, "stop", 75),
        ([75, 137], signal.SIGTERM, "stop", 137),
        ([76, 76], 0, "stop", 76),
        ([76, 76], signal.SIGTERM, "stop", 76),  # started again, the file STOP would stop it again
        ([76, 137], 0, "again", 137),
        ([143, 143], signal.SIGTERM, "stop", 143),
        ([1, 137], 0, "again", 1),
        ([75, 137], 0, "again", 137),
        ([87, 87], 0, "again", 87),
        ([1], 0, "again", 1),
        ([73, 73], 0, "stop", 73),
        ([73, 1], 0, "stop", 73),
        ([73, 137], 0, "stop", 73),
        ([1, 73], 0, "stop", 73),
        ([73, 75], signal.SIGTERM, "stop", 73),
    ],
)
def test_what_follows_is_decided_by_exit_codes(codes: list[int], asked_by: int, follows: str, code: int) -> None:
    verdict = judge(OneStart(*codes).wait(), "rank", asked_by=asked_by)
    assert (verdict.follows, verdict.code) == (follows, code)


def test_ranks_that_are_asked_before_they_train_have_lost_nothing() -> None:
    def why(*codes: int, is_trainer: bool = True) -> str:
        return judge(OneStart(*codes).wait(), "rank", asked_by=signal.SIGTERM, is_trainer=is_trainer).why

    how = "asked by SIGTERM; rank 0 was killed by SIGTERM"
    assert why(143, 75) == f"{how} while its program was loading, so nothing had to be saved"
    assert why(143, 75, is_trainer=False) == f"{how}; not all ranks could save"
    assert why(75, 137).endswith("rank 1 was killed by SIGKILL; not all ranks could save")


@pytest.mark.parametrize(("codes", "follows", "code"), [([73, 1], "again", 73), ([1, 2], "stop", 2), ([1], "again", 1)])
def test_what_follows_later_starts_differs_by_the_run_directory_alone(
    codes: list[int], follows: str, code: int
) -> None:
    verdict = judge(OneStart(*codes).wait(), "rank", asked_by=0, is_first=False)
    assert (verdict.follows, verdict.code) == (follows, code)


@pytest.mark.parametrize(("is_first", "follows", "code"), [(True, "stop", 2), (False, "again", 1)])
def test_a_host_that_has_not_the_program_ends_it_at_the_first_start_alone(
    is_first: bool, follows: str, code: int
) -> None:
    """Later a file server may be away."""
    ended = Ended({"n1": 1, "n2": NOTHING_STARTED}, "n2", 1.0)
    verdict = judge(ended, "host", asked_by=0, is_first=is_first)
    assert (verdict.follows, verdict.code) == (follows, code)


def test_a_directory_that_an_earlier_start_still_has_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As by a root that is cut off, and can write there: by time, whatever --max-restarts is."""
    monkeypatch.setattr("horovod_train.commands.launch.MAX_PAUSE_S", 0.0)
    room: list[OneStart | None] = [OneStart(137, 0), *[OneStart(73, 73)] * 3, OneStart(0, 0)]
    assert supervise(room, PLAN, Program(["x"], ["x"], tmp_path), max_restarts=1) == 0
    assert capfd.readouterr().err.count("another run has the run directory, after ") == 3


def test_it_is_waited_for_no_longer_than_a_rank_that_is_cut_off_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("horovod_train.commands.launch.MAX_PAUSE_S", 0.0)
    room: list[OneStart | None] = [OneStart(137, 0), OneStart(73, 73)]
    assert supervise(room, PLAN, Program(["x"], ["x"], tmp_path, cut_off_s=-math.inf)) == 73
    assert "stopped: exit code 73: another run has the run directory, after 1 s; it has been so " in (
        capfd.readouterr().err
    )


@pytest.mark.parametrize(
    ("setting", "cut_off_s"),
    [("watch.first_step_after_s=7200", 7200), ("watch.first_step_after_s=700", 700), ("watch.enabled=false", 1800)],
)
def test_a_rank_that_is_cut_off_may_run_as_long_as_the_watch_lets_it(setting: str, cut_off_s: float) -> None:
    words = ["--config", str(PROJECT / "configs" / "digits_convnet.yaml"), setting]
    assert _program(Namespace(words=words, run_dir=None)).cut_off_s == cut_off_s


def test_a_directory_in_use_is_not_waited_for_before_ranks_have_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where hosts had no room at first."""
    monkeypatch.setattr("horovod_train.commands.launch.MAX_PAUSE_S", 0.0)
    waiting = replace(PLAN, may_wait=True)
    assert supervise([None, OneStart(73, 73)], waiting, Program(["x"], ["later"], tmp_path)) == 73


@pytest.mark.parametrize(
    ("kind", "first", "code", "who"),
    [
        ("rank", "1", 137, "rank 1 was killed by SIGKILL"),
        ("mpirun", "mpirun", 137, "a rank was killed by SIGKILL"),
        ("host", "n2", 137, "a rank on n2 was killed by SIGKILL"),
        ("host", "n2", 1, "a rank on n2 ended with exit code 1"),
        ("host", "n2", 255, "n2 is lost: ssh does not reach it any more"),
    ],
)
def test_a_lost_rank_is_named_where_it_is_known(kind: Kind, first: str, code: int, who: str) -> None:
    assert judge(Ended({first: code}, first, 1.0), kind, asked_by=0).why == who


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-np", "0", "--", "true"], "argument -np/--np: expected a whole number of at least 1; received '0'"),
        (["--", "true"], "-np N is required: the number of ranks; or -H HOST:SLOTS"),
        (["-np", "2", "--min-np", "3", "--", "true"], "--min-np must be at most -np, 2; received 3"),
        (["-np", "2", "--max-restarts", "-1", "--", "true"], "argument --max-restarts: expected"),
        (["-np", "2", "--slots", "2", "--", "true"], "--slots is for ranks on several hosts"),
        (["-H", "n1:x", "--", "true"], "-H: expected HOST:SLOTS, such as n1:4; received 'n1:x'"),
        (["-H", "n1:2,n1:2", "--", "true"], "n1 is named twice"),
        (["-H", "localhost:2,n1:2", "--", "true"], "localhost is another host for each of them"),
        (["-H", "me@n1:2,you@n1:2", "--", "true"], "n1 is named twice"),
        (["-H", "me@localhost:2,n1:2", "--", "true"], "localhost is another host for each of them"),
        (["-H", "me@:2", "--", "true"], "-H: expected HOST:SLOTS, such as n1:4; received 'me@:2'"),
        (["-H", ",", "--", "true"], "-H: expected HOST:SLOTS"),
        (["-H", "n1:2", "-np", "3", "--", "true"], "-H names 2 slots; -np wants 3"),
        (["-H", "n1:2", "--over", "mpi", "--", "true"], "leave out --over mpi"),
        (["-H", "n1:2", "--host-discovery", "a", "--", "true"], "not allowed with argument"),
        (["--host-discovery", "/no/such", "--", "true"], "--host-discovery /no/such: No such file or directory"),
        (["--host-discovery", "false", "--", "true"], "--host-discovery false: ended with exit code 1"),
        (["--host-discovery", "true", "--", "true"], "names no host yet; say by -np"),
        (["-np", "2", "--run-dir", "a", "--", "--config", "a.yaml"], "--run-dir is for a script"),
        (["-np", "2", "--over", "gloo", "--", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (
            ["-np", "2", "--over", "gloo", "--", "no-such-program"],
            "no-such-program: there is no such program. After --",
        ),
    ],
)
def test_bad_arguments_are_one_line(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("launch: ")]
    assert line.startswith("error: ")
    assert message in line


def test_launch_under_a_launcher_is_refused() -> None:
    environment = rank_environment() | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    finished = run_process([*LAUNCH, "-np", "2", "--", "true"], environment=environment)
    assert finished.returncode == 2
    assert "torchrun has started 2 of it, and each would start ranks" in finished.stderr


STEP_OF_ONE = {
    "SLURM_JOB_ID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
"""As in the shell of `srun --pty bash`, or of salloc."""


TWO_HOSTS = {
    "SLURM_JOBID": "1",
    "SLURM_NODELIST": "n1,n2",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}


@pytest.mark.parametrize("environment", [STEP_OF_ONE | TWO_HOSTS, {"SLURM_JOB_ID": "1"} | TWO_HOSTS])
@pytest.mark.parametrize("over", [pytest.param("auto", marks=pytest.mark.long), "mpi", "gloo"])
def test_ranks_of_this_host_start_in_an_allocation_of_several(environment: dict[str, str], over: str) -> None:
    """More of them than are planned for it: neither mpirun nor the ranks take them for those of all hosts."""
    rank = "from horovod_train.distributed.launch.launcher import detect; detect().check(); print(detect().job)"
    words = ["-np", "2", "--over", over, "--max-restarts", "0", "--", sys.executable, "-c", rank]
    finished = run_process([*LAUNCH, *words], environment=rank_environment() | environment)
    assert finished.returncode == 0, finished.text
    assert "".join(finished.stdout.split()) == "11"  # mpirun may put both on one line


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (STEP_OF_ONE, ["-np", "2", "--over", "gloo"]),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, ["-H", "localhost:2"]),
        ({"PBS_NODEFILE": "nodes"}, ["-H", "localhost:2"]),
    ],
)
def test_launch_starts_ranks_in_an_allocation(tmp_path: Path, environment: dict[str, str], words: list[str]) -> None:
    (tmp_path / "nodes").write_text("n1\nn2\n")
    command = [*LAUNCH, *words, "--", "sh", "-c", f"touch {tmp_path}/$HOROVOD_TRAIN_RANK"]
    finished = run_process(command, cwd=tmp_path, environment=rank_environment() | environment)
    assert finished.returncode == 0, finished.text
    assert all((tmp_path / rank).exists() for rank in "01")


def test_the_command_that_would_be_started_is_shown() -> None:
    words = ["--config", "configs/digits_convnet.yaml", "train.epochs=2"]
    finished = launch("-np", 3, "--over", "mpi", "--dry-run", "--", *words)
    command = [*launch_command("mpirun", 3), sys.executable, "-m", "horovod_train.main", *words]
    assert finished.stdout.split() == command, finished.stderr


@pytest.mark.parametrize(("np", "tries"), [(1, False), (2, True)])
def test_a_single_rank_waits_for_no_trial_of_mpi(monkeypatch: pytest.MonkeyPatch, np: int, tries: bool) -> None:
    tried: list[bool] = []

    def try_mpi() -> tuple[str, str]:
        tried.append(True)
        return "mpirun", "it works"

    monkeypatch.setattr(launch_module, "best_way", try_mpi)
    plan = _plan_of_this_host(Namespace(np=np, over="auto", slots=None))
    assert (bool(tried), plan.how.startswith("ranks are started by mpirun: it works")) == (tries, tries)


def test_it_loads_neither_numpy_nor_tensorflow() -> None:
    finished = run_process([sys.executable, "-X", "importtime", *LAUNCH[1:], "-np", "1", "--", "true"])
    assert "launch: ranks are started by launch itself: a single one exchanges nothing\n" in finished.stderr
    assert not re.search(r"\| +(numpy|tensorflow)$", finished.stderr, re.MULTILINE)


def test_a_setting_is_no_program() -> None:
    finished = launch("-np", 2, "--over", "mpi", "--dry-run", "--", "train.epochs=2")
    assert finished.stdout.split()[-3:] == ["-m", "horovod_train.main", "train.epochs=2"], finished.text


def test_each_rank_knows_its_place_and_all_share_a_secret(tmp_path: Path) -> None:
    program = f'env > {tmp_path}/$HOROVOD_TRAIN_RANK; test "$HOROVOD_TRAIN_SIZE" = 2'
    finished = launch("-np", 2, "--over", "gloo", "--", "sh", "-c", program)
    assert finished.returncode == 0, finished.text
    places = [
        dict(line.split("=", 1) for line in (tmp_path / rank).read_text().splitlines() if "=" in line) for rank in "01"
    ]
    assert [place["HOROVOD_TRAIN_LOCAL_RANK"] for place in places] == ["0", "1"]
    assert len({place["HOROVOD_TRAIN_TOKEN"] for place in places}) == 1
    assert len(places[0]["HOROVOD_TRAIN_TOKEN"]) == 32


def with_other_hosts(folder: Path, *variables: str) -> dict[str, str]:
    """An environment whose ssh stays on this host, and notes in `asked` whom it reaches. variables: set there."""
    there = shlex.join(["env", *variables])
    ssh = folder / "ssh"
    ssh.write_text(f'#!/bin/bash\necho "${{@: -2:1}}" >> {folder}/asked\nexec {there} sh -c "${{@: -1}}"\n')
    ssh.chmod(0o755)
    environment = rank_environment()
    return environment | {"PATH": f"{folder}:{environment['PATH']}"}


@pytest.mark.parametrize(
    ("hosts", "asked", "root"),
    [
        (f"me@n1,you@n2,me@{socket.gethostname()}", {"me@n1", "you@n2"}, "n1"),  # this host is not asked
        ("n2:3", {"n2"}, "localhost"),  # one host: nothing listens on its network
    ],
)
def test_a_user_name_is_for_ssh_and_ranks_meet_at_the_host(
    tmp_path: Path, hosts: str, asked: set[str], root: str
) -> None:
    environment = with_other_hosts(tmp_path)
    program = f"echo $HOROVOD_TRAIN_ROOT > {tmp_path}/$HOROVOD_TRAIN_RANK"
    words = ["-H", hosts, "--", "sh", "-c", program]
    finished = run_process([*LAUNCH, *words], environment=environment)
    assert finished.returncode == 0, finished.text
    assert [(tmp_path / rank).read_text() for rank in "012"] == [f"{root}\n"] * 3
    assert set((tmp_path / "asked").read_text().split()) == asked


@pytest.mark.parametrize(
    ("name", "value", "there"),
    [
        ("CUDA_VISIBLE_DEVICES", "2,3", "of that host"),
        ("NVIDIA_VISIBLE_DEVICES", "GPU-5a", "of that host"),
        ("GPU_DEVICE_ORDINAL", "2,3", "of that host"),
        ("ROCR_VISIBLE_DEVICES", "2,3", "of that host"),
        ("CUDA_VISIBLE_DEVICES", "", ""),  # hidden on purpose
        ("CUDA_VISIBLE_DEVICES", "-1", "-1"),
        ("MY_VISIBLE_DEVICES", "2,3", "2,3"),
    ],
)
def test_gpus_of_this_host_are_not_those_of_others(tmp_path: Path, name: str, value: str, there: str) -> None:
    environment = with_other_hosts(tmp_path, f"{name}=of that host") | {name: value}
    words = ["-H", "n2:1", "--", "sh", "-c", f'echo "${name}" > {tmp_path}/told']
    finished = run_process([*LAUNCH, *words], environment=environment)
    assert finished.returncode == 0, finished.text
    assert (tmp_path / "told").read_text() == f"{there}\n"


def test_a_rank_that_ends_as_a_lost_host_would_is_none() -> None:
    finished = launch("-H", "localhost:1", "--max-restarts", 0, "--", "sh", "-c", "exit 255")
    assert finished.returncode == 1
    assert "launch: stopped: a rank on localhost ended with exit code 1, after" in finished.stderr


def test_a_rank_of_the_trainer_that_runs_on_is_ended_over_ssh_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the agent of its host, after a limit: the launch sees only agents."""
    monkeypatch.setattr(hosts, "_agent", lambda: [sys.executable, "-c", AGENT_OF_A_SECOND])
    program = ["sh", "-c", f"echo $$ > {tmp_path}/$HOROVOD_TRAIN_RANK; [ $HOROVOD_TRAIN_RANK = 0 ] || exec sleep 600"]
    ranks = hosts.start_on_hosts([hosts.Share("localhost", 0, 2)], program, end_together=True)
    assert ranks.wait(end_together=True).codes == {"localhost": 137}
    assert not psutil.pid_exists(int((tmp_path / "1").read_text()))


AGENT_OF_A_SECOND = """
from horovod_train.distributed.launch import hosts, started_ranks
started_ranks.SAVE_WITHIN_S = 1.0
raise SystemExit(hosts.run_agent())
"""


@pytest.mark.parametrize(("host", "says"), [("n2", True), ("localhost", False)])
def test_gpus_that_are_hidden_here_alone_are_said(tmp_path: Path, host: str, says: bool) -> None:
    environment = with_other_hosts(tmp_path) | {"CUDA_VISIBLE_DEVICES": "2,3"}
    finished = run_process([*LAUNCH, "-H", f"{host}:1", "--", "true"], environment=environment)
    assert finished.returncode == 0, finished.text
    assert ("CUDA_VISIBLE_DEVICES names GPUs of this host" in finished.stderr) == says


def test_a_host_that_answers_in_another_encoding_is_named(tmp_path: Path) -> None:
    environment = with_other_hosts(tmp_path)
    (tmp_path / "ssh").write_text("#!/bin/sh\nprintf 'h\\364te inconnu\\n' >&2; exit 255\n")
    finished = run_process([*LAUNCH, "-H", "n2:1", "--", "true"], environment=environment)
    assert (finished.returncode, finished.stderr.count("Traceback")) == (2, 0), finished.text
    assert "n2 is left out, because it does not answer: h" in finished.stderr


def test_a_directory_in_use_is_one_over_ssh_too(tmp_path: Path) -> None:
    """Whichever rank of a host ends first."""
    program = '[ "$HOROVOD_TRAIN_RANK" = 0 ] || exit 1; sleep 1; exit 73'
    words = ["-H", "n2:2", "--max-restarts", "0", "--", "sh", "-c", program]
    finished = run_process([*LAUNCH, *words], environment=with_other_hosts(tmp_path))
    assert finished.returncode == 73, finished.text
    assert "launch: stopped: exit code 73: another run has the run directory, after" in finished.stderr


@pytest.mark.parametrize("code", [2, 86, 75, 76])
def test_a_fault_of_the_user_and_a_request_to_stop_end_it(tmp_path: Path, code: int) -> None:
    finished = launch("-np", 2, "--over", "gloo", "--", "sh", "-c", f"echo here >> {tmp_path}/starts; exit {code}")
    assert finished.returncode == code
    assert len((tmp_path / "starts").read_text().split()) == 2  # two ranks, once
    assert "launch: stopped: " in finished.stderr


def save(run_dir: Path) -> str:
    """Words of the shell by which rank 0 leaves one more checkpoint at each start."""
    folder = run_dir / "checkpoints"
    return f"[ $HOROVOD_TRAIN_RANK != 0 ] || mkdir -p {folder}/step-00000000$(ls {folder} 2>/dev/null | wc -l)"


def test_it_starts_again_as_long_as_there_is_progress(tmp_path: Path) -> None:
    program = f"{save(tmp_path)}; exit 1"
    finished = launch("-np", 2, "--over", "gloo", "--max-restarts", 3, "--run-dir", tmp_path, "--", "sh", "-c", program)
    assert finished.returncode == 1
    starts = [line for line in finished.stderr.splitlines() if line.startswith("launch: start ")]
    assert starts[0] == "launch: start 1 of at most 4: 2 rank(s)"
    assert starts[1:] == [
        f"launch: start {number} of at most 4: 2 rank(s); newest checkpoint: step {number - 2}" for number in (2, 3, 4)
    ]
    assert "--max-restarts 3 is used up" in finished.stderr


def test_two_starts_without_progress_end_it_and_it_says_why(tmp_path: Path) -> None:
    """And names the command that says more, if the ranks have left what it reads."""
    for program, hint in (("", ""), (f"mkdir -p {tmp_path}/logs; ", ". What happened: horovod-train explain ")):
        command = ("-np", 2, "--over", "gloo", "--run-dir", tmp_path, "--", "sh", "-c", f"{program}kill -9 $$")
        finished = launch(*command)
        assert finished.returncode == 137
        assert finished.stderr.count("launch: start ") == 2
        last = finished.stderr.splitlines()[-1]
        assert "was killed by SIGKILL" in last
        assert last.partition("two starts in a row have left no checkpoint")[2].startswith(hint)
        assert bool(hint) == ("explain" in last)


def test_what_it_says_is_kept_with_the_run(tmp_path: Path) -> None:
    """From the first start on, though the folder of logs comes later."""
    program = f"mkdir -p {tmp_path}/logs; exit 1"
    words = ["-np", 1, "--over", "gloo", "--max-restarts", 1, "--run-dir", tmp_path]
    finished = launch(*words, "--", "sh", "-c", program)
    said = [line for line in finished.stderr.splitlines() if line.startswith("launch: ")][1:]
    kept = (tmp_path / "logs" / "launch.log").read_text().splitlines()
    assert [line.partition(" ")[2] for line in kept] == said
    assert said[-1].startswith("launch: stopped: rank 0 ended with exit code 1, after 0 s; --max-restarts 1 is used up")


def test_what_it_said_is_kept_as_soon_as_the_run_has_a_folder(tmp_path: Path) -> None:
    """So that it is there if launch is killed in its first start."""
    program = f"mkdir -p {tmp_path}/logs; until grep -q 'start 1 of' {tmp_path}/logs/launch.log; do sleep 0.05; done"
    finished = launch("-np", 1, "--over", "gloo", "--run-dir", tmp_path, "--", "sh", "-c", program)
    assert finished.returncode == 0, finished.text
    kept = (tmp_path / "logs" / "launch.log").read_text()
    assert (kept.count("start 1 of"), kept.count("done, after")) == (1, 1)


@pytest.mark.parametrize(
    ("starts", "is_finished", "is_here", "code"),
    [
        ([(0, 0)], True, True, 0),
        ([(0, 0), (1, 1)], False, True, 1),  # a library has ended both
        ([(0, 137)], True, True, 0),  # killed when it had no more to do
        ([(0, 137)], True, False, 0),
        ([(0, 137), (2, 2)], False, True, 2),
        ([(0, 0)], False, False, 0),  # what root has written may be seen here later
    ],
)
def test_ranks_of_the_trainer_are_done_when_the_run_is_finished(
    tmp_path: Path, starts: list[tuple[int, int]], is_finished: bool, is_here: bool, code: int
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"finished": is_finished}))
    room: list[OneStart | None] = [OneStart(*codes) for codes in starts]
    program = Program(["x"], ["x"], tmp_path, is_trainer=True)
    assert supervise(room, replace(PLAN, is_here=is_here), program, max_restarts=1) == code
    assert not room
    assert supervise([OneStart(0, 0)], PLAN, Program(["x"], ["x"], tmp_path)) == 0  # a script writes no summary


def test_without_progress_it_tries_with_fewer_ranks(tmp_path: Path) -> None:
    program = 'test "$HOROVOD_TRAIN_SIZE" = 1 || kill -9 $$'
    words = ["-np", 2, "--min-np", 1, "--over", "gloo", "--run-dir", tmp_path]
    finished = launch(*words, "--", "sh", "-c", program)
    assert finished.returncode == 0, finished.text
    starts = [line.partition(": 2 rank")[1] or line.partition(": 1 rank")[1] for line in finished.stderr.splitlines()]
    assert [start for start in starts if start] == [": 2 rank", ": 2 rank", ": 1 rank"]


WAITS = "echo here > {folder}/${{HOROVOD_TRAIN_RANK:-$OMPI_COMM_WORLD_RANK}}; while :; do sleep 0.05; done"
TRAPS = f"trap 'exit 75' TERM USR1; {WAITS}"
SAVES = f"trap 'sleep {{seconds}}; echo saved > {{folder}}/saved; exit 75' TERM USR1; {WAITS}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_all_ranks(tmp_path: Path, number: signal.Signals) -> None:
    program = TRAPS.format(folder=tmp_path)
    started = start(tmp_path, program)
    started.send_signal(number)
    assert started.wait(HANGS_AFTER_S) == 75


@pytest.mark.parametrize(("over", "ranks", "seconds"), [("gloo", 2, 0), ("mpi", 1, 2)])
def test_ranks_may_save_when_launch_is_killed(tmp_path: Path, over: str, ranks: int, seconds: int) -> None:
    started = start(tmp_path, SAVES.format(folder=tmp_path, seconds=seconds), over, ranks)
    below = psutil.Process(started.pid).children(recursive=True)
    started.kill()
    started.wait()
    _, alive = psutil.wait_procs(below, timeout=HANGS_AFTER_S)
    assert not alive
    assert (tmp_path / "saved").exists()


def start(folder: Path, program: str, over: str = "gloo", ranks: int = 2) -> subprocess.Popen[bytes]:
    """Returns when all ranks run."""
    words = [*LAUNCH, "-np", str(ranks), "--over", over, "--", "sh", "-c", program]
    started = subprocess.Popen(words, cwd=PROJECT, env=rank_environment(), stderr=subprocess.DEVNULL)
    until = time.monotonic() + HANGS_AFTER_S
    while not all((folder / str(rank)).exists() for rank in range(ranks)):
        assert started.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    return started


def test_a_discovery_that_fails_between_two_starts_is_asked_again(tmp_path: Path) -> None:
    """It is asked when launch begins, and before each start."""
    discovery = tmp_path / "hosts.sh"
    discovery.write_text(
        f"#!/bin/sh\necho >> {tmp_path}/asked; [ $(wc -l < {tmp_path}/asked) != 3 ] || {{ echo no answer; exit 1; }}\n"
        "echo localhost:1\n"
    )
    discovery.chmod(0o755)
    program = f"echo >> {tmp_path}/starts; [ $(wc -l < {tmp_path}/starts) = 2 ]"
    finished = launch("--host-discovery", discovery, "--", "sh", "-c", program)
    assert finished.returncode == 0, finished.text
    assert re.search(r"ended with exit code 1: no answer, after \d+ s; next start in", finished.stderr)


class OneStart:
    """A start whose ranks ended with these codes."""

    kind = "rank"

    def __init__(self, *codes: int) -> None:
        self.codes = {str(rank): code for rank, code in enumerate(codes)}

    def wait(self, *, end_together: bool = False) -> Ended:
        return Ended(self.codes, next((rank for rank, code in self.codes.items() if code not in SAVED), ""), 1.0)

    def send(self, number: int) -> None:
        return None

    def kill(self) -> None:
        return None


def supervise_by(
    start: Callable[..., OneStart],
    plan: Plan,
    program: Program,
    *,
    ranks: int = 2,
    least: int = 2,
    max_restarts: int = 100,
) -> int:
    """The exit code of a launch whose starts are what start gives."""
    plan = replace(plan, start=cast(Callable[..., StartedRanks], start))
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        return Supervisor(program, plan, ranks, least, max_restarts).run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def supervise(
    room: list[OneStart | None],
    plan: Plan,
    program: Program,
    *,
    max_restarts: int = 100,
) -> int:
    """The exit code of a launch of two ranks. room: its starts in turn; None: the hosts have no room."""

    def start(*_: object) -> OneStart:
        if (found := room.pop(0)) is None:
            raise NotEnough("no room")
        return found

    return supervise_by(start, plan, program, max_restarts=max_restarts)


def not_replaced(*_: object) -> StartedRanks:
    raise AssertionError


PLAN = Plan(2, "", not_replaced)


@pytest.mark.long
def test_each_wait_for_hosts_begins_with_a_short_pause(capfd: pytest.CaptureFixture[str]) -> None:
    """However many starts there were before: the hosts are often there again within seconds."""
    room: list[OneStart | None] = [*[OneStart(137, 0)] * 6, None, None, OneStart(137, 0), None, OneStart(0, 0)]
    assert supervise(room, PLAN, Program(["x"], ["x"], None)) == 0
    assert re.findall(r"next start in (\d+) s", capfd.readouterr().err) == ["1", "2", "1"]


def test_a_wait_for_hosts_is_no_start_without_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod_train.commands.launch.MAX_PAUSE_S", 0.0)
    waiting, program = replace(PLAN, may_wait=True), Program(["x"], ["x"], tmp_path)
    assert supervise([None, None, OneStart(137, 0), None, OneStart(0, 0)], waiting, program) == 0
    assert supervise([None, OneStart(137, 0), None, OneStart(137, 0), OneStart(0, 0)], waiting, program) == 137


def test_fewer_ranks_have_two_starts_without_progress_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod_train.commands.launch.MAX_PAUSE_S", 0.0)
    started: list[int] = []

    def start(words: Sequence[str], ranks: int, least: int) -> OneStart:
        started.append(ranks)
        return OneStart(137, *[0] * (ranks - 1))

    assert supervise_by(start, PLAN, Program(["x"], ["x"], tmp_path), ranks=3, least=1) == 137
    assert started == [3, 3, 2, 2, 1, 1]


@pytest.mark.parametrize("lost", ["directory", "checkpoints"])
def test_no_ranks_are_started_while_what_was_there_of_a_run_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], lost: str
) -> None:
    """As on the disk below a mount that is lost: they would begin anew there."""
    run_dir, checkpoints, elsewhere = tmp_path / "run", tmp_path / "run" / "checkpoints", tmp_path / "elsewhere"
    place = run_dir if lost == "directory" else checkpoints
    starts: list[bool] = []
    has_looked = threading.Event()
    look = Supervisor._newest

    def newest(supervisor: Supervisor) -> int | None:
        seen = look(supervisor)
        if supervisor._had_directory and (seen or lost == "directory"):
            has_looked.set()
        return seen

    def start(words: Sequence[str], *_: object) -> OneStart:
        starts.append(checkpoints.exists())
        if len(starts) == 2:
            return OneStart(0, 0)
        (checkpoints / "step-000000460").mkdir(parents=True)
        assert has_looked.wait(HANGS_AFTER_S)
        place.rename(elsewhere)
        return OneStart(1, 1)

    def come_back(supervisor: Supervisor, seconds: float) -> None:
        if seconds > 1:
            elsewhere.rename(place)

    monkeypatch.setattr("horovod_train.commands.launch.LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(Supervisor, "_newest", newest)
    monkeypatch.setattr(Supervisor, "_pause", come_back)
    assert supervise_by(start, PLAN, Program(["x"], ["x"], run_dir, is_trainer=True)) == 0
    assert starts == [False, True]
    gone = (
        "is gone: removed, renamed or no longer mounted"
        if lost == "directory"
        else "gone, or cannot be read; the newest was"
    )
    said = re.findall(rf"^launch: .*{gone}.*; no ranks are started, after 0 s", capfd.readouterr().err, re.MULTILINE)
    assert len(said) == 2


def test_a_script_may_remove_its_folder_and_make_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod_train.commands.launch.MAX_PAUSE_S", 0.0)
    run_dir = tmp_path / "run"
    run_dir.mkdir()

    def start(words: Sequence[str], *_: object) -> OneStart:
        if not run_dir.exists():
            return OneStart(0, 0)
        run_dir.rmdir()
        return OneStart(1, 1)

    assert supervise_by(start, PLAN, Program(["x"], ["x"], run_dir)) == 0


@pytest.mark.parametrize(
    ("words", "added"),
    [
        (["--resume", "never"], ["--resume", "auto"]),
        (["checkpoint.resume=never"], ["--resume", "auto"]),
        ([], []),
    ],
)
def test_a_run_that_was_to_begin_anew_resumes_from_its_second_start_on(words: list[str], added: list[str]) -> None:
    words = ["--config", "digits_convnet_plain", "--output-dir", "out", *words]
    program = _program(Namespace(words=words, run_dir=None))
    assert program.first[-len(words) :] == words
    assert program.later == [*program.first, *added]


@pytest.mark.parametrize("saved_before", [False, True])
def test_a_run_that_was_to_begin_anew_does_so_until_it_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_before: bool
) -> None:
    """Its first start may be lost before it has begun, and checkpoints that were there are another run's."""
    monkeypatch.setattr("horovod_train.commands.launch.MAX_PAUSE_S", 0.0)
    folder, commands = tmp_path / "checkpoints", list[str]()
    if saved_before:
        (folder / "step-000000001").mkdir(parents=True)

    def start(words: Sequence[str], *_: object) -> OneStart:
        commands.extend(words)
        if len(commands) == 2:
            (folder / "step-000000002").mkdir(parents=True)
        return OneStart(1, 1) if len(commands) < 3 else OneStart(0, 0)

    assert supervise_by(start, PLAN, Program(["first"], ["later"], tmp_path)) == 0
    assert commands == ["first", "first", "first" if saved_before else "later"]


def test_a_checkpoint_that_is_seen_late_is_resumed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host has saved it; the next start is refused, as one that is to begin anew."""
    monkeypatch.setattr("horovod_train.commands.launch.MAX_PAUSE_S", 0.0)
    commands = list[str]()

    def start(words: Sequence[str], *_: object) -> OneStart:
        commands.extend(words)
        if len(commands) == 2:
            (tmp_path / "checkpoints" / "step-000000002").mkdir(parents=True)
        return OneStart([137, 2, 0][len(commands) - 1])

    assert supervise_by(start, PLAN, Program(["first"], ["later"], tmp_path)) == 0
    assert commands == ["first", "first", "later"]


@pytest.mark.parametrize(
    ("number", "fails_first", "code", "starts"),
    [(errno.EAGAIN, True, 0, 2), (errno.ENOENT, False, 0, 3), (errno.ENOENT, True, 2, 1)],
)
def test_a_program_that_cannot_be_started_now_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fails_first: bool, code: int, starts: int
) -> None:
    """Unless it never could: there may be too many processes, or the file server of the interpreter is away."""
    monkeypatch.setattr("horovod_train.commands.launch.MAX_PAUSE_S", 0.0)
    results: list[OneStart | OSError] = [OSError(number, "no"), OneStart(0, 0)]
    if not fails_first:
        results.insert(0, OneStart(137, 0))
    count = 0

    def start(*_: object) -> OneStart:
        nonlocal count
        result = results[count]
        count += 1
        if isinstance(result, OSError):
            raise result
        return result

    try:
        ended = supervise_by(start, PLAN, Program(["x"], ["x"], tmp_path))
    except UserError as error:
        ended = error.exit_code
    assert (ended, count) == (code, starts)


def test_a_full_disk_leaves_the_log_whole(full_disk: Path) -> None:
    """Which often is what has ended the ranks. What could not be written comes once there is room."""
    log, filler = full_disk / "logs" / "launch.log", full_disk / "filler"
    log.parent.mkdir()
    log.write_text("-" * (mmap.PAGESIZE - 30) + "\n")  # of a line that follows, the beginning has room
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(mmap.PAGESIZE))
    codes = [(137, 0), (0, 0)]

    def start(*_: object) -> OneStart:
        if len(codes) == 1:
            filler.unlink()
        return OneStart(*codes.pop(0))

    assert supervise_by(start, PLAN, Program(["x"], ["x"], full_disk)) == 0
    said = [line.partition(" launch: ")[2] for line in log.read_text().splitlines()[1:]]
    assert [line[:14] for line in said] == ["start 1 of at ", "rank 0 was kil", "start 2 of at ", "done, after 1 "]


def test_a_file_system_that_does_not_answer_when_ranks_have_ended_ends_no_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is often what has ended them, and is mounted again a minute later."""

    def stale(_: Path) -> list[int]:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("horovod_train.commands.launch.steps_in", stale)
    assert supervise([OneStart(137, 0), OneStart(0, 0)], PLAN, Program(["x"], ["x"], tmp_path)) == 0


def test_a_run_directory_that_may_not_be_entered_leaves_the_exit_code_of_the_ranks(
    tmp_path: Path, ordinary_user: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (closed := tmp_path / "closed").mkdir(mode=0)
    assert supervise([OneStart(2, 0)], PLAN, Program(["x"], ["x"], closed / "run")) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("launch: stopped: ")
    closed.chmod(0o700)


@pytest.mark.parametrize(
    ("gpus", "words", "ranks"),
    [
        (8, ["--config", "digits_convnet_plain"], 8),
        (8, ["--config", "digits_convnet_plain", "device.per_rank=2"], 4),
        (0, ["--config", "digits_convnet_plain", "device.per_rank=2"], 1),
        (8, ["sh", "-c", "true"], 8),
    ],
)
def test_a_host_that_starts_launch_has_a_rank_for_the_gpus_that_a_rank_takes(
    monkeypatch: pytest.MonkeyPatch, gpus: int, words: list[str], ranks: int
) -> None:
    monkeypatch.setattr(launch_module, "list_gpus", lambda: dict.fromkeys(range(gpus), "GPU"))
    monkeypatch.setattr(launch_module, "meeting_of_hosts", lambda meeting, ranks: meeting)
    arguments = Namespace(
        words=words, run_dir=None, hosts=None, host_discovery=None, over="auto", slots=None, np=None, min_np=None
    )
    meeting = cast(Meeting, Namespace(launcher="an Indexed Job", size=2, rank=0))
    assert _plan_of_member(arguments, meeting, _program(arguments)).ranks == 2 * ranks


def test_of_several_launches_of_one_run_the_first_keeps_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "meeting_of_hosts", lambda meeting, ranks: meeting)
    arguments = Namespace(hosts=None, host_discovery=None, over="auto", slots=2, np=None, min_np=None)
    program = Program(["x"], ["x"], tmp_path)
    (tmp_path / "logs").mkdir()
    for rank, lines in ((1, 0), (0, 2)):
        meeting = cast(Meeting, Namespace(launcher="indexed-job", size=2, rank=rank))
        plan = _plan_of_member(arguments, meeting, program)
        assert supervise([OneStart(0, 0)], plan, program) == 0
        log = tmp_path / "logs" / "launch.log"
        kept = log.read_text().splitlines() if log.exists() else []
        assert len(kept) == lines
    assert kept[0].endswith("start 1 of at most 101: 2 rank(s), 2 on each of 2 hosts of indexed-job")
