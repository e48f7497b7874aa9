"""The command `report`: one page of what runs were, to read in a browser or to send.

python -m horovod_train.main report runs/a runs/b --out report.html

The page holds curves, starts and settings of one run, or of several side by side. It loads nothing from a server. First
what a run was is read from the files in its directory; then charts and timelines are drawn as SVG, by matplotlib, in
colours that the page sets. Needs no TensorFlow.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from horovod_train.commands.cli import check_out, write_out
from horovod_train.commands.explain import Explanation, explain, settings_of
from horovod_train.config.loader import by_key
from horovod_train.config.registry import import_extra
from horovod_train.data.audit import FOLDER, audit
from horovod_train.errors import UserError
from horovod_train.output.console import to_stdout
from horovod_train.output.files import Artifact, begins, each_line, read_json
from horovod_train.output.metrics import FIGURES, MOST_DRAWN, Row, metrics_in
from horovod_train.output.rank_log import TROUBLE, RankStory, read_phase, read_starts_of_root, stamp
from horovod_train.output.tensorboard import Costs, find_profiles, read_profiles
from horovod_train.shown_text import printable, without_secrets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="the output_dir of a run")
    parser.add_argument(
        "--out", default="report.html", metavar="FILE.html", help="the page to write; default: %(default)s"
    )


def run(arguments: argparse.Namespace) -> int:
    out = Path(arguments.out)
    if out.suffix != ".html":
        raise UserError(f"--out: expected a name that ends in .html; received {out}.")
    check_out("--out", arguments.out, _PAGE)
    page = build_page([read_run(Path(run_dir)) for run_dir in arguments.run_dirs])
    write_out("--out", arguments.out, page, _PAGE)
    to_stdout(f"{out}: {len(page) / 1e6:.1f} MB")
    return 0


# --- what a run was ---------------------------------------------------------------------------------------------

_RESUMED = re.compile(r"resumed from .+ at step (\d{1,18})$")
_CODE = re.compile(r"code: (.+)")
_TRAINS = "ends at step "
_MOST_AUDITED = 50_000_000
"""Bytes of an audit; larger ones take minutes to read."""
_REMARKED = (*TROUBLE, "warning")


class Phase(NamedTuple):
    """What root was doing, and when, in seconds since the first start of the run."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Start:
    """One start of a run, as root's log tells it. Times: seconds since the first start of the run."""

    story: RankStory
    from_step: int
    last_step: int
    trained: bool
    """Whether it came as far as training, before which it writes no metrics and removes none."""
    begin: float
    end: float
    phases: tuple[Phase, ...]
    code: str
    """The commit that it ran; empty outside a repository."""
    ended: str
    remarks: tuple[str, ...]

    def seconds_in(self, phase: str) -> float:
        return sum(each.end - each.begin for each in self.phases if each.name == phase)


@dataclass(frozen=True)
class Run:
    name: str
    explanation: Explanation
    settings: Mapping[str, Any]
    """`section.key` → value, of the newest start."""
    summary: Mapping[str, Any]
    starts: Sequence[Start]
    rows: Sequence[Row]
    """Of metrics.jsonl; seconds: since the first start of the run."""
    audit: str
    """Whether each record was read once an epoch, in a sentence."""
    profiles: Sequence[Costs]

    @property
    def metrics(self) -> list[str]:
        """The names of all values in the rows, in the order in which they appear."""
        return list(dict.fromkeys(name for row in self.rows for name in row.values))


def read_run(run_dir: Path) -> Run:
    """Raises UserError if no run has written to the directory, or its files cannot be read."""
    explanation = explain(run_dir)
    try:
        starts = list(_starts(read_starts_of_root(run_dir, _is_read)))
        rows = list(_rows(run_dir / "metrics.jsonl", starts))
        starts = list(_with_steps_of(rows, starts))
    except (OSError, ValueError) as error:
        raise UserError(f"{run_dir}: cannot be read: {error}.") from error
    by_name = dict(by_key(settings_of(run_dir)))
    summary = read_json(run_dir / "summary.json")
    profiles = read_profiles(find_profiles(run_dir))
    name = os.fsencode(run_dir).decode(errors="replace")
    return Run(name, explanation, by_name, summary, starts, rows, _audit(run_dir), profiles)


