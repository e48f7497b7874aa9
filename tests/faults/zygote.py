"""Tries scenarios again and again, each time with another call failing: zygote.py SHIM SCRATCH TASK, under LD_PRELOAD.

TASK is JSON: {"scenarios": names in scenarios.SCENARIOS, "choose": how the faults are chosen of the points that a run
without faults has passed (see `choose`)}. Prints a report of each as JSON. Every try is a fork of this process, which
has imported TensorFlow but started no thread of it, so a try costs what the scenario does, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import gc
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

FILE_ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.ENOENT)
SEND_ERRORS = (errno.EPIPE, errno.ECONNRESET, *FILE_ERRORS)
_PR_SET_CHILD_SUBREAPER = 36
MODES = {"once": 0, "on": 1, "half": 2, "full": 3}
"""once: one call fails; on: it and all after it, of sends or of the rest; half: a write is cut in two; full: so it is,
and the disk is full."""
AFTER_DEATH_S = 15.0

CHANGING = re.compile(r"\d{9,}\.\d+|[0-9a-f]{8,}|(?<=[.-])\d{2,7}(?=\.|$|/|-old)|(?<=tmp)\w{8}")
"""What differs between the names of two runs: times, tokens, process numbers, temporary names."""


@dataclasses.dataclass(frozen=True)
class Point:
    """The n-th call of a kind on a rank."""

    rank: int
    kind: str
    n: int
    about: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind} {self.n} {self.about}"


@dataclasses.dataclass(frozen=True)
class Fault:
    point: Point
    error: int
    mode: str

    def __str__(self) -> str:
        return f"{self.point}: {errno.errorcode[self.error]} {self.mode}"


@dataclasses.dataclass
class Finished:
    """How a try ended on each rank; exit codes below 0 are signals. hits: what failed, in the order in which it did."""

    exit_codes: list[int]
    stdout: str
    stderr: str
    hits: list[str]

    @property
    def text(self) -> str:
        return f"exit codes {self.exit_codes}\n--- stdout\n{self.stdout[-1500:]}\n--- stderr\n{self.stderr[-2500:]}"


class Zygote:
    """Forks the tries of one scenario. Each begins with the same files at the same place, `scratch/here`."""

    def __init__(self, shim: str, scratch: Path, scenario: Any) -> None:
        self.shim, self.scratch, self.scenario = ctypes.CDLL(shim), scratch, scenario
        self.here, self.before, self.plain = (scratch / name for name in ("here", "before", "plain"))
        scratch.mkdir(parents=True, exist_ok=True)
        self.before.mkdir()
        prepared = self._fork_all(self.before, [self.scenario.prepare], None)
        assert prepared.exit_codes == [0], prepared.text
        self.tries = 0

    def dry_run(self) -> tuple[list[Point], Finished]:
        """The points that a run without faults passes."""
        finished = self.run(None)
        assert not any(finished.exit_codes), finished.text
        shutil.copytree(self.here, self.plain, symlinks=True)
        points = []
        for rank in range(self.scenario.ranks):
            for line in self._log(rank).read_text(errors="replace").splitlines():
                _, kind, n, about = line.split(" ", 3)
                points.append(Point(rank, kind, int(n), CHANGING.sub("#", about)))
        return [point for point in points if point.kind in self.scenario.kinds or not self.scenario.kinds], finished

    def run(self, fault: Fault | None) -> Finished:
        shutil.rmtree(self.here, ignore_errors=True)
        shutil.copytree(self.before, self.here, symlinks=True)
        return self.start_again(fault)

    def start_again(self, fault: Fault | None = None) -> Finished:
        """On the files as they are now."""
        return self._fork_all(self.here, [self.scenario.run] * self.scenario.ranks, fault)

    def _fork_all(self, folder: Path, actions: list[Any], fault: Fault | None) -> Finished:
        gc.freeze()
        self.tries = getattr(self, "tries", 0) + 1
        children = [self._fork(folder, rank, len(actions), action, fault) for rank, action in enumerate(actions)]
        exit_codes = _wait(children, self.scenario.limit_s)
        _wait_for_orphans()
        hits = [
            line for rank in range(len(actions)) for line in self._log(rank).read_text(errors="replace").splitlines()
        ]
        outs, errs = (
            "".join((self.scratch / f"{name}-{rank}").read_text(errors="replace") for rank in range(len(actions)))
            for name in ("stdout", "stderr")
        )
        return Finished(exit_codes, outs, errs, [line[4:] for line in hits if line.startswith("hit ")])

    def _log(self, rank: int) -> Path:
        return self.scratch / f"log-{rank}"

    def _fork(self, folder: Path, rank: int, size: int, action: Any, fault: Fault | None) -> int:
        self._log(rank).unlink(missing_ok=True)
        if pid := os.fork():
            return pid
        code = 70
        try:
            for number, name in ((1, "stdout"), (2, "stderr")):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                os.dup2(os.open(self.scratch / f"{name}-{rank}", flags), number)
            os.setpgid(0, 0)
            os.chdir(folder)
            if size > 1:
                place = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_JOB_ID": os.getppid() * 1000 + self.tries}
                step = {"SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_TASKS_PER_NODE": size, "SLURM_STEP_ID": 0}
                os.environ |= {name: str(value) for name, value in {**place, **step, "SLURM_NODEID": 0}.items()}
                os.environ |= {"SLURM_STEP_NODELIST": "localhost", "HOROVOD_TRAIN_TOKEN": "a secret of these ranks"}
                os.environ["HOROVOD_START_TIMEOUT"] = "15"
            self.shim.faults_watch(str(folder).encode(), str(self._log(rank)).encode())
            if fault is not None and fault.point.rank == rank:
                point = fault.point
                self.shim.faults_arm(point.kind.encode(), ctypes.c_long(point.n), fault.error, MODES[fault.mode])
            code = _run(action)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _run(action: Any) -> int:
    """The exit code; the package's own errors are shown as its command line shows them."""
    from horovod_train.errors import RunError

    try:
        return int(action())
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _wait(children: list[int], limit_s: float) -> list[int]:
    """The exit codes, as subprocess gives them; children that take longer are killed.

    As under `srun --wait`: once a rank has died of a signal, the others are ended AFTER_DEATH_S later.
    """
    codes: dict[int, int] = {}
    until, ending = time.monotonic() + limit_s, signal.SIGKILL
    while len(codes) < len(children):
        for child in set(children) - set(codes):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child] < 0 and ending is not signal.SIGTERM:
                    until, ending = min(until, time.monotonic() + AFTER_DEATH_S), signal.SIGTERM
            elif time.monotonic() > until:
                os.kill(child, ending)
        if time.monotonic() > until:
            until, ending = time.monotonic() + AFTER_DEATH_S, signal.SIGKILL
        time.sleep(0.005)
    return [codes[child] for child in children]


