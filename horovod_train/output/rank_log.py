"""Logs of each rank in the run directory: `logs/rank-N.log` for people, `rank-N.end.json` for programs.

A line is `TIME KIND TEXT`; continuation lines are indented. Best effort: a rank whose host cannot write there continues
without a log. Does not decide what is worth a line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import sys
import threading
import traceback
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from horovod_train.output.console import to_stderr
from horovod_train.output.files import Lines, write_atomically
from horovod_train.output.removal import Artifact, remove
from horovod_train.shown_text import printable, without_secrets

FOLDER = "logs"
_END = Artifact("the note of how a rank ended", r"rank-\d+\.end\.json")


class RankLog(Protocol):
    """The log of one rank: a FileRankLog, or a NullRankLog where there is no run directory."""

    name: str
    """Path of the file in the run directory; empty without one."""

    def write(self, kind: str, text: str) -> None:
        """Add a line immediately. kind: start, watch, stall, cause, lost, failed, stacks, end, and those of logs."""

    def write_stacks(self, why: str) -> None:
        """Add the stacks of all threads of this process."""

    def end_process_after(self, seconds: float) -> None:
        """End this process after `seconds`, with exit code 1 and its stacks here, even while Python shuts down."""

    def write_traceback(self, error: BaseException, kind: str = "failed") -> None: ...

    def end(self, ended: str, exit_code: int, **facts: Any) -> None:
        """Write for programs how this rank ended; a later call replaces the earlier result.

        ended: done, failed, followed (another rank's end), stalled, stopped. facts: JSON values.
        """


class NullRankLog:
    """Drops all lines, and writes stacks to standard error."""

    name = ""

    def write(self, kind: str, text: str) -> None: ...

    def write_stacks(self, why: str) -> None:
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)

    def end_process_after(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)

    def write_traceback(self, error: BaseException, kind: str = "failed") -> None: ...

    def end(self, ended: str, exit_code: int, **facts: Any) -> None: ...


class FileRankLog:
    """Appends to the rank's file in `folder`; safe to use from several threads."""

    def __init__(self, folder: Path, rank: int, host: str) -> None:
        self.name = f"{FOLDER}/rank-{rank}.log"
        self._about = {"rank": rank, "host": host, "pid": os.getpid()}
        self._end = end_file(folder, rank)
        self._lock = threading.Lock()
        remove(self._end, _END)
        self._lines = _LogLines(log_file(folder, rank))
        # C code writes stacks, when there may be no time left to open a file.
        self._stacks = self._lines.path.open("a", encoding="utf-8")

    def write(self, kind: str, text: str) -> None:
        entry = printable(without_secrets(f"{kind} {text}")).replace("\n", "\n    ")
        with self._lock:
            self._lines.append(f"{_now()} {entry}")

    def write_stacks(self, why: str) -> None:
        self.write("stacks", f"of all threads: {why}")
        with self._lock:
            faulthandler.dump_traceback(file=self._stacks, all_threads=True)

    def end_process_after(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stacks)

    def write_traceback(self, error: BaseException, kind: str = "failed") -> None:
        self.write(kind, "".join(traceback.format_exception(error)).rstrip())

    def end(self, ended: str, exit_code: int, **facts: Any) -> None:
        shown = {name: without_secrets(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
        content = {**self._about, "ended": ended, "exit_code": exit_code, **shown, "time": _now()}
        with self._lock:
            # Before the line: a reader that has seen the line finds the file.
            try:
                write_atomically(self._end, json.dumps(content) + "\n", _END, sync=False)
            except OSError as error:
                to_stderr(f"warning: {self._end} cannot be written: {error.strerror}.")
        self.write("end", f"{ended}, exit code {exit_code}")
        with self._lock:
            self._lines.report_missing()


class _LogLines(Lines):
    def report(self, level: int, text: str) -> None:
        # Not logged, because it would be written here.
        to_stderr(f"warning: {text}" if level == logging.WARNING else text)


def make_folder(run_dir: Path | None) -> None:
    """On root (None elsewhere), before other ranks open logs: create the folder, without ends of an earlier start."""
    if run_dir is None:
        return
    with contextlib.suppress(OSError):
        (run_dir / FOLDER).mkdir(exist_ok=True)
        for old in (run_dir / FOLDER).glob("rank-*.end.json"):
            remove(old, _END)


def open_rank_log(run_dir: str | Path, rank: int, host: str, *, start_text: str) -> RankLog:
    """Open the log of a rank; call after root's make_folder. start_text: see `introduction`.

    Does not create the folder: on a host that does not see root's, another folder would only mislead.
    """
    try:
        log = FileRankLog(Path(run_dir) / FOLDER, rank, host)
    except OSError as error:
        reason = error.strerror or str(error)
        to_stderr(f"warning: rank {rank} ({host}) keeps no log: {error.filename}: {reason}")
        return NullRankLog()
    log.write("start", start_text)
    return log


def introduction(rank: int, size: int, launcher: str, host: str, about: str = "") -> str:
    """Return the first text of a log on each start, which rank_log_reader reads. about: more facts about this rank."""
    text = f"rank {rank} of {size}, launcher {launcher}, process {os.getpid()} on {host}"
    return f"{text}; {about}" if about else text


def log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def end_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.end.json"


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="milliseconds")