def _audit(run_dir: Path) -> str:
    if not (run_dir / FOLDER).exists():
        return "none; data.audit: true writes one"
    stored = sum(path.stat().st_size for path in (run_dir / FOLDER).glob("*.jsonl"))
    if stored > _MOST_AUDITED:
        return f"not read, because it has {stored / 1e9:.1f} GB: check-data --audit {run_dir}"
    try:
        epochs = audit(str(run_dir))
    except UserError as error:
        return str(error)
    wrong = [
        f"epoch {epoch.epoch}: {len(epoch.missing)} missing, {len(epoch.twice)} twice"
        for epoch in epochs
        if epoch.missing or epoch.twice
    ]
    complete = sum(epoch.is_whole for epoch in epochs)
    skipped = len({record for epoch in epochs for record in epoch.skipped})
    left_out = f"; {skipped} records could not be used and were skipped" * bool(skipped)
    right = f"every record once in {complete} whole epoch(s), none twice in {len(epochs)} begun"
    return ("; ".join(wrong) or right) + left_out


def _is_read(info: str) -> bool:
    """Return whether `_starts` reads such a line of a log."""
    return info.startswith(_TRAINS) or bool(_RESUMED.match(info) or _CODE.match(info))


def _starts(stories: Sequence[RankStory]) -> Iterator[Start]:
    entries = [entry for story in stories for entry in story.entries]
    # A clock that has been set back, or that of another host, may be behind that of the line before.
    passed_s = (max(0.0, (later.time - earlier.time).total_seconds()) for earlier, later in pairwise(entries))
    all_times = accumulate(passed_s, initial=0.0)
    for story in stories:
        times = list(islice(all_times, len(story.entries)))
        infos = [entry.text for entry in story.find("info")]
        resumed = [_RESUMED.match(text) for text in infos]
        from_step = max((int(step[1]) for step in resumed if step), default=0)
        yield Start(
            story=story,
            from_step=from_step,
            last_step=max(from_step, story.last_step or 0),
            trained=any(text.startswith(_TRAINS) for text in infos),
            begin=times[0],
            end=times[-1],
            phases=tuple(_phases(story, times)),
            code=next((code[1] for code in map(_CODE.match, infos) if code), ""),
            ended=next((entry.text for entry in story.find("end")), "its log ends without a word"),
            remarks=tuple(f"{stamp(entry.time)} {entry.text}" for entry in story.entries if entry.kind in _REMARKED),
        )


def _with_steps_of(rows: Sequence[Row], starts: Sequence[Start]) -> Iterator[Start]:
    """Yield the starts, of which the last that trained has come to the last row: a resume removes those after it."""
    last = max((number for number, start in enumerate(starts) if start.trained), default=None)
    reached = max((row.step for row in rows), default=0)
    for number, start in enumerate(starts):
        yield dataclasses.replace(start, last_step=max(start.last_step, reached)) if number == last else start


def _phases(story: RankStory, times: Sequence[float]) -> Iterator[Phase]:
    """Yield the phases of a start. The first is "start"; one ends where the next begins."""
    name, begin = "start", times[0]
    for entry, time in zip(story.entries, times, strict=True):
        if entry.kind == "phase":
            yield Phase(name, begin, time)
            name, begin = read_phase(entry.text)[0], time
    yield Phase(name, begin, times[-1])


def _rows(path: Path, starts: Sequence[Start]) -> Iterator[Row]:
    """Yield the lines of metrics.jsonl; the last may be cut short.

    A resume removes the lines after its step, so a line is of the last start that trained from before its step.
    """
    if not path.exists():
        return
    trained_from = [(start.from_step, start.begin) for start in starts if start.trained] or [(0, 0.0)]
    current, seconds = 0, 0.0
    for row in metrics_in(each_line(path)):
        # A start counts seconds from 0: at the step of its resume it may evaluate what a stop had interrupted.
        made_up = row.step if row.seconds < seconds else row.step - 1
        current = max(number for number, (step, _) in enumerate(trained_from) if number <= current or step <= made_up)
        seconds = row.seconds
        yield row._replace(seconds=trained_from[current][1] + seconds)


