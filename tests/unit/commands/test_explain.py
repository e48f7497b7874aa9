"""`explain` on run directories as ranks leave them: what was first, who followed, from where to go on."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import run_process

from horovod_train.checkpoint.layout import FORMAT, MANIFEST, Facts, find_start, pack, sha256, verify
from horovod_train.commands import explain as explain_lease
from horovod_train.commands.explain import explain
from horovod_train.commands.watch import Follower, news
from horovod_train.distributed.launch.local import launch_command
from horovod_train.errors import RunError, UserError
from horovod_train.output.files import STOP_FILE
from horovod_train.output.lease import describe_me
from horovod_train.output.rank_log import (
    end_file,
    introduction,
    log_file,
    make_folder,
    open_rank_log,
    read_starts_of_root,
    read_stories,
)


class Run:
    """A run directory of `np` ranks on hosts node0, node1, …, all trained to step 470."""

    def __init__(self, folder: Path, np: int, launcher: str = "horovodrun", hosts: int = 1) -> None:
        self.folder = folder
        make_folder(folder)
        self.logs: list[Any] = []
        for rank in range(np):
            host = f"node{rank * hosts // np}"
            said = introduction(rank, np, launcher, host, "CPU")
            log = open_rank_log(folder, rank, host, start_text=said)
            log.write("phase", "train after step 0")
            self.logs.append(log)
        (folder / "config.yaml").write_text("checkpoint: {resume: auto}\n")
        rows = [{"step": step, "split": "train", "loss": 1.0} for step in (100, 200, 470)]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def end(self, rank: int, ended: str, exit_code: int, **facts: Any) -> None:
        self.logs[rank].end(ended, exit_code, **{"step": 470, "phase": "train", "error": None, **facts})
        time.sleep(0.002)  # the next is later

    def checkpoint(self, step: int, size: int = 3) -> Path:
        folder = self.folder / "checkpoints" / f"step-{step:09d}"
        folder.mkdir(parents=True)
        files = {}
        for name in ("state.index", "state.data-00000-of-00001"):
            (folder / name).write_bytes(b"abc")
            files[name] = {"bytes": size, "sha256": sha256(folder / name)}
        facts = dataclasses.asdict(Facts(step, epoch=0, records=0, ranks=1, config={}, versions={}))
        (folder / MANIFEST).write_bytes(pack({"format": FORMAT, **facts, "files": files}))
        return folder


def summary(run: Run, **facts: Any) -> None:
    (run.folder / "summary.json").write_text(json.dumps({"ended": "done", "steps": 470, **facts}))


def test_a_finished_run_needs_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    run.checkpoint(470)
    summary(run)
    run.end(0, "done", 0)
    run.end(1, "done", 0)
    found = explain(tmp_path)
    assert (found.state, found.next, found.silent) == ("finished", "nothing to do", [])
    assert list(found.lines()) == [
        f"{tmp_path}: finished after 470 steps",
        f"when: {found.time}",
        "next: nothing to do",
    ]


@pytest.mark.parametrize("ended", ["done", "SIGTERM"])
def test_how_a_run_ended_is_known_without_the_log_of_rank_0(tmp_path: Path, ended: str) -> None:
    run = Run(tmp_path, 3)
    summary(run, ended=ended)
    for rank in range(3):
        run.end(rank, "done" if ended == "done" else "stopped", 0 if ended == "done" else 75)
    log_file(tmp_path / "logs", 0).write_text("")
    found = explain(tmp_path)
    expected = "finished after 470 steps" if ended == "done" else "stopped after 470 steps: SIGTERM"
    assert (found.what, found.silent) == (expected, [])
    assert list(read_stories(tmp_path)) == [1, 2]


def test_a_rank_that_keeps_no_log_is_not_told_of_by_that_of_an_earlier_start(tmp_path: Path) -> None:
    """As where its host may no longer write there: it continues without a log."""
    for start, ranks in (("first", (0, 1)), ("second", (0,))):
        make_folder(tmp_path)
        logs = []
        for rank in ranks:
            said = introduction(rank, 2, "mpirun", f"node{rank}", "on CPU", start=start)
            logs.append(open_rank_log(tmp_path, rank, f"node{rank}", start_text=said))
        if start == "first":
            logs[1].write("failed", "ValueError: the reactor is on fire")
            logs[1].end("failed", 1, step=3, phase="train", error="ValueError: the reactor is on fire")
        logs[0].end("followed" if start == "first" else "done", 0, step=9, phase="train", error=None)
    (tmp_path / "summary.json").write_text('{"steps": 9}')
    assert list(read_stories(tmp_path)) == list(Follower(tmp_path).look().ranks) == [0]
    assert explain(tmp_path).what == "finished after 9 steps"


def test_logs_of_other_ranks_count_without_that_of_rank_0(tmp_path: Path) -> None:
    Run(tmp_path, 2)
    log_file(tmp_path / "logs", 0).unlink()
    found = explain(tmp_path)
    assert (found.state, found.silent) == ("disappeared", [1])
    assert "horovodrun --gloo -np 2 " in found.next
    log_file(tmp_path / "logs", 1).unlink()
    assert explain(tmp_path).state == "unknown"


def test_a_start_that_was_killed_before_it_trained_is_not_the_end_before_it(tmp_path: Path) -> None:
    """It has not removed the summary of that yet."""
    summary(Run(tmp_path, 1, "none"))
    assert explain(tmp_path).state == "finished"  # the disk was full for its log
    time.sleep(0.002)
    open_rank_log(tmp_path, 0, "node0", start_text=introduction(0, 1, "none", "node0"))
    assert explain(tmp_path).state == "disappeared"


def test_the_end_of_an_earlier_process_is_not_the_end_of_this_one(tmp_path: Path) -> None:
    """As where a rank starts on a host that cannot remove the file."""
    run = Run(tmp_path, 2)
    for rank in (0, 1):
        run.end(rank, "failed", 1)
    path = end_file(tmp_path / "logs", 1)
    path.write_text(path.read_text().replace(f'"pid": {os.getpid()}', '"pid": 1'))
    log = log_file(tmp_path / "logs", 1)
    log.write_text("".join(line for line in log.open() if " end " not in line))
    stories = read_stories(tmp_path)
    assert stories[0].end is not None
    assert stories[1].end is None


def test_the_first_failure_is_told_and_who_only_followed(tmp_path: Path) -> None:
    run = Run(tmp_path, 4, hosts=2)
    run.checkpoint(400)
    whole = run.checkpoint(460)
    run.logs[0].write("slow", "rank 3 (node1) has been in input for 74 s at step 412; 3 ranks wait for it")
    run.end(2, "failed", 1, error="ValueError: no luck", step=471)
    for rank in (0, 1, 3):
        run.end(rank, "followed", 1, error="stopped: rank 2 (node1) failed: ValueError: no luck", cause=2)
    found = explain(tmp_path)
    assert (found.state, found.rank, found.followed, found.silent) == ("failed", 2, [0, 1, 3], [])
    assert found.what == "rank 2 (node1) failed in train at step 471: ValueError: no luck"
    assert found.checkpoint is not None
    assert (found.checkpoint.path, found.checkpoint.step, found.steps_lost) == (str(whole), 460, 11)
    assert found.slow == ["rank 3 (node1) has been in input for 74 s at step 412; 3 ranks wait for it"]
    assert found.next == (
        f"read the traceback in {tmp_path}/logs/rank-2.log; then resume with: horovodrun --gloo -np 4 "
        f"-H node0:2,node1:2 python -m horovod_train.main --config {tmp_path}/config.yaml --output-dir {tmp_path}"
    )


def test_of_two_failures_the_earlier_counts(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    run.end(1, "failed", 2, error="shard-3: record 7 is damaged")
    run.end(0, "failed", 1, error="KeyError: 'x'")
    found = explain(tmp_path)
    assert found.rank == 1
    assert found.next.startswith("fix that; then start again with: ")
    assert (found.checkpoint, found.steps_lost) == (None, 470)


@pytest.mark.parametrize("hours", [-1, 1])
def test_the_earlier_failure_counts_where_the_clock_of_a_host_is_wrong(tmp_path: Path, hours: int) -> None:
    run = Run(tmp_path, 2, hosts=2)
    run.end(1, "failed", 2, error="shard-3: record 7 is damaged")
    run.end(0, "failed", 1, error="KeyError: 'x'")

    def moved(time: re.Match[str]) -> str:
        return (datetime.fromisoformat(time[0]) + timedelta(hours=hours)).isoformat(timespec="milliseconds")

    for path in (tmp_path / "logs" / "rank-1.log", end_file(tmp_path / "logs", 1)):
        path.write_text(re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+\+\d\d:\d\d", moved, path.read_text()))
    assert explain(tmp_path).rank == 1


@pytest.mark.parametrize(
    ("error", "blamed"),
    [
        (
            "Model diverged at step 3: loss or gradients are not finite on rank 2 (node0). Nothing saved.",
            2,
        ),
        ("ranks disagree at step 10 on model/at/gain: rank 1 (node0) differs from rank 0", 1),
        ("the last checkpoint could not be saved: No space left on device", 0),
    ],
)
def test_an_error_of_all_ranks_is_that_of_the_rank_where_it_began(tmp_path: Path, error: str, blamed: int) -> None:
    run = Run(tmp_path, 3)
    for rank in (1, 2, 0):
        run.end(rank, "failed", 1, error=error)
    found = explain(tmp_path)
    assert found.rank == blamed
    assert found.what == f"rank {blamed} (node0) failed in train at step 470: {error}"


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            "3 saves in a row have failed: …: No space left on device: x",
            "free space on the disk that is full (df {run})",
        ),
        (
            "the last checkpoint could not be saved: Disk quota exceeded",
            "remove files of yours there, or ask for a larger quota",
        ),
        (
            "the last checkpoint could not be saved: File too large",
            "raise the limit on the size of a file (ulimit -f), or see what the file system of {run} takes",
        ),
        ("OSError: [Errno 28] No space left on device: '/tmp/x'", "free space on the disk that is full (df {run})"),
        ("the last checkpoint could not be saved: Permission denied", "see to the disk of {run}, where saves fail"),
        ("output_dir: x is gone: removed, renamed or no longer", "bring {run} back, or choose another --output-dir"),
        ("Model diverged with loss = NaN at step 3: on rank 0 (a)", "lower lr_schedule.base_lr, or look for values in"),
        ("ResourceExhaustedError: OOM when allocating tensor with", "take a smaller data.global_batch_size, or more"),
        ("_ArrayMemoryError: Unable to allocate 128. TiB for", "take a smaller data.global_batch_size, or more"),
        ("KeyError: 'x' (at /home/me/nets.py:7)", "fix /home/me/nets.py:7; the traceback is in {run}/logs/rank-0.log"),
        ("ValueError: no luck", "read the traceback in {run}/logs/rank-0.log"),
    ],
)
def test_the_next_step_is_that_of_the_cause(tmp_path: Path, error: str, advice: str) -> None:
    run = Run(tmp_path, 1, "none")
    run.end(0, "failed", 1, error=error)
    assert explain(tmp_path).next.startswith(advice.format(run=tmp_path))


def test_a_rank_that_vanished_is_known_from_the_others(tmp_path: Path) -> None:
    run = Run(tmp_path, 3, "mpirun")
    run.logs[0].write("cause", "rank 1 (node0) disappeared: killed or out of memory?")
    found = explain(tmp_path)
    assert (found.state, found.rank, found.followed, found.silent) == ("disappeared", 1, [0], [1, 2])
    assert (
        "see whether node0 ran out of memory, the likely reason (dmesg, or the scheduler's record), and take a"
        in found.next
    )
    assert shlex.join([*launch_command("mpirun", 3), "python", "-m"]) in found.next


def test_a_rank_that_keeps_no_log_may_be_the_one_that_vanished(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, "mpirun")
    summary(run)
    run.logs[0].write("cause", "rank 7 (node9) disappeared: killed or out of memory?")
    found = explain(tmp_path)
    assert (found.state, found.rank) == ("disappeared", 7)


def test_each_launcher_is_named_as_it_starts_ranks(tmp_path: Path) -> None:
    lines = {"srun": "srun --mpi=none -n 3 python -m horovod_train.main", "flux": "flux run -n 3 python -m"}
    lines |= {"srun-pmix": "srun --mpi=pmix -n 3 python -m", "launch": "horovod_train.main launch -np 3 -- --config"}
    lines |= {"torchrun": "torchrun --nproc-per-node 3 -m horovod_train.main --config"}
    lines |= {"tf-config": f"--output-dir {tmp_path / 'tf-config'}, on each of the 3 ranks of tf-config"}
    for launcher, line in lines.items():
        (tmp_path / launcher).mkdir()
        run = Run(tmp_path / launcher, 3, launcher)
        run.logs[0].write("cause", "rank 1 (node0) disappeared: killed or out of memory?")
        assert line in explain(tmp_path / launcher).next
    (tmp_path / "hosts").mkdir()
    over_hosts = Run(tmp_path / "hosts", 4, "launch", hosts=2)
    over_hosts.logs[0].write("cause", "rank 1 (node0) disappeared: killed or out of memory?")
    assert "horovod_train.main launch -H node0:2,node1:2 -- --config" in explain(over_hosts.folder).next


@pytest.mark.parametrize("launcher", ["srun", "srun-pmix"])
def test_a_job_of_slurm_is_submitted_again_with_all_that_it_asks_for(tmp_path: Path, launcher: str) -> None:
    run = Run(tmp_path, 2, launcher)
    run.checkpoint(470)
    run.end(0, "stopped", 75)
    script = "submit its batch script again{} (sbatch), unless SLURM has requeued it already (squeue); "
    then = f"inside an allocation resume with: srun --mpi={'none' if launcher == 'srun' else 'pmix'} -n 2 python "
    assert explain(tmp_path).next.startswith(script.format("") + then)
    (tmp_path / "config.yaml").write_text("checkpoint: {resume: never}\n")
    assert explain(tmp_path).next.startswith(script.format(" with checkpoint.resume=auto in it") + then)
    run.logs[1].write("cause", "rank 0 (node0) disappeared: killed or out of memory?")
    shutil.rmtree(tmp_path / "checkpoints")
    summary(run)
    assert "sbatch" not in explain(tmp_path).next  # it would refuse


@pytest.mark.parametrize("asked", [True, False])
def test_ranks_that_launch_killed_because_it_was_asked_to_stop_are_no_riddle(tmp_path: Path, asked: bool) -> None:
    run = Run(tmp_path, 2, "launch")
    run.logs[0].write("cause", "rank 1 (node0) disappeared: killed or out of memory?")
    what = "asked by SIGTERM; rank 1 was killed by SIGKILL; not all ranks could save" if asked else "--max-restarts 0"
    write_launch_log(run, f"stopped: {what}", age_s=0)
    assert ("memory" in explain(tmp_path).next) == (not asked)


def test_what_launch_said_last_is_shown(tmp_path: Path) -> None:
    Run(tmp_path, 2, "launch")
    lines = [
        f"2026-11-26T12:00:0{number}.000+00:00 launch: start {number} of at most 11: 2 rank(s)" for number in range(9)
    ]
    (tmp_path / "logs" / "launch.log").write_text("\n".join(lines) + "\n")
    assert [line for line in explain(tmp_path).lines() if " launch: " in line] == lines[-6:]


def test_a_start_of_launch_that_left_no_logs_hides_no_earlier_one(tmp_path: Path) -> None:
    """As of a run that is done, whose data are gone when it is started again with more epochs."""
    run = Run(tmp_path, 2, "launch")
    summary(run)
    for rank in (0, 1):
        run.end(rank, "done", 0)
    log, why = tmp_path / "logs" / "launch.log", "the config, the arguments or the data are bad, after 3 s"

    def launched(year: int) -> None:
        lines = ("start 1 of at most 11: 2 rank(s)", f"stopped: {why}")
        log.write_text("".join(f"{year}-11-26T12:00:00.000+00:00 launch: {line}\n" for line in lines))

    launched(2020)
    assert explain(tmp_path).state == "finished"
    launched(2120)
    found = explain(tmp_path)
    assert (found.state, found.what) == ("failed", f"the last start ended before its ranks had logs: {why}")
    assert "read what the ranks have printed" in found.next


REFUSED = "stopped: exit code 73: another run has the run directory, after 12 s"


def write_launch_log(run: Run, *lines: str, age_s: float = 0.0) -> None:
    """Add what launch says, a line a millisecond; the last `age_s` ago."""
    now = datetime.now().astimezone() - timedelta(seconds=age_s)
    with (run.folder / "logs" / "launch.log").open("a") as file:
        for number, line in enumerate(lines, 1 - len(lines)):
            said = (now + timedelta(milliseconds=number)).isoformat(timespec="milliseconds")
            file.write(f"{said} launch: {line}\n")


def test_a_run_of_which_each_pod_starts_its_ranks_is_started_as_they_did_it(tmp_path: Path) -> None:
    """Pods have no ssh: `launch -H` would reach none of them."""
    run = Run(tmp_path, 2, "launch")
    time.sleep(0.005)
    write_launch_log(run, "start 1 of at most 101: 2 rank(s), 1 on each of 2 hosts of indexed-job")
    run.logs[0].write("cause", "rank 1 (node0) disappeared: killed or out of memory?")
    write_launch_log(run, "stopped: rank 0 ended with exit code 1, after 3 s")
    command = f"launch --slots 1 -- --config {tmp_path}/config.yaml --output-dir {tmp_path}"
    assert explain(tmp_path).next.endswith(f"{command}, on each of 2 hosts of indexed-job")


@pytest.mark.parametrize("launcher", ["launch", "mpirun"])
def test_a_launch_that_was_refused_says_nothing_of_the_run_that_has_the_directory(
    tmp_path: Path, launcher: str
) -> None:
    run = Run(tmp_path, 2, launcher)
    time.sleep(0.005)
    write_launch_log(run, "start 1 of at most 11: 2 rank(s)", REFUSED)
    leave_lease(tmp_path, age_s=1)
    assert explain(tmp_path, watch_s=300).state == "running"
    (tmp_path / "lease.json").unlink()
    run.logs[0].write("cause", "rank 1 (node0) disappeared: killed or out of memory?")
    found = explain(tmp_path)
    assert (found.state, found.rank) == ("disappeared", 1)
    assert found.launched[-1].endswith(REFUSED)
    assert ("launch -np 2" in found.next) == (launcher == "launch")


@pytest.mark.parametrize("sign", ["lease", "log"])
def test_a_launch_that_stopped_says_nothing_of_a_run_that_is_there(tmp_path: Path, sign: str) -> None:
    run = Run(tmp_path, 2, "srun")
    time.sleep(0.005)
    why = "stopped: the config, the arguments or the data are bad, after 3 s"
    write_launch_log(run, "start 1 of at most 11: 2 rank(s)", why)
    assert explain(tmp_path).state == "failed"
    time.sleep(0.005)
    if sign == "lease":
        leave_lease(tmp_path, age_s=1)
    else:
        run.logs[1].write("phase", "train after step 480")
    assert explain(tmp_path, watch_s=300).state == ("running" if sign == "lease" else "disappeared")


def test_a_run_that_launch_starts_again_is_running(tmp_path: Path) -> None:
    write_launch_log(run := Run(tmp_path, 2, "mpirun"), "start 1 of at most 11: 2 rank(s)", age_s=900)
    run.logs[0].write("cause", "rank 1 (node0) disappeared: killed or out of memory?")
    run.end(0, "followed", 1, cause=1)
    assert explain(tmp_path).state == "disappeared"
    time.sleep(0.005)
    again = "start 2 of at most 11: 2 rank(s); newest checkpoint: step 400"
    write_launch_log(run, "mpirun ended with exit code 1, after 40 s", again)
    found = explain(tmp_path)
    assert (found.state, found.what) == ("running", f"still running: launch starts it again: {again}")
    assert found.next.startswith("wait; ")
    write_launch_log(run, "stopped: mpirun ended with exit code 1, after 1 s; --max-restarts 1 is used up")
    found = explain(tmp_path)
    assert found.state == "failed"
    assert "horovod_train.main launch -np 2 -- --config" in found.next  # not what launch starts its ranks by


def test_what_a_launch_that_was_killed_has_said_ages(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, "launch")
    log = log_file(tmp_path / "logs", 0)
    log.write_text(re.sub(r"^\S+", "2020-11-26T12:00:00.000+00:00", log.read_text(), flags=re.MULTILINE))
    late_s = 300 + 30
    for pause, state in (
        ("", "disappeared"),
        ("; next start in 60 s", "running"),
        ("; next start in 8 s", "disappeared"),
    ):
        write_launch_log(run, f"rank 0 was killed by SIGKILL, after 3 s{pause}", age_s=late_s)
        assert explain(tmp_path).state == state


def test_ranks_that_launch_started_by_mpirun_are_started_by_launch_again(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "launch.log"
    log.write_text("2020-11-26T12:00:00.000+00:00 launch: start 1 of at most 11: 2 rank(s)\n")
    run = Run(tmp_path, 2, "mpirun")
    run.logs[0].write("cause", "rank 1 (node0) disappeared: killed or out of memory?")
    assert "horovod_train.main launch -np 2 -- --config" in explain(tmp_path).next
    Run(tmp_path, 2, "mpirun").logs[0].write("cause", "rank 1 (node0) disappeared: killed or out of memory?")
    assert "mpirun" in explain(tmp_path).next  # a later start by hand


def test_of_a_suspension_that_gloo_did_not_survive_it_says_what_to_set(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    why = "was suspended for 700 s, longer than gloo waits (HOROVOD_GLOO_TIMEOUT_SECONDS: 630)"
    run.end(0, "failed", 1, error=why, cause=0)
    run.end(1, "followed", 1, error=f"stopped: rank 0 (node0) {why}", cause=0)
    found = explain(tmp_path)
    assert (found.what, found.followed) == (f"rank 0 (node0) failed in train at step 470: {why}", [1])
    assert found.next.startswith(
        "set HOROVOD_GLOO_TIMEOUT_SECONDS to more seconds than the job is suspended for; then "
    )


def test_ends_that_a_full_disk_did_not_take_are_read_from_the_logs(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    run.logs[0].write("phase", "save after step 470")
    try:
        raise RunError("3 saves in a row have failed; the last: No space left on device.")
    except RunError as error:
        run.logs[0].write_traceback(error)
    run.end(0, "failed", 1)
    run.end(1, "followed", 1)
    for rank in (0, 1):
        end_file(tmp_path / "logs", rank).unlink()
    found = explain(tmp_path)
    assert (found.state, found.rank, found.followed, found.silent) == ("failed", 0, [1], [])
    assert found.what == (
        "rank 0 (node0) failed in save at step 470: 3 saves in a row have failed; the last: No space left on device."
    )
    assert "free space on the disk that is full" in found.next


CRASHING = """
import ctypes, pathlib, sys
from horovod_train.output.rank_log import introduction, open_rank_log
log = open_rank_log(sys.argv[1], 1, "node0", start_text=introduction(1, 2, "mpirun", "node0"))
log.write("phase", "train after step 470")
ctypes.string_at(0)
"""


def test_a_crash_in_c_code_leaves_its_stack_and_is_no_lack_of_memory(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, "mpirun")
    (tmp_path / "crashing.py").write_text(CRASHING)
    run_process([sys.executable, str(tmp_path / "crashing.py"), str(tmp_path)])
    run.logs[0].write("cause", "rank 1 (node0) disappeared: killed or out of memory?")
    found = explain(tmp_path)
    assert (found.state, found.rank) == ("crashed", 1)
    assert found.what == f"rank 1 (node0) crashed: Segmentation fault, at {tmp_path}/crashing.py:6"
    assert found.next.startswith(f"see the stack in {tmp_path}/logs/rank-1.log; then ")


def test_of_several_threads_the_one_that_crashed_is_told(tmp_path: Path) -> None:
    """Also where Python writes others first, and where the crash is in a library that a frame of the user called."""
    run = Run(tmp_path, 2, "mpirun")
    waits = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\nctypes.string"
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING.replace("ctypes.string", waits))
    run_process([sys.executable, str(script), str(tmp_path)])
    log = log_file(tmp_path / "logs", 1)
    text = log.read_text()
    assert text.index("Thread 0x") < text.index("Current thread 0x")
    run.logs[0].write("cause", "rank 1 (node0) disappeared: killed or out of memory?")
    assert explain(tmp_path).what == f"rank 1 (node0) crashed: Segmentation fault, at {script}:8"
    log.write_text(
        text.replace("Thread 0x", 'Thread 0x1 (most recent call first):\n  File "/a.py", line 3 in g\n\nThread 0x')
    )
    assert explain(tmp_path).what.endswith(f", at {script}:8")
    log.write_text(log.read_text().replace("Current thread", "Thread"))  # one of C, of which Python does not know
    assert explain(tmp_path).what == "rank 1 (node0) crashed: Segmentation fault"


def test_a_crash_of_a_run_that_another_has_followed_is_not_told_as_that_of_the_other(tmp_path: Path) -> None:
    Run(tmp_path, 2, "mpirun")
    again = 'open_rank_log(sys.argv[1], 1, "node1", start_text=introduction(1, 2, "mpirun", "node1"))'
    (tmp_path / "crashing.py").write_text(CRASHING.replace("log.write", f"{again}\nlog.write"))
    crashed = run_process([sys.executable, str(tmp_path / "crashing.py"), str(tmp_path)])
    assert "Segmentation fault" in crashed.stderr
    assert "Segmentation fault" not in (tmp_path / "logs" / "rank-1.log").read_text()


def test_without_a_config_to_name_the_same_command_is_advised(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, "none")
    (tmp_path / "config.yaml").unlink()
    run.end(0, "failed", 2, error="no such model")
    assert explain(tmp_path).next.endswith("then start it again with the same command")


def test_a_stall_is_told_with_its_sentence(tmp_path: Path) -> None:
    run = Run(tmp_path, 3, "srun")
    sentence = "rank 1 (node0) has sent no heartbeat for 31 s, last seen in compute at step 469; 2 ranks wait for it"
    run.end(0, "stalled", 87, error=sentence)
    run.end(2, "stalled", 87, error=sentence)
    found = explain(tmp_path)
    assert (found.state, found.rank, found.silent) == ("stalled", 1, [1])
    assert found.what == f"stalled: {sentence}"
    assert "srun --mpi=none -n 3 python" in found.next


def test_a_stall_that_the_ends_of_the_others_show_names_its_rank(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    run.end(1, "stalled", 87, error="stopped: the other ranks have ended: rank 0 (node0) has sent nothing for 6 s")
    assert explain(tmp_path).rank == 0


def test_the_beginning_of_a_stall_is_not_told_twice(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, "srun")
    for text in ("rank 1 (node0) took 9 s at step 300", "rank 1 (node0) is slow since step 469"):
        run.logs[0].write("slow", text)
    run.end(0, "stalled", 87, error="rank 1 (node0) has sent no heartbeat for 31 s")
    found = explain(tmp_path)
    assert found.state == "stalled"
    assert found.slow == ["rank 1 (node0) took 9 s at step 300"]


def test_a_run_that_was_asked_to_stop_can_go_on(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, "none")
    (tmp_path / "config.yaml").write_text("checkpoint: {resume: never}\n")
    run.checkpoint(470)
    summary(run, ended="SIGTERM")
    run.end(0, "stopped", 75)
    found = explain(tmp_path)
    assert (found.state, found.what, found.steps_lost) == ("stopped", "stopped at step 470: SIGTERM", 0)
    assert found.next.startswith("resume with: python -m horovod_train.main --config ")
    assert "checkpoint.resume=auto" in found.next


def test_a_start_that_is_refused_does_not_hide_that_the_run_had_finished(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, "mpirun")
    summary(run, ended="done")
    run.end(0, "failed", 2, error="checkpoint.resume: never", phase="start", step=None)
    run.end(1, "followed", 2)
    found = explain(tmp_path)
    assert (found.state, found.rank) == ("failed", 0)
    assert "before that: an earlier start ended after 470 steps: done" in list(found.lines())
    run.end(0, "failed", 2, error="bad record", phase="train", step=480)
    assert explain(tmp_path).earlier == ""


def test_a_stop_file_that_is_still_there_is_to_be_removed_first(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, "none")
    run.checkpoint(470)
    summary(run, ended="STOP file")
    run.end(0, "stopped", 75)
    assert explain(tmp_path).next.startswith("resume with: ")
    (tmp_path / STOP_FILE).touch()
    expected = f"remove {tmp_path}/STOP, which would stop the run again; then resume with: "
    assert explain(tmp_path).next.startswith(expected)


def test_a_damaged_checkpoint_is_not_good(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, "none")
    run.checkpoint(300)
    run.checkpoint(400, size=4)
    (run.folder / "checkpoints" / ".step-000000450.1.partial").mkdir()
    run.checkpoint(460).joinpath("manifest.json").write_text('{"step": 4')
    run.end(0, "failed", 1, error="OSError: disk full")
    found = explain(tmp_path)
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.steps_lost) == (300, 170)
    assert [line.rpartition("/")[2] for line in found.damaged] == [
        "step-000000460: manifest.json: expected JSON with its own sha256, found something else: "
        "Expecting ',' delimiter: line 1 column 11 (char 10)",
        "step-000000400: state.index: expected 4 bytes, found 3",
    ]


@pytest.mark.parametrize("are_damaged", [False, True])
def test_a_run_whose_checkpoints_are_lost_is_not_told_to_resume(tmp_path: Path, are_damaged: bool) -> None:
    """It would refuse that: see layout.find_start."""
    run = Run(tmp_path, 1, "none")
    summary(run, ended="SIGTERM", finished=False)
    run.end(0, "stopped", 75)
    if are_damaged:
        run.checkpoint(470, size=4)
    folder, out = tmp_path / "checkpoints", f"--config {tmp_path}/config.yaml --resume never --output-dir {tmp_path}"
    anew = f"remove {folder} and start with" if are_damaged else "start with"
    found = explain(tmp_path)
    assert found.next == (
        f"bring {folder} back, whole, from a copy; to begin anew, {anew}: python -m horovod_train.main {out}"
    )
    with pytest.raises(UserError):
        find_start(folder, "auto", verify)
    shutil.rmtree(folder, ignore_errors=True)
    assert find_start(folder, "never", verify).checkpoint is None
    (tmp_path / "config.yaml").write_text("checkpoint: {resume: runs/b}\n")  # from there it may begin
    assert explain(tmp_path).next.startswith("start again with: ")


@pytest.mark.parametrize("are_damaged", [False, True])
def test_a_finished_run_whose_checkpoints_are_lost_is_told_so(tmp_path: Path, are_damaged: bool) -> None:
    run = Run(tmp_path, 1, "none")
    summary(run)
    run.end(0, "done", 0)
    if are_damaged:
        run.checkpoint(470, size=4)
    found = explain(tmp_path)
    lost = f"finished, but none of its checkpoints can be read: restore {tmp_path}/checkpoints from a copy"
    assert (found.state, found.next) == ("finished", lost)


def test_a_checkpoint_with_one_other_byte_is_not_good(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, "none")
    run.checkpoint(400)
    run.checkpoint(460).joinpath("state.index").write_bytes(b"abd")
    run.end(0, "failed", 1, error="OSError: disk full")
    found = explain(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 400
    (line,) = found.damaged
    assert "step-000000460: state.index: expected SHA-256 " in line


def test_only_the_last_start_counts(tmp_path: Path) -> None:
    run = Run(tmp_path, 3)
    run.end(2, "failed", 1, error="ValueError: of the first start")
    again = Run(tmp_path, 2)
    again.end(0, "done", 0)
    again.end(1, "done", 0)
    found = explain(tmp_path)
    assert (found.state, found.followed, found.silent) == ("finished", [], [])


@pytest.mark.parametrize("of", ["one start", pytest.param("many starts", marks=pytest.mark.long)])
def test_a_long_log_is_not_held_in_memory(tmp_path: Path, of: str) -> None:
    Run(tmp_path, 1, "none")
    log = log_file(tmp_path / "logs", 0)
    start, phase = log.read_text().splitlines(keepends=True)
    info = phase.replace("phase", f"info {'x' * 150}")
    log.write_text(start + phase + info * 30_000 if of == "one start" else (start + phase * 50) * 600 + start + info)
    readers: dict[str, Callable[[Path], object]] = {
        "explain": read_stories,
        "watch": lambda run_dir: Follower(run_dir).look(),
    }
    if of == "one start":  # a report shows the phases of all starts
        readers["report"] = read_starts_of_root
    for name, read in readers.items():
        tracemalloc.start()
        read(tmp_path)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < log.stat().st_size / 4, name
    assert explain(tmp_path).what.endswith(f"last line in the logs: {info[30:].rstrip()}")


def test_a_log_cut_short_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    Run(tmp_path, 1, "none")
    with (tmp_path / "logs" / "rank-0.log").open("ab") as file:
        file.write(b"2026-11-21T13:5\xff")
    (tmp_path / "logs" / "rank-0.end.json").write_text('{"rank"')
    found = explain(tmp_path)
    assert (found.state, found.silent) == ("disappeared", [0])
    assert found.what.endswith("last line in the logs: phase train after step 0")


def test_of_logs_that_were_rotated_it_is_said(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, "none")
    log_file(tmp_path / "logs", 0).rename(tmp_path / "logs" / "rank-0.log.1")
    found = explain(tmp_path, watch_s=0.0)
    assert found.what == "there are no logs of ranks: the run ended before its ranks had connected"
    log_file(tmp_path / "logs", 0).touch()
    run.logs[0].write("phase", "train after step 480")
    found = explain(tmp_path, watch_s=0.0)
    assert (found.state, found.what) == (
        *("unknown",),
        f"{tmp_path}/logs/rank-0.log does not begin with a start, as after a rotation: it tells no more",
    )
    title = next(iter(news(None, Follower(tmp_path).look())))
    assert title == f"{tmp_path}: no log of a rank begins with a start, as after a rotation"


def test_a_run_whose_process_is_here_is_running(tmp_path: Path) -> None:
    make_folder(tmp_path)
    open_rank_log(tmp_path, 0, "here", start_text=introduction(0, 1, "none", socket.gethostname()))
    found = explain(tmp_path)
    assert (found.state, found.silent) == ("running", [])
    assert found.next.startswith("wait; ")


def test_a_copy_of_a_run_that_trains_here_is_not_running(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    make_folder(tmp_path / "run")
    open_rank_log(tmp_path / "run", 0, "here", start_text=introduction(0, 1, "none", socket.gethostname()))
    lease = dataclasses.asdict(describe_me("", tmp_path / "run"))
    (tmp_path / "run" / "lease.json").write_text(json.dumps(lease))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    found = {name: explain(tmp_path / name, watch_s=0.0) for name in ("run", "copy")}
    assert {name: each.state == "running" for name, each in found.items()} == {"run": True, "copy": False}


@pytest.mark.parametrize("has_another", [True, False])
def test_a_process_with_the_number_of_one_of_another_machine_is_another(tmp_path: Path, has_another: bool) -> None:
    """As in containers, whose numbers are small, or after the host has booted again; its name is the same."""
    make_folder(tmp_path)
    log = open_rank_log(tmp_path, 0, "here", start_text=introduction(0, 1, "none", socket.gethostname()))
    log.write("phase", "train after step 0")
    path = leave_lease(tmp_path, age_s=3600)
    machine = {} if has_another else {"machine": describe_me("", tmp_path).machine}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": socket.gethostname()} | machine))
    os.utime(path, (time.time() - 3600,) * 2)
    assert explain(tmp_path, watch_s=0.0).state == ("disappeared" if has_another else "running")


def leave_lease(folder: Path, age_s: float, machine: str = "another") -> Path:
    """A lease as a run on another host leaves it, last refreshed `age_s` ago."""
    about = {"host": "node12", "pid": 4, "job": "33", "since": "now", "machine": machine, "started": "1", "token": "a"}
    (folder / "lease.json").write_text(json.dumps(about))
    os.utime(folder / "lease.json", (time.time() - age_s,) * 2)
    return folder / "lease.json"


def test_a_run_on_other_hosts_is_running_as_long_as_its_lease_is_fresh(tmp_path: Path) -> None:
    Run(tmp_path, 2, hosts=2)
    leave_lease(tmp_path, age_s=2)
    found = explain(tmp_path, watch_s=300)
    assert (found.state, found.steps_lost, found.silent) == ("running", None, [])
    assert found.what.startswith("still running: pid 4 on node12, job 33, since now, whose lease was refreshed ")
    assert found.next.startswith("wait; ")


@pytest.mark.parametrize("behind_s", [-3600, 3600])
def test_a_lease_is_watched_where_the_clocks_of_hosts_may_differ(
    tmp_path: Path, behind_s: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(tmp_path, 1, "srun")
    path = leave_lease(tmp_path, age_s=behind_s)

    def refresh(seconds: float) -> None:
        os.utime(path, (time.time() - behind_s,) * 2)

    monkeypatch.setattr(explain_lease, "time", SimpleNamespace(**vars(time) | {"sleep": refresh}))  # between two looks
    assert explain(tmp_path, watch_s=30).what.endswith("whose lease was refreshed just now")
    assert "Watching its lease" in capsys.readouterr().err


def test_a_run_that_ends_while_its_lease_is_watched_has_not_disappeared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, 1, "srun")
    path = leave_lease(tmp_path, age_s=60)

    def end(seconds: float) -> None:
        summary(run)
        run.end(0, "done", 0)
        path.unlink()

    monkeypatch.setattr(explain_lease, "time", SimpleNamespace(**vars(time) | {"sleep": end}))  # between two looks
    assert explain(tmp_path, watch_s=30).state == "finished"


def test_a_lease_that_no_process_refreshes_is_not_taken_for_a_run(tmp_path: Path) -> None:
    Run(tmp_path, 1, "srun")
    leave_lease(tmp_path, age_s=60)
    assert explain(tmp_path, watch_s=0.2).state == "disappeared"


def test_a_run_that_has_left_no_log_yet_is_running_where_it_holds_a_lease(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    assert explain(tmp_path).state == "unknown"
    leave_lease(tmp_path, age_s=1)
    assert explain(tmp_path, watch_s=300).state == "running"


def test_the_lease_of_a_dead_process_on_this_host_is_known_without_watching(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(tmp_path, 1, "none")
    script = (
        "import os, sys; from pathlib import Path; from horovod_train.output.lease import open_lease\n"
        "open_lease(Path(sys.argv[1])); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path], check=False)
    assert (tmp_path / "lease.json").exists()
    assert explain(tmp_path).state == "disappeared"
    assert "Watching" not in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a run directory"):
        explain(tmp_path)
    with pytest.raises(UserError, match="found no folder"):
        explain(tmp_path / "nothing")


def test_it_answers_without_tensorflow(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    run.end(0, "failed", 1, error="ValueError: no luck")
    script = (
        "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = None\n"
        "import argparse; from horovod_train.commands import explain\n"
        "parser = argparse.ArgumentParser(); explain.add_arguments(parser)\n"
        f"sys.exit(explain.run(parser.parse_args([{str(tmp_path)!r}, '--json'])))"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 1, finished.stderr
    assert json.loads(finished.stdout)["state"] == "failed"


def test_a_rank_that_does_not_see_the_folder_goes_on_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = open_rank_log(tmp_path / "elsewhere", 3, "node3", start_text="")
    log.write("phase", "train")
    log.end("done", 0)
    assert not (tmp_path / "elsewhere").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: rank 3 (node3) keeps no log: ")
