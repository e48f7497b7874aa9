"""The lease: one run per directory, and a dead run's directory is free again."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_train.errors import InUse, UserError
from horovod_train.host import start_ticks
from horovod_train.output import lease
from horovod_train.output.lease import FileLease, Lease, describe_me, open_lease, read_lease

SPAWN = multiprocessing.get_context("spawn")


def told(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "lease.json").read_text())


def leave(directory: Path, *, age_s: float = 0, **changes: Any) -> None:
    """A lease as a run on another host leaves it, whose last sign of life is `age_s` old."""
    other = dataclasses.replace(describe_me("33", directory), host="node12", machine="another", **changes)
    written = directory / "written"
    written.write_text(json.dumps(dataclasses.asdict(other)))
    os.utime(written, (time.time() - age_s,) * 2)
    written.rename(directory / "lease.json")  # as another run takes it: the holder's file is no longer the one here


def wait_for(condition: Any, timeout_s: float = 300) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


@pytest.fixture
def looks_again(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Wait until a holder has tried to refresh its lease, and has done what follows."""
    check, tries = FileLease._check, list[bool]()

    def noted(held: FileLease, *, refresh: bool) -> None:
        tries.append(refresh)
        check(held, refresh=refresh)

    def waits() -> bool:
        before = sum(tries)
        return wait_for(lambda: sum(tries) >= before + 2)

    monkeypatch.setattr(FileLease, "_check", noted)
    return waits


def is_refreshed(path: Path) -> bool:
    """Wait until the holder refreshes its lease."""
    first = path.stat().st_mtime_ns
    return wait_for(lambda: path.stat().st_mtime_ns > first)