def _wait_for_orphans() -> None:
    """What a rank has left behind to speak for it comes to this process, and ends by itself."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def choose(points: list[Point], how: dict[str, Any]) -> list[Fault]:
    """how: {"per_place": N or null for all, "faults": "all", "turns" or a number, "share": [i, of], "about": regex}.

    about: only points where it is found in what they are about.
    per_place: of the calls of one kind on one file so many, the first and the last among them. faults: each with every
    error, alone and from then on; or alone and from then on with one error each, the errors taking turns; or so many
    of all, drawn at random. And every write in halves.
    """
    places: dict[tuple[int, str, str], list[Point]] = {}
    for point in (point for point in points if re.search(how.get("about", ""), point.about)):
        places.setdefault((point.rank, point.kind, point.about), []).append(point)
    most = how["per_place"] or len(points)
    kept = [found[:1] + found[1:][-(most - 1) :] if most > 1 else found[:1] for found in places.values()]
    chosen = [point for found in kept for point in found]
    if how["faults"] == "turns":
        turns = {errors: itertools.cycle(errors) for errors in (FILE_ERRORS, SEND_ERRORS)}
        other = {errors: itertools.cycle(errors[2:] + errors[:2]) for errors in turns}
        faults = [
            Fault(p, next(turn[_errors(p)]), mode) for p in chosen for turn, mode in ((turns, "once"), (other, "on"))
        ]
    else:
        faults = [Fault(p, error, mode) for p in chosen for error in _errors(p) for mode in ("once", "on")]
    faults += [Fault(p, errno.ENOSPC, mode) for p in chosen if p.kind == "write" for mode in ("half", "full")]
    if isinstance(how["faults"], int):
        faults = random.Random(1).sample(faults, min(how["faults"], len(faults)))
    share, of = how.get("share", (0, 1))
    return faults[share::of]


def _errors(point: Point) -> tuple[int, ...]:
    return SEND_ERRORS if point.kind == "send" else FILE_ERRORS


def try_all(zygote: Zygote, how: dict[str, Any]) -> dict[str, Any]:
    points, plain = zygote.dry_run()
    complaints, hit = [], set()
    faults = choose(points, how)
    began = time.monotonic()
    for fault in faults:
        finished = zygote.run(fault)
        hit |= {CHANGING.sub("#", line) for line in finished.hits[:1]}
        found = zygote.scenario.judge(zygote, plain, finished)
        said = f"{len(complaints)} complaints; {fault}, hit {finished.hits[:1]}: {finished.exit_codes} {found}"
        print(said, file=sys.stderr, flush=True)
        if found:
            complaints.append({"fault": str(fault), "hit": finished.hits[:1], "said": found, "text": finished.text})
    return {
        "scenario": zygote.scenario.name,
        "points": len(points),
        "points_by_kind": {kind: sum(p.kind == kind for p in points) for kind in dict.fromkeys(p.kind for p in points)},
        "faults": len(faults),
        "hit": len(hit),
        "errors": sorted({errno.errorcode[fault.error] for fault in faults}),
        "seconds": round(time.monotonic() - began, 1),
        "complaints": complaints,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1"}
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    task = json.loads(sys.argv[3])
    from scenarios import SCENARIOS

    reports = []
    for name in task["scenarios"]:
        SCENARIOS[name].load()
        scratch = Path(sys.argv[2]) / name.replace(" ", "")
        reports.append(try_all(Zygote(sys.argv[1], scratch, SCENARIOS[name]), task["choose"]))
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
