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
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from points import MODES, Fault, Point, choose, points_of
from scenario import START_AGAIN
from scenarios import SCENARIOS

_PR_SET_CHILD_SUBREAPER = 36
AFTER_DEATH_S = 15.0


@dataclasses.dataclass
class Finished:
    """How a try ended on each rank; exit codes below 0 are signals. hits: what failed, in the order in which it did."""

    exit_codes: list[int]
    stdout: str
    stderr: str
    hits: list[str]

    @property
    def said(self) -> str:
        return self.stdout + self.stderr

    @property
    def text(self) -> str:
        return f"exit codes {self.exit_codes}\n--- stdout\n{self.stdout[-1500:]}\n--- stderr\n{self.stderr[-2500:]}"


class Zygote:
    """Forks the tries of one scenario. Each begins with the same files at the same place, `scratch/here`.

    Tries mostly wait, some for seconds, so several lanes may make them side by side, each in a place of its own.
    """

    def __init__(self, shim: str, scratch: Path, scenario: Any) -> None:
        self.shim, self.scratch, self.scenario = ctypes.CDLL(shim), scratch, scenario
        self.here, self.before, self.plain = (scratch / name for name in ("here", "before", "plain"))
        self.lane = self.tries = 0
        scratch.mkdir(parents=True, exist_ok=True)
        self.before.mkdir()
        prepared = self._fork_all(self.before, [self.scenario.prepare], None)
        assert prepared.exit_codes == [0], prepared.text

    def dry_run(self) -> tuple[list[Point], Finished]:
        """The points that a run without faults passes."""
        finished = self.run(None)
        assert set(finished.exit_codes) == {self.scenario.ends}, finished.text
        points: list[Point] = []
        for rank in range(self.scenario.ranks):
            points += points_of(rank, self._log(rank).read_text(errors="replace"))
        if self.scenario.resumes and any(finished.exit_codes):
            again = self.start_again()
            assert not any(again.exit_codes), again.text
        shutil.copytree(self.here, self.plain, symlinks=True)
        return [point for point in points if point.kind in self.scenario.kinds or not self.scenario.kinds], finished

    def in_lanes(self, faults: list[Fault], plain: Finished, lanes: int) -> list[dict[str, Any]]:
        """Try the faults; return the reports of the lanes."""
        children = [self._fork_lane(lane, faults[lane::lanes], plain) for lane in range(lanes)]
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * lanes
        return [json.loads(self._report(lane).read_text()) for lane in range(lanes)]

    def _report(self, lane: int) -> Path:
        return self.scratch / f"report-{lane}.json"

    def _fork_lane(self, lane: int, faults: list[Fault], plain: Finished) -> int:
        if pid := os.fork():
            return pid
        code = 70
        try:
            adopt_orphans()
            self.lane, self.here = lane, self.scratch / f"here-{lane}"
            self._report(lane).write_text(json.dumps(self._try_each(faults, plain)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _try_each(self, faults: list[Fault], plain: Finished) -> dict[str, Any]:
        complaints: list[Any] = []
        hit = 0
        for fault in faults:
            finished = self.run(fault)
            hit += bool(finished.hits)
            found = self.scenario.judge(self, plain, fault, finished)
            said = f"{len(complaints)} complaints; {fault}, hit {finished.hits[:1]}: {finished.exit_codes} {found}"
            print(said, file=sys.stderr, flush=True)
            if found:
                complaints.append({"fault": str(fault), "hit": finished.hits[:1], "said": found, "text": finished.text})
        return {"complaints": complaints, "hit": hit}

    def run(self, fault: Fault | None) -> Finished:
        shutil.rmtree(self.here, ignore_errors=True)
        shutil.copytree(self.before, self.here, symlinks=True)
        return self.start_again(fault)

    def start_again(self, fault: Fault | None = None) -> Finished:
        """On the files as they are now."""
        return self._fork_all(self.here, [self.scenario.run] * self.scenario.ranks, fault)

    def _fork_all(self, folder: Path, actions: list[Any], fault: Fault | None) -> Finished:
        gc.freeze()
        self.tries += 1
        children = [self._fork(folder, rank, len(actions), action, fault) for rank, action in enumerate(actions)]
        exit_codes = _wait(children, self.scenario.limit_s)
        _wait_for_orphans()
        hits = [
            line for rank in range(len(actions)) for line in self._log(rank).read_text(errors="replace").splitlines()
        ]
        outs, errs = (
            "".join(self._said(name, rank).read_text(errors="replace") for rank in range(len(actions)))
            for name in ("stdout", "stderr")
        )
        return Finished(exit_codes, outs, errs, [line[4:] for line in hits if line.startswith("hit ")])

    def _log(self, rank: int) -> Path:
        return self.scratch / f"log-{self.lane}-{rank}"

    def _said(self, name: str, rank: int) -> Path:
        return self.scratch / f"{name}-{self.lane}-{rank}"

    def _fork(self, folder: Path, rank: int, size: int, action: Any, fault: Fault | None) -> int:
        self._log(rank).unlink(missing_ok=True)
        if pid := os.fork():
            return pid
        code = 70
        try:
            for number, name in ((1, "stdout"), (2, "stderr")):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                os.dup2(os.open(self._said(name, rank), flags), number)
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
                kind, about = point.kind.encode(), point.unchanging.encode()
                self.shim.faults_arm(kind, about, ctypes.c_long(point.n), fault.error, MODES[fault.mode])
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

    As under `srun --wait`: once a rank has ended badly, the others are ended AFTER_DEATH_S later.
    """
    codes: dict[int, int] = {}
    until, ending = time.monotonic() + limit_s, signal.SIGKILL
    while len(codes) < len(children):
        for child in set(children) - set(codes):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child] not in (0, START_AGAIN) and ending is not signal.SIGTERM:
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


def try_all(zygote: Zygote, how: dict[str, Any]) -> dict[str, Any]:
    """Return what was tried: points are the calls of the run without faults, places the files and kinds of messages.

    hit: how many of the faults came; a run need not come to the last call of another run.
    """
    points, plain = zygote.dry_run()
    faults = choose(points, how)
    began = time.monotonic()
    reports = zygote.in_lanes(faults, plain, how.get("lanes", 1))
    return {
        "scenario": zygote.scenario.name,
        "points": len(points),
        "places": sorted({f"rank {p.rank} {p.kind} {p.about}" for p in points}),
        "points_tried": len({fault.point for fault in faults}),
        "faults": len(faults),
        "hit": sum(report["hit"] for report in reports),
        "errors": sorted({errno.errorcode[fault.error] for fault in faults}),
        "seconds": round(time.monotonic() - began, 1),
        "complaints": [complaint for report in reports for complaint in report["complaints"]],
    }


def adopt_orphans() -> None:
    """Become the parent of what children leave behind, so that it can be waited for."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def main() -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1"}
    adopt_orphans()
    task = json.loads(sys.argv[3])
    reports = []
    for name in task["scenarios"]:
        SCENARIOS[name].load()
        scratch = Path(sys.argv[2]) / re.sub(r"\W+", "-", name)
        reports.append(try_all(Zygote(sys.argv[1], scratch, SCENARIOS[name]), task["choose"]))
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
