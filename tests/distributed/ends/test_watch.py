"""A run that stands still, or loses a rank, says why, on which rank, and ends. On real ranks, with real mishaps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from conftest import HANGS_AFTER_S, PROGRAMS, PROJECT, launcher_command, rank_environment, warm_python
from strangers import Siege

from horovod_train.commands.explain import explain
from horovod_train.output.rank_log import RankStory, read_stories

WARN_S, STOP_S = 3.0, 5.0
WAITED_FOR = "rank {rank} (HOST) has sent no heartbeat for N s, last seen in PHASE at step N; {others} wait for it"


@dataclass
class Job:
    """Ranks that train in `out` until something happens."""

    out: Path
    np: int
    processes: list[subprocess.Popen[bytes]]

    @property
    def said(self) -> list[str]:
        return (self.out / "stderr").read_text().splitlines()

    @property
    def stories(self) -> dict[int, RankStory]:
        return read_stories(self.out)

    def pid(self, rank: int) -> int:
        return int((self.out / f"pid-{rank}").read_text())

    def wait_until_trained(self) -> None:
        """All ranks are past their first steps, and have told root so."""
        until(lambda: all((self.out / f"pid-{rank}").exists() for rank in range(self.np)), self)
        time.sleep(1)

    def wait_until_said(self, words: str) -> None:
        until(lambda: any(words in line for line in self.said), self)

    def wait_until_gone(self) -> None:
        """All ranks, and the launcher."""
        pids = [self.pid(rank) for rank in range(self.np)]
        until(
            lambda: all(process.poll() is not None for process in self.processes) and not any(map(is_alive, pids)),
            self,
        )


def until(condition: Callable[[], bool], job: Job) -> None:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > HANGS_AFTER_S:
            pytest.fail(f"not within {HANGS_AFTER_S} s:\n" + "\n".join(job.said[-40:]))
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def started(out: Path, commands: Sequence[Sequence[str]], np: int) -> Iterator[Job]:
    """Whatever becomes of them: what these commands started is gone afterwards."""
    with (out / "stdout").open("wb") as stdout, (out / "stderr").open("wb") as stderr:
        environment = rank_environment()
        processes = [
            subprocess.Popen(
                command, cwd=PROJECT, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
            )
            for command in commands
        ]
    try:
        yield Job(out, np, processes)
    finally:
        for process in processes:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
            process.wait()


def watched(
    out: Path, launcher: str, np: int, victim: int, trouble: str, warn_s: float = WARN_S, stop_s: float = STOP_S
) -> AbstractContextManager[Job]:
    program = [*warm_python(), str(PROGRAMS / "watched.py"), str(out), str(victim), trouble, str(warn_s), str(stop_s)]
    return started(out, [[*launcher_command(launcher, np), *program]], np)


def plain(line: str) -> str:
    """Without what differs from run to run: host, seconds, steps; and without horovodrun's prefix."""
    line = re.sub(r"^\[\d+\]<stderr>:", "", line)
    line = re.sub(r"last seen in \w+ at step \d+(, reading [\w.-]+)?", "last seen in PHASE at step N", line)
    return re.sub(r"for \d+ s", "for N s", re.sub(r"(rank \d+) \([^)]+\)", r"\1 (HOST)", line))


def ours_among(lines: Iterable[str]) -> list[str]:
    """Horovod writes a line at the same moment, on another rank and on this one, where its "[" comes before the rest.

    Our line may stand before what it writes, or after that "[".
    """
    said = [re.sub(r"\[\d{4}-\d\d-\d\d [\d:.]+: E .*|\[(?=(warning|error|stopped): )", "", line) for line in lines]
    return [line for line in said if re.search(r"(^|:)(warning|error|stopped): ", line)]


