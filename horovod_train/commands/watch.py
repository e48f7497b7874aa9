"""The command `watch`: a run while it trains, from the files in its directory, on any host that sees them.

python -m horovod_train.main watch runs/digits_convnet

In a terminal one screen that is drawn again, elsewhere a line for each thing that is new. Ends with the run. Exit code
0 if the run has finished or still trains, 1 if it has ended otherwise, 2 for a folder that is no run directory. Reads
what the files have gained since the last look; needs no TensorFlow, and changes nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import BinaryIO, TypeVar

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from horovod_train.commands.cli import open_screen, require_run
from horovod_train.commands.explain import explain, read_launched, starts_again, was_launched
from horovod_train.errors import UserError
from horovod_train.output.console import Screen, can_redraw, has_reader, plain
from horovod_train.output.files import open_regular
from horovod_train.output.lease import STALE_S, read_lease
from horovod_train.output.metrics import FIGURES, MOST_DRAWN, Row, metrics_in, objects_in
from horovod_train.output.rank_log import (
    FOLDER,
    TROUBLE,
    Entry,
    Introduction,
    name_ranks,
    read_introduction,
    read_line,
    read_phase,
)

GONE_AFTER_S = 10.0
"""A run without a lease, whose logs do not say how it ended, is over if they are this old. A run that fails gives its
lease up before its ranks write how they ended.
"""
LAUNCH_SAYS_WITHIN_S = 60.0
"""For how long after the last line of the ranks' logs launch may wait for ranks to end, before it says what follows."""
_LAST_STEP = re.compile(r"ends at step (\d{1,18})$")
_LOG = re.compile(r"rank-(\d+)\.log")
_BARS = "▁▂▃▄▅▆▇█"
_CELLS = 24
"""Width of a curve, in characters."""
_FIRST_ROWS = 10
"""How many lines of metrics a first look tells of."""
_MOST_ROWS = 1000
"""How many lines of a file are kept from one look to the next: memory does not grow with the run."""
_MOST_MEANS = 2048
"""How many points of a course are kept; even."""
_MOST_GROUPS = 12
"""Lines about ranks: those in trouble come first."""

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the output_dir of a run")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="pause between looks; default: 2")
    parser.add_argument("--once", action="store_true", help="look once, and end")


def run(arguments: argparse.Namespace) -> int:
    if not 0.1 <= arguments.every <= 3600:
        raise UserError(f"--every: expected 0.1 to 3600 seconds; received {arguments.every:g}.")
    follower, screen = Follower(Path(arguments.run_dir)), open_screen()
    try:
        if arguments.once:
            screen.print(draw(follower.look()))
        elif can_redraw(sys.stdout):
            # Live cuts lines off at the width of the terminal, so that they must be folded.
            with Live(console=Screen(highlight=False), auto_refresh=False) as live:
                for look in follower.looks(arguments.every):
                    live.update(draw(look), refresh=True)
        else:
            before = None
            for look in follower.looks(arguments.every):
                for line in news(before, look):
                    screen.print(line, markup=False)
                if not has_reader():
                    return 0
                before = look
    except KeyboardInterrupt:  # how one stops looking
        return 0
    if not follower.last.is_over:
        return 0
    explanation = explain(Path(arguments.run_dir), watch_s=0.0)
    screen.print(*explanation.lines(), sep="\n", markup=False)
    return 0 if explanation.state == "finished" else 1


@dataclass(frozen=True)
class RankNow:
    """What a rank's log says last. began: as the rank's host has it."""

    about: Introduction
    began: datetime
    doing: str = "start"
    step: int | None = None
    """The last that its log names."""
    trouble: str = ""
    is_in_traceback: bool = False
    """Whether the lines that follow in its log are of a traceback."""
    ended: str | None = None


