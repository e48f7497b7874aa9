"""The ranks of one start: started, sent signals, waited for, and judged by their exit codes.

On one host they are started by mpirun where MPI works, because it exchanges in shared memory; otherwise by this process
itself, and they meet as those of the convention `launch` do. On several hosts an agent on each starts them in this way;
see hosts. Does not start them again; see commands/launch. Imports neither Horovod nor TensorFlow.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from horovod_train.distributed.launch.conventions import JOB, LOCAL_RANK, PORT, RANK, ROOT, SIZE, Meeting
from horovod_train.distributed.launch.launcher import TOKEN, TOKEN_FILE
from horovod_train.distributed.launch.local import launch_command
from horovod_train.errors import SAVED, START_AGAIN, STOPPED, InUse, RanksDisagree, UserError
from horovod_train.output.console import to_stderr
from horovod_train.output.files import STOP_FILE

Kind = Literal["rank", "mpirun", "host"]
"""What a process of a start is: a rank, the mpirun of all ranks, or the agent of a host's ranks."""

OTHERS_END_WITHIN_S = 30.0
"""How long ranks may take to notice that one has failed, and to end; then they are killed."""
CANNOT_RUN = {errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.E2BIG}
"""Why a program cannot be started here. Other errors may pass: too many processes, a file server that is away."""
SSH_LOST = 255
"""What ssh ends with if it cannot reach the host, or reaches it no longer."""
NOTHING_STARTED = 254
"""What the agent of a host ends with if the program, or this folder, is not there."""
OTHERS_END_AFTER_LOSS_S = 5.0
"""The same where a host is lost: ranks elsewhere wait for it in vain, and can save nothing more."""
SAVE_WITHIN_S = 300.0
"""How long ranks may take to save and end after the launch, or the shell that started them, is gone; then they are
killed. A large checkpoint to a busy file server takes minutes."""
AGENT_ENDS_WITHIN_S = 5.0
ENDS_AFTER_KILL_WITHIN_S = 30.0
"""The kernel takes seconds to free the memory of a large process; after this it may never come to it."""
POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
_SHELLS = {"sh", "bash", "dash", "ash", "busybox", "ksh", "mksh", "zsh", "fish", "csh", "tcsh"}


@dataclass(frozen=True)
class Ended:
    """How a start ended. codes: exit code of each process that ended by itself, 128 + signal if it was killed.

    Those that were killed because they ran on after others had saved are there too. That of mpirun is the first of its
    ranks that was not 0; that of a host's agent is what `judge` says of its ranks.
    """

    codes: Mapping[str, int]
    """By the name of the process: that of a rank is its number, that of an agent its host."""
    first: str
    """The process that ended first of those that failed; "" if none has."""
    seconds: float


class Verdict(NamedTuple):
    """What follows the end of a start. code: the exit code if nothing is started again."""

    follows: Literal["done", "stop", "again"]
    code: int
    why: str


def judge(ended: Ended, kind: Kind, *, asked_by: int, is_first: bool = True, is_trainer: bool = False) -> Verdict:
    """Decide by the exit codes of the processes. asked_by: the signal that asked for the end; 0 if none has.

    is_first: whether no ranks were started before, of which one on a host that is lost may still run.
    is_trainer: whether the ranks are of the trainer, which a signal ends only while it loads.
    """
    codes = set(ended.codes.values())
    if kind == "host" and NOTHING_STARTED in codes and is_first:  # later a file server may be away
        codes.add(UserError.exit_code)
    if codes == {0}:
        return Verdict("done", 0, "done")
    for code, why in (
        (RanksDisagree.exit_code, "the ranks hold different weights; starting again would not change that"),
        (UserError.exit_code, "the config, the arguments or the data are bad; the message above says which"),
    ):
        if code in codes:
            return Verdict("stop", code, why)
    first = ended.codes.get(ended.first, 1)
    how = _how_it_ended(kind, ended.first, first)
    if STOPPED in codes and codes <= SAVED:
        why = f"exit code {STOPPED}: the run has saved; remove the file {STOP_FILE} before it is started again"
        return Verdict("stop", STOPPED, why)
    if asked_by:
        asked = f"asked by {signal_name(asked_by)}"
        if codes <= SAVED:
            return Verdict("stop", START_AGAIN, f"{asked}; the ranks have saved")
        was_loading = is_trainer and kind == "rank" and codes <= {START_AGAIN, STOPPED, 128 + asked_by}
        ending = " while its program was loading, so nothing had to be saved" if was_loading else ""
        return Verdict("stop", first, f"{asked}; {how}{ending or '; not all ranks could save'}")
    if codes <= SAVED:
        return Verdict("stop", START_AGAIN, "the run was asked to stop, and has saved what it had trained")
    if InUse.exit_code in codes:
        why = f"exit code {InUse.exit_code}: another run has the run directory"
        return Verdict("stop" if is_first else "again", InUse.exit_code, why)
    return Verdict("again", 1 if kind == "host" and first == NOTHING_STARTED else first, how)


