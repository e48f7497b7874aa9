"""The command `launch`: start ranks here or on several hosts, and again from the newest checkpoint when one is lost.

horovod-train launch -np 4 --min-np 2 --max-restarts 10 -- --config A.yaml train.epochs=5
horovod-train launch -H n1:4,n2:4 -- --config A.yaml
horovod-train launch -np 4 --run-dir runs/a -- python train.py

Decides by the exit codes of the ranks and by the newest checkpoint. How ranks are started and watched: see
distributed/launch/started_ranks and hosts. Started once on each host by something else (Kubernetes' Indexed Job,
TF_CONFIG, and whatever names rank, size and a meeting place), it starts the ranks of that host alone, and those of all
hosts meet.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from horovod_train.checkpoint.layout import CHECKPOINTS, steps_in
from horovod_train.commands.cli import EXAMPLE, Parser, add_config_arguments, at_least_0, count, is_run_dir, load_config
from horovod_train.config.settings import WatchConfig
from horovod_train.distributed.launch import hosts, launcher
from horovod_train.distributed.launch.conventions import Meeting
from horovod_train.distributed.launch.hosts import Host
from horovod_train.distributed.launch.launcher import STOP_SIGNALS
from horovod_train.distributed.launch.local import best_way, launch_command, list_gpus
from horovod_train.distributed.launch.started_ranks import (
    CANNOT_RUN,
    NOTHING_STARTED,
    SAVE_WITHIN_S,
    Ended,
    StartedRanks,
    Verdict,
    judge,
    meeting_of_hosts,
    new_meeting,
    signal_name,
    start_by_mpirun,
    start_here,
)
from horovod_train.errors import SAVED, START_AGAIN, InUse, UserError
from horovod_train.output.console import to_stderr, to_stdout
from horovod_train.output.files import Lines, is_gone, read_json
from horovod_train.output.rank_log import launch_log, now
from horovod_train.shown_text import printable, without_secrets

MAX_PAUSE_S = 60.0
"""The longest pause before a start. Starts that made progress are followed by the next one without a pause."""
LOOK_EVERY_S = 10.0
"""Between looks for a new checkpoint while ranks run."""
LOG_EVERY_S = 0.5
"""Between tries to write the log, until there is a folder for it."""
CUT_OFF_S = WatchConfig().first_step_after_s
"""How long a rank that is cut off with its host may run before the watch ends it, where no config says so."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-np", "--np", type=count, metavar="N", help="the number of ranks; default: all slots of -H")
    parser.add_argument(
        "--min-np",
        type=count,
        metavar="N",
        help="start again with as few as this, if hosts are lost or starts with more ranks fail; default: as -np",
    )
    parser.add_argument("--max-restarts", type=at_least_0, default=10, metavar="N", help="default %(default)s")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS,…", help="start the ranks there, over ssh; default: here")
    where.add_argument(
        "--host-discovery",
        metavar="SCRIPT",
        help="a program that prints HOST:SLOTS on each line; asked before each start, so that hosts may join",
    )
    parser.add_argument(
        "--slots",
        type=count,
        metavar="N",
        help="ranks of a host whose number is not said; default: 1. Where each host starts launch: default its GPUs, "
        "of a config with device.per_rank so many for each rank",
    )
    parser.add_argument(
        "--over",
        choices=("auto", "mpi", "gloo"),
        default="auto",
        help="how ranks on CPUs of this host exchange; auto: MPI if it works here, else gloo",
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="for a script: where it saves checkpoints/step-N, by which progress is seen; the trainer's is known",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the command that would be started, and end")
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        type=str,
        metavar="-- ARGUMENTS",
        help="after `--`: the arguments of the training, as after `horovod-train`; or a program with its arguments",
    )


