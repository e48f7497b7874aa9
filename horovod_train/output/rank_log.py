"""Logs of each rank in the run directory: `logs/rank-N.log` for people, `rank-N.end.json` for programs.

Writes and reads them. A line is `TIME KIND TEXT`; continuation lines are indented. Best effort: a rank whose host
cannot write there continues without a log. Does not decide what is worth a line; explain judges what happened.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from horovod_train.errors import UserError
from horovod_train.output.console import to_stderr
from horovod_train.output.files import (
    Artifact,
    Lines,
    each_line,
    is_cut_short,
    open_regular,
    parse_json,
    read_whole,
    remove,
    remove_drafts,
    write_atomically,
)
from horovod_train.shown_text import printable, without_secrets

FOLDER = "logs"
TROUBLE = ("slow", "stall", "cause", "lost", "failed", "error")
"""Kinds of entries that tell of trouble."""
MOST_CLOCKS_DIFFER_S = 60.0
"""By how much the clocks of hosts may differ; a host whose clock differs by more is named."""
_END = Artifact("the note of how a rank ended", r"rank-\d+\.end\.json")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d")
_INTRODUCTION = re.compile(r"rank (\d{1,9}) of (\d{1,9}), launcher (\S+), process (\d{1,9}) on ([^\s;]+)")
_START = re.compile(r"; start (\S+)$")
_ENDED = re.compile(r"(\w+), exit code (\d{1,9})")
_OUR_CLASS = re.compile(r"^horovod_train\.errors\.\w+: ")
"""What Python's tracebacks begin the text of our errors with."""
_PHASE = re.compile(r"(\w+)(?:.* after step (\d{1,18})\b)?")
_METRICS = re.compile(r"\d+:\d\d:\d\d  .*?\bstep (\d{1,18})  ")
"""What a line of metrics begins with in root's log."""