def _how_it_ended(kind: Kind, name: str, code: int) -> str:
    if kind == "host" and code == SSH_LOST:
        return f"{name} is lost: ssh does not reach it any more"
    if kind == "host" and code == NOTHING_STARTED:
        return f"{name} has not the program or its folder now"
    who = {"rank": f"rank {name}", "mpirun": "mpirun", "host": f"a rank on {name}"}[kind]
    if code <= 128:
        return f"{who} ended with exit code {code}"
    return f"{'a rank' if kind == 'mpirun' else who} was killed by {signal_name(code - 128)}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Started:
    """One process of a start, with `ranks` ranks. A rank may be a shell script: what it starts ends with it.

    It is in the process group of the script; what moves to another group does not end.
    """

    def __init__(self, kind: Kind, name: str, process: subprocess.Popen[bytes], ranks: int = 1) -> None:
        self.kind, self.name, self.process, self._ranks = kind, name, process, ranks
        self._asked: set[psutil.Process] = set()
        """The processes of a rank that have been asked to end. A second SIGINT would end them unsaved."""
        self._number = 0
        """The signal for the ranks of mpirun; 0 if there is none."""
        self._told: set[psutil.Process] = set()
        """The ranks of mpirun that have got it."""
        self._kill_at: float | None = None
        self._is_over = False
        """Whether nothing is left of a rank: its number may then belong to other processes."""

    def send(self, number: int) -> None:
        """Pass a signal on to every rank that still runs. mpirun itself would answer some by killing its ranks."""
        if self.kind == "rank" and number == signal.SIGKILL:
            self._kill_group()
        elif self.process.poll() is not None:
            return
        elif self.kind == "rank":
            self._send_to_each(_with_children_of_shells(self.process.pid), number)
        elif self.kind == "host":
            self.tell_agent(b"%d" % number)
        else:
            self._number, self._told = number, set()
            self.send_late()

    def tell_agent(self, line: bytes) -> None:
        """Give the agent of a host its order, or the number of a signal."""
        assert self.process.stdin is not None
        with suppress(OSError):  # its host is lost, and ssh says so
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()

    def send_late(self) -> None:
        """Send the newest signal to those ranks that mpirun had not started when it came."""
        if not self._number or len(self._told) == self._ranks or self.process.poll() is not None:
            return
        with suppress(psutil.NoSuchProcess):
            mpirun = psutil.Process(self.process.pid)
            for rank in mpirun.children():
                if rank in self._told:
                    continue
                if self._number == signal.SIGKILL:  # also to a copy of mpirun: it would run on as a rank
                    self._told.add(rank)
                    self._send_to_each([rank], signal.SIGKILL)
                    _kill_group(rank.pid)
                elif _has_begun(rank, mpirun):
                    self._told.add(rank)
                    self._send_to_each(_that_may_end(rank.pid, self._number), self._number)

    @property
    def was_asked(self) -> bool:
        """Whether a rank has got a signal."""
        return bool(self._asked)

    def end_rest(self) -> bool:
        """Return whether something is left of a rank that has ended. Asks it once to end; kills it after a while."""
        if self.kind != "rank" or self._is_over or self.process.poll() is None:
            return False
        left = _members(self.process.pid)
        if not left:
            self._is_over = True
            return False
        if self._kill_at is None:
            self._kill_at = time.monotonic() + (SAVE_WITHIN_S if self._asked else OTHERS_END_WITHIN_S)
        self._send_to_each([process for process in left if process not in self._asked], signal.SIGTERM)
        if time.monotonic() > self._kill_at:
            self._kill_group()
        return True

    def kill(self) -> None:
        """Kill the ranks that still run. See wait_for_end."""
        self.send(signal.SIGKILL)
        if self.kind == "host":
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(AGENT_ENDS_WITHIN_S)
        if self.kind != "rank":
            self.process.kill()

    def wait_for_end(self, deadline: float) -> None:
        """Wait for the process, which was killed, but no longer than to `deadline`, on time.monotonic's clock."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            to_stderr(
                f"launch: {self.name} (pid {self.process.pid}) was killed and does not end: it waits in the kernel, as "
                "for a device or a file server"
            )

    def _send_to_each(self, processes: Sequence[psutil.Process], number: int) -> None:
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(number)
        self._asked.update(processes)

    def _kill_group(self) -> None:
        if not self._is_over:
            _kill_group(self.process.pid)


def _with_children_of_shells(leader: int) -> list[psutil.Process]:
    """Return a process; and if it is a shell, what it has started, because a shell passes no signal on.

    Not what other programs have started: a rank needs the processes that load its data until it has saved.
    """

    def walk(process: psutil.Process) -> Iterator[psutil.Process]:
        yield process
        with suppress(psutil.Error):
            if _is_shell(process):
                for child in process.children():
                    if os.getpgid(child.pid) == leader:
                        yield from walk(child)

    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        return list(walk(psutil.Process(leader)))
    return []


def _that_may_end(leader: int, number: int) -> list[psutil.Process]:
    """Return the processes of a rank of mpirun that a signal is for.

    mpirun ends all ranks, unsaved, when a shell is killed by it: those that do not catch it are left out.
    """
    processes = _with_children_of_shells(leader)
    return [each for each in processes if not _is_shell(each) or _catches(each, number)] or processes


def _is_shell(process: psutil.Process) -> bool:
    try:
        return Path(process.exe()).name in _SHELLS
    except psutil.Error:
        return False


def _catches(process: psutil.Process, number: int) -> bool:
    try:
        caught = Path(f"/proc/{process.pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    except (OSError, IndexError):  # it has ended
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


def _has_begun(rank: psutil.Process, mpirun: psutil.Process) -> bool:
    """Return whether a child of mpirun runs its program: before that it is a copy of mpirun, and drops signals."""
    try:
        return rank.exe() != mpirun.exe()
    except psutil.Error:
        return False


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> list[psutil.Process]:
    """Return the processes of a group that run. Those that have ended may stay there: process 1 must collect them."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # the latter of what runs as another user, such as by sudo
        return []
    members = []
    for number in psutil.pids():
        with suppress(psutil.Error, OSError):
            if os.getpgid(number) == group and (process := psutil.Process(number)).status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


