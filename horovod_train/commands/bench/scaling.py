"""`bench scaling`: how fast a config trains on 1, 2, 4 … ranks of this host, and what its exchange costs.

python -m horovod_train.main bench scaling --config configs/digits_convnet.yaml --np 1,2

Each number of ranks is measured beside as many runs of one rank each, at the same time, which do the same work without
any exchange. All take turns, so that other load on the machine affects each of them; medians over the rounds are shown.

For `bench scaling`: one measured run of the trainer, from its own files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from horovod_train.commands.cli import add_config, check_new, count, load_from_arguments, open_screen, several
from horovod_train.config.loader import dump
from horovod_train.config.registry import import_extra
from horovod_train.config.rules import resolve
from horovod_train.config.settings import CheckpointConfig, Config, EarlyStoppingConfig, EvalConfig, LogConfig
from horovod_train.distributed.launch.local import (
    Way,
    best_way,
    launch_command,
    start_program,
    visible_gpus,
    wait_for_all,
)
from horovod_train.distributed.launch.tuning import sees_gpu
from horovod_train.errors import RunError, UserError
from horovod_train.output.rank_log import read_stories

SHARES = ("input", "compute", "exchange")
_LINES = 10
"""Lines of metrics in a run; the first fifth of them is not counted."""
_TIMEOUT_S = 3600.0


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


class Measured(NamedTuple):
    """examples_per_s: over all ranks. shares: of all ranks' time in steps; {} for a short run.

    first_step_s: from the launch on.
    """

    examples_per_s: float
    shares: dict[str, float]
    first_step_s: float

    def line(self) -> str:
        return f"{self.examples_per_s:,.0f} examples/s, first step after {self.first_step_s:.1f} s"


def measured_config(config: Config, steps: int) -> Config:
    """Return the config of a run that does nothing but train for so many steps."""
    train = dataclasses.replace(config.train, max_steps=steps, epochs=None, max_time=None)
    if config.train.epochs is not None:
        train = dataclasses.replace(train, epochs=10**6)  # epochs of schedules stay epochs
    return dataclasses.replace(
        config,
        train=train,
        data=dataclasses.replace(config.data, eval=()),
        eval=EvalConfig(every_epochs=None if config.data.eval_fraction else EvalConfig.every_epochs),
        early_stopping=EarlyStoppingConfig(),
        checkpoint=CheckpointConfig(every_epochs=None, resume="never"),
        log=LogConfig(every_steps=max(1, steps // _LINES), tensorboard=False, progress="plain"),
    )


def measure(config: Config, ranks: int, way: Way | None) -> Measured:
    """Run it once. way None: as so many runs of one rank at the same time, each with the batch and cores of one rank.

    Raises RunError with the run's message if a run fails.
    """
    with tempfile.TemporaryDirectory(prefix="bench-scaling-") as folder:
        if way is not None:
            launcher = [] if ranks == 1 else launch_command(way, ranks)
            return _measure_all([_start(config, Path(folder, "run"), launcher)])[0]
        one_rank_config = _config_of_one_rank(config, ranks)
        environments = environments_apart(ranks, config.device.per_rank) if sees_gpu() else [{}] * ranks
        runs = [_start(one_rank_config, Path(folder, f"run-{n}"), [], env) for n, env in enumerate(environments)]
        measured = _measure_all(runs)
    return Measured(
        sum(each.examples_per_s for each in measured),
        {phase: statistics.fmean(each.shares[phase] for each in measured) for phase in measured[0].shares},
        max(each.first_step_s for each in measured),
    )


def environments_apart(ranks: int, per_rank: int) -> list[dict[str, str]]:
    """Return for each of so many runs the variable that leaves it GPUs of its own, of those that are visible here.

    None of them where all are hidden. Raises UserError if there are too few.
    """
    needed, names = ranks * per_rank, visible_gpus()
    if names is None:
        names = [str(number) for number in range(needed)]
    if 0 < len(names) < needed:
        raise UserError(
            f"bench scaling: {ranks} ranks of {per_rank} take {needed} GPUs; CUDA_VISIBLE_DEVICES names {len(names)}: "
            f"{','.join(names)}. Name more there, or give a lower --np."
        )
    apart = [names[rank * per_rank : (rank + 1) * per_rank] for rank in range(ranks)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(each)} if each else {} for each in apart]


class _Run(NamedTuple):
    process: subprocess.Popen[str]
    run_dir: Path
    began: float


def _config_of_one_rank(config: Config, ranks: int) -> Config:
    """Return the config of one of so many runs, which has the batch and the threads of one of so many ranks."""
    batch = resolve(config, ranks).data.global_batch_size
    assert batch is not None
    data = dataclasses.replace(config.data, global_batch_size=-(-batch // ranks), batch_size_per_rank=None)
    threads = config.device.intra_op_threads or max(1, len(os.sched_getaffinity(0)) // ranks)
    return dataclasses.replace(config, data=data, device=dataclasses.replace(config.device, intra_op_threads=threads))


def _start(
    config: Config, run_dir: Path, launcher: Sequence[str], environment: Mapping[str, str] | None = None
) -> _Run:
    run_dir.mkdir()
    file = run_dir.with_suffix(".yaml")
    with file.open("x", encoding="utf-8") as opened:
        opened.write(dump(config))
    train = [sys.executable, "-m", "horovod_train.main", "--config", str(file), "--output-dir", str(run_dir)]
    return _Run(start_program([*launcher, *train], environment), run_dir, time.time())


def _measure_all(runs: Sequence[_Run]) -> list[Measured]:
    """Wait for runs, which have started at the same time."""
    if problem := wait_for_all([run.process for run in runs], _TIMEOUT_S):
        errors = re.findall(r"error: .*", problem)
        raise RunError(f"bench: a run failed: {errors[0] if errors else problem}")
    return [_read(run) for run in runs]


def _read(run: _Run) -> Measured:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").open(encoding="utf-8")]
    counted = [row for row in rows if row["split"] == "train" and "examples_per_s" in row][_LINES // 5 :]
    if not counted:
        raise RunError("bench: a run was too short to measure. Give more --steps.")
    with_shares = [row for row in counted if "input_share" in row]
    shares = {phase: statistics.fmean(row[f"{phase}_share"] for row in with_shares) for phase in SHARES if with_shares}
    compiled = next(
        datetime.fromisoformat(entry.time).timestamp()
        for entry in read_stories(run.run_dir)[0].find("phase")
        if entry.text.startswith("train")
    )
    rate = statistics.harmonic_mean([row["examples_per_s"] for row in counted])
    return Measured(rate, shares, compiled - run.began)
