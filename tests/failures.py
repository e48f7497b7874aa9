"""Runs that fail, and what is printed and explained of them: the page docs/failures.md.

    python tests/failures.py > docs/failures.md

Each failure is made by a run of two ranks that really fails. A test makes them again and compares the words.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from conftest import PROJECT, launcher_command, rank_environment, run_process, train

from horovod_train.checkpoint.layout import CHECKPOINTS, step_name, steps_in
from horovod_train.output.rank_log import read_stories

ENDS_WITHIN_S = 180.0
"""A limit for what hangs, not a promise."""
LONG = ("train.epochs=1000", "checkpoint.every_steps=20", "log.every_steps=20")


@dataclass
class Run:
    """A run that has started. data: of this failure alone."""

    run_dir: Path
    process: subprocess.Popen[str]

    def wait_until_trained(self, steps: int) -> None:
        """Until it has saved, and has trained that many steps."""
        began = time.monotonic()
        while not (steps_in(self.run_dir / CHECKPOINTS) and self._last_step() >= steps):
            assert self.process.poll() is None, "the run ended before anything was done to it"
            assert time.monotonic() - began < ENDS_WITHIN_S, "the run does not train"
            time.sleep(0.05)

    def _last_step(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(read_stories(self.run_dir)[rank].pid, number)

    def kill_all(self) -> None:
        """As the kernel or a scheduler does it: all in the same moment, with no time for a last word."""
        launcher = psutil.Process(self.process.pid)
        processes = [launcher, *launcher.children(recursive=True)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                if process.is_running():
                    os.kill(process.pid, number)


@dataclass(frozen=True)
class Failure:
    """name: of its run directory. befall: what happens to the run while it trains; prepare: before it starts."""

    name: str
    title: str
    story: str
    overrides: tuple[str, ...]
    befall: Callable[[Run], None] = lambda run: None
    prepare: Callable[[Path], None] = lambda folder: None
    afterwards: Callable[[Path], None] = lambda run_dir: None

    @property
    def arguments(self) -> list[str]:
        return ["--config", "configs/digits_convnet.yaml", *self.overrides, "--output-dir", f"runs/{self.name}"]


def _kill_rank_1(run: Run) -> None:
    run.wait_until_trained(60)
    run.signal(1, signal.SIGKILL)


def _freeze_rank_1(run: Run) -> None:
    run.wait_until_trained(60)
    run.signal(1, signal.SIGSTOP)


def _kill_all(run: Run) -> None:
    run.wait_until_trained(60)
    run.kill_all()


def _stop_file(run: Run) -> None:
    run.wait_until_trained(40)
    (run.run_dir / "STOP").touch()


def _damage_a_record(folder: Path) -> None:
    damaged = folder / "data" / "damaged"
    shutil.copytree(folder / "data" / "digits", damaged)
    _flip_a_byte(sorted((damaged / "train").glob("*.tfrecord"))[2], at=60000)


def _damage_the_newest_checkpoint(run_dir: Path) -> None:
    newest = run_dir / CHECKPOINTS / step_name(steps_in(run_dir / CHECKPOINTS)[0])
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    _flip_a_byte(largest, at=largest.stat().st_size // 2)


def _flip_a_byte(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def _troubled(what: str) -> str:
    return f"model={{name: user_models:troubled, options: {{step: 45, on_rank: 1, what: {what}}}}}"


FAILURES = (
    Failure(
        "killed",
        "A rank is killed",
        "Rank 1 gets SIGKILL, as from the kernel when memory runs out.",
        LONG,
        _kill_rank_1,
    ),
    Failure(
        "frozen",
        "A rank no longer answers",
        "Rank 1 is stopped with SIGSTOP. A host that swaps, a dead disk and a lost network look the same. The limits "
        "are short here; the defaults are 60 s and 600 s.",
        (*LONG, "watch.warn_after_s=2", "watch.stop_after_s=4", "watch.first_step_after_s=120"),
        _freeze_rank_1,
    ),
    Failure(
        "raising",
        "An error in your own code, on one rank",
        "A layer of the user's own raises on rank 1 in step 45. Its traceback is in `logs/rank-1.log`.",
        (*LONG, _troubled("raise")),
    ),
    Failure(
        "diverging",
        "The loss is no longer a number",
        "The learning rate is far too high.",
        (*LONG, "lr_schedule.base_lr=1e6", "lr_schedule.warmup_epochs=0"),
    ),
    Failure(
        "apart",
        "Ranks hold different weights",
        "A layer changes its own weight on rank 1 only, as code that depends on the rank would.",
        (*LONG, "train.check_agreement_every_steps=20", _troubled("tamper")),
    ),
    Failure(
        "damaged",
        "A record is damaged",
        "One byte of a file is not what was written. `data.on_bad_record: skip` would leave such records out.",
        (*LONG, "data.train=data/damaged/train"),
        prepare=_damage_a_record,
    ),
    Failure(
        "vanished",
        "The whole job is gone",
        "All processes get SIGKILL at the same moment, from the scheduler or a power cut.",
        LONG,
        _kill_all,
    ),
    Failure(
        "bitrot",
        "The newest checkpoint is damaged",
        "As above; and then one byte of the newest checkpoint changes. A run that is started again sets that "
        "checkpoint aside and resumes from the one before.",
        LONG,
        _kill_all,
        afterwards=_damage_the_newest_checkpoint,
    ),
    Failure(
        "stopped",
        "Asked to stop",
        "The file `STOP` was made in the run directory. SIGTERM, `train.max_time` and the end of a SLURM job's time "
        "do the same, with exit code 75.",
        LONG,
        _stop_file,
    ),
    Failure(
        "finished",
        "Nothing went wrong",
        "For comparison.",
        ("train.epochs=2",),
    ),
)


def make_folder(folder: Path, digits: Path) -> None:
    """The folder that a reader has: configs and data in it."""
    (folder / "configs").symlink_to(PROJECT / "configs")
    (folder / "data").mkdir()
    (folder / "data" / "digits").symlink_to(digits)


def section(failure: Failure, folder: Path) -> str:
    """Make it, in a folder of `make_folder`, and return its part of the page."""
    run_dir = folder / "runs" / failure.name
    failure.prepare(folder)
    with (folder / f"{failure.name}.stderr").open("w+") as errors:
        process = subprocess.Popen(
            [*launcher_command("horovodrun", 2), sys.executable, "-m", "horovod_train.main", *failure.arguments],
            cwd=folder,
            env=rank_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            text=True,
        )
        try:
            failure.befall(Run(run_dir, process))
            process.wait(ENDS_WITHIN_S)
        finally:
            if process.poll() is None:
                Run(run_dir, process).kill_all()
                process.wait()
        errors.seek(0)
        printed = our_lines(errors.read())
    failure.afterwards(run_dir)
    explained = run_process([sys.executable, "-m", "horovod_train.main", "explain", f"runs/{failure.name}"], cwd=folder)
    words = shlex.join(["horovodrun", "--gloo", "-np", "2", "python", "-m", "horovod_train.main", *failure.arguments])
    lines = "\n".join(
        [
            f"## {failure.title}",
            "",
            textwrap.fill(failure.story + exit_codes(run_dir), 138),
            "",
            "```text",
            f"$ {words}",
            *printed,
            "",
            f"$ python -m horovod_train.main explain runs/{failure.name}",
            explained.stdout.rstrip("\n"),
            "```",
        ]
    )
    return lines.replace(f"{PROJECT}/tests/", "")


def exit_codes(run_dir: Path) -> str:
    codes = sorted({story.end["exit_code"] for story in read_stories(run_dir).values() if story.end})
    return f" Exit code of the ranks: {', '.join(map(str, codes))}." if codes else ""


def our_lines(text: str) -> list[str]:
    """What this project prints, without horovodrun's prefix, each line once."""
    lines = (re.sub(r"^\[\d+\]<stderr>:", "", line) for line in text.splitlines())
    ours = (re.sub(r"\[\d{4}-\d\d-\d\d [\d:.]+: E .*", "", line) for line in lines)
    return list(dict.fromkeys(line for line in ours if re.match(r"(warning|error|stopped|note): |rank \d+: ", line)))


