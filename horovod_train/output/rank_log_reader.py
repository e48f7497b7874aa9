"""Reads what each rank left: its log, start by start, and how its last start ended. rank_log writes them.

Does not judge what happened; see commands/explain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from horovod_train.errors import UserError
from horovod_train.output.files import lines_in
from horovod_train.output.rank_log import FOLDER, end_file, log_file

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d")
_INTRODUCTION = re.compile(r"rank (\d+) of (\d+), launcher (\S+), process (\d+) on ([^\s;]+)")
_PHASE = re.compile(r"(\w+)(?:.* after step (\d+))?")
TROUBLE = ("slow", "stall", "cause", "lost", "failed", "error")
"""Kinds of entries that tell of trouble."""


@dataclass(frozen=True)
class Entry:
    """A line of a rank's log, with its continuation lines. time: in the format of datetime.fromisoformat."""

    time: str
    kind: str
    text: str


@dataclass(frozen=True)
class Introduction:
    """What the first line of a start says."""

    rank: int
    size: int
    launcher: str
    pid: int
    host: str


@dataclass(frozen=True)
class RankStory(Introduction):
    """end: the content of `rank-N.end.json`, see RankLog.end; None if the process could not write it."""

    entries: tuple[Entry, ...]
    end: Mapping[str, Any] | None

    def find(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]


def read_stories(run_dir: Path) -> dict[int, RankStory]:
    """Return the stories of the last start's ranks, by rank. Lines cut short by a kill are read as far as possible.

    Raises UserError for a log that cannot be read.
    """
    last_starts = [_read_starts(path)[-1:] for path in (run_dir / FOLDER).glob("rank-*.log")]
    stories = {story.rank: story for starts in last_starts for story in starts}
    # An earlier start may have had more ranks.
    size = stories[0].size if 0 in stories else len(stories)
    return {rank: stories[rank] for rank in sorted(stories) if rank < size}


def read_starts_of_root(run_dir: Path) -> list[RankStory]:
    """Return the stories of rank 0, one for each start of the run; `end` is known of the last one only.

    Raises UserError for a log that cannot be read.
    """
    path = log_file(run_dir / FOLDER, 0)
    return _read_starts(path) if path.exists() else []


def read_line(line: str) -> Entry | None:
    """Return the entry that begins in a line of a log; None for a line that continues one."""
    time, kind, text = (*line.split(" ", 2), "", "")[:3]
    return Entry(time, kind, text) if _TIME.fullmatch(time) else None


def read_introduction(text: str) -> Introduction | None:
    """Return what the text of a "start" says; None if a kill has cut it short."""
    match = _INTRODUCTION.match(text)
    if match is None:
        return None
    rank, size, launcher, pid, host = match.groups()
    return Introduction(int(rank), int(size), launcher, int(pid), host)


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


def _read_starts(path: Path) -> list[RankStory]:
    starts: list[list[Entry]] = []
    try:
        lines = lines_in(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    for line in lines:
        entry = read_line(line)
        if entry and entry.kind == "start":
            starts.append([])
        if starts and entry:
            starts[-1].append(entry)
        elif starts:  # continues the line above
            last = starts[-1].pop()
            starts[-1].append(replace(last, text=f"{last.text}\n{line}"))
    stories = [story for story in map(_story, starts) if story is not None]
    if stories:
        stories[-1] = replace(stories[-1], end=_read_end(path.parent, stories[-1]))
    return stories


def _story(entries: Sequence[Entry]) -> RankStory | None:
    introduction = read_introduction(entries[0].text)
    return RankStory(**vars(introduction), entries=tuple(entries), end=None) if introduction else None


def _read_end(folder: Path, story: RankStory) -> Mapping[str, Any] | None:
    """Return the end that the process of a story has written, if it has."""
    try:
        end = json.loads(end_file(folder, story.rank).read_text(encoding="utf-8"))
        datetime.fromisoformat(end["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_complete = {"ended", "exit_code", "host", "pid"} <= end.keys()
    return end if is_complete and (end["host"], end["pid"]) == (story.host, story.pid) else None
