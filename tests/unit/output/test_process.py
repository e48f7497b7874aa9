"""A process is told apart from a later one with its pid; one that cannot be seen counts as running."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest

from horovod_train.output.lease import has_run_since, is_running, start_ticks


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
from horovod_train.output.lease import is_running
print(psutil.pid_exists(1), is_running(1, "0"))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs a /proc of its own")
def test_another_users_process_that_proc_hides_counts_as_running() -> None:
    """psutil says that it is gone, and its lease would be taken."""
    as_other = 'mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"'
    command = ["unshare", "-m", "sh", "-c", as_other, "-", sys.executable, "-c", HIDDEN]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert finished.stdout.split() == ["False", "True"]


NEVER_FREED = """
import atexit, os
from horovod_train import main

class Held:
    def __del__(self):
        print("is freed", flush=True)
        os.read(os.pipe()[0], 1)

def train():
    atexit.register(print, "Horovod's end", flush=True)
    return {exit_code}

held = Held()
main.main = train
main.entry()
"""


def test_a_failed_program_does_not_wait_for_what_python_frees_at_its_end() -> None:
    """A failed run ended a minute late, or with the exit code of an alarm, waiting for an iterator of tf.data."""
    code = NEVER_FREED.replace("{exit_code}", "2")
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert (failed.returncode, failed.stdout) == (2, "Horovod's end\n")
    code = NEVER_FREED.replace("{exit_code}", "0")  # the negative: nothing else ends it
    done = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    assert [done.stdout.readline(), done.stdout.readline()] == ["Horovod's end\n", "is freed\n"]
    done.kill()
    done.wait()
    done.stdout.close()
