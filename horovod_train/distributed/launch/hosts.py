"""Ranks on several hosts: which hosts there are, which of them answer, and their ranks, started over ssh.

`ssh HOST` starts an agent on each host, `python -m` this module, and gives it an order: one line of JSON, and then the
number of a signal on each line. ssh returns the exit code of the agent, which is that of its ranks, and 255 if the host
is lost. horovodrun would end with 1 for every reason, and pass no signal on. Secrets travel in the order, not on a
command line, which other users can read. Imports neither Horovod nor TensorFlow.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from horovod_train.distributed.launch.conventions import is_loopback
from horovod_train.distributed.launch.launcher import STOP_SIGNALS
from horovod_train.distributed.launch.local import named_gpus
from horovod_train.distributed.launch.started_ranks import (
    CANNOT_RUN,
    NOTHING_STARTED,
    SAVE_WITHIN_S,
    SSH_LOST,
    Started,
    StartedRanks,
    judge,
    new_meeting,
    start,
    start_here,
)
from horovod_train.errors import UserError
from horovod_train.host import answer_of
from horovod_train.output.console import to_stderr

SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"),
    # A host that is switched off says nothing. The ranks elsewhere notice it as fast, by their heartbeats.
    *("-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"),
)
END_RANKS = signal.SIGUSR2
"""For an agent: its host must end, as a pod must when its node is drained."""
ANSWER_WITHIN_S = 20.0
DISCOVER_WITHIN_S = 60.0
_OF_THIS_HOST = re.compile(r"HOSTNAME|SSH_.*|DISPLAY|XDG_.*|DBUS_.*|PWD|OLDPWD|SHLVL|_|BASH_FUNC_.*|LS_COLORS|TERM")
"""Variables that describe this host or this terminal. All others reach the ranks of every host."""
_GPUS_OF_THIS_HOST = re.compile(r"(CUDA|NVIDIA|HIP|ROCR)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL")
"""Variables that name GPUs of this host. They reach other hosts only where they hide all."""

_WORD = "[A-Za-z0-9_][A-Za-z0-9_.-]*"


class Host(NamedTuple):
    name: str
    """Its address; or USER@ADDRESS, for ssh."""
    slots: int
    """The number of ranks that it has room for."""


class Share(NamedTuple):
    """The ranks of one host at one start: `ranks` of them, from `first` on."""

    host: str
    first: int
    ranks: int


def parse_hosts(words: Sequence[str], where: str, slots: int = 1) -> list[Host]:
    """Parse HOST or HOST:SLOTS of each word, as Horovod writes it; HOST may be USER@ADDRESS.

    slots: where none are given. Raises UserError.
    """
    hosts: list[Host] = []
    for word in words:
        match = re.fullmatch(rf"((?:{_WORD}@)*{_WORD})(?::([1-9]\d{{0,4}}))?", word)
        if match is None:
            raise UserError(f"{where}: expected HOST:SLOTS, such as n1:4; received {word!r}.")
        hosts.append(Host(match[1], int(match[2] or slots)))
    names = [address_of(host.name) for host in hosts]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{where}: {twice[0]} is named twice; name it once, with all its slots.")
    if len(hosts) > 1 and (local := next(filter(is_loopback, names), None)):
        raise UserError(f"{where}: {local} is another host for each of them; give the name by which others reach it.")
    return hosts


def discover_hosts(script: str, slots: int) -> list[Host]:
    """Run a script that prints HOST or HOST:SLOTS on each line, as Horovod's elastic runs do. Raises UserError."""
    where = f"--host-discovery {script}"
    try:
        finished = answer_of([script], within_s=DISCOVER_WITHIN_S)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{where}: {reason}. It must be a program that prints HOST:SLOTS on each line.") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{where}: has not ended within {DISCOVER_WITHIN_S:.0f} s.") from error
    if finished.returncode:
        said = (finished.stderr.strip() or finished.stdout.strip()).rpartition("\n")[2]
        raise UserError(f"{where}: ended with exit code {finished.returncode}: {said}")
    return parse_hosts(finished.stdout.split(), where, slots)


def address_of(name: str) -> str:
    """Return where ranks find a host: its name without the user, which only ssh needs."""
    return name.rpartition("@")[2]


def is_this_host(name: str) -> bool:
    name = address_of(name)
    return is_loopback(name) or name in _own_names()


@functools.cache  # a name server that does not answer takes seconds
def _own_names() -> set[str]:
    name = socket.gethostname()
    return {name, name.partition(".")[0], socket.getfqdn()}