def plain(text: str) -> str:
    """Without what differs from run to run and from machine to machine: numbers, times, host, phase."""
    text = text.replace(socket.gethostname(), "HOST")
    text = re.sub(r"\b(rank \d+) \([\w.-]+\)", r"\1 (HOST)", text)
    text = re.sub(r"\b(input|compute|exchange|update|save|log|compile)\b", "PHASE", text)
    text = re.sub(r"\b[0-9a-f]{12}\b", "HASH", text)
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "N", text)


def sections_of_the_page() -> dict[str, str]:
    """Title → section."""
    page = (PROJECT / "docs" / "failures.md").read_text()
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].removeprefix("## "): part.rstrip("\n") for part in parts}


HEAD = """# Failures

<!-- Made by `python tests/failures.py > docs/failures.md`; a test keeps its words current. Do not edit it. -->

`python -m horovod_train.main explain RUN_DIR` says what happened to a run, on which rank, what is lost and what to do
next, from the files that its ranks left. It needs neither TensorFlow nor the ranks' hosts. Its exit code is 0 if the
run has finished, 1 if not, and 2 for a folder that is no run directory; `--json` is for programs.

Below, runs on two ranks are made to fail. Each begins with the command and what it printed, without rank 0's lines of
metrics. [Running](running.md#how-a-run-ends) lists the exit codes."""


def _main() -> None:
    with tempfile.TemporaryDirectory() as name:
        digits = Path(name) / "digits"
        made = train(["prepare", "digits", "--out", digits])
        assert made.returncode == 0, made.text
        folder = Path(name) / "project"
        folder.mkdir()
        make_folder(folder, digits)
        print("\n\n".join([HEAD, *map(functools.partial(section, folder=folder), FAILURES)]))


if __name__ == "__main__":
    _main()