class StartedRanks:
    """Processes that have been started together."""

    def __init__(self, processes: Sequence[Started]) -> None:
        self.kind = processes[0].kind
        self._processes, self._began = processes, time.monotonic()
        self.asked_by = 0
        """The first signal that was sent to them."""

    def send(self, number: int) -> None:
        self.asked_by = self.asked_by or number
        for started in self._processes:
            started.send(number)

    def wait(self, *, end_together: bool = False) -> Ended:
        """Return when all processes have ended, and what ranks have started too.

        Those that do not end after one has failed, or has saved, are killed. end_together: also after one that is done.
        """
        codes: dict[str, int] = {}
        first, saved, kill_at = "", "", math.inf
        while sum(started.end_rest() for started in self._processes) or len(codes) < len(self._processes):
            for started in self._processes:
                started.send_late()
                if started.name not in codes and (code := started.process.poll()) is not None:
                    codes[started.name] = 128 - code if code < 0 else code
                    if codes[started.name] == 0 and not end_together:
                        continue
                    if codes[started.name] in SAVED:  # to a program of the user it may mean something else
                        saved = saved or started.name
                        kill_at = min(kill_at, time.monotonic() + SAVE_WITHIN_S)
                        continue
                    first = first or started.name
                    is_lost = started.kind == "host" and codes[started.name] == SSH_LOST
                    wait_s = OTHERS_END_AFTER_LOSS_S if is_lost else OTHERS_END_WITHIN_S
                    if started.was_asked and started.end_rest():  # a shell; the rank that it has started saves
                        wait_s = SAVE_WITHIN_S
                    kill_at = min(kill_at, time.monotonic() + wait_s)
            if time.monotonic() > kill_at:
                if not first:
                    first = self._lose_rest(codes, saved)
                self.kill()
                break
            time.sleep(POLL_S)
        return Ended(codes, first, time.monotonic() - self._began)

    def _lose_rest(self, codes: dict[str, int], saved: str) -> str:
        """Count those that have not ended as killed, and say so; return the first of them. saved: the first to end."""
        late = [started.name for started in self._processes if started.name not in codes]
        who = "rank " if self.kind == "rank" else ""
        for name in late:
            to_stderr(
                f"launch: {who}{name} still runs {SAVE_WITHIN_S:.0f} s after {who}{saved} ended with exit code "
                f"{codes[saved]}, and is killed"
            )
        codes.update(dict.fromkeys(late, 128 + signal.SIGKILL))
        return next(iter(late), "")

    def kill(self) -> None:
        """Kill the ranks that still run, and wait for their ends."""
        for started in self._processes:
            started.kill()
        deadline = time.monotonic() + ENDS_AFTER_KILL_WITHIN_S
        for started in self._processes:
            started.wait_for_end(deadline)


