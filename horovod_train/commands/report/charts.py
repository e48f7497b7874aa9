"""For `report`: which charts there are, and the points of their curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from horovod_train.commands.report.story import Run
from horovod_train.output.metrics import Row

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
            points = [
                (row.step if time_unit_s is None else row.seconds / time_unit_s, _value(row, name)) for row in rows
            ]
            if points:
                thinned = thin(points, MOST_POINTS)
                yield Curve(index, split, [x for x, _ in thinned], [y for _, y in thinned])


def _value(row: Row, name: str) -> float:
    value = row.values[name]
    return math.nan if value is None else float(value)


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