@dataclass(frozen=True)
class Look:
    """A run at one moment."""

    run_dir: str
    ranks: Mapping[int, RankNow]
    """Of the last start, by rank."""
    rows: Sequence[Row]
    """The newest of metrics.jsonl."""
    rows_before: int
    """How many lines of metrics.jsonl come before them."""
    last_rows: Mapping[str, Row]
    """The last of each split."""
    courses: Mapping[tuple[str, str], Sequence[float]]
    """Of each value of a split that is shown."""
    verdicts: Mapping[int, str]
    """What limited training, by the step at which it was said; the newest."""
    last_step: int | None
    """Where the run ends."""
    silent_s: float | None
    """For how long a run on another host has shown no sign of life; None if it has lately, or its process is here."""
    is_over: bool
    is_starting: bool = False
    """Whether launch starts the ranks again, of which there is no log yet."""
    has_lines: bool = False
    """Whether ranks have written to their logs."""

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
class Course:
    """The finite values of a metric, without huge ones; those of a long run as means of equally many of them."""

    means: list[float] = field(default_factory=list)
    _values_a_mean: int = 1
    _waiting: int = 0
    """How many values belong to the next mean."""
    _sum: float = 0.0
    """Of them."""

    def add(self, value: float | None) -> None:
        if value is None or abs(value) >= MOST_DRAWN:
            return
        self._waiting, self._sum = self._waiting + 1, self._sum + value
        if self._waiting == self._values_a_mean:
            self.means.append(self._sum / self._waiting)
            self._waiting, self._sum = 0, 0.0
        if len(self.means) == _MOST_MEANS:
            self.means = [fmean(pair) for pair in zip(self.means[::2], self.means[1::2], strict=True)]
            self._values_a_mean *= 2


@dataclass
class _Tail:
    """Reads a file that grows, or that another may replace."""

    path: Path
    _read_to: int = 0
    _inode: int | None = None

    @property
    def has_lines(self) -> bool:
        """Whether it has read any."""
        return self._read_to > 0

    def new_lines(self) -> tuple[bool, Iterator[str]]:
        """Return whether the file was replaced since the last call, and its complete new lines.

        The lines are read as they are taken, so that they are not all in memory. Raises PermissionError.
        """
        try:
            file = open_regular(self.path)
            about = os.fstat(file.fileno())
        except PermissionError:  # nor may later looks
            raise
        except OSError:
            is_replaced, self._inode, self._read_to = self._inode is not None, None, 0
            return is_replaced, iter(())
        is_replaced = about.st_ino != self._inode or about.st_size < self._read_to
        if is_replaced:
            self._inode, self._read_to = about.st_ino, 0
        return is_replaced, self._read(file)

    def _read(self, file: BinaryIO) -> Iterator[str]:
        with file, suppress(OSError):  # then the rest is read at the next call
            file.seek(self._read_to)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read_to += len(line)
                yield line[:-1].decode("utf-8", errors="replace")