# --- its curves -------------------------------------------------------------------------------------------------

MOST_POINTS = 1000
"""Of one curve. A longer one is shown by the smallest and the largest value of each of half as many stretches.

A timeline has as many stretches; see `thin_phases`.
"""

_CURVES = 6
_INK, _GRID = "#010101", "#020202"
_VARIABLES = {_INK: "currentColor", _GRID: "var(--grid)"}
_VARIABLES |= {f"#0304{number:02x}": f"var(--curve-{number})" for number in range(_CURVES)}
_PHASES = ("train", "evaluate", "save", "compile", "start")
"""In the order of the legend. What is none of them, such as reading an index, belongs to the start."""

_FIGURES: dict[str, Any] = {
    "text.parse_math": False,  # a metric may be named with two $
    "svg.fonttype": "none",  # text stays text, for search and screen readers
    "svg.hashsalt": "report",
    "path.simplify": False,  # each point is a row of metrics.jsonl
    "font.size": 9,
    "lines.markersize": 3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
    "grid.color": _GRID,
}


class Curve(NamedTuple):
    """run: its place in the report. x, y: of equal length; y is NaN where a value was not finite, or too large."""

    run: int
    split: str
    x: list[float]
    y: list[float]


class Chart(NamedTuple):
    name: str
    x_label: str
    y_label: str
    curves: list[Curve]


def build_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return a chart by step and one by time for each metric of the model, and one by step for each other value."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    unit, seconds = time_unit(max((row.seconds for run in runs for row in run.rows), default=0.0))
    by_time = f"{unit} since the first start"
    charts = []
    for name in sorted(names, key=lambda name: name in FIGURES):  # the model's first; else in their order
        axis = FIGURES[name].unit if name in FIGURES else name
        charts.append(Chart(f"{name} by step", "step", axis, list(_curves_of(runs, name, None))))
        if name not in FIGURES:
            charts.append(Chart(f"{name} by time", by_time, name, list(_curves_of(runs, name, seconds))))
    return charts


def time_unit(longest_s: float) -> tuple[str, float]:
    """Return the unit for an axis of that many seconds, and its seconds."""
    for name, seconds in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if longest_s >= 2 * seconds:
            return name, seconds
    return "seconds", 1.0


def _curves_of(runs: Sequence[Run], name: str, time_unit_s: float | None) -> Iterator[Curve]:
    for index, run in enumerate(runs):
        for split in dict.fromkeys(row.split for row in run.rows):
            rows = [row for row in run.rows if row.split == split and name in row.values]
            times = [row.step if time_unit_s is None else row.seconds / time_unit_s for row in rows]
            values = [math.nan if (value := row.values[name]) is None else float(value) for row in rows]
            values = [value if abs(value) < MOST_DRAWN else math.nan for value in values]
            points = [(x, y) for x, y in zip(times, values, strict=True) if abs(x) < MOST_DRAWN]
            if points:
                thinned = thin(points, MOST_POINTS)
                yield Curve(index, split, [x for x, _ in thinned], [y for _, y in thinned])


