"""The command `launch`: start ranks on this host, and start them again from the newest checkpoint when one is lost.

horovod-train launch -np 4 --min-np 2 --max-restarts 10 -- --config A.yaml train.epochs=5
horovod-train launch -np 4 --run-dir runs/a -- python train.py

Decides by the exit codes of the ranks and by the newest checkpoint. How ranks are started and watched: see
distributed/launch/started_ranks.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from horovod_train.checkpoint.layout import CHECKPOINTS, steps_in
from horovod_train.commands.cli import Parser, add_config_arguments, count, load_config
from horovod_train.commands.first_run import CONFIG
from horovod_train.distributed.launch import launcher
from horovod_train.distributed.launch.launcher import STOP_SIGNALS
from horovod_train.distributed.launch.local import best_way, launch_command
from horovod_train.distributed.launch.started_ranks import Ended, StartedRanks, Way
from horovod_train.errors import START_AGAIN, RanksDisagree, UserError
from horovod_train.output.console import to_stderr, to_stdout

MAX_PAUSE_S = 60.0
"""The longest pause before a start. Starts that made progress are followed by the next one without a pause."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-np", "--np", type=count, required=True, metavar="N", help="the number of ranks")
    parser.add_argument(
        "--min-np",
        type=count,
        metavar="N",
        help="start again with as few as this, if starts with more ranks fail; default: the same as -np",
    )
    parser.add_argument("--max-restarts", type=_at_least_0, default=10, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--over",
        choices=("auto", "mpi", "gloo"),
        default="auto",
        help="how ranks on CPUs exchange; auto: MPI if it works here, else gloo",
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
    if started_by.size > 1:
        raise UserError(
            f"launch: {started_by.launcher} has started {started_by.size} of it, and each would start ranks. Start the "
            "training without launch, or one launch without a launcher."
        )
    min_np = arguments.min_np or arguments.np
    if min_np > arguments.np:
        raise UserError(f"launch: --min-np must be at most -np, {arguments.np}; received {min_np}.")
    program = _program(arguments)
    way, why = _choose_way(arguments.over)
    if arguments.dry_run:
        to_stdout(shlex.join([*(launch_command("mpirun", arguments.np) if way == "mpirun" else []), *program.first]))
        return 0
    to_stderr(f"launch: ranks are started by {'mpirun' if way == 'mpirun' else 'launch itself'}: {why}")
    return _Supervisor(program, way, arguments.np, min_np, arguments.max_restarts).run()


def _at_least_0(text: str) -> int:
    return 0 if text == "0" else count(text)


def _choose_way(over: str) -> tuple[Way, str]:
    if over == "mpi":
        return "mpirun", "--over mpi"
    if over == "gloo":
        return "launch", "gloo, because of --over gloo"
    way, why = best_way()
    return ("mpirun", why) if way == "mpirun" else ("launch", why)


class Program(NamedTuple):
    """What each rank runs: at the first start, and at later ones."""

    first: list[str]
    later: list[str]
    run_dir: Path | None
    """Where its checkpoints are; None if not known."""


def _program(arguments: argparse.Namespace) -> Program:
    """Return what follows `--`. Raises UserError if it is the trainer's arguments and they are bad."""
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if words and not words[0].startswith("-"):
        return Program(words, words, Path(arguments.run_dir) if arguments.run_dir else None)
    if arguments.run_dir:
        raise UserError("launch: --run-dir is for a script; the trainer writes to its output_dir (--output-dir DIR).")
    parser = Parser(prog="horovod_train.main launch")
    add_config_arguments(parser, required=False)
    parser.add_argument("--resume")
    parsed = parser.parse_intermixed_args(words)
    parsed.config = parsed.config or [CONFIG]
    config, _ = load_config(parsed)
    command = [sys.executable, "-m", "horovod_train.main", *words]
    resume = parsed.resume or config.checkpoint.resume
    # A run that was to begin anew has begun; what it has saved since is its own.
    later = [*command, "--resume", "auto"] if resume == "never" else command
    return Program(command, later, Path(config.output_dir) if config.output_dir else None)


class Verdict(NamedTuple):
    """What follows the end of a start. code: the exit code if nothing is started again."""

    follows: Literal["done", "stop", "again"]
    code: int
    why: str


def judge(ended: Ended, way: Way, *, asked_by: int) -> Verdict:
    """Decide by the exit codes of the ranks. asked_by: the signal that asked for the end; 0 if none has."""
    codes = set(ended.codes.values())
    if codes == {0}:
        return Verdict("done", 0, "done")
    for code, why in (
        (RanksDisagree.exit_code, "the ranks hold different weights; starting again would not change that"),
        (UserError.exit_code, "the config, the arguments or the data are bad; the message above says which"),
    ):
        if code in codes:
            return Verdict("stop", code, why)
    first = ended.codes.get(ended.first, 1)
    who = "mpirun" if way == "mpirun" else f"rank {ended.first}"
    how = f"{who} ended with exit code {first}"
    if first > 128 and way != "mpirun":
        how = f"{who} was killed by {_signal_name(first - 128)}"
    elif first > 128:
        how = f"a rank was killed by {_signal_name(first - 128)}"
    if asked_by:
        is_saved = codes <= {0, START_AGAIN}
        ending = "the ranks have saved" if is_saved else f"{how}; not all ranks could save"
        return Verdict("stop", START_AGAIN if is_saved else first, f"asked by {_signal_name(asked_by)}; {ending}")
    if codes <= {0, START_AGAIN}:
        return Verdict("stop", START_AGAIN, "the run was asked to stop, and has saved")
    return Verdict("again", first, how)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass
class _Supervisor:
    """Starts the ranks until they are done, or until that no longer helps."""

    program: Program
    way: Way
    ranks: int
    min_ranks: int
    max_restarts: int
    _asked_by: int = 0
    _started: StartedRanks | None = None

    def run(self) -> int:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        restarts, in_vain, newest = 0, 0, self._newest()
        while True:
            self._say_start(restarts, newest)
            ended = self._start(self.program.later if restarts else self.program.first)
            verdict = judge(ended, self.way, asked_by=self._asked_by)
            after = f"{verdict.why}, after {ended.seconds:.0f} s"
            if verdict.follows != "again":
                to_stderr(f"launch: {after if verdict.follows == 'done' else f'stopped: {after}'}")
                return verdict.code
            before, newest = newest, self._newest()
            in_vain = in_vain + 1 if newest == before and self.program.run_dir is not None else 0
            if restarts == self.max_restarts:
                return self._give_up(f"{after}; --max-restarts {self.max_restarts} is used up", verdict.code)
            if in_vain >= 2:
                lost = sum(code > 128 for code in ended.codes.values()) or 1
                if self.ranks == self.min_ranks:
                    where = "no checkpoint" if newest is None else f"no checkpoint after that of step {newest}"
                    return self._give_up(f"{after}; two starts in a row have left {where}", verdict.code)
                self.ranks, in_vain = max(self.min_ranks, self.ranks - lost), 0
            restarts += 1
            pause_s = min(MAX_PAUSE_S, 2.0 ** (in_vain - 1)) if in_vain else 0.0
            to_stderr(f"launch: {after}" + (f"; next start in {pause_s:.0f} s" if pause_s else ""))
            self._pause(pause_s)
            if self._asked_by:
                to_stderr(f"launch: stopped: asked by {_signal_name(self._asked_by)} between two starts")
                return START_AGAIN

    def _start(self, command: Sequence[str]) -> Ended:
        try:
            self._started = StartedRanks(self.way, self.ranks, command)
        except OSError as error:
            raise UserError(
                f"launch: {command[0]}: {error.strerror}. Name a program that each rank can run."
            ) from error
        try:
            if self._asked_by:  # while the ranks were being started
                self._started.send(self._asked_by)
            return self._started.wait()
        finally:
            self._started.kill()
            self._started = None

    def _on_signal(self, number: int, _: object) -> None:
        self._asked_by = self._asked_by or number
        if self._started is not None:
            self._started.send(number)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._asked_by and (left := end - time.monotonic()) > 0:
            time.sleep(min(0.1, left))

    def _newest(self) -> int | None:
        if self.program.run_dir is None:
            return None
        return next(iter(steps_in(self.program.run_dir / CHECKPOINTS)), None)

    def _say_start(self, restarts: int, newest: int | None) -> None:
        origin = "" if newest is None else f"; newest checkpoint: step {newest}"
        limit = f" of at most {self.max_restarts + 1}"
        to_stderr(f"launch: start {restarts + 1}{limit}: {self.ranks} rank(s){origin}")

    def _give_up(self, why: str, code: int) -> int:
        run_dir = self.program.run_dir
        advice = "" if run_dir is None else f". What happened: horovod-train explain {shlex.quote(str(run_dir))}"
        to_stderr(f"launch: stopped: {why}{advice}")
        return code