@dataclass
class Follower:
    """Looks at a run directory again and again. Raises UserError if no run has written to it; OSError if unreadable."""

    run_dir: Path
    last: Look = field(init=False)
    """What the last `look` has found."""
    _tails: dict[str, _Tail] = field(default_factory=dict)
    _ranks: dict[int, RankNow] = field(default_factory=dict)
    _rows: Sequence[Row] = ()
    _rows_read: int = 0
    _last_rows: dict[str, Row] = field(default_factory=dict)
    _courses: dict[tuple[str, str], Course] = field(default_factory=dict)
    _verdicts: Sequence[tuple[int, str]] = ()
    _last_step: int | None = None
    _seen: dict[str, tuple[tuple[float, ...], float]] = field(default_factory=dict)
    """When files were written, by the clock that stamps them; and when this process first saw that, by its clock."""

    def __post_init__(self) -> None:
        require_run(self.run_dir)

    def looks(self, every_s: float) -> Iterator[Look]:
        """Look until the run is over."""
        while not self.look().is_over:
            yield self.last
            time.sleep(every_s)
        yield self.last

    def look(self) -> Look:
        silent_s = self._silent_s()  # before the logs, which may say meanwhile that the run has ended
        logs = self._logs()
        for rank, path in logs.items():
            self._read_log(rank, path)
        self._read_rows()
        newest = _newest(self._ranks)
        ranks = {rank: now for rank, now in sorted(self._ranks.items()) if newest and now.about.is_with(newest.about)}
        root = ranks.get(0)
        has_ended = root is not None and root.ended is not None
        launched = read_launched(self.run_dir)  # after the logs: ranks that it started since then are no end
        is_starting = starts_again(launched, root.began if root else None)
        is_over = has_ended or (silent_s is not None and silent_s > STALE_S)
        self.last = Look(
            run_dir=str(self.run_dir),
            ranks=ranks,
            rows=self._rows,
            rows_before=self._rows_read - len(self._rows),
            last_rows=dict(self._last_rows),
            courses={name: tuple(course.means) for name, course in self._courses.items()},
            verdicts=dict(self._verdicts),
            last_step=self._last_step,
            silent_s=None if has_ended or is_starting else silent_s,
            is_over=is_over and not is_starting and not (root and self._may_be_started_again(root, launched)),
            is_starting=is_starting,
            has_lines=any(self._tails[path.name].has_lines for path in logs.values()),
        )
        return self.last

    def _logs(self) -> dict[int, Path]:
        """Return the logs by rank."""
        paths = (self.run_dir / FOLDER).glob("rank-*.log")
        return {int(name[1]): path for path in paths if (name := _LOG.fullmatch(path.name))}

    def _new(self, path: Path) -> tuple[bool, Iterator[str]]:
        return self._tails.setdefault(path.name, _Tail(path)).new_lines()

    def _read_log(self, rank: int, path: Path) -> None:
        for line in self._new(path)[1]:
            entry, now = read_line(line), self._ranks.get(rank)
            if entry is None:
                # Later lines of an entry have four blanks before them. The last that has no more is the error.
                if now and now.is_in_traceback and re.match(r" {4}\S", line):
                    self._ranks[rank] = replace(now, trouble=line.strip())
                continue
            if entry.kind == "start" and (about := read_introduction(entry.text)):
                self._ranks[rank] = RankNow(about, entry.time)
            elif now and (last_step := _LAST_STEP.search(entry.text)) and entry.kind == "info":
                self._last_step = int(last_step[1])
            elif now:
                self._ranks[rank] = _after(now, entry)

    def _read_rows(self) -> None:
        is_replaced, lines = self._new(self.run_dir / "metrics.jsonl")
        if is_replaced:
            self._rows_read, self._last_rows, self._courses = 0, {}, {}
        self._rows = _newest_of(self._rows, map(self._noted, metrics_in(lines)), is_replaced)
        is_replaced, lines = self._new(self.run_dir / "times.jsonl")
        said = (
            (row["step"], str(row["verdict"]))
            for row in objects_in(deque(lines, _MOST_ROWS) if is_replaced else lines)
            if isinstance(row.get("step"), int) and "verdict" in row
        )
        self._verdicts = _newest_of(self._verdicts, said, is_replaced)

    def _noted(self, row: Row) -> Row:
        self._rows_read += 1
        self._last_rows[row.split] = row
        for name, value in _visible_values(row).items():
            self._courses.setdefault((row.split, name), Course()).add(value)
        return row

    def _silent_s(self) -> float | None:
        """Return for how long the lease of the directory has not been refreshed; infinity if its process has ended."""
        try:
            _, refreshed, runs_here = read_lease(self.run_dir)
        except OSError:
            return float("inf") if self._unwritten_s() > GONE_AFTER_S else None
        if runs_here is not None:
            return None if runs_here else float("inf")
        silent_s = self._watched_s("lease", refreshed)
        return silent_s if silent_s > STALE_S / 2 else None

    def _unwritten_s(self) -> float:
        """Return how long ago a rank has written its log: at least as long as this process has seen no change."""
        written = tuple(path.stat().st_mtime for path in self._logs().values())
        return max(time.time() - max(written, default=0.0), self._watched_s("logs", *written))

    def _watched_s(self, name: str, *written: float) -> float:
        """Return for how long this process has known that files were last written at those times."""
        if name not in self._seen or self._seen[name][0] != written:
            self._seen[name] = written, time.monotonic()
        return time.monotonic() - self._seen[name][1]

    def _may_be_started_again(self, root: RankNow, launched: Sequence[Entry]) -> bool:
        """Return whether launch, which has started the ranks, has yet to say what follows their end."""
        if (root.ended or "").startswith("done"):
            return False
        # It has mpirun start ranks of one host.
        if root.about.launcher != "launch" and not was_launched(self.run_dir, launched):
            return False
        has_said = any(entry.time > root.began for entry in launched)
        return not has_said and self._unwritten_s() <= LAUNCH_SAYS_WITHIN_S