def between_looks(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Call `act` whenever a run that waits for a lease has looked at it, and will look again."""
    monkeypatch.setattr(lease, "time", SimpleNamespace(**vars(time) | {"sleep": lambda seconds: act()}))


# One holder.


def test_a_lease_names_its_holder_and_goes_at_the_end(tmp_path: Path) -> None:
    held = open_lease(tmp_path, job="4711")
    assert told(tmp_path)["pid"] == os.getpid()
    assert told(tmp_path)["job"] == "4711"
    assert held.is_ours()
    assert held.lost is None
    held.close()
    assert os.listdir(tmp_path) == []


def test_a_second_run_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    held = open_lease(tmp_path, job="4711")
    with pytest.raises(InUse) as refused:
        open_lease(tmp_path)
    line = str(refused.value)
    assert line.startswith(
        f"output_dir: {tmp_path} is in use by another run: pid {os.getpid()} on {os.uname().nodename}"
    )
    assert f", job 4711, since {told(tmp_path)['since']}. Stop that run, or choose another directory" in line
    assert os.listdir(tmp_path) == ["lease.json"]
    held.close()
    open_lease(tmp_path).close()


def test_other_ranks_have_a_lease_without_effect() -> None:
    held = open_lease(None)
    assert type(held) is Lease
    assert held.is_ours()
    held.close()


def test_a_folder_that_is_not_there_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^output_dir: cannot write .*lease.json: No such file or directory"):
        open_lease(tmp_path / "nowhere")


def test_a_group_that_may_write_the_directory_may_take_over_the_lease(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        held = open_lease(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "lease.json").stat().st_mode & 0o777 == 0o664
    held.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_lease_that_only_its_owner_can_write_is_named_with_the_owner() -> None:
    program = "import os, pathlib, sys\nfrom horovod_train.output.lease import open_lease\nos.setuid(54321)\n"
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        leave(Path(folder), age_s=3600)
        os.chmod(f"{folder}/lease.json", 0o644)
        command = [sys.executable, "-c", f"{program}open_lease(pathlib.Path({folder!r}))"]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300).stderr.splitlines()[-1]
        assert os.listdir(folder) == ["lease.json"]
    assert said.startswith(f"horovod_train.errors.UserError: output_dir: {folder}/lease.json belongs to root, and only")
    assert "on node12, job 33" in said
    assert said.endswith("If that run has ended, remove the file; or choose another directory with --output-dir.")


def test_what_is_no_lease_names_no_holder_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "lease.json").write_text("[" * 60_000)
    assert read_lease(tmp_path)[0] is None
    (tmp_path / "lease.json").unlink()
    os.mkfifo(tmp_path / "lease.json")
    with pytest.raises(OSError, match="Illegal seek"):
        read_lease(tmp_path)
    with pytest.raises(UserError, match="Choose another: --output-dir"):
        open_lease(tmp_path)


# Alive or dead?


def hold(directory: Path) -> None:
    open_lease(directory)
    time.sleep(600)


@pytest.mark.parametrize("is_reaped", [True, False], ids=["gone", "a zombie"])
def test_the_lease_of_a_killed_process_on_this_host_is_free_at_once(
    tmp_path: Path, is_reaped: bool, said: list[str]
) -> None:
    holder = SPAWN.Process(target=hold, args=(tmp_path,), daemon=True)
    holder.start()
    assert wait_for(lambda: (tmp_path / "lease.json").exists() and (tmp_path / "lease.json").read_text())
    with pytest.raises(InUse, match=f"is in use by another run: pid {holder.pid} "):
        open_lease(tmp_path)  # as long as it lives
    holder.kill()
    if is_reaped:
        holder.join()
    assert holder.pid is not None
    assert wait_for(lambda: is_reaped or start_ticks(holder.pid or 0) is None)
    open_lease(tmp_path).close()
    (line,) = said
    assert line.startswith(f"warning: {tmp_path / 'lease.json'} was held by pid {holder.pid} on ")
    assert line.endswith("which has ended. This run takes over.")
    holder.join()


def test_another_process_with_the_pid_of_the_dead_one_is_not_taken_for_it(tmp_path: Path) -> None:
    me = describe_me("", tmp_path)
    (tmp_path / "lease.json").write_text(json.dumps(dataclasses.asdict(dataclasses.replace(me, started="1"))))
    open_lease(tmp_path).close()
    (tmp_path / "lease.json").write_text(json.dumps(dataclasses.asdict(me)))
    with pytest.raises(InUse, match="in use"):
        open_lease(tmp_path)


def test_the_lease_in_a_copy_of_a_folder_in_use_is_nobodys(tmp_path: Path, said: list[str]) -> None:
    """Its process lives, and refreshes the other one. A folder that is renamed is still the one that it holds."""
    original, copy, moved = tmp_path / "original", tmp_path / "copy", tmp_path / "moved"
    original.mkdir()
    held = open_lease(original)
    shutil.copytree(original, copy)
    assert read_lease(original)[2] is True
    assert read_lease(copy)[2] is None
    open_lease(copy, stale_s=1, refresh_s=0.1).close()
    assert "which has not refreshed it for" in said[-1]
    original.rename(moved)
    with pytest.raises(InUse, match="in use"):
        open_lease(moved)
    moved.rename(original)
    held.close()


def test_a_lease_of_a_version_that_noted_no_folder_is_that_of_its_process(tmp_path: Path) -> None:
    about = dataclasses.asdict(describe_me("", tmp_path))
    del about["folder"]
    (tmp_path / "lease.json").write_text(json.dumps(about))
    with pytest.raises(InUse, match="in use"):
        open_lease(tmp_path)


def test_a_silent_lease_of_another_host_is_watched_then_taken(tmp_path: Path, said: list[str]) -> None:
    leave(tmp_path)
    open_lease(tmp_path, stale_s=1, refresh_s=0.1).close()
    assert "is held by pid" in said[0]
    assert "on node12, job 33" in said[0]
    (waits_s,) = re.findall(r"Waiting up to (\d+) s to see whether it is refreshed\.", said[0])
    assert int(waits_s) <= 1  # less where this process looked late
    (silent_s,) = re.findall(r"has not refreshed it for (\d+) s\. This run takes over\.", said[1])
    assert int(silent_s) >= 1


def test_a_stale_lease_of_another_host_is_taken_after_two_refreshes(tmp_path: Path, said: list[str]) -> None:
    """Not after the whole stale_s, which would be ten minutes here."""
    leave(tmp_path, age_s=3600)
    open_lease(tmp_path, stale_s=600, refresh_s=0.5).close()
    assert "Waiting up to 1 s" in said[0]
    assert "has not refreshed it for 36" in said[1]


def test_a_stale_lease_is_watched_also_by_a_run_that_looked_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first look the disk was slow, or the process frozen, for more than two refreshes."""
    leave(tmp_path, age_s=3600)
    touch = Path.touch

    def slowly(path: Path) -> None:
        time.sleep(0.3)
        touch(path)

    monkeypatch.setattr(Path, "touch", slowly)
    between_looks(monkeypatch, lambda: os.utime(tmp_path / "lease.json"))
    with pytest.raises(InUse, match=r"in use by another run: pid .* on node12"):
        open_lease(tmp_path, refresh_s=0.1)


@pytest.mark.parametrize("behind_s", [40, 7200])
def test_a_live_lease_that_looks_stale_because_clocks_differ_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind_s: float
) -> None:
    """As where the client's clock stamps files, and the other host's is behind by more than stale_s."""
    leave(tmp_path, age_s=behind_s)
    between_looks(monkeypatch, lambda: os.utime(tmp_path / "lease.json", (time.time() - behind_s,) * 2))
    with pytest.raises(InUse, match=r"in use by another run: pid .* on node12"):
        open_lease(tmp_path)
    assert told(tmp_path)["host"] == "node12"