def start_by_mpirun(ranks: int, program: Sequence[str]) -> StartedRanks:
    # mpirun passes SIGUSR1 on to its ranks; after SIGTERM it would kill them a second later.
    mpirun = start([*launch_command("mpirun", ranks), *program], os.environ, at_parents_end=signal.SIGUSR1)
    return StartedRanks([Started("mpirun", "mpirun", mpirun, ranks)])


def new_meeting(ranks: int, root: str) -> dict[str, str]:
    """Return what all ranks of a start have in their environment. root: the host of rank 0.

    Name and secret are new, so that no rank of an earlier start can join it.
    """
    return {SIZE: str(ranks), ROOT: root, JOB: secrets.token_hex(8), TOKEN: secrets.token_hex(16)}


def meeting_of_hosts(hosts: Meeting, ranks: int) -> dict[str, str]:
    """Return the same where each host has a rank of `hosts`, whose launcher gave it a secret, if it has one."""
    secret = {name: os.environ[name] for name in (TOKEN, TOKEN_FILE) if name in os.environ}
    return {**secret, SIZE: str(ranks), ROOT: hosts.root, JOB: hosts.name, PORT: str(hosts.port or "")}


def start_here(meeting: Mapping[str, str], first: int, ranks: int, program: Sequence[str]) -> StartedRanks:
    """Start `ranks` ranks from `first` on, on this host. meeting: see new_meeting. Raises OSError."""
    given = {name: value for name, value in os.environ.items() if name not in (PORT, TOKEN_FILE)}
    started: list[Started] = []
    try:
        for local_rank in range(ranks):
            place = {RANK: str(first + local_rank), LOCAL_RANK: str(local_rank)}
            started.append(Started("rank", place[RANK], start(program, {**given, **meeting, **place})))
    except OSError:
        if started:
            StartedRanks(started).kill()
        raise
    return StartedRanks(started)


_libc = ctypes.CDLL(None, use_errno=True)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    is_agent: bool = False,
    at_parents_end: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start a process that gets a signal when this one ends, even if that is killed. An agent sees its input end."""

    def end_with_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, at_parents_end)

    # A session of its own: Ctrl-C would reach the ranks from the terminal too, and a second one ends them unsaved.
    return subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.PIPE if is_agent else subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=None if is_agent else end_with_parent,  # an agent sees that its input ends
    )
