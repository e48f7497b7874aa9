"""Ranks that shells or other programs start: they get signals once, and none outlives the start."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from conftest import HANGS_AFTER_S

from horovod_train.distributed.launch import started_ranks
from horovod_train.distributed.launch.started_ranks import Ended, StartedRanks, new_meeting, start_by_mpirun, start_here

RANK = """
import os, select, signal, sys
folder = sys.argv[1]
name = f"{folder}/{os.environ.get('HOROVOD_TRAIN_RANK') or os.environ['OMPI_COMM_WORLD_RANK']}"
reading, writing = os.pipe()
os.set_blocking(writing, False)
signal.set_wakeup_fd(writing)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: None)
print(os.getpid(), file=open(f"{name}.part", "w"))
os.rename(f"{name}.part", f"{name}.pid")
received = os.read(reading, 1)
while select.select([reading], [], [], 0.3)[0]:
    received += os.read(reading, 1)
print(*received, file=open(f"{name}.received", "w"))
sys.exit(75)
"""
"""Says that it runs, and, once asked to end, by which signals."""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[str]:
    """Words of a shell that run such a rank; it does not outlive the test."""
    (tmp_path / "rank.py").write_text(RANK)
    yield f"{sys.executable} {tmp_path}/rank.py {tmp_path}"
    for file in tmp_path.glob("*.pid"):
        try:
            psutil.Process(int(file.read_text())).kill()
        except psutil.NoSuchProcess:
            continue


Start = Callable[[int, Sequence[str]], StartedRanks]


def by_launch(ranks: int, program: Sequence[str]) -> StartedRanks:
    return start_here(new_meeting(ranks, "localhost"), 0, ranks, program)


def begin(
    folder: Path, ranks: int, program: Sequence[str], start: Start = by_launch
) -> tuple[StartedRanks, list[psutil.Process]]:
    """Returns when all ranks run, with the processes that are ranks."""
    started = start(ranks, program)
    files = [folder / f"{rank}.pid" for rank in range(ranks)]
    wait_until(lambda: all(file.exists() for file in files))
    return started, [psutil.Process(int(file.read_text())) for file in files]


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + HANGS_AFTER_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def wait(started: StartedRanks) -> Ended:
    """Ends the ranks of a start that hangs."""
    limit = threading.Timer(HANGS_AFTER_S, started.kill)
    limit.start()
    try:
        return started.wait()
    finally:
        limit.cancel()


def is_over(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)  # nothing collects it in some containers
    except psutil.NoSuchProcess:
        return True


WITH_A_TRAP = "trap 'exit 75' TERM INT; {}; true"


@pytest.mark.parametrize(
    ("start", "script", "number"),
    [
        (by_launch, "exec {}", signal.SIGINT),
        (by_launch, WITH_A_TRAP, signal.SIGTERM),
        (start_by_mpirun, WITH_A_TRAP, signal.SIGTERM),
        *(
            pytest.param(start, script, number, marks=pytest.mark.long)
            for start, script, number in [
                (by_launch, "exec {}", signal.SIGTERM),
                (by_launch, WITH_A_TRAP, signal.SIGINT),
                *((by_launch, "{}; true", number) for number in (signal.SIGTERM, signal.SIGINT)),
                *((by_launch, "({}; true); true", number) for number in (signal.SIGTERM, signal.SIGINT)),
                (start_by_mpirun, "{}; true", signal.SIGINT),
                (start_by_mpirun, "({}; true); true", signal.SIGTERM),
            ]
        ),
    ],
)
def test_ranks_of_a_shell_get_a_signal_once_and_may_save(
    tmp_path: Path, rank: str, start: Start, script: str, number: signal.Signals
) -> None:
    started, ranks = begin(tmp_path, 2, ["bash", "-c", script.format(rank)], start)
    started.send(number)
    wait(started)
    assert [(tmp_path / f"{rank}.received").read_text() for rank in range(2)] == [f"{int(number)}\n"] * 2
    assert all(map(is_over, ranks))


def test_a_shell_that_passes_on_the_exit_code_of_its_rank_has_it(tmp_path: Path, rank: str) -> None:
    started, _ = begin(tmp_path, 2, ["bash", "-c", f"exec {rank}"])
    started.send(signal.SIGTERM)
    assert wait(started).codes == {"0": 75, "1": 75}


def test_what_is_left_of_a_rank_that_is_lost_may_save_and_ends(tmp_path: Path, rank: str) -> None:
    started, ranks = begin(tmp_path, 1, ["bash", "-c", f"{rank}; true"])
    (shell,) = [parent for parent in ranks[0].parents() if parent.name() == "bash"][:1]
    shell.kill()
    assert wait(started).codes == {"0": 137}
    assert (tmp_path / "0.received").read_text() == f"{int(signal.SIGTERM)}\n"
    assert is_over(ranks[0])


def test_what_does_not_end_is_killed(tmp_path: Path, rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started_ranks, "OTHERS_END_WITHIN_S", 0.1)
    started, ranks = begin(tmp_path, 1, ["bash", "-c", f"{rank} & while [ ! -e {tmp_path}/0.pid ]; do :; done; exit 0"])
    ranks[0].suspend()
    assert wait(started).codes == {"0": 0}
    assert is_over(ranks[0])


@pytest.mark.parametrize("code", [75, 76])
def test_a_rank_that_runs_on_though_another_has_saved_is_killed_and_lost(
    rank: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    """As one that waits in vain for a rank of a program to which the exit code means something else."""
    monkeypatch.setattr(started_ranks, "SAVE_WITHIN_S", 0.1)
    ended = wait(by_launch(2, ["sh", "-c", f"[ $HOROVOD_TRAIN_RANK = 1 ] || exit {code}; {rank}"]))
    assert (ended.codes, ended.first) == ({"0": code, "1": 137}, "1")
    assert f"launch: rank 1 still runs 0 s after rank 0 ended with exit code {code}, and is killed" in (
        capfd.readouterr().err
    )


def test_a_rank_may_run_on_though_another_is_done(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started_ranks, "SAVE_WITHIN_S", 0.0)
    ended = wait(by_launch(2, ["sh", "-c", "[ $HOROVOD_TRAIN_RANK = 0 ] || sleep 0.3"]))
    assert (ended.codes, ended.first) == ({"0": 0, "1": 0}, "")


def test_a_rank_that_runs_on_where_all_end_together_is_killed(
    rank: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(started_ranks, "SAVE_WITHIN_S", 0.1)
    ended = by_launch(2, ["sh", "-c", f"[ $HOROVOD_TRAIN_RANK = 1 ] || exit 0; {rank}"]).wait(end_together=True)
    assert (ended.codes, ended.first) == ({"0": 0, "1": 137}, "1")
    assert "launch: rank 1 still runs 0 s after rank 0 ended with exit code 0, and is killed" in capfd.readouterr().err


def test_a_shell_of_mpirun_that_catches_a_signal_gets_it(tmp_path: Path) -> None:
    script = f"trap 'exit 75' TERM; touch {tmp_path}/0.begun; while :; do sleep 0.05; done"
    started = start_by_mpirun(1, ["bash", "-c", script])
    wait_until((tmp_path / "0.begun").exists)
    started.send(signal.SIGTERM)
    assert wait(started).codes == {"mpirun": 75}


def test_ranks_that_mpirun_has_not_started_yet_get_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun = started_ranks._has_begun
    monkeypatch.setattr(started_ranks, "_has_begun", lambda *_: False)
    started = start_by_mpirun(1, ["sleep", str(2 * HANGS_AFTER_S)])
    started.send(signal.SIGTERM)
    monkeypatch.setattr(started_ranks, "_has_begun", has_begun)
    assert wait(started).codes == {"mpirun": 128 + signal.SIGTERM}


def test_a_rank_that_mpirun_is_starting_is_killed_with_the_others(
    tmp_path: Path, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not passed over, as by other signals, which it would drop: it would run on without mpirun."""
    started, ranks = begin(tmp_path, 2, ["bash", "-c", f"{rank}; true"], start_by_mpirun)
    monkeypatch.setattr(started_ranks, "_has_begun", lambda *_: False)
    started.kill()
    wait_until(lambda: all(map(is_over, ranks)))
    assert not list(tmp_path.glob("*.received"))


