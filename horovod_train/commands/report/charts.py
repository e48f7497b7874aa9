"""For `report`: which charts there are, and charts and timelines as SVG, by matplotlib. The page sets their colours."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from horovod_train.commands.report.story import Run
from horovod_train.config.registry import import_extra
from horovod_train.shown_text import printable

MOST_POINTS = 1000
"""Of one curve. A longer one is shown by the smallest and the largest value of each of half as many stretches."""

UNITS = {
    "examples_per_s": "examples / s, all ranks",
    "examples_per_s_per_rank": "examples / s, one rank",
    "s_per_step": "seconds a step",
    "input_share": "share of all ranks' time",
    "compute_share": "share of all ranks' time",
    "hook_share": "share of all ranks' time",
    "exchange_share": "share of all ranks' time",
    "own_s_per_step_min": "seconds a step, without the exchange",
    "own_s_per_step_median": "seconds a step, without the exchange",
    "own_s_per_step_max": "seconds a step, without the exchange",
    "slowest_rank": "rank",
    "save_blocked_s": "seconds that saving held up training",
    "learning_rate": "learning rate",
}
"""Values that are no metrics of the model, with what their axis says."""
_CURVES = 6
_INK, _GRID = "#010101", "#020202"
_VARIABLES = {_INK: "currentColor", _GRID: "var(--grid)"}
_VARIABLES |= {f"#0304{number:02x}": f"var(--curve-{number})" for number in range(_CURVES)}
_PHASES = ("train", "evaluate", "save", "compile", "start")
"""In the order of the legend. What is none of them, such as reading an index, belongs to the start."""

_STYLE: dict[str, Any] = {
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
    """run: its place in the report. x, y: of equal length; y is NaN where a value was not finite."""

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
    for name in sorted(names, key=lambda name: name in UNITS):  # the model's first; else in their order
        charts.append(Chart(f"{name} by step", "step", UNITS.get(name, name), list(_curves(runs, name, None))))
        if name not in UNITS:
            charts.append(Chart(f"{name} by time", by_time, name, list(_curves(runs, name, seconds))))
    return charts


def time_unit(longest_s: float) -> tuple[str, float]:
    """Return the unit for an axis of that many seconds, and its seconds."""
    for name, seconds in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if longest_s >= 2 * seconds:
            return name, seconds
    return "seconds", 1.0


def _curves(runs: Sequence[Run], name: str, time_unit_s: float | None) -> Iterator[Curve]:
    for index, run in enumerate(runs):
        for split in dict.fromkeys(row.split for row in run.rows):
            rows = [row for row in run.rows if row.split == split and name in row.values]
            times = [row.step if time_unit_s is None else row.seconds / time_unit_s for row in rows]
            values = [math.nan if (value := row.values[name]) is None else float(value) for row in rows]
            points = list(zip(times, values, strict=True))
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


class Drawer:
    """Draws with matplotlib. Raises UserError if it is not installed."""

    def __init__(self) -> None:
        self._matplotlib = import_extra("matplotlib", "report", "report")
        self._figure: ModuleType = import_extra("matplotlib.figure", "report", "report")

    def chart(self, chart: Chart, runs: Sequence[Run], name: str) -> str:
        """Return an SVG. Its group with the id `NAME-curve-N` holds the points of the chart's curve N."""
        with self._matplotlib.rc_context(_STYLE):
            figure = self._figure.Figure(figsize=(6.4, 3.2), layout="constrained")
            axes = figure.add_subplot()
            for number, curve in enumerate(chart.curves):
                label = printable(" ".join([*([runs[curve.run].name] if len(runs) > 1 else []), curve.split]))
                color = curve.run if len(runs) > 1 else int(curve.split == "eval")
                dashes = "-" if curve.split == "train" else "--"
                marker = "o" if curve.split == "eval" or len(curve.x) < 3 else ""
                (line,) = axes.plot(curve.x, curve.y, dashes, color=_color(color), marker=marker)
                line.set(label=label, gid=f"curve-{number}")
            axes.set(xlabel=chart.x_label, ylabel=printable(chart.y_label))
            axes.grid(visible=True)
            if len(chart.curves) > 1:
                axes.legend(frameon=False)
            return _svg(figure, name)

    def timeline(self, run: Run, name: str) -> str:
        """Return an SVG with a bar for each start of a run, in the colours of its phases."""
        unit, seconds = time_unit(max((start.end for start in run.starts), default=0.0))
        with self._matplotlib.rc_context(_STYLE):
            figure = self._figure.Figure(figsize=(6.4, 1.3 + 0.25 * len(run.starts)), layout="constrained")
            axes = figure.add_subplot()
            for color, phase_name in enumerate(_PHASES):
                for row, start in enumerate(run.starts):
                    spans = [
                        (phase.begin / seconds, (phase.end - phase.begin) / seconds)
                        for phase in start.phases
                        if phase_name == (phase.name if phase.name in _PHASES else "start")
                    ]
                    label = None if row else phase_name
                    axes.broken_barh(spans, (row - 0.4, 0.8), color=_color(color), label=label)
            axes.set(xlabel=f"{unit} since the first start", yticks=range(len(run.starts)))
            axes.set_yticklabels([f"{start.ranks} ranks" for start in run.starts])
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
