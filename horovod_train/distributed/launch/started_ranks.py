"""The ranks of one start on this host: started, sent signals, waited for. Does not decide what follows.

Ranks are started by mpirun where MPI works, because it exchanges in shared memory; otherwise by this process itself,
and they meet as those of the convention `launch` do. Imports neither Horovod nor TensorFlow; see commands/launch.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

from horovod_train.distributed.launch.conventions import JOB, PORT, ROOT, SIZE
from horovod_train.distributed.launch.launcher import TOKEN, TOKEN_FILE
from horovod_train.distributed.launch.local import launch_command
from horovod_train.errors import START_AGAIN

Way = Literal["mpirun", "launch"]
"""launch: by this process itself."""

OTHERS_END_WITHIN_S = 30.0
"""How long ranks may take to notice that one has failed, and to end; then they are killed."""
POLL_S = 0.02
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ended:
    """How a start ended. codes: exit code of each rank that ended by itself, 128 + signal if it was killed."""

    codes: Mapping[int, int]
    """Under mpirun only that of mpirun, which is the first that was not 0."""
    first: int
    """The rank that ended first of those with a code that is not 0; 0 if there was none."""
    seconds: float
    failed_at: float
    """When it ended, by time.monotonic()."""


class StartedRanks:
    """Processes that have been started together."""

    def __init__(self, way: Way, ranks: int, program: Sequence[str]) -> None:
        self.way, self._began = way, time.monotonic()
        if way == "mpirun":
            self._processes = [_start([*launch_command("mpirun", ranks), *program], os.environ)]
        else:
            inherited = {name: value for name, value in os.environ.items() if name not in (PORT, TOKEN_FILE)}
            self._processes = [_start(program, inherited | place) for place in _places(ranks)]

    def send(self, number: int) -> None:
        """Pass a signal on to every rank that still runs. mpirun itself would answer some by killing its ranks."""
        for process in self._processes:
            if process.poll() is None:
                started = psutil.Process(process.pid).children() if self.way == "mpirun" else [process]
                for rank in started:
                    try:
                        rank.send_signal(number)
                    except psutil.NoSuchProcess:
                        continue

    def wait(self) -> Ended:
        """Return when all ranks have ended. Those that do not end after one has failed are killed."""
        codes: dict[int, int] = {}
        first, failed_at = 0, 0.0
        while len(codes) < len(self._processes):
            for rank, process in enumerate(self._processes):
                if rank not in codes and (code := process.poll()) is not None:
                    codes[rank] = 128 - code if code < 0 else code
                    if codes[rank] and not failed_at:
                        first, failed_at = rank, time.monotonic()
            is_failure = any(code not in (0, START_AGAIN) for code in codes.values())
            if is_failure and time.monotonic() - failed_at > OTHERS_END_WITHIN_S:
                self.kill()
                break
            time.sleep(POLL_S)
        return Ended(codes, first, time.monotonic() - self._began, failed_at)

    def kill(self) -> None:
        """Kill the ranks that still run, and wait for their ends."""
        for process in self._processes:
            if process.poll() is None:
                if self.way == "mpirun":
                    self.send(signal.SIGKILL)
                process.kill()
                process.wait()


def _places(ranks: int) -> list[dict[str, str]]:
    """Return the environment of each rank. The secret is new for each start, so that no earlier rank can join it."""
    together = {
        SIZE: str(ranks),
        ROOT: "localhost",
        JOB: secrets.token_hex(8),
        TOKEN: secrets.token_hex(16),
    }
    return [
        {**together, "HOROVOD_TRAIN_RANK": str(rank), "HOROVOD_TRAIN_LOCAL_RANK": str(rank)} for rank in range(ranks)
    ]


_libc = ctypes.CDLL(None, use_errno=True)


def _end_with_parent() -> None:
    """Ask Linux to send this process SIGTERM when the one that started it ends, even if that is killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C would reach the ranks from the terminal too, and a second one ends them unsaved.
    return subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
