"""Reads what each rank left of its last start: its log from there on, and its end. rank_log writes them.

Does not judge what happened; see commands/explain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from horovod_train.output.rank_log import FOLDER, end_file

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d")
_INTRODUCTION = re.compile(r"rank (\d+) of (\d+), launcher (\S+), process (\d+) on ([^\s;]+)")


@dataclass(frozen=True)
class Entry:
    """A line of a rank's log, with its continuation lines. time: in the format of datetime.fromisoformat."""

    time: str
    kind: str
    text: str


@dataclass(frozen=True)
class RankStory:
    """end: the content of `rank-N.end.json`, see RankLog.end; None if the process could not write it."""

    rank: int
    size: int
    launcher: str
    pid: int
    host: str
    entries: tuple[Entry, ...]
    end: Mapping[str, Any] | None

    def find(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]


def read_stories(run_dir: Path) -> dict[int, RankStory]:
    """Return the stories of the last start's ranks, by rank. Lines cut short by a kill are read as far as possible."""
    found = [_read_story(path) for path in (run_dir / FOLDER).glob("rank-*.log")]
    stories = {story.rank: story for story in found if story is not None}
    # An earlier start may have had more ranks.
    size = stories[0].size if 0 in stories else len(stories)
    return {rank: stories[rank] for rank in sorted(stories) if rank < size}


def _read_story(path: Path) -> RankStory | None:
    entries: list[Entry] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        time, kind, text = (*line.split(" ", 2), "", "")[:3]
        if not _TIME.fullmatch(time):  # continues the line above
            entries[-1:] = [replace(entry, text=f"{entry.text}\n{line}") for entry in entries[-1:]]
        elif kind == "start":
            entries = [Entry(time, kind, text)]
        else:
            entries.append(Entry(time, kind, text))
    said = _INTRODUCTION.match(entries[0].text) if entries else None
    if said is None:
        return None
    rank, size, launcher, pid, host = said.groups()
    end = _read_end(end_file(path.parent, int(rank)))
    return RankStory(int(rank), int(size), launcher, int(pid), host, tuple(entries), end)


def _read_end(path: Path) -> Mapping[str, Any] | None:
    try:
        end = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return end if isinstance(end, dict) and {"ended", "exit_code", "time"} <= end.keys() else None