def thin(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most so many of the points, in order: of each stretch the smallest and the largest value."""
    if len(points) <= most:
        return list(points)
    stretches = most // 2
    indices = set()
    for number in range(stretches):
        stretch = range(number * len(points) // stretches, (number + 1) * len(points) // stretches)
        finite = [index for index in stretch if not math.isnan(points[index][1])] or list(stretch[:1])
        indices |= {min(finite, key=lambda index: points[index][1]), max(finite, key=lambda index: points[index][1])}
    return [points[index] for index in sorted(indices)]


def thin_phases(phases: Sequence[Phase], within_s: float) -> Iterator[Phase]:
    """Yield the phases by their names in the legend; of those that begin within such a stretch, the sum of each name.

    Only the last phase of a stretch may be longer than it. Its name comes last, so that others stay in their place.
    """
    for _, group in groupby(phases, key=lambda phase: phase.begin // within_s):
        stretch, spent_s = list(group), dict[str, float]()
        for phase in stretch:
            name = phase.name if phase.name in _PHASES else "start"
            spent_s[name] = spent_s.pop(name, 0.0) + phase.end - phase.begin
        begin = stretch[0].begin
        for name, length_s in spent_s.items():
            yield Phase(name, begin, begin + length_s)
            begin += length_s


class Drawer:
    """Draws with matplotlib. Raises UserError if it is not installed."""

    def __init__(self) -> None:
        self._matplotlib = import_extra("matplotlib", "report", "report")
        self._figure: ModuleType = import_extra("matplotlib.figure", "report", "report")

    def chart(self, chart: Chart, runs: Sequence[Run], name: str) -> str:
        """Return an SVG. Its group with the id `NAME-curve-N` holds the points of the chart's curve N."""
        with self._matplotlib.rc_context(_FIGURES):
            figure = self._figure.Figure(figsize=(6.4, 3.2), layout="constrained")
            axes = figure.add_subplot()
            for number, curve in enumerate(chart.curves):
                label = printable(" ".join([*([runs[curve.run].name] if len(runs) > 1 else []), curve.split]))
                color = curve.run if len(runs) > 1 else int(curve.split == "eval")
                dashes = "-" if curve.split == "train" else "--"
                marker = "o" if curve.split == "eval" or len(curve.x) < 3 else ""
                (line,) = axes.plot(curve.x, curve.y, dashes, color=_color(color), marker=marker)
                # matplotlib leaves labels that begin with _ out of a legend.
                line.set(label=f" {label}" if label.startswith("_") else label, gid=f"curve-{number}")
            axes.set(xlabel=chart.x_label, ylabel=printable(chart.y_label))
            axes.grid(visible=True)
            if len(chart.curves) > 1:
                axes.legend(frameon=False)
            return _svg(figure, name)

    def timeline(self, run: Run, name: str) -> str:
        """Return an SVG with a bar for each start of a run, in the colours of its phases."""
        longest_s = max((start.end for start in run.starts), default=0.0)
        unit, seconds = time_unit(longest_s)
        bars = [list(thin_phases(start.phases, longest_s / MOST_POINTS or 1.0)) for start in run.starts]
        with self._matplotlib.rc_context(_FIGURES):
            figure = self._figure.Figure(figsize=(6.4, 1.3 + 0.25 * len(run.starts)), layout="constrained")
            axes = figure.add_subplot()
            for color, phase_name in enumerate(_PHASES):
                for row, phases in enumerate(bars):
                    spans = [
                        (phase.begin / seconds, (phase.end - phase.begin) / seconds)
                        for phase in phases
                        if phase.name == phase_name
                    ]
                    label = None if row else phase_name
                    axes.broken_barh(spans, (row - 0.4, 0.8), color=_color(color), label=label)
            axes.set(xlabel=f"{unit} since the first start", yticks=range(len(run.starts)))
            axes.set_yticklabels([f"{start.story.size} ranks" for start in run.starts])
            axes.invert_yaxis()
            axes.legend(frameon=False, ncols=len(_PHASES), loc="lower left", bbox_to_anchor=(0, 1))
            return _svg(figure, name)


def _color(number: int) -> str:
    return f"#0304{number % _CURVES:02x}"


def _svg(figure: Any, name: str) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="(?!curve-)[^"]*"', "<g", svg)
    # One page holds several of them, and each id once.
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", svg)


# --- the page ---------------------------------------------------------------------------------------------------