def ask_hosts(hosts: Sequence[Host]) -> dict[str, str]:
    """Return the hosts that do not answer over ssh, each with the reason that ssh gives."""

    def ask(host: Host) -> str:
        if is_this_host(host.name):
            return ""
        try:
            finished = answer_of([*SSH, host.name, "true"], within_s=ANSWER_WITHIN_S)
        except FileNotFoundError as error:
            raise UserError("there is no ssh on PATH, by which the ranks of other hosts are started.") from error
        except subprocess.TimeoutExpired:
            return f"no answer within {ANSWER_WITHIN_S:.0f} s"
        if finished.returncode == 0:
            return ""
        return finished.stderr.strip().rpartition("\n")[2].strip() or f"ssh ended with {finished.returncode}"

    with ThreadPoolExecutor(max(1, min(32, len(hosts)))) as threads:
        reasons = threads.map(ask, hosts)
        return {host.name: reason for host, reason in zip(hosts, reasons, strict=True) if reason}


def share_out(hosts: Sequence[Host], ranks: int) -> list[Share]:
    """Give each host its ranks, in the order of the hosts, until none are left or all slots are taken."""
    shares: list[Share] = []
    first = 0
    for host in hosts:
        if count := min(host.slots, ranks - first):
            shares.append(Share(host.name, first, count))
            first += count
    return shares


def start_on_hosts(shares: Sequence[Share], program: Sequence[str], *, end_together: bool) -> StartedRanks:
    """Start the ranks of all hosts. Every host must see this folder and this Python under the same paths.

    end_together: see StartedRanks.wait. Raises OSError.
    """
    root = "localhost" if len(shares) == 1 else address_of(shares[0].host)
    meeting = new_meeting(sum(share.ranks for share in shares), root)
    environment = {name: value for name, value in os.environ.items() if _is_for_all_hosts(name, value)}
    are_here = [is_this_host(share.host) for share in shares]
    if "CUDA_VISIBLE_DEVICES" in os.environ and "CUDA_VISIBLE_DEVICES" not in environment and not all(are_here):
        to_stderr("launch: CUDA_VISIBLE_DEVICES names GPUs of this host, so the ranks of others do not get it")
    started: list[Started] = []
    try:
        for share, is_here in zip(shares, are_here, strict=True):
            agent = start(_agent() if is_here else [*SSH, share.host, _agent_over_ssh()], os.environ, is_agent=True)
            order = {
                "meeting": meeting,
                "first": share.first,
                "ranks": share.ranks,
                "program": list(program),
                "end_together": end_together,
                "environment": {} if is_here else environment,
            }
            started.append(Started("host", share.host, agent))
            started[-1].tell_agent(json.dumps(order).encode())
    except OSError:
        if started:
            StartedRanks(started).kill()
        raise
    return StartedRanks(started)


def _is_for_all_hosts(name: str, value: str) -> bool:
    if _GPUS_OF_THIS_HOST.fullmatch(name):
        return not named_gpus(value)
    return not _OF_THIS_HOST.fullmatch(name)


def _agent() -> list[str]:
    return [sys.executable, "-m", __name__]


def _agent_over_ssh() -> str:
    """Return words for the shell of another host, which may have neither this folder nor this Python."""
    folder, python = shlex.quote(os.getcwd()), shlex.quote(sys.executable)
    path = shlex.quote(os.environ.get("PYTHONPATH", ""))
    says = f'echo "error: $(hostname) has not" {folder} "or not" {python}", as this host has." >&2'
    refuse = f"{{ {says}; exit {NOTHING_STARTED}; }}"
    words = f"cd {folder} && test -x {python} || {refuse}; PYTHONPATH={path} exec {shlex.join(_agent())}"
    return f"exec sh -c {shlex.quote(words)}"  # whatever shell the user has there, such as tcsh


def run_agent() -> int:
    """Start the ranks of this host as the launch of another host orders, and pass signals on to them.

    Reads the order from standard input. If the input ends, the launch or the connection to it is gone: the ranks are
    asked to save and to end, as at the signal END_RANKS. Returns their exit code.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _let_launch_decide)
    order = json.loads(sys.stdin.readline())
    os.environ.update(order["environment"])
    try:
        ranks = start_here(order["meeting"], order["first"], order["ranks"], order["program"])
    except OSError as error:
        to_stderr(f"error: {order['program'][0]}: {error.strerror} on {socket.gethostname()}.")
        return NOTHING_STARTED if error.errno in CANNOT_RUN else 1

    def end_ranks(_number: int, _frame: object) -> None:
        if not ranks.asked_by:  # once: a second one might end a script unsaved
            ranks.send(signal.SIGTERM)

    signal.signal(END_RANKS, end_ranks)
    threading.Thread(target=_pass_on, args=(ranks,), daemon=True).start()
    code = judge(ranks.wait(end_together=order["end_together"]), ranks.kind, asked_by=ranks.asked_by).code
    return 1 if code in (SSH_LOST, NOTHING_STARTED) else code  # which mean something else


def _let_launch_decide(number: int, _: object) -> None:
    """Take a signal of the terminal or of sshd. If it were ignored, the ranks would inherit that."""


def _pass_on(ranks: StartedRanks) -> None:
    for line in sys.stdin:
        ranks.send(int(line))
    ranks.send(signal.SIGTERM)
    time.sleep(SAVE_WITHIN_S)
    ranks.send(signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run_agent())
