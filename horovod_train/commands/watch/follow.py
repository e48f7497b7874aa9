"""For `watch`: reads what a run's files have gained since the last look. Needs no TensorFlow, changes nothing."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from horovod_train.commands.run_selection import require_run
from horovod_train.output.files import lines_in
from horovod_train.output.lease import STALE_S, read_lease
from horovod_train.output.metrics import Row, metrics_in, objects_in
from horovod_train.output.rank_log import FOLDER
from horovod_train.output.rank_log_reader import TROUBLE, Entry, Introduction, read_introduction, read_line, read_phase

_LAST_STEP = re.compile(r"ends at step (\d+)$")
_LOG = re.compile(r"rank-(\d+)\.log")
GONE_AFTER_S = 10.0
"""A run without a lease, whose logs do not say how it ended, is over if they are this old. A run that fails gives its
lease up before its ranks write how they ended.
"""


@dataclass(frozen=True)
class RankNow:
    """What a rank's log says last. began: as the rank's host has it."""

    about: Introduction
    began: datetime
    doing: str = "start"
    step: int | None = None
    """The last that its log names."""
    trouble: str | None = None
    ended: str | None = None


@dataclass(frozen=True)
class Look:
    """A run at one moment."""

    run_dir: str
    ranks: Mapping[int, RankNow]
    """Of the last start, by rank."""
    rows: Sequence[Row]
    """All of metrics.jsonl."""
    verdicts: Mapping[int, str]
    """What limited training, by the step at which it was said."""
    last_step: int | None
    """Where the run ends."""
    silent_s: float | None
    """For how long a run on another host has shown no sign of life; None if it has lately, or its process is here."""
    is_over: bool

    @property
    def step(self) -> int:
        named = [self.ranks[0].step] if 0 in self.ranks else []
        return max((step for step in [*named, *(row.step for row in self.rows[-1:])] if step is not None), default=0)

    @property
    def seconds_left(self) -> float | None:
        """By the speed of the newest lines of metrics, without evaluations and saves."""
        speeds = [row.values.get("s_per_step") for row in self.rows[-20:] if row.split == "train"]
        known = [speed for speed in speeds if speed is not None]
        if self.last_step is None or not known:
            return None
        return (self.last_step - self.step) * sum(known) / len(known)


@dataclass
class _Tail:
    """Reads a file that grows, or that another may replace."""

    path: Path
    _read_to: int = 0
    _inode: int | None = None

    def new_lines(self) -> tuple[bool, list[str]]:
        """Return whether the file was replaced since the last call, and its complete new lines."""
        try:
            with self.path.open("rb") as file:
                about = os.fstat(file.fileno())
                is_replaced = about.st_ino != self._inode or about.st_size < self._read_to
                if is_replaced:
                    self._inode, self._read_to = about.st_ino, 0
                file.seek(self._read_to)
                lines, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            is_replaced, self._inode, self._read_to = self._inode is not None, None, 0
            return is_replaced, []
        self._read_to += len(lines) + len(newline)
        return is_replaced, lines_in(lines + newline)


@dataclass
class Follower:
    """Looks at a run directory again and again. Raises UserError if no run has written to it."""

    run_dir: Path
    last: Look = field(init=False)
    """What the last `look` has found."""
    _tails: dict[str, _Tail] = field(default_factory=dict)
    _ranks: dict[int, RankNow] = field(default_factory=dict)
    _rows: list[Row] = field(default_factory=list)
    _verdicts: dict[int, str] = field(default_factory=dict)
    _last_step: int | None = None
    _refreshed: tuple[float, float] | None = None
    """When the lease was refreshed, by the clock of its host; and when this process saw that, by its clock."""

    def __post_init__(self) -> None:
        require_run(self.run_dir)

    def look(self) -> Look:
        silent_s = self._silent_s()  # before the logs, which may say meanwhile that the run has ended
        for path in self._logs():
            self._read_log(path)
        self._read_rows()
        size = self._ranks[0].about.size if 0 in self._ranks else len(self._ranks)
        ranks = {rank: now for rank, now in sorted(self._ranks.items()) if rank < size}
        has_ended = 0 in ranks and ranks[0].ended is not None
        self.last = Look(
            run_dir=str(self.run_dir),
            ranks=ranks,
            rows=tuple(self._rows),
            verdicts=dict(self._verdicts),
            last_step=self._last_step,
            silent_s=None if has_ended else silent_s,
            is_over=has_ended or (silent_s is not None and silent_s > STALE_S),
        )
        return self.last

    def _logs(self) -> list[Path]:
        return sorted((self.run_dir / FOLDER).glob("rank-*.log"))

    def _new(self, path: Path) -> tuple[bool, list[str]]:
        return self._tails.setdefault(path.name, _Tail(path)).new_lines()

    def _read_log(self, path: Path) -> None:
        file_name = _LOG.fullmatch(path.name)
        if file_name is None:
            return
        _, lines = self._new(path)
        rank = int(file_name[1])
        for line in lines:
            entry = read_line(line)
            if entry is None:
                continue
            now = self._ranks.get(rank)
            if entry.kind == "start" and (about := read_introduction(entry.text)):
                self._ranks[rank] = RankNow(about, datetime.fromisoformat(entry.time))
            elif now and (last_step := _LAST_STEP.search(entry.text)) and entry.kind == "info":
                self._last_step = int(last_step[1])
            elif now:
                self._ranks[rank] = _after(now, entry)

    def _read_rows(self) -> None:
        is_replaced, lines = self._new(self.run_dir / "metrics.jsonl")
        if is_replaced:
            self._rows.clear()
        self._rows.extend(metrics_in(lines))
        is_replaced, lines = self._new(self.run_dir / "times.jsonl")
        if is_replaced:
            self._verdicts.clear()
        self._verdicts |= {
            row["step"]: row["verdict"] for row in objects_in(lines) if {"step", "verdict"} <= row.keys()
        }

    def _silent_s(self) -> float | None:
        """Return for how long the lease of the directory has not been refreshed; infinity if its process has ended."""
        try:
            _, refreshed, runs_here = read_lease(self.run_dir)
        except OSError:
            last_written = max((path.stat().st_mtime for path in self._logs()), default=0.0)
            return float("inf") if time.time() - last_written > GONE_AFTER_S else None
        if runs_here is not None:
            return None if runs_here else float("inf")
        if self._refreshed is None or self._refreshed[0] != refreshed:
            self._refreshed = (refreshed, time.monotonic())
        silent_s = time.monotonic() - self._refreshed[1]
        return silent_s if silent_s > STALE_S / 2 else None


def _after(now: RankNow, entry: Entry) -> RankNow:
    """Return a rank as it is after an entry of its log."""
    if entry.kind == "phase":
        doing, step = read_phase(entry.text)
        return replace(now, doing=doing, step=now.step if step is None else step)
    if entry.kind in TROUBLE:
        return replace(now, trouble=entry.text)
    return replace(now, ended=entry.text) if entry.kind == "end" else now