def test_a_last_sign_in_the_future_is_watched_for_no_longer(tmp_path: Path, said: list[str]) -> None:
    """As where the clock ran ahead when the other run died."""
    leave(tmp_path, age_s=-3600)
    held = open_lease(tmp_path, stale_s=1, refresh_s=0.1)
    assert "Waiting up to 1 s" in said[0]
    assert told(tmp_path)["host"] == os.uname().nodename
    held.close()


def test_a_lease_of_another_host_that_shows_life_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path, age_s=1)
    between_looks(monkeypatch, lambda: os.utime(tmp_path / "lease.json"))
    with pytest.raises(InUse, match=r"in use by another run: pid .* on node12"):
        open_lease(tmp_path, stale_s=300)


@pytest.mark.parametrize("hours_ahead", [-2, 2])
def test_the_clock_of_this_host_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours_ahead: int
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * hours_ahead)
    monkeypatch.setattr(time, "time_ns", lambda: int((now() + 3600 * hours_ahead) * 1e9))
    held = open_lease(tmp_path, refresh_s=0.05)
    assert is_refreshed(tmp_path / "lease.json")
    assert abs((tmp_path / "lease.json").stat().st_mtime - now()) < 60
    with pytest.raises(InUse, match="in use"):
        open_lease(tmp_path)
    held.close()


def test_a_live_lease_of_this_host_is_respected_after_its_clock_was_set_forward(tmp_path: Path) -> None:
    held = open_lease(tmp_path, refresh_s=0.5)
    os.utime(tmp_path / "lease.json", (time.time() - 3600,) * 2)
    with pytest.raises(InUse, match="in use"):
        open_lease(tmp_path, refresh_s=60)  # watches for two minutes, however late the holder's thread is
    assert held.is_ours()
    held.close()


def test_a_lease_that_says_nothing_is_waited_for_and_taken(tmp_path: Path, said: list[str]) -> None:
    """A process that died just after it had made the file."""
    (tmp_path / "lease.json").touch()
    open_lease(tmp_path, stale_s=0.5, refresh_s=0.1).close()
    assert "held by an unnamed process" in said[0]