def our_lines(job: Job) -> list[str]:
    return [plain(line) for line in ours_among(job.said)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "np", "victim", "exit_code"),
    [
        pytest.param("mpirun", 3, 2, 87, id="a rank"),
        pytest.param("mpirun", 3, 0, 87, id="root", marks=pytest.mark.exhaustive),
        pytest.param("horovodrun", 3, 2, 1, id="horovodrun", marks=pytest.mark.exhaustive),
    ],
)
def test_a_frozen_rank_is_named_and_all_end(
    tmp_path: Path, launcher: str, np: int, victim: int, exit_code: int
) -> None:
    """horovodrun has an exit code of its own."""
    sentence = WAITED_FOR.format(rank=victim, others=f"{np - 1} ranks")
    with watched(tmp_path, launcher, np, victim, "none") as job:
        job.wait_until_trained()
        os.kill(job.pid(victim), signal.SIGSTOP)
        if victim == 0:
            job.wait_until_said(f"rank {victim} (")
            expected = [f"error: stalled: {sentence}; the stacks of the other ranks are in logs/"]
        else:
            job.wait_until_said(f"rank {victim} (")
            job.wait_until_said("error: stalled: ")
            expected = [f"warning: {sentence}", f"error: stalled: {sentence}; the stacks of all ranks are in logs/"]
        job.wait_until_gone()
        assert our_lines(job) == expected
        assert job.processes[0].returncode == exit_code
        for rank, story in job.stories.items():
            if rank != victim:
                assert story.end is not None
                assert (story.end["ended"], story.end["exit_code"]) == ("stalled", 87)
                (stacks,) = story.find("stacks")
                assert "watched.py" in stacks.text
        told = explain(tmp_path)
        assert (told.state, told.rank) == ("stalled", victim)


@pytest.mark.exhaustive
def test_a_watch_that_strangers_besiege_still_names_a_frozen_rank(tmp_path: Path) -> None:
    with watched(tmp_path, "mpirun", 2, 1, "none") as job:
        job.wait_until_trained()
        listens = re.search(r" watch listens at ([\d.]+):(\d+)", (tmp_path / "logs" / "rank-0.log").read_text())
        assert listens is not None
        with Siege(listens[1], int(listens[2]), idle=500) as siege:
            siege.send(10_000)
            print(siege.counts)
            assert not our_lines(job)
            os.kill(job.pid(1), signal.SIGSTOP)
            job.wait_until_said("error: stalled: rank 1 (")
            job.wait_until_gone()
        assert job.processes[0].returncode == 87


@pytest.mark.parametrize(
    "victim", [pytest.param(0, id="root"), pytest.param(1, id="a rank", marks=pytest.mark.exhaustive)]
)
def test_each_process_ends_with_87_and_the_frozen_one_once_it_goes_on(tmp_path: Path, victim: int) -> None:
    """Without a launcher, which would end the others itself."""
    program = [sys.executable, str(PROGRAMS / "guarded.py"), str(tmp_path)]
    commands = [[*program, str(rank), "3", "2", "3"] for rank in range(3)]
    with started(tmp_path, commands, 3) as job:
        job.wait_until_trained()
        os.kill(job.pid(victim), signal.SIGSTOP)
        (tmp_path / "stand-still").touch()
        job.wait_until_said(f"error: stalled: rank {victim} (")
        others = [process for rank, process in enumerate(job.processes) if rank != victim]
        until(lambda: all(process.poll() is not None for process in others), job)
        assert job.processes[victim].poll() is None
        os.kill(job.pid(victim), signal.SIGCONT)
        job.wait_until_gone()
        assert [process.returncode for process in job.processes] == [87, 87, 87]


@pytest.mark.long
def test_ranks_whose_words_nobody_takes_end_too(tmp_path: Path) -> None:
    program = ["bash", "-c", 'exec "$@" 2> /dev/full', "-", sys.executable, str(PROGRAMS / "guarded.py"), str(tmp_path)]
    with started(tmp_path, [[*program, str(rank), "2", "1", "2"] for rank in range(2)], 2) as job:
        job.wait_until_trained()
        (tmp_path / "stand-still").touch()
        until(lambda: all(process.poll() is not None for process in job.processes), job)
        assert [process.returncode for process in job.processes] == [87, 87]