class RankLog:
    """The log of one rank. This one, without a run directory, drops lines and shows stacks on standard error."""

    name = ""
    """Path of the file in the run directory; empty without one."""

    def write(self, kind: str, text: str) -> None:
        """Add a line immediately. kind: start, watch, stall, cause, lost, failed, stacks, end, and those of logs."""

    def write_stacks(self, why: str) -> None:
        """Add the stacks of all threads of this process."""
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)

    def end_process_after(self, seconds: float) -> None:
        """End this process after `seconds`, with exit code 1 and its stacks here, even while Python shuts down."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)

    def write_traceback(self, error: BaseException, kind: str = "failed") -> None:
        """Add the traceback of an error."""
        self.write(kind, "".join(traceback.format_exception(error)).rstrip())

    def end(self, ended: str, exit_code: int, **facts: Any) -> None:
        """Write for programs how this rank ended; a later call replaces the earlier result.

        ended: done, failed, followed (another rank's end), stalled, stopped. facts: JSON values.
        """


class FileRankLog(RankLog):
    """Appends to the rank's file in `folder`, until a later start does; safe to use from several threads.

    A run that was suspended may have lost its directory to a run that appends to the same file, and whose readers take
    what follows its "start" for that run's. From then on this one is as a log without a run directory.
    """

    _enabled_it = False
    """Whether faulthandler writes to the file of a log of this class."""

    def __init__(self, folder: Path, rank: int, host: str) -> None:
        self.name = f"{FOLDER}/rank-{rank}.log"
        self._about = {"rank": rank, "host": host, "pid": os.getpid()}
        self._end = end_file(folder, rank)
        self._lock = threading.Lock()
        remove(self._end, _END)
        self._lines = _LogLines(log_file(folder, rank))
        # C code writes stacks, when there may be no time left to open a file.
        self._stacks = self._lines.path.open("a", encoding="utf-8")
        self._searched = self._lines.path.stat().st_size
        """Up to where the file has been searched for starts."""
        self._starts = 0
        """This one, and those that have begun in the file since."""
        # PYTHONFAULTHANDLER has enabled it, and shows the terminal; or an earlier run of this process has.
        self._catches_crashes = FileRankLog._enabled_it or not faulthandler.is_enabled()
        if self._catches_crashes:
            faulthandler.enable(self._stacks)  # a crash in C code has no exception
            FileRankLog._enabled_it = True
        if is_cut_short(self._lines.path):
            self._lines.add(b"\n")

    def write(self, kind: str, text: str) -> None:
        entry = printable(without_secrets(f"{kind} {text}")).replace("\n", "\n    ")
        with self._lock:
            if self._is_ours():
                self._lines.append(f"{now()} {entry}")

    def write_stacks(self, why: str) -> None:
        self.write("stacks", f"of all threads: {why}")
        with self._lock:
            faulthandler.dump_traceback(file=self._stacks if self._is_ours() else sys.stderr, all_threads=True)

    def end_process_after(self, seconds: float) -> None:
        # Asks no disk, which may hang, and waits for no thread that does.
        file = self._stacks if self._starts < 2 else sys.stderr
        faulthandler.dump_traceback_later(seconds, exit=True, file=file)

    def end(self, ended: str, exit_code: int, **facts: Any) -> None:
        shown = {name: without_secrets(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
        content = {**self._about, "ended": ended, "exit_code": exit_code, **shown, "time": now()}
        with self._lock:
            # Before the line: a reader that has seen the line finds the file.
            try:
                if self._is_ours():
                    write_atomically(self._end, json.dumps(content) + "\n", _END, sync=False)
            except OSError as error:
                to_stderr(f"warning: {self._end} cannot be written: {error.strerror}.")
        self.write("end", f"{ended}, exit code {exit_code}")
        with self._lock:
            self._lines.report_missing()

    def _is_ours(self) -> bool:
        """Return whether no later start has begun in the file."""
        with contextlib.suppress(OSError):
            new_bytes = self._lines.path.stat().st_size - self._searched
            if self._starts < 2 and new_bytes > 0:
                with open_regular(self._lines.path) as file:
                    file.seek(self._searched)
                    lines, end, _ = file.read(new_bytes).rpartition(b"\n")
                self._searched += len(lines + end)
                entries = [read_line(line.decode("utf-8", errors="replace")) for line in lines.split(b"\n")]
                self._starts += sum(entry is not None and entry.kind == "start" for entry in entries)
        if self._starts > 1 and self.name:
            self.name = ""
            if self._catches_crashes:
                faulthandler.enable(sys.stderr)
        return self._starts < 2


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
        remove_drafts(run_dir / FOLDER, _END)


def open_rank_log(run_dir: str | Path, rank: int, host: str, *, start_text: str) -> RankLog:
    """Open the log of a rank; call after root's make_folder. start_text: see `introduction`.

    Does not create the folder: on a host that does not see root's, another folder would only mislead.
    """
    try:
        log = FileRankLog(Path(run_dir) / FOLDER, rank, host)
    except OSError as error:
        reason = error.strerror or str(error)
        to_stderr(f"warning: rank {rank} ({host}) keeps no log: {error.filename}: {reason}")
        return RankLog()
    log.write("start", start_text)
    return log


def introduction(rank: int, size: int, launcher: str, host: str, about: str = "", start: str = "") -> str:
    """Return the text of "start", which read_introduction reads.

    about: more facts about this rank. start: the same on all ranks of a start of the run, and another for each start:
    the log of a rank that could not write one may be of an earlier start.
    """
    text = f"rank {rank} of {size}, launcher {launcher}, process {os.getpid()} on {host}"
    return "; ".join(filter(None, [text, about, start and f"start {start}"]))


def launch_log(run_dir: Path) -> Path:
    """Return the file of what the command launch says of its starts, a line each with its time."""
    return run_dir / FOLDER / "launch.log"


def log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def end_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.end.json"


def now() -> str:
    return stamp(datetime.now().astimezone())


def stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Entry:
    """A line of a rank's log, with its continuation lines."""

    time: datetime
    kind: str
    text: str


@dataclass
class Introduction:
    """What the first line of a start says. start: tells starts of a run apart; "" in a log that does not."""

    rank: int
    size: int
    launcher: str
    pid: int
    host: str
    start: str

    def is_with(self, other: Introduction) -> bool:
        """Return whether this is of the same start as another, which may have fewer ranks than the one before."""
        return self.rank < other.size and self.start == other.start


@dataclass
class RankStory(Introduction):
    """end: the content of `rank-N.end.json`, see RankLog.end, with its time as datetime; of its line in the log if only
    that could be written, as on a full disk; None without either. entries: those of the kind info only where they were
    wanted, and the last. shown_step: that of the last line of metrics."""

    entries: list[Entry]
    end: Mapping[str, Any] | None
    shown_step: int | None = None

    @property
    def last_step(self) -> int | None:
        """The last step that its log or its end names."""
        phases = [read_phase(entry.text)[1] for entry in self.find("phase")]
        steps = [*phases, self.shown_step, (self.end or {}).get("step")]
        return max((step for step in steps if step is not None), default=None)

    @property
    def began(self) -> datetime:
        return self.entries[0].time

    def find(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]


def read_stories(run_dir: Path) -> dict[int, RankStory]:
    """Return the stories of the last start's ranks, by rank. Lines cut short by a kill are read as far as possible.

    Raises UserError for a log that cannot be read.
    """
    last_starts = [
        _read_starts(path, lambda text: False, is_last_only=True) for path in (run_dir / FOLDER).glob("rank-*.log")
    ]
    stories = {story.rank: story for starts in last_starts for story in starts}
    if not stories:
        return {}
    # Rank 0 too may have none of this start.
    newest = max(stories.values(), key=lambda story: (story.began, -story.rank))
    return {rank: story for rank, story in sorted(stories.items()) if story.is_with(newest)}


def read_starts_of_root(run_dir: Path, is_wanted: Callable[[str], bool] = lambda text: False) -> list[RankStory]:
    """Return the stories of rank 0, one for each start of the run; `end` is known of the last one only.

    is_wanted: which texts of the kind info they have. Raises UserError for a log that cannot be read.
    """
    path = log_file(run_dir / FOLDER, 0)
    return _read_starts(path, is_wanted) if path.exists() else []


def _read_starts(path: Path, is_wanted: Callable[[str], bool], *, is_last_only: bool = False) -> list[RankStory]:
    starts: list[RankStory] = []
    story: RankStory | None = None  # before the first line of a start nothing is kept
    try:
        for line in each_line(path):
            entry = read_line(line)
            if entry and entry.kind == "start":
                about = read_introduction(entry.text)
                story = RankStory(**vars(about), entries=[entry], end=None) if about else None
                if story:
                    if is_last_only:
                        starts.clear()
                    starts.append(story)
            elif story is None:
                continue
            elif entry is None:  # continues the line above
                last = story.entries[-1]
                story.entries[-1] = replace(last, text=f"{last.text}\n{line}")
            else:
                # Lines of progress are most of a long log. The last entry of a start is kept: it tells when that ended.
                if story.entries[-1].kind == "info" and not is_wanted(story.entries[-1].text):
                    story.entries.pop()
                story.entries.append(entry)
                if entry.kind == "info" and (metrics := _METRICS.match(entry.text)):
                    story.shown_step = int(metrics[1])
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    if starts:
        starts[-1].end = _read_end(path.parent, starts[-1]) or _end_in_log(starts[-1])
    return starts


def _end_in_log(story: RankStory) -> Mapping[str, Any] | None:
    """Return the end that the log itself tells of, if it does."""
    found = [(entry.time, match) for entry in story.find("end") if (match := _ENDED.fullmatch(entry.text))]
    if not found:
        return None
    time, (ended, exit_code) = found[-1][0], found[-1][1].groups()
    phases = [read_phase(entry.text) for entry in story.find("phase")]
    errors = [entry.text.splitlines()[-1].strip() for entry in story.entries if entry.kind in ("failed", "cause")]
    return {
        "rank": story.rank,
        "host": story.host,
        "pid": story.pid,
        "time": time,
        "ended": ended,
        "exit_code": int(exit_code),
        "phase": phases[-1][0] if phases else "start",
        "step": max((step for _, step in phases if step is not None), default=None),
        "error": _OUR_CLASS.sub("", errors[-1]) if errors else None,
    }


def _read_end(folder: Path, story: RankStory) -> Mapping[str, Any] | None:
    """Return the end that the process of a story has written, if it has."""
    try:
        end = parse_json(read_whole(end_file(folder, story.rank)))
        end["time"] = _read_time(end["time"])
        is_complete = end["time"] and isinstance(end["ended"], str) and isinstance(end["exit_code"], int)
        is_complete = is_complete and isinstance(end.get("step"), int | None)
        return end if is_complete and (end["host"], end["pid"]) == (story.host, story.pid) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def read_line(line: str) -> Entry | None:
    """Return the entry that begins in a line of a log; None for a line that continues one."""
    word, kind, text = (*line.split(" ", 2), "", "")[:3]
    time = _read_time(word)
    return Entry(time, kind, text) if time else None


def _read_time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if _TIME.fullmatch(text) else None
    except ValueError:  # such as a month 19
        return None


def read_introduction(text: str) -> Introduction | None:
    """Return what the text of a "start" says; None if a kill has cut it short."""
    match = _INTRODUCTION.match(text)
    if match is None:
        return None
    rank, size, launcher, pid, host = match.groups()
    start = _START.search(text)
    return Introduction(int(rank), int(size), launcher, int(pid), host, start[1] if start else "")


def read_phase(text: str) -> tuple[str, int | None]:
    """Return what a "phase" says: what the rank does now, and after which step, if it says that."""
    phase = _PHASE.match(text)
    return (phase[1], int(phase[2]) if phase[2] else None) if phase else ("", None)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 5`, or `ranks 0-3, 5`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    ranges = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges}"