HEAD = "<!doctype html>\n<!-- Written by horovod_train: a report of runs -->\n"
_PAGE = Artifact("a report", r".+\.html", content_matches=lambda path: begins(path, HEAD))
_ROWS_SHOWN = 20
_NAME = re.compile(r"\w+(\.\w+)*")
_OF_A_START = ["began", "ranks", "root on", "by", "steps", "training s", "evaluating s", "saving s", "start s", "end"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --grid: #ddd; --soft: #f4f4f4;
  --curve-0: #0072b2; --curve-1: #d55e00; --curve-2: #009e73; --curve-3: #aa4499; --curve-4: #8a6d00; --curve-5: #555; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #16181b; --grid: #3a3d42; --soft: #22252a;
  --curve-0: #56b4e9; --curve-1: #ff9d5c; --curve-2: #2ecc9b; --curve-3: #e39bc9; --curve-4: #f0e442;
  --curve-5: #aaa; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 1rem;
  max-width: 72rem; }
a { color: var(--curve-0); } a:focus-visible, summary:focus-visible, .wide:focus-visible { outline: 3px solid; }
h2 { border-top: 2px solid var(--grid); padding-top: 1rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--grid); vertical-align: top;
  overflow-wrap: break-word; min-width: 3rem; } td:nth-child(2):last-child { overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
figure { margin: 0; overflow-x: auto; } svg { width: 100%; min-width: 22rem; height: auto; }
figcaption { font-weight: 600; }
pre { background: var(--soft); padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; }
pre span { white-space: nowrap; }
"""


def build_page(runs: Sequence[Run]) -> str:
    """Return the report of runs, as HTML. Raises UserError if what draws is not installed."""
    drawer = Drawer()
    title = _text(f"Report of {', '.join(run.name for run in runs)}")
    parts = [
        HEAD + f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><nav>",
        " · ".join(f'<a href="#{anchor}">{_text(label)}</a>' for anchor, label in _contents(runs)),
        "</nav><main>",
        *_curves(runs, drawer),
        *(_different_settings(runs) if len(runs) > 1 else ()),
        *(part for number, run in enumerate(runs) for part in _summary(run, number)),
        *(part for number, run in enumerate(runs) for part in _details(run, number, drawer)),
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


def _contents(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    yield "curves", "curves"
    if len(runs) > 1:
        yield "settings", "different settings"
    yield from ((f"run-{number}", run.name) for number, run in enumerate(runs))
    yield from ((f"details-{number}", f"starts of {run.name}") for number, run in enumerate(runs))


def _different_settings(runs: Sequence[Run]) -> Iterator[str]:
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [[key, *(_value(run.settings.get(key)) for run in runs)] for key in keys]
    different = [row for row in rows if len(set(row[1:])) > 1]
    yield '<h2 id="settings">Different settings</h2>'
    if not different:
        yield "<p>None.</p>"
        return
    table = _table(["setting", *(run.name for run in runs)], different)
    is_long = len(different) > _ROWS_SHOWN
    yield f"<details><summary>{len(different)} settings</summary>{table}</details>" if is_long else table


def _curves(runs: Sequence[Run], drawer: Drawer) -> Iterator[str]:
    charts = build_charts(runs)
    yield '<h2 id="curves">Curves</h2>'
    if not charts:
        yield "<p>No metrics were written.</p>"
        return
    figures = {False: list[str](), True: list[str]()}  # those of the model, and those of speed and time
    for number, chart in enumerate(charts):
        svg = drawer.chart(chart, runs, f"chart-{number}")
        label = _text(f"{chart.name}: {len(chart.curves)} curves")
        caption = _text(chart.name)
        figure = f'<figure role="img" aria-label="{label}"><figcaption>{caption}</figcaption>{svg}</figure>'
        figures[chart.name.removesuffix(" by step") in FIGURES].append(figure)
    yield f'<div class="charts">{"".join(figures[False])}</div>'
    if more := figures[True]:
        yield f"<details{'' if figures[False] else ' open'}><summary>Speed, time and rates: {len(more)}</summary>"
        yield f'<div class="charts">{"".join(more)}</div></details>'


def _summary(run: Run, number: int) -> Iterator[str]:
    yield f'<h2 id="run-{number}">{_text(run.name)}</h2>'
    story = _text("\n".join(run.explanation.lines()))
    story = re.sub("(--[a-z-]+)", r"<span>\1</span>", story)  # browsers break --output-dir after its hyphens
    yield f"<pre>{story}</pre>"
    yield _table(["", ""], [list(fact) for fact in _facts(run)])


def _details(run: Run, number: int, drawer: Drawer) -> Iterator[str]:
    yield f'<h2 id="details-{number}">Starts of {_text(run.name)}</h2>'
    if run.starts:
        label = _text(f"what {run.name} was doing, by start")
        yield f'<figure role="img" aria-label="{label}">{drawer.timeline(run, f"timeline-{number}")}</figure>'
        yield _table(_OF_A_START, [_start(start) for start in run.starts])
    remarks = [remark for start in run.starts for remark in start.remarks]
    if remarks:
        yield f"<details><summary>{len(remarks)} warnings and failures in root's log</summary>"
        yield f"<pre>{_text(chr(10).join(remarks))}</pre></details>"
    for costs in run.profiles:
        yield f"<h3>{_text(costs.heading[0].upper() + costs.heading[1:])}</h3>"
        if costs.ops:
            yield _table(["ms", "share", "op", "name"], [list(row) for row in costs.rows()])
    if run.rows:
        yield f"<details><summary>The last {_ROWS_SHOWN} lines of metrics</summary>{_last_rows(run)}</details>"
    settings = [[key, _value(value)] for key, value in run.settings.items()]
    yield f"<details><summary>All settings</summary>{_table(['setting', 'value'], settings)}</details>"


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    versions = run.summary.get("versions")
    if versions and isinstance(versions, dict):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    if code := list(dict.fromkeys(start.code for start in run.starts if start.code)):
        yield "code", "; ".join(code)
    yield "audit", run.audit
    # Before it has ended, there is no summary, or that of an earlier start; what was written says how far it came.
    summary = run.summary if run.explanation.state in ("finished", "stopped") else {}
    reached = {"steps": run.rows[-1].step, "epochs": run.rows[-1].epoch} if run.rows else {}
    for key, label in (("steps", "steps"), ("epochs", "epochs"), ("weights_sha256", "SHA-256 of the weights")):
        if key in summary:
            yield label, str(summary[key])
        elif key in reached:
            yield label, f"{reached[key]}, of the last line of metrics"
    for split in ("train", "eval"):
        rows = [row for row in run.rows if row.split == split]
        told = summary.get(split)
        last = told if told and isinstance(told, dict) else rows[-1].values if rows else {}
        values = {name: value for name, value in last.items() if name not in FIGURES}
        if values:
            yield f"last {split}", ", ".join(f"{name} {_value(value)}" for name, value in values.items())


def _start(start: Start) -> list[str]:
    spent = [start.seconds_in(name) for name in ("train", "evaluate", "save")]
    spent.append(start.end - start.begin - sum(spent))
    steps = f"{start.from_step} to {start.last_step}"
    story, seconds = start.story, [f"{each:.1f}" for each in spent]
    began = story.began.isoformat(sep=" ", timespec="seconds")
    return [began, str(story.size), story.host, story.launcher, steps, *seconds, start.ended]


def _last_rows(run: Run) -> str:
    names = run.metrics
    rows = [
        [str(row.step), row.split, f"{row.seconds:.1f}", *(_value(row.values.get(name, "")) for name in names)]
        for row in run.rows[-_ROWS_SHOWN:]
    ]
    return _table(["step", "split", "s since the first start", *names], rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_text(title)}</th>' for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{_breaking(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = f"<thead><tr>{head}</tr></thead>" if any(titles) else ""
    return f'<div class="wide" tabindex="0"><table>{head}<tbody>{body}</tbody></table></div>'


def _text(text: str) -> str:
    """Return text for HTML, also for an attribute. It has no other characters than HTML may have."""
    return html.escape(printable(without_secrets(text)))


def _breaking(text: str) -> str:
    """Return text for HTML; a name such as data.global_batch_size may go on in the next line after `.` and `_`."""
    shown = _text(text)
    return re.sub(r"(?<=[A-Za-z])([._])(?=[A-Za-z])", r"\1<wbr>", shown) if _NAME.fullmatch(text) else shown


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None or value in ({}, [], ""):
        return "–"
    return value if isinstance(value, str) else json.dumps(value)