def run(arguments: argparse.Namespace) -> int:
    started_by = launcher.detect()
    over_ssh = arguments.hosts is not None or arguments.host_discovery is not None
    if started_by.launcher != "none" or not over_ssh:  # else it need not be started as the scheduler plans
        started_by.check(may_leave_hosts=arguments.np is not None)
    program = _program(arguments)
    # A SLURM step of one task is a shell in an allocation.
    meeting = None if started_by.step is None or started_by.step.is_slurm_step else started_by.step
    if meeting is not None and meeting.is_one_a_host and meeting.launcher != "launch":
        plan = _plan_of_member(arguments, meeting, program)
    elif started_by.size > 1 or meeting is not None:
        raise UserError(
            f"launch: {started_by.launcher} has started {started_by.size} of it, and each would start ranks. Start the "
            "training without launch, or one launch without a launcher."
        )
    elif over_ssh:
        plan = _plan_of_hosts(arguments, program)
    else:
        plan = _plan_of_this_host(arguments)
    min_np = arguments.min_np or plan.ranks
    if min_np > plan.ranks:
        raise UserError(f"launch: --min-np must be at most -np, {plan.ranks}; received {min_np}.")
    if arguments.dry_run:
        to_stdout(shlex.join([*plan.shown, *program.first]))
        return 0
    to_stderr(f"launch: {plan.how}")
    return Supervisor(program, plan, plan.ranks, min_np, arguments.max_restarts).run()


class NotEnough(Exception):
    """Fewer ranks than wanted have room on the hosts that answer."""


@dataclass(frozen=True)
class Plan:
    """How ranks are started."""

    ranks: int
    how: str
    """For the user."""
    start: Callable[[Sequence[str], int, int], StartedRanks]
    """Start a program on at most so many ranks, and at least so many. Raises NotEnough, OSError."""
    shown: Sequence[str] = ()
    """The words before the program, of a command that would do the same."""
    may_wait: bool = False
    """Whether to wait for hosts already at the first start."""
    is_here: bool = False
    """Whether all ranks are on this host."""
    where: str = ""
    """Added to what is said of each start, for `explain`."""
    keeps_log: bool = True
    """False for one of several launches that start ranks of one run: only the first of them has its log."""


def _plan_of_this_host(arguments: argparse.Namespace) -> Plan:
    if arguments.np is None:
        raise UserError("launch: -np N is required: the number of ranks; or -H HOST:SLOTS,… for several hosts.")
    if arguments.slots is not None:
        raise UserError("launch: --slots is for ranks on several hosts; -np says how many there are on this one.")
    is_mpi = arguments.over == "mpi"
    if arguments.over != "auto":
        why = "--over mpi" if is_mpi else "gloo, because of --over gloo"
    elif arguments.np == 1:
        why = "a single one exchanges nothing"
    else:
        way, why = best_way()
        is_mpi = way == "mpirun"
    if is_mpi:
        how, shown = f"ranks are started by mpirun: {why}", launch_command("mpirun", arguments.np)
        return Plan(arguments.np, how, lambda words, most, _: start_by_mpirun(most, words), shown, is_here=True)
    how = f"ranks are started by launch itself: {why}"

    def begin(words: Sequence[str], most: int, _least: int) -> StartedRanks:
        return start_here(new_meeting(most, "localhost"), 0, most, words)

    return Plan(arguments.np, how, begin, is_here=True)


def _plan_of_member(arguments: argparse.Namespace, meeting: Meeting, program: Program) -> Plan:
    """Return the plan where something else has started one launch on each host, which starts that host's ranks."""
    if arguments.hosts is not None or arguments.host_discovery is not None or arguments.over == "mpi":
        raise UserError(
            f"launch: {meeting.launcher} has started {meeting.size} of it, and each starts the ranks of its own host, "
            "which meet over gloo: leave out -H, --host-discovery and --over mpi."
        )
    slots = arguments.slots or len(list_gpus()) // program.gpus_per_rank or 1
    ranks = slots * meeting.size
    if (arguments.np or ranks) != ranks or (arguments.min_np or ranks) != ranks:
        raise UserError(
            f"launch: {meeting.launcher} has started {meeting.size} of it, each for {slots} rank(s) of its host: "
            f"there are always {ranks}. --slots says how many a host has. Leave out -np and --min-np."
        )
    together = meeting_of_hosts(meeting, ranks)

    def begin(words: Sequence[str], _most: int, _least: int) -> StartedRanks:
        return start_here(together, meeting.rank * slots, slots, words)

    how = f"{meeting.launcher} has started {meeting.size} of it; {slots} of {ranks} ranks are here"
    where = f", {slots} on each of {meeting.size} hosts of {meeting.launcher}"
    return Plan(ranks, how, begin, where=where, keeps_log=meeting.rank == 0)