def _newest_of(known: Sequence[T], new: Iterable[T], is_replaced: bool) -> Sequence[T]:
    """Return the newest of what is known, and all that is new; only the newest if the file was replaced."""
    return tuple(deque(new, _MOST_ROWS)) if is_replaced else (*known[-_MOST_ROWS:], *new)


def _newest(ranks: Mapping[int, RankNow]) -> RankNow | None:
    """Return the rank whose log began last, which is one of the last start; None without logs."""
    return max(ranks.values(), key=lambda now: (now.began, -now.about.rank), default=None)


def _after(now: RankNow, entry: Entry) -> RankNow:
    """Return a rank as it is after an entry of its log."""
    if entry.kind == "phase":
        doing, step = read_phase(entry.text)
        return replace(now, doing=doing, step=now.step if step is None else step)
    now = replace(now, is_in_traceback=False)
    if entry.kind in TROUBLE:
        return replace(now, trouble=entry.text, is_in_traceback=entry.text.startswith("Traceback "))
    return replace(now, ended=entry.text) if entry.kind == "end" else now


def draw(look: Look) -> RenderableType:
    """Return what a terminal shows."""
    parts: list[RenderableType] = [Text(_title(look), style="bold"), *_progress(look)]
    if look.rows:
        parts.append(_metrics(look))
    if look.verdicts:
        parts.append(Text(look.verdicts[max(look.verdicts)]))
    parts += [Text(line, style="red" if is_trouble else "") for line, is_trouble in _about_ranks(look)]
    return Group(*parts)


def _title(look: Look) -> str:
    rank = _newest(look.ranks)
    if rank is None:
        about = "no log of a rank begins with a start, as after a rotation"
        return f"{look.run_dir}: {about if look.has_lines else 'no rank has written its log yet'}"
    hosts = len({each.about.host for each in look.ranks.values()})
    where = f"{rank.about.size} rank(s) on {hosts} host(s), launcher {rank.about.launcher}"
    if look.is_over:
        return f"{look.run_dir}: over; {where}"
    if look.is_starting:
        return f"{look.run_dir}: launch starts it again; before: {where}"
    return f"{look.run_dir}: {where}, for {_clock((datetime.now().astimezone() - rank.began).total_seconds())}"


def _progress(look: Look) -> Iterator[RenderableType]:
    of = "" if look.last_step is None else f" of {look.last_step}"
    epoch = f", epoch {look.rows[-1].epoch}" if look.rows else ""
    left = look.seconds_left
    remaining = f", {_clock(left)} left" if left is not None and not look.is_over else ""
    text = f"step {look.step}{of}{epoch}{remaining}"
    if look.last_step:
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_column()
        row.add_column(overflow="fold")
        row.add_row(ProgressBar(total=look.last_step, completed=look.step, width=32), plain(text))
        yield row
    else:
        yield Text(text)
    if look.silent_s:
        yield Text(_silence(look.silent_s), style="red")


