"""For `watch`: a look at a run as a screen, and what is new in it as lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from statistics import fmean

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from horovod_train.commands.watch.follow import Look, RankNow
from horovod_train.output.metrics import Row
from horovod_train.output.rank_log_reader import name_ranks
from horovod_train.output.screen import plain

_BARS = "▁▂▃▄▅▆▇█"
_CELLS = 24
"""Width of a curve, in characters."""
_HIDDEN = ("_share", "own_s_per_step_", "slowest_rank", "s_per_step", "examples_per_s_per_rank")
"""Parts of names of values that the verdict sums up, or that say what another one says."""
_FIRST_ROWS = 10
"""How many lines of metrics a first look tells of."""
_MOST_GROUPS = 12
"""Lines about ranks: those in trouble come first."""


def draw(look: Look) -> RenderableType:
    """Return what a terminal shows."""
    parts: list[RenderableType] = [Text(_title(look), style="bold"), *_progress(look)]
    if look.rows:
        parts.append(_metrics(look))
    if look.verdicts:
        parts.append(Text(look.verdicts[max(look.verdicts)]))
    parts += [Text(line, style="red" if is_trouble else "") for line, is_trouble in _about_ranks(look)]
    return Group(*parts)


def _metrics(look: Look) -> Table:
    """Return the last values of each split, and the whole course of each."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for split in dict.fromkeys(row.split for row in look.rows):
        rows = [row for row in look.rows if row.split == split]
        for name, value in _visible_values(rows[-1]).items():
            course = [row.values.get(name) for row in rows]
            cells = (split, name, _value(value), sparkline([each for each in course if each is not None]))
            table.add_row(*map(plain, cells))
    return table


def news(before: Look | None, now: Look) -> Iterator[str]:
    """Yield a line for each thing that has happened between two looks; before: None at the first."""
    if before is None or (0 in before.ranks, before.is_over) != (0 in now.ranks, now.is_over):
        yield _title(now)
    yield from (_line(row, now) for row in _new_rows(before, now))
    for rank, state in now.ranks.items():
        old = before.ranks.get(rank) if before else None
        if state.trouble and (old is None or old.trouble != state.trouble):
            yield f"rank {rank} ({state.about.host}): {_first_line(state.trouble)}"
        if state.ended and (old is None or not old.ended):
            yield f"rank {rank} ({state.about.host}): {state.ended}"
    if now.silent_s and not (before and before.silent_s):
        yield f"no sign of life for {now.silent_s:.0f} s"


def _new_rows(before: Look | None, now: Look) -> Sequence[Row]:
    if before is None:
        return now.rows[-_FIRST_ROWS:]
    known = len(before.rows)
    if before.rows == now.rows[:known]:
        return now.rows[known:]
    # A resume has removed rows.
    return [row for row in now.rows if row not in before.rows]


def sparkline(values: Sequence[float]) -> str:
    """Return the whole course of values as one line of bars, from the smallest to the largest."""
    if len(values) < 2:
        return ""
    cells = min(_CELLS, len(values))
    means = [fmean(values[n * len(values) // cells : (n + 1) * len(values) // cells]) for n in range(cells)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _title(look: Look) -> str:
    root = look.ranks.get(0)
    if root is None:
        return f"{look.run_dir}: no rank has written its log yet"
    hosts = len({rank.about.host for rank in look.ranks.values()})
    where = f"{root.about.size} rank(s) on {hosts} host(s), launcher {root.about.launcher}"
    if look.is_over:
        return f"{look.run_dir}: over; {where}"
    return f"{look.run_dir}: {where}, for {_clock((_now() - root.began).total_seconds())}"


def _progress(look: Look) -> Iterator[RenderableType]:
    of = "" if look.last_step is None else f" of {look.last_step}"
    epoch = f", epoch {look.rows[-1].epoch}" if look.rows else ""
    left = look.seconds_left
    remaining = f", {_clock(left)} left" if left is not None and not look.is_over else ""
    text = f"step {look.step}{of}{epoch}{remaining}"
    if look.last_step:
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_row(ProgressBar(total=look.last_step, completed=look.step, width=32), plain(text))
        yield row
    else:
        yield Text(text)
    if look.silent_s:
        seconds = "" if look.silent_s == float("inf") else f" for {look.silent_s:.0f} s"
        yield Text(f"no sign of life{seconds}", style="red")


def _about_ranks(look: Look) -> Iterator[tuple[str, bool]]:
    """Yield lines about ranks, those that do the same in one, and whether it is trouble."""
    groups: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
    for rank, now in look.ranks.items():
        trouble = "" if now.ended or now.trouble is None else _first_line(now.trouble)
        groups[_does(now), trouble, bool(trouble)].append(rank)
    in_trouble_first = sorted(groups.items(), key=lambda group: not group[0][2])
    for (does, trouble, is_trouble), ranks in in_trouble_first[:_MOST_GROUPS]:
        hosts = _hosts(look.ranks, ranks)
        yield f"{name_ranks(ranks)} ({hosts}): {does}" + (f"; {trouble}" if trouble else ""), is_trouble
    if len(groups) > _MOST_GROUPS:
        yield f"… and {len(groups) - _MOST_GROUPS} more groups of ranks", False


def _does(now: RankNow) -> str:
    if now.ended:
        return now.ended
    return now.doing if now.step is None else f"{now.doing}, step {now.step} or later"


def _hosts(all_ranks: Mapping[int, RankNow], ranks: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(all_ranks[rank].about.host for rank in ranks))
    return hosts[0] if len(hosts) == 1 else f"{hosts[0]} … {hosts[-1]}"


def _line(row: Row, look: Look) -> str:
    values = "  ".join(f"{name} {_value(value)}" for name, value in _visible_values(row).items())
    verdict = look.verdicts.get(row.step, "") if row.split == "train" else ""
    of = "" if look.last_step is None else f" of {look.last_step}"
    return f"{row.split:<5} step {row.step}{of}  epoch {row.epoch}  {values}" + (f"  {verdict}" if verdict else "")


def _visible_values(row: Row) -> dict[str, float | None]:
    return {name: value for name, value in row.values.items() if not any(part in name for part in _HIDDEN)}


def _value(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=max(0, round(seconds))))


def _now() -> datetime:
    return datetime.now().astimezone()