def _plan_of_hosts(arguments: argparse.Namespace, program: Program) -> Plan:
    if arguments.over == "mpi":
        raise UserError("launch: ranks on several hosts meet over gloo or NCCL; leave out --over mpi, or use mpirun.")
    slots = arguments.slots or 1

    def find() -> list[Host]:
        if arguments.host_discovery is not None:
            return hosts.discover_hosts(arguments.host_discovery, slots)
        return hosts.parse_hosts([word for word in arguments.hosts.split(",") if word], "-H", slots)

    found = find()
    if arguments.hosts is not None and not found:
        raise UserError("launch: -H: expected HOST:SLOTS, such as n1:4; received nothing.")
    ranks = arguments.np or sum(host.slots for host in found)
    if not ranks:
        raise UserError("launch: --host-discovery names no host yet; say by -np how many ranks are wanted.")
    if arguments.hosts is not None and sum(host.slots for host in found) < ranks:
        raise UserError(f"launch: -H names {sum(host.slots for host in found)} slots; -np wants {ranks}.")

    def begin(words: Sequence[str], most: int, least: int) -> StartedRanks:
        try:
            there = find()
        except UserError as error:  # it could be asked when launch began
            raise NotEnough(str(error).rstrip(".")) from error
        silent = hosts.ask_hosts(there)
        for name, reason in silent.items():
            to_stderr(f"launch: {name} is left out, because it does not answer: {reason}")
        shares = hosts.share_out([host for host in there if host.name not in silent], most)
        if (room := sum(share.ranks for share in shares)) < least:
            raise NotEnough(f"the hosts that answer have room for {room} rank(s), and at least {least} must start")
        if room < most:
            to_stderr(f"launch: {room} rank(s) in place of {most}, which is what the hosts that answer have room for")
        return hosts.start_on_hosts(shares, words, end_together=program.is_trainer)

    named = ", ".join(f"{host.name}:{host.slots}" for host in found)
    may_join = arguments.host_discovery is not None
    return Plan(ranks, f"ranks are started over ssh on {named or 'hosts to come'}", begin, may_wait=may_join)


class Program(NamedTuple):
    """What each rank runs: until a run has begun, and once it has saved."""

    first: list[str]
    later: list[str]
    run_dir: Path | None
    """Where its checkpoints are; None if not known."""
    cut_off_s: float = CUT_OFF_S
    """How long one of its ranks may run after it is cut off from the others."""
    gpus_per_rank: int = 1
    """1 for a script, which is not asked."""
    is_trainer: bool = False
    """Whether its ranks end together, and never remove their run directory. Those of a script may run on alone."""


def _program(arguments: argparse.Namespace) -> Program:
    """Return what follows `--`. Raises UserError if it is the trainer's arguments and they are bad."""
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    is_setting = bool(words) and "=" in words[0] and shutil.which(words[0]) is None
    if words and not words[0].startswith("-") and not is_setting:
        if shutil.which(words[0]) is None:
            raise UserError(
                f"launch: {words[0]}: there is no such program. After -- stands a program, or the training's own "
                "arguments: --config A.yaml …"
            )
        return Program(words, words, Path(arguments.run_dir) if arguments.run_dir else None)
    if arguments.run_dir:
        raise UserError("launch: --run-dir is for a script; the trainer writes to its output_dir (--output-dir DIR).")
    parser = Parser(prog="horovod_train.main launch")
    add_config_arguments(parser, required=False)
    parser.add_argument("--resume")
    parsed = parser.parse_intermixed_args(words)
    parsed.config = parsed.config or [EXAMPLE]
    config, _ = load_config(parsed)
    command = [sys.executable, "-m", "horovod_train.main", *words]
    resume = parsed.resume or config.checkpoint.resume
    # What a run that was to begin anew has saved is its own, and is resumed.
    later = [*command, "--resume", "auto"] if resume == "never" else command
    run_dir = Path(config.output_dir) if config.output_dir else None
    cut_off_s = config.watch.first_step_after_s if config.watch.enabled else CUT_OFF_S
    return Program(command, later, run_dir, cut_off_s, config.device.per_rank, is_trainer=True)


class _Log(Lines):
    """Waits for a folder to write to, and for a disk that has room."""

    def report(self, level: int, text: str) -> None:
        """A rank says so."""


