"""Files stay open between reads, within a limit, and none is closed while a thread reads from it.

A process is told apart from a later one with its pid; one that cannot be seen counts as running. Cores are those that
the container may use.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from horovod_train.host import (
    OpenFiles,
    cpu_quota,
    has_run_since,
    idle_descriptors,
    is_running,
    start_ticks,
    usable_cores,
    usable_memory,
)

FILES = 12


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    for number in range(FILES):
        (tmp_path / str(number)).write_text(f"content {number}")
    return [str(tmp_path / str(number)) for number in range(FILES)]


def open_here(paths: list[str]) -> list[str]:
    """Those of the paths that this process has open."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # of listdir itself
            continue
    return sorted(name for name in names if name in paths)


def read(files: OpenFiles, path: str) -> str:
    with files.opened(path) as descriptor:
        return os.pread(descriptor, 100, 0).decode()


def test_a_file_is_opened_once(paths: list[str]) -> None:
    files = OpenFiles()
    found = set()
    for _ in range(3):
        with files.opened(paths[0]) as descriptor:
            found.add(descriptor)
    assert len(found) == 1
    assert open_here(paths) == paths[:1]


def test_the_least_recently_used_are_closed(paths: list[str]) -> None:
    files = OpenFiles(max_open=3)
    for number in (0, 1, 2, 0, 3):
        assert read(files, paths[number]) == f"content {number}"
    assert open_here(paths) == sorted([paths[0], paths[2], paths[3]])


def test_a_file_in_use_stays_open_beyond_the_limit(paths: list[str]) -> None:
    files = OpenFiles(max_open=1)
    with files.opened(paths[0]) as first:
        for number in range(1, 4):
            assert read(files, paths[number]) == f"content {number}"
        assert os.pread(first, 100, 0) == b"content 0"
    assert len(open_here(paths)) == 1


def test_many_threads_read_more_files_than_may_be_open(paths: list[str]) -> None:
    files, together = OpenFiles(max_open=2), threading.Barrier(8)

    def some(start: int) -> bool:
        together.wait()
        order = [(start + step) % FILES for step in range(200)]
        return all(read(files, paths[number]) == f"content {number}" for number in order)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(some, range(8)))
    assert len(open_here(paths)) <= 2


def test_a_replaced_file_is_read_as_it_was(paths: list[str], tmp_path: Path) -> None:
    files = OpenFiles()
    read(files, paths[0])
    (tmp_path / "new").write_text("other content")
    os.replace(tmp_path / "new", paths[0])
    assert read(files, paths[0]) == "content 0"
    assert read(OpenFiles(), paths[0]) == "other content"


def test_files_are_closed_where_the_process_has_no_descriptor_left(paths: list[str]) -> None:
    files, before = OpenFiles(), resource.getrlimit(resource.RLIMIT_NOFILE)
    for path in paths[:6]:
        read(files, path)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken = [os.dup(0) for _ in range(highest - len(os.listdir("/proc/self/fd")) + 2)]  # no gap is left
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        assert read(files, paths[7]) == "content 7"
        assert open_here(paths) == [paths[7]]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)


def test_a_missing_file_is_an_error_and_leaves_nothing_open(paths: list[str]) -> None:
    with pytest.raises(FileNotFoundError):
        read(OpenFiles(), f"{paths[0]}.gone")
    files = OpenFiles()
    read(files, paths[1])
    del files
    assert open_here(paths) == []


def test_files_that_are_only_kept_open_are_known(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    files = OpenFiles()
    with files.opened(str(tmp_path / "a")) as descriptor:
        assert descriptor not in idle_descriptors()
    assert descriptor in idle_descriptors()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"memory.max": "max\n"}, None),
        ({"memory.max": "1048576\n"}, 1048576),
        ({"memory/memory.limit_in_bytes": "2097152\n"}, 2097152),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_the_memory_of_a_container_is_what_it_may_use(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_memory(tmp_path) == (expected or psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("files", "quota", "cores"),
    [
        ({}, math.inf, 64),
        ({"cpu.max": "max 100000\n"}, math.inf, 64),
        ({"cpu.max": "400000 100000\n"}, 4, 4),
        ({"cpu.max": "50000 100000\n"}, 0.5, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf, 64),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.5, 2),
    ],
)
def test_ranks_use_no_more_cores_than_the_container_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: float, cores: int
) -> None:
    """By cgroups of version 2 or 1."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota
    monkeypatch.setattr("horovod_train.host.cpu_quota", lambda: quota)
    assert usable_cores(64) == cores
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    assert usable_cores() == cores


def test_this_process_runs_and_no_earlier_one_with_its_pid() -> None:
    started = start_ticks(os.getpid())
    assert started is not None
    assert is_running(os.getpid(), started)
    assert not is_running(os.getpid(), str(int(started) - 1))
    assert has_run_since(os.getpid(), time.time())
    assert not has_run_since(os.getpid(), time.time() - 86_400 * 365)


def test_a_process_that_has_ended_does_not_run_before_its_parent_has_noticed_either() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = start_ticks(ended.pid)
    assert started is not None
    assert ended.stdin is not None
    ended.stdin.close()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # leaves it a zombie
    for _ in range(2):
        assert not is_running(ended.pid, started)
        assert not has_run_since(ended.pid, time.time())
        ended.wait()


HIDDEN = """
import psutil
from horovod_train.host import is_running
print(psutil.pid_exists(1), is_running(1, "0"))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs a /proc of its own")
def test_another_users_process_that_proc_hides_counts_as_running() -> None:
    """psutil says that it is gone."""
    as_other = 'mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"'
    command = ["unshare", "-m", "sh", "-c", as_other, "-", sys.executable, "-c", HIDDEN]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if finished.stderr.startswith("unshare: "):
        pytest.skip(f"a /proc of its own needs more rights: {finished.stderr.strip()}")
    assert finished.stdout.split() == ["False", "True"], finished.stderr