@pytest.mark.parametrize(("start", "is_signal"), [(by_launch, False), (by_launch, True), (start_by_mpirun, False)])
def test_killed_ranks_leave_nothing(tmp_path: Path, rank: str, start: Start, is_signal: bool) -> None:
    """By the agent of a host too, which gets the number of the signal."""
    started, ranks = begin(tmp_path, 2, ["bash", "-c", f"{rank}; true"], start)
    if is_signal:
        started.send(signal.SIGKILL)
        wait(started)
    else:
        started.kill()
    wait_until(lambda: all(map(is_over, ranks)))
    assert not list(tmp_path.glob("*.received"))


WITH_A_WORKER = """
import os, signal, subprocess, sys
reading, writing = os.pipe()
os.set_blocking(writing, False)
signal.set_wakeup_fd(writing)
signal.signal(signal.SIGTERM, lambda *_: None)
worker = subprocess.Popen([sys.executable, f"{sys.argv[1]}/rank.py", sys.argv[1]])
os.read(reading, 1)
try:
    worker.wait(1)
except subprocess.TimeoutExpired:
    worker.kill()
    sys.exit(75)
"""


def test_processes_that_load_a_ranks_data_stay_until_it_has_saved(tmp_path: Path, rank: str) -> None:
    started, _ = begin(tmp_path, 1, [sys.executable, "-c", WITH_A_WORKER, str(tmp_path)])
    started.send(signal.SIGTERM)
    assert wait(started).codes == {"0": 75}


TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_ulong, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p]
seize = 0x4206
assert libc.ptrace(seize, int(sys.argv[1]), None, None) == 0, ctypes.get_errno()
print("seized", flush=True)
sys.stdin.read()
"""


def test_a_rank_that_the_kernel_does_not_let_go_holds_neither_launch_nor_other_ranks(
    tmp_path: Path, rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tracer stands for a device that hangs: while it does not collect a killed process, nobody else can."""
    monkeypatch.setattr(started_ranks, "ENDS_AFTER_KILL_WITHIN_S", 1.0)
    started, ranks = begin(tmp_path, 2, rank.split())
    command = [sys.executable, "-c", TRACER, str(ranks[0].pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdout.readline() == b"seized\n"
        started.kill()
        said = f"launch: 0 (pid {ranks[0].pid}) was killed and does not end"
        assert said in capsys.readouterr().err
        assert is_over(ranks[1])