@dataclass
class Supervisor:
    """Starts the ranks until they are done, or until that no longer helps."""

    program: Program
    plan: Plan
    ranks: int
    min_ranks: int
    max_restarts: int
    _asked_by: int = 0
    _started: StartedRanks | None = None
    _seen: int | None = None
    """The step of the newest checkpoint that has been seen."""
    _had_directory: bool = False
    """Whether the run directory has been seen."""
    _is_over: threading.Event = field(default_factory=threading.Event)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        run_dir = self.program.run_dir
        self._log = _Log(launch_log(run_dir)) if run_dir is not None and self.plan.keeps_log else None

    def run(self) -> int:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        threading.Thread(target=self._keep_looking, daemon=True).start()
        try:
            return self._run()
        finally:
            self._is_over.set()

    def _run(self) -> int:
        restarts, in_vain, waits, newest = 0, 0, 0, self._newest()
        at_first, has_run, in_use_since = newest, False, math.inf
        while True:
            origin = "" if newest is None else f"; newest checkpoint: step {newest}"
            ranks = f"{self.ranks} rank(s){self.plan.where}"
            self._say(f"start {restarts + 1} of at most {self.max_restarts + 1}: {ranks}{origin}")
            has_saved = at_first is None and newest is not None
            command = self.program.later if has_saved else self.program.first
            verdict, seconds, lost = self._start(command, is_first=not has_run)
            after = f"{verdict.why}, after {seconds:.0f} s"
            if verdict.follows == "done":
                self._say(after)
                return verdict.code
            before, newest = newest, self._newest()
            # What another host saved is seen here late: a run that is to begin anew is refused then, and resumes now.
            is_seen_late = has_run and at_first is None and before is None and newest is not None
            if verdict.follows == "stop" and not (is_seen_late and verdict.code == UserError.exit_code):
                return self._stop(after, verdict.code)
            if lost:  # else no rank has trained, as while hosts do not answer
                in_vain = in_vain + 1 if newest == before and self.program.run_dir is not None else 0
                has_run, in_use_since = True, math.inf
            is_in_use = verdict.code == InUse.exit_code
            if is_in_use:
                in_use_since = min(in_use_since, time.monotonic())
                if (waited_s := time.monotonic() - in_use_since) > self.program.cut_off_s + SAVE_WITHIN_S:
                    return self._stop(f"{after}; it has been so for {waited_s:.0f} s", verdict.code)
            elif restarts == self.max_restarts:
                return self._stop(f"{after}; --max-restarts {self.max_restarts} is used up", verdict.code)
            if in_vain >= 2 and lost:
                if self.ranks == self.min_ranks:
                    where = "no checkpoint" if newest is None else f"no checkpoint after that of step {newest}"
                    return self._stop(f"{after}; two starts in a row have left {where}", verdict.code)
                self.ranks, in_vain = max(self.min_ranks, self.ranks - lost), 0
            # A directory in use is waited for by time: a rank that is cut off may have it for half an hour.
            restarts, waits = restarts + (not is_in_use), 0 if lost else waits + 1
            # Hosts that do not answer may need minutes; ranks that fail without progress need some distance in time.
            in_a_row = in_vain if lost else waits
            pause_s = min(MAX_PAUSE_S, 2.0 ** (in_a_row - 1)) if in_a_row else 0.0
            self._say(f"{after}" + (f"; next start in {pause_s:.0f} s" if pause_s else ""))
            self._pause(pause_s)
            if self._asked_by:
                self._say(f"stopped: asked by {signal_name(self._asked_by)} between two starts")
                return START_AGAIN

    def _start(self, command: list[str], *, is_first: bool) -> tuple[Verdict, float, int]:
        """Start the ranks and wait; return what follows, after how many seconds, and how many ranks were lost.

        0 are lost if there was no room to start, the run directory was in use, or it is gone, so that the run would
        begin anew, as on the disk below a mount that is lost.
        """
        if gone := self._gone():
            return Verdict("again", 1, f"{gone}; no ranks are started"), 0.0, 0
        try:
            self._started = self.plan.start(command, self.ranks, self.min_ranks)
        except NotEnough as error:
            if is_first and not self.plan.may_wait:
                raise UserError(f"launch: {error}.") from error
            return Verdict("again", 1, str(error)), 0.0, 0
        except OSError as error:
            if is_first and error.errno in CANNOT_RUN:
                problem = f"launch: {command[0]}: {error.strerror}. Name a program that each rank can run."
                raise UserError(problem) from error
            return Verdict("again", 1, f"{command[0]} cannot be started: {error.strerror}"), 0.0, 0
        try:
            if self._asked_by:  # while the ranks were being started
                self._started.send(self._asked_by)
            ended = self._started.wait(end_together=self.program.is_trainer)
        finally:
            self._started.kill()
            kind, self._started = self._started.kind, None
        verdict = judge(ended, kind, asked_by=self._asked_by, is_first=is_first, is_trainer=self.program.is_trainer)
        verdict = self._by_summary(verdict, ended)
        killed = sum(code > 128 for code in ended.codes.values())
        has_no_files = kind == "host" and NOTHING_STARTED in ended.codes.values()
        return verdict, ended.seconds, 0 if has_no_files or verdict.code == InUse.exit_code else killed or 1

    def _by_summary(self, verdict: Verdict, ended: Ended) -> Verdict:
        """Return the verdict on ranks of the trainer with what root has left: a library may end a process with 0.

        Another host than root's may see later what root has written.
        """
        if not (self.program.is_trainer and self.program.run_dir and 0 in ended.codes.values()):
            return verdict
        is_finished = bool(read_json(self.program.run_dir / "summary.json").get("finished"))
        if verdict.follows == "again" and is_finished:  # a rank was lost, or killed, when it had no more to do
            return Verdict("done", 0, f"done, though {verdict.why}")
        if verdict.follows == "done" and not is_finished and not self._asked_by and self.plan.is_here:
            return Verdict("again", 1, "the ranks ended with exit code 0 before the run was finished, as by exit(0)")
        return verdict

    def _on_signal(self, number: int, _: object) -> None:
        self._asked_by = self._asked_by or number
        if self._started is not None:
            self._started.send(number)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._asked_by and (left := end - time.monotonic()) > 0:
            time.sleep(min(0.1, left))

    def _newest(self) -> int | None:
        """Look; return the step of the newest checkpoint that has been seen, now or before."""
        run_dir = self.program.run_dir
        self._had_directory |= run_dir is not None and os.path.isdir(run_dir)
        self._seen = next(iter(self._steps()), self._seen)
        return self._seen

    def _gone(self) -> str:
        """Return what is no longer there of what has been seen; "" if all is."""
        run_dir = self.program.run_dir
        if run_dir is None:
            return ""
        if self._had_directory and self.program.is_trainer and is_gone(run_dir):
            return f"{run_dir} is gone: removed, renamed or no longer mounted"
        if self._seen is not None and not self._steps():
            return f"the checkpoints of {run_dir} are gone, or cannot be read; the newest was that of step {self._seen}"
        return ""

    def _steps(self) -> list[int]:
        """Return the steps of the checkpoints that are there, newest first; [] too if they cannot be read now."""
        if self.program.run_dir is None:
            return []
        try:
            return steps_in(self.program.run_dir / CHECKPOINTS)
        except OSError:  # what has ended the ranks, often
            return []

    def _keep_looking(self) -> None:
        """Look while ranks run too: where the directory goes, and they with it, it is too late afterwards."""
        looked_at = time.monotonic()
        while not self._is_over.wait(LOG_EVERY_S if self._log and self._log.has_pending else LOOK_EVERY_S):
            if self._log and self._log.has_pending:
                with self._writing:
                    self._log.flush()
            if time.monotonic() - looked_at >= LOOK_EVERY_S:
                looked_at = time.monotonic()
                self._newest()

    def _say(self, text: str) -> None:
        """Say it to the user, and to explain and report, once the run has a folder for its logs."""
        to_stderr(f"launch: {text}")
        if self._log:
            with self._writing:
                self._log.append(f"{now()} launch: {printable(without_secrets(text))}")

    def _stop(self, why: str, code: int) -> int:
        self._say(f"stopped: {why}{'' if code in SAVED else self._hint()}")
        return code

    def _hint(self) -> str:
        """Return which command says more; "" if the ranks have left nothing that it could read."""
        run_dir = self.program.run_dir
        try:
            if run_dir is None or not is_run_dir(run_dir):
                return ""
        except OSError:  # what has ended the ranks, often
            return ""
        return f". What happened: horovod-train explain {shlex.quote(str(run_dir))}"