def test_a_lease_that_another_has_just_replaced_is_not_replaced_again(tmp_path: Path) -> None:
    """The second of two takers, which had looked before the first one took over."""
    leave(tmp_path, age_s=60)
    path = tmp_path / "lease.json"
    with lease._opened(path) as looked_at:
        refreshed_ns = path.stat().st_mtime_ns
        held = open_lease(tmp_path, refresh_s=0.1)
        assert not lease._replace(path, looked_at, refreshed_ns, tmp_path / "probe", describe_me("", tmp_path))
    assert held.is_ours()
    held.close()


def test_a_taker_that_is_stuck_does_not_hold_up_the_others_forever(tmp_path: Path) -> None:
    leave(tmp_path, age_s=60)
    with lease._opened(tmp_path / "lease.json") as stuck:
        fcntl.flock(stuck, fcntl.LOCK_EX)
        with pytest.raises(InUse, match="in use by another run"):
            open_lease(tmp_path, stale_s=0.2, refresh_s=0.1)


# Keeping it, losing it.


def test_a_held_lease_stays_fresh(tmp_path: Path) -> None:
    held = open_lease(tmp_path, refresh_s=0.05)
    assert is_refreshed(tmp_path / "lease.json")
    held.close()


def test_a_lost_lease_is_noticed_and_left_alone(tmp_path: Path) -> None:
    held = open_lease(tmp_path, refresh_s=0.05)
    assert is_refreshed(tmp_path / "lease.json")
    assert held.lost is None
    leave(tmp_path, age_s=1, token="theirs")
    sign = (tmp_path / "lease.json").stat().st_mtime_ns
    assert not held.is_ours()  # at once, when asked
    assert wait_for(lambda: held.lost is not None)
    assert "on node12, job 33" in str(held.lost)
    held.close()
    assert told(tmp_path)["token"] == "theirs"
    assert (tmp_path / "lease.json").stat().st_mtime_ns == sign


def test_a_process_that_wakes_sees_a_lost_lease_before_its_thread_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = open_lease(tmp_path, refresh_s=500)
    leave(tmp_path, token="theirs")
    assert held.lost is None  # it has just been refreshed, and is not read for each line
    now = lease._now() + 1001
    monkeypatch.setattr(lease, "_now", lambda: now)
    assert "on node12, job 33" in str(held.lost)
    held.close()


def test_a_run_that_wakes_while_it_closes_its_lease_knows_that_it_is_lost(tmp_path: Path) -> None:
    held = open_lease(tmp_path, refresh_s=500)
    leave(tmp_path, token="theirs")
    held.close()
    assert "on node12, job 33" in str(held.lost)
    assert told(tmp_path)["token"] == "theirs"


def test_the_holder_notices_by_itself(tmp_path: Path) -> None:
    held = open_lease(tmp_path, refresh_s=0.05)
    leave(tmp_path, token="theirs")
    assert wait_for(lambda: held.lost is not None)


# Freezes itself right after it first wrote, or refreshed, the lease: before the caller has noted that it did.
FROZEN = """
import os, signal, sys, threading, time
from pathlib import Path
from horovod_train.host import start_ticks
from horovod_train.output import lease

def freeze_after(owner, name, kind):
    call = getattr(owner, name)
    def call_and_freeze(path, *args):
        call(path, *args)
        if isinstance(path, kind):
            setattr(owner, name, call)
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    setattr(owner, name, call_and_freeze)

if sys.argv[2] == "written":
    freeze_after(lease, "_create", Path)
else:
    freeze_after(os, "utime", int)
held = lease.open_lease(Path(sys.argv[1]), refresh_s=0.1, stale_s=1)
while not held.lost:
    time.sleep(0.05)
print("lost to", held.lost)
"""