def _silence(silent_s: float) -> str:
    """Return the line about it; infinity: the process has gone."""
    return "no sign of life" if silent_s == float("inf") else f"no sign of life for {silent_s:.0f} s"


def _metrics(look: Look) -> Table:
    """Return the last values of each split, and the whole course of each."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(4):
        table.add_column(overflow="fold")
    for split, row in look.last_rows.items():
        for name, value in _visible_values(row).items():
            cells = (split, name, _value(value), sparkline(look.courses[split, name]))
            table.add_row(*map(plain, cells))
    return table


def sparkline(values: Sequence[float]) -> str:
    """Return the whole course of values as one line of bars, from the smallest to the largest."""
    if len(values) < 2:
        return ""
    cells = min(_CELLS, len(values))
    means = [fmean(values[n * len(values) // cells : (n + 1) * len(values) // cells]) for n in range(cells)]
    low, high = min(means), max(means)
    span = math.inf if math.isclose(low, high) else high - low  # means of equal values differ by rounding
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)


def _about_ranks(look: Look) -> Iterator[tuple[str, bool]]:
    """Yield lines about ranks, those that do the same in one, and whether it is trouble."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, now in look.ranks.items():
        step = "" if now.step is None else f", step {now.step} or later"
        groups[now.ended or f"{now.doing}{step}", "" if now.ended else now.trouble].append(rank)
    in_trouble_first = sorted(groups.items(), key=lambda group: not group[0][1])
    for (does, trouble), ranks in in_trouble_first[:_MOST_GROUPS]:
        hosts = list(dict.fromkeys(look.ranks[rank].about.host for rank in ranks))
        where = hosts[0] if len(hosts) == 1 else f"{hosts[0]} … {hosts[-1]}"
        yield f"{name_ranks(ranks)} ({where}): {does}" + (f"; {trouble}" if trouble else ""), bool(trouble)
    if len(groups) > _MOST_GROUPS:
        yield f"… and {len(groups) - _MOST_GROUPS} more groups of ranks", False


def news(before: Look | None, now: Look) -> Iterator[str]:
    """Yield a line for each thing that has happened between two looks; before: None at the first."""
    if before is None or _stage(before) != _stage(now):
        yield _title(now)
    yield from (_line(row, now) for row in _new_rows(before, now))
    for rank, state in now.ranks.items():
        old = before.ranks.get(rank) if before else None
        if state.trouble and (old is None or old.trouble != state.trouble):
            yield f"rank {rank} ({state.about.host}): {state.trouble}"
        if state.ended and (old is None or not old.ended):
            yield f"rank {rank} ({state.about.host}): {state.ended}"
    if now.silent_s and not (before and before.silent_s):
        yield _silence(now.silent_s)


def _stage(look: Look) -> tuple[bool, bool, bool]:
    return bool(look.ranks), look.is_starting, look.is_over


def _new_rows(before: Look | None, now: Look) -> Sequence[Row]:
    if before is None:
        return now.rows[-_FIRST_ROWS:]
    # A resume removes the last rows, and writes others.
    first = max(before.rows_before, now.rows_before)
    known, rows = (look.rows[first - look.rows_before :] for look in (before, now))
    changed = (at for at, (old, new) in enumerate(zip(known, rows, strict=False)) if old != new)
    return rows[next(changed, len(known)) :]


def _line(row: Row, look: Look) -> str:
    values = "  ".join(f"{name} {_value(value)}" for name, value in _visible_values(row).items())
    verdict = look.verdicts.get(row.step, "") if row.split == "train" else ""
    of = "" if look.last_step is None else f" of {look.last_step}"
    return f"{row.split:<5} step {row.step}{of}  epoch {row.epoch}  {values}" + (f"  {verdict}" if verdict else "")


def _visible_values(row: Row) -> dict[str, float | None]:
    return {name: value for name, value in row.values.items() if name not in FIGURES or FIGURES[name].is_brief}


def _value(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=max(0, round(seconds))))
