"""`bench scaling`: how fast a config trains on 1, 2, 4 … ranks of this host, and what its exchange costs.

python -m horovod_train.main bench scaling --config configs/digits_convnet.yaml --np 1,2

Each number of ranks is measured beside as many runs of one rank each, at the same time, which do the same work without
any exchange. All take turns, so that other load on the machine affects each of them; medians over the rounds are shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from horovod_train.commands.arguments import add_config, count, load_from_arguments, several
from horovod_train.commands.bench.scaling_run import SHARES, Measured, measure, measured_config
from horovod_train.commands.out_files import check_new
from horovod_train.commands.tables import open_screen
from horovod_train.config.registry import import_extra
from horovod_train.distributed.launch.local import Way, best_way
from horovod_train.errors import RunError, UserError


class Point(NamedTuple):
    """What was measured with one number of ranks: a value for each round."""

    ranks: int
    together: list[Measured]
    separate: list[Measured]
    """As many runs of one rank at the same time; the same as `together` for one rank."""

    @property
    def rate(self) -> float:
        """Examples per second over all ranks."""
        return statistics.median(each.examples_per_s for each in self.together)

    @property
    def efficiency(self) -> float:
        """The rate over that of the runs without exchange."""
        return self.rate / statistics.median(each.examples_per_s for each in self.separate)

    def share(self, phase: str) -> float:
        return statistics.median(each.shares[phase] for each in self.together)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, "what is trained, as to train it", required=True)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--np", type=several(count), default=[1, 2], metavar="N,N", help="numbers of ranks; default 1,2"
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="in each run; the first fifth is not timed; default %(default)s"
    )
    parser.add_argument("--rounds", type=count, default=3, help="runs of each; default %(default)s")
    parser.add_argument("--way", choices=("mpirun", "horovodrun"), help="default: the fastest that works here")
    parser.add_argument("--json", metavar="FILE", help="write the figures of every run there")
    parser.add_argument("--png", metavar="FILE", help="draw them there; needs horovod_train[report]")


def run(arguments: argparse.Namespace) -> int:
    if arguments.steps < 20:
        raise UserError(f"bench scaling: --steps must be at least 20; received {arguments.steps}.")
    if arguments.png:
        import_extra("matplotlib", "report", "bench scaling --png")
    check_new("bench scaling: --json", arguments.json)
    check_new("bench scaling: --png", arguments.png)
    config = measured_config(load_from_arguments([*arguments.config, *arguments.overrides]), arguments.steps)
    way = arguments.way or best_way()[0]
    points = {ranks: Point(ranks, [], []) for ranks in sorted(set(arguments.np))}
    for number in range(arguments.rounds):
        for ranks, point in points.items():
            point.together.append(measure(config, ranks, way))
            point.separate.append(point.together[-1] if ranks == 1 else measure(config, ranks, None))
            print(f"round {number + 1}, {ranks} ranks: {point.together[-1].line()}", file=sys.stderr, flush=True)
            if not point.together[-1].shares:
                raise RunError("bench scaling: the run was too short to see what its steps do. Give more --steps.")
    screen = open_screen()
    screen.print(f"started by {way}; medians of {arguments.rounds} rounds\n", *table(list(points.values())), sep="\n")
    if arguments.json:
        with Path(arguments.json).open("x", encoding="utf-8") as file:
            file.write(json.dumps(_figures(points, way), indent=2) + "\n")
    if arguments.png:
        _draw(Path(arguments.png), list(points.values()))
    return 0


def table(points: Sequence[Point]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| ranks | examples/s | slowest to fastest | speed-up | efficiency | input | compute | exchange | start, s |"
    yield "|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for point in points:
        rates = [each.examples_per_s for each in point.together]
        start = statistics.median(each.first_step_s for each in point.together)
        cells = [
            str(point.ranks),
            f"{point.rate:,.0f}",
            f"{min(rates):,.0f} to {max(rates):,.0f}",
            f"{point.rate / points[0].rate:.2f}",
            f"{point.efficiency:.2f}",
            *(f"{point.share(phase):.0%}".replace("%", " %") for phase in SHARES),
            f"{start:.1f}",
        ]
        yield f"| {' | '.join(cells)} |"


def _figures(points: Mapping[int, Point], way: Way) -> dict[str, object]:
    return {
        "way": way,
        "ranks": {
            str(ranks): {
                "together": [each._asdict() for each in point.together],
                "apart": [each._asdict() for each in point.separate],
            }
            for ranks, point in points.items()
        },
    }


def _draw(path: Path, points: Sequence[Point]) -> None:
    """Draw the rate by ranks, with the range of its rounds, and what it would be without exchange."""
    figure_of = import_extra("matplotlib.figure", "report", "bench scaling --png")
    figure = figure_of.Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    ranks = [point.ranks for point in points]
    rates = [[each.examples_per_s for each in point.together] for point in points]
    spread = [
        [point.rate - min(each) for point, each in zip(points, rates, strict=True)],
        [max(each) - point.rate for point, each in zip(points, rates, strict=True)],
    ]
    axes.errorbar(ranks, [point.rate for point in points], yerr=spread, marker="o", capsize=3, label="with exchange")
    axes.plot(ranks, [point.rate / point.efficiency for point in points], "--", marker="s", label="without exchange")
    axes.set(xlabel="ranks", ylabel="examples / s, all ranks", xticks=ranks, ylim=(0, None))
    axes.grid(visible=True)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