@pytest.mark.parametrize(
    ("when", "has_ended"),
    [
        ("written", True),
        ("refreshed", False),
        *(pytest.param(*more, marks=pytest.mark.long) for more in [("written", False), ("refreshed", True)]),
    ],
)
def test_a_run_that_was_frozen_learns_that_it_has_been_replaced(tmp_path: Path, has_ended: bool, when: str) -> None:
    frozen = subprocess.Popen([sys.executable, "-c", FROZEN, tmp_path, when], stdout=subprocess.PIPE, text=True)
    try:
        state = os.waitid(os.P_PID, frozen.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert state
        assert state.si_code == os.CLD_STOPPED
        assert wait_for(lambda: time.time() - (tmp_path / "lease.json").stat().st_mtime > 1.1)
        held = open_lease(tmp_path, refresh_s=0.1, stale_s=1)
        if has_ended:
            held.close()
        frozen.send_signal(signal.SIGCONT)
        stdout, _ = frozen.communicate(timeout=60)
    finally:
        frozen.kill()
    assert stdout.startswith("lost to one that has ended" if has_ended else f"lost to pid {os.getpid()} on ")
    if has_ended:
        assert not (tmp_path / "lease.json").exists()
    else:
        assert held.is_ours()
        held.close()


def test_a_lease_that_vanished_is_made_anew_and_a_vanished_folder_is_not_a_loss(
    tmp_path: Path, looks_again: Callable[[], bool]
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    held = open_lease(directory, refresh_s=0.05, stale_s=600)
    (directory / "lease.json").unlink()
    assert wait_for((directory / "lease.json").exists)
    directory.rename(tmp_path / "gone")  # in one step: the holder may write its lease again while the folder is emptied
    assert looks_again()
    assert held.is_ours()
    assert held.lost is None
    assert not directory.exists()
    directory.mkdir()
    assert wait_for((directory / "lease.json").exists)
    held.close()
    assert os.listdir(directory) == []


def test_a_lease_that_ends_while_it_is_made_anew_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = open_lease(tmp_path, refresh_s=0.05)
    create, is_making, may_make = lease._create, threading.Event(), threading.Event()

    def make_late(*given: Any) -> None:
        is_making.set()
        may_make.wait(300)
        create(*given)

    monkeypatch.setattr(lease, "_create", make_late)
    (tmp_path / "lease.json").unlink()
    assert is_making.wait(300)
    threading.Timer(0.5, may_make.set).start()  # later than the next refresh would be
    held.close()
    assert isinstance(held, FileLease)
    held._thread.join(300)
    assert os.listdir(tmp_path) == []


def test_a_file_system_that_hangs_holds_no_run_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease stays, and becomes stale: removed, it might be written again."""
    is_touching, may_touch, touch = threading.Event(), threading.Event(), os.utime

    def touch_late(*given: Any) -> None:
        is_touching.set()
        may_touch.wait()
        touch(*given)

    monkeypatch.setattr(lease, "CLOSE_WITHIN_S", 0.1)
    held = open_lease(tmp_path, refresh_s=0.01)
    monkeypatch.setattr(os, "utime", touch_late)
    assert is_touching.wait(300)
    held.close()
    assert os.listdir(tmp_path) == ["lease.json"]
    may_touch.set()


def fill(disk: Path) -> None:
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with (disk / "others").open("ab") as others:
        others.write(b"x" * free)


def test_a_full_or_read_only_disk_takes_no_lease_away(full_disk: Path, looks_again: Callable[[], bool]) -> None:
    held = open_lease(full_disk, refresh_s=0.05)
    fill(full_disk)
    assert is_refreshed(full_disk / "lease.json")  # needs no room
    remount: list[Any] = ["mount", "-o", "remount,ro", full_disk]
    assert wait_for(lambda: subprocess.run(remount, check=False).returncode == 0)  # not while the holder has it open
    assert looks_again()
    assert held.is_ours()
    subprocess.run(["mount", "-o", "remount,rw", full_disk], check=True)
    assert is_refreshed(full_disk / "lease.json")
    held.close()
    fill(full_disk)
    with pytest.raises(UserError, match=r"cannot write .*lease.json: No space left on device"):
        open_lease(full_disk)
    assert os.listdir(full_disk) == ["others"]


# Races.

ROUNDS = 10


class Meeting:
    """Where two that race for a lease wait for each other, once for each lease."""

    def __init__(self, barrier: Barrier) -> None:
        self._barrier, self.is_over = barrier, False

    def wait(self) -> None:
        if not self.is_over:
            self._barrier.wait(300)
            self.is_over = True


def remove_locks(barrier: Barrier, turn: int, first_has_it: Event) -> None:
    """Show what the lock is for: both judge the lease stale and continue, one after the other."""
    meeting = Meeting(barrier)

    @contextmanager
    def without_lock(path: Path, opened: int) -> Iterator[bool]:
        if not meeting.is_over:
            meeting.wait()
            assert turn == 0 or first_has_it.wait(300)
        yield True

    lease._locked = without_lock  # type: ignore[assignment]


def refuse_locks(barrier: Barrier) -> None:
    """As on a file system without locks, where both judge the lease stale, and look again once both have written."""
    judged, written = Meeting(barrier), Meeting(barrier)

    def no_locks(descriptor: int, operation: int) -> None:
        judged.wait()
        raise OSError(errno.ENOLCK, "No locks available")

    def sleep(seconds: float) -> None:
        if seconds == lease.SETTLE_S:
            written.wait()
        else:
            time.sleep(seconds)

    fcntl.flock = no_locks  # type: ignore[assignment]
    pytest.MonkeyPatch().setattr(lease, "time", SimpleNamespace(**vars(time) | {"sleep": sleep}))


def race(directories: list[Path], guard: str, barrier: Barrier, first_has_it: Event, won: Any) -> None:
    for number, directory in enumerate(directories):
        turn = barrier.wait(300)
        if guard == "none":
            remove_locks(barrier, turn, first_has_it)
        if guard == "settling":
            refuse_locks(barrier)
        held = None
        try:
            held = open_lease(directory, refresh_s=0.1)
            won.put((number, os.getpid()))
            first_has_it.set()
        except InUse:
            pass
        barrier.wait(300)
        if held is not None:
            held.close()


def winners(directories: list[Path], guard: str) -> list[int]:
    """How many of two processes got the lease of each directory, at the same moment."""
    barrier, first_has_it, won = SPAWN.Barrier(2), SPAWN.Event(), SPAWN.Queue()
    given = (directories, guard, barrier, first_has_it, won)
    racers = [SPAWN.Process(target=race, args=given, daemon=True) for _ in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(300)
    assert [racer.exitcode for racer in racers] == [0, 0]
    numbers = []
    while not won.empty():
        numbers.append(won.get()[0])
    return [numbers.count(number) for number in range(len(directories))]


def directories(parent: Path, count: int, *, stale: bool) -> list[Path]:
    made = [parent / str(number) for number in range(count)]
    for directory in made:
        directory.mkdir()
        if stale:
            leave(directory, age_s=60)
    return made


@pytest.mark.parametrize("stale", [False, True], ids=["free", "stale"])
def test_of_two_that_race_for_a_lease_one_wins(tmp_path: Path, stale: bool) -> None:
    made = directories(tmp_path, ROUNDS, stale=stale)
    assert winners(made, "lock") == [1] * ROUNDS
    assert [os.listdir(directory) for directory in made] == [[]] * ROUNDS


def test_where_files_cannot_be_locked_one_wins_as_well(tmp_path: Path) -> None:
    assert winners(directories(tmp_path, 1, stale=True), "settling") == [1]


def test_without_the_lock_two_would_win(tmp_path: Path) -> None:
    """The races above can be lost: two that judge a lease stale at the same time both replace it."""
    assert winners(directories(tmp_path, 1, stale=True), "none") == [2]


def test_a_lease_json_that_is_no_lease_stays(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    path.write_text('{"flat": "4 B", "rent": 950}')
    os.utime(path, (time.time() - 1000,) * 2)
    with pytest.raises(UserError, match=r"lease\.json is not a run's lease, and a run would replace it"):
        open_lease(tmp_path, stale_s=0.5, refresh_s=0.1)
    assert path.read_text() == '{"flat": "4 B", "rent": 950}'
    assert os.listdir(tmp_path) == ["lease.json"]