@pytest.mark.long
def test_a_rank_that_waits_for_its_input_is_named_with_the_file(tmp_path: Path) -> None:
    with watched(tmp_path, "mpirun", 3, 1, "slow-input") as job:
        job.wait_until_trained()
        job.wait_until_said("rank 1 (")
        job.wait_until_said("error: stalled: ")
        job.wait_until_gone()
        sentence = (
            "rank 1 (HOST) has been in input for N s at step 30, reading train-00031.tfrecord; 2 ranks wait for it"
        )
        assert our_lines(job) == [
            f"warning: {sentence}",
            f"error: stalled: {sentence}; the stacks of all ranks are in logs/",
        ]
        assert job.processes[0].returncode == 87
        assert [story.end and story.end["phase"] for story in job.stories.values()] == ["exchange", "input", "exchange"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "np", "victim"),
    [pytest.param("horovodrun", 3, 1, marks=pytest.mark.exhaustive), ("mpirun", 3, 1), ("none", 1, 0)],
)
def test_a_failure_is_read_first_and_others_point_at_it(tmp_path: Path, launcher: str, np: int, victim: int) -> None:
    """At np=3 one of the others hears of it from Horovod; the last is busy elsewhere, and has to be ended."""
    with watched(tmp_path, launcher, np, victim, "raise") as job:
        job.wait_until_trained()
        job.wait_until_said(f"ValueError: no luck on rank {victim}")
        job.wait_until_gone()
        assert job.processes[0].returncode == 1
        first, *others = [plain(line) for line in job.said if f"ValueError: no luck on rank {victim}" in line]
        what = f"ValueError: no luck on rank {victim} (HOST)"  # the place in the code, which `plain` takes for a host
        who = f"rank {victim} (HOST): " if np > 1 else ""
        assert first == f"error: {who}{what}; the traceback is in logs/rank-{victim}.log"
        line = f"stopped: rank {victim} (HOST) failed: {what}; see logs/rank-{victim}.log"
        assert others == [line] * min(1, np - 1)  # for all ranks of the host
        assert our_lines(job) == [first, *others]
        told = explain(tmp_path)
        assert (told.state, told.rank, told.followed) == (
            "failed",
            victim,
            [rank for rank in range(np) if rank != victim],
        )
        assert f"failed in train at step 30: {what}" in plain(told.what)


@pytest.mark.long
def test_what_fails_on_all_ranks_alike_is_read_once(tmp_path: Path) -> None:
    with watched(tmp_path, "mpirun", 2, 0, "raise-alike") as job:
        job.wait_until_trained()
        job.wait_until_gone()
        (line,) = [line for line in job.said if "no luck" in line]
        assert "): ValueError: no luck on any rank (at " in line
        assert job.processes[0].returncode == 1


@pytest.mark.parametrize("launcher", ["horovodrun"])
def test_a_killed_rank_is_missed(tmp_path: Path, launcher: str) -> None:
    with watched(tmp_path, launcher, 3, 1, "none") as job:
        job.wait_until_trained()
        os.kill(job.pid(1), signal.SIGKILL)
        job.wait_until_gone()
        assert our_lines(job) == ["stopped: rank 1 (HOST) disappeared: killed or out of memory?"]
        assert job.processes[0].returncode != 0
        told = explain(tmp_path)
        assert (told.state, told.rank, told.followed, told.silent) == ("disappeared", 1, [0, 2], [1])


@pytest.mark.exhaustive
def test_of_two_killed_ranks_one_is_missed_though_the_other_was_the_hosts_first_one_left(tmp_path: Path) -> None:
    with watched(tmp_path, "horovodrun", 3, 0, "none") as job:
        job.wait_until_trained()
        os.kill(job.pid(1), signal.SIGSTOP)  # It must not print before it is killed.
        os.kill(job.pid(0), signal.SIGKILL)
        os.kill(job.pid(1), signal.SIGKILL)
        job.wait_until_gone()
        assert our_lines(job) == ["stopped: rank 0 (HOST) disappeared: killed or out of memory?"]


@pytest.mark.long
def test_without_the_watch_nobody_ends_a_frozen_run(tmp_path: Path) -> None:
    """The negative of all this."""
    with watched(tmp_path, "mpirun", 2, 1, "unwatched", 0.5, 1) as job:
        job.wait_until_trained()
        os.kill(job.pid(1), signal.SIGSTOP)
        time.sleep(3)  # three times as long as it would take
        assert job.processes[0].poll() is None
        assert all(is_alive(job.pid(rank)) for rank in range(2))
        assert not our_lines(job)
