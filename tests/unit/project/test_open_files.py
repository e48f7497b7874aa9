"""Files stay open between reads, within a limit, and none is closed while a thread reads from it."""

from __future__ import annotations

import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from horovod_train.open_files import OpenFiles, idle_descriptors

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
