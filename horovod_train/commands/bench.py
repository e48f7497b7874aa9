"""The command `bench`: measures how fast a user's data is read, and a user's config trains, on this host.

python -m horovod_train.main bench input data/digits/train
python -m horovod_train.main bench scaling --config configs/digits_convnet.yaml --np 1,2
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from horovod_train.commands.cli import (
    add_config,
    build_table,
    check_new,
    count,
    load_from_arguments,
    open_screen,
    several,
)
from horovod_train.config.loader import dump
from horovod_train.config.registry import import_extra
from horovod_train.config.rules import resolve
from horovod_train.config.settings import (
    CheckpointConfig,
    Config,
    DataConfig,
    EarlyStoppingConfig,
    EvalConfig,
    LogConfig,
)
from horovod_train.data.dataset import Records, open_records
from horovod_train.data.schema import Feature
from horovod_train.data.source import LoadBlock, LoadedBlock, Parser, RecordSource
from horovod_train.distributed.launch.local import (
    Way,
    best_way,
    launch_command,
    start_program,
    visible_gpus,
    wait_for_all,
)
from horovod_train.errors import RunError, UserError
from horovod_train.host import sees_gpu, usable_cores
from horovod_train.output import logs
from horovod_train.output.files import json_text
from horovod_train.output.rank_log import read_stories

if TYPE_CHECKING:
    import tensorflow as tf

    from horovod_train.data.pipeline import Pipeline

PLAN = "plan"
SHARES = ("input", "compute", "exchange")
_LINES = 10
"""Lines of metrics in a run of `bench scaling`; the first fifth of them is not counted."""
_TIMEOUT_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (line, add, _) in KINDS.items():
        add(kinds.add_parser(name, help=line, description=line))


def run(arguments: argparse.Namespace) -> int:
    _, _, measure_kind = KINDS[arguments.kind]
    return measure_kind(arguments)


# --- bench input ------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """What a pass over the records took, averaged over a turn."""

    seconds: float
    cpu_seconds: float
    """Of all threads, in the system too: a pipeline that leaves cores idle is slower than these say."""


def _add_input_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", metavar="PATH", help="a folder of records, or a glob")
    add_config(parser, "read what it trains on")
    parser.add_argument("--batch-size", type=count, default=128, help="records a step; default %(default)s")
    parser.add_argument("--rounds", type=count, default=5, help="turns of each; default %(default)s")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="compare with blocks that come so late")
    parser.add_argument("--passes", type=count, default=3, help="over the records in a turn; default %(default)s")


def _measure_input(arguments: argparse.Namespace) -> int:
    """Show how fast records are read, parsed and batched as training reads them, on one rank.

    Records per second of whole passes, drained inside TensorFlow; the CPU time of a record; and how long the first
    batch takes. With --delay-ms the same again with every block late, as from a store with that latency.
    benchmarks/tfrecords.py compares with pipelines of tf.data.
    """
    if bool(arguments.path) == bool(arguments.config):
        raise UserError("bench input: give either the path of records or --config.")
    if arguments.delay_ms < 0:
        raise UserError(f"bench input: --delay-ms must be at least 0; received {arguments.delay_ms:g}.")
    in_folder = Config(data=DataConfig(train=(arguments.path,)))
    config = load_from_arguments(arguments.config) if arguments.config else in_folder
    # Of files as they are: what training leaves out or repeats concerns no reader.
    data = dataclasses.replace(config.data, train=config.data.paths("train"), fold=None, eval_fraction=None)
    config = dataclasses.replace(config, data=data)
    records = open_records(data, "train")
    logs.load_tensorflow(on_cpu=True)
    ways = {PLAN: passes_of(build_input(records, config, arguments.batch_size))}
    if arguments.delay_ms:
        late_records = dataclasses.replace(records, source=DelayedSource(records.source, arguments.delay_ms / 1e3))
        late = build_input(late_records, config, arguments.batch_size)
        ways[f"{PLAN}, blocks {arguments.delay_ms:g} ms late"] = passes_of(late)
    show_turns(records, measure_turns(ways, records.num_records, arguments))
    starts = _measure_starts(build_input(records, config, arguments.batch_size))
    print("the plan's first batch: " + ", ".join(f"at {place} of an epoch {s:.2f} s" for place, s in starts.items()))
    return 0


def build_input(records: Records, config: Config, batch_size: int) -> Pipeline:
    """Build the pipeline of a run with one rank."""
    from horovod_train.data.pipeline import Ranks, build_pipeline

    ranks = Ranks(0, 1)
    return build_pipeline(records, config.data, ranks, seed=config.seed, training=True, global_batch_size=batch_size)


def passes_of(pipeline: Pipeline) -> Callable[[int], tf.data.Dataset]:
    """Return a function: so many passes over the records, each time of other epochs → chunks of batches."""
    epochs = itertools.count()
    return lambda passes: pipeline.chunks(next(epochs) * passes, epochs=passes)


def measure_turns(
    ways: Mapping[str, Callable[[int], tf.data.Dataset]], num_records: int, arguments: argparse.Namespace
) -> dict[str, list[Turn]]:
    """Return the turns of each way to read. The first turn is a warm-up and is not counted.

    ways: functions (passes over the records) → batches, or chunks of them. arguments: rounds, passes and batch_size.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    for _ in range(arguments.rounds + 1):
        for name, make in ways.items():
            turns[name].append(_drain(make, arguments.passes, num_records, arguments.batch_size))
    return {name: taken[1:] for name, taken in turns.items()}


def _drain(make: Callable[[int], tf.data.Dataset], passes: int, num_records: int, batch_size: int) -> Turn:
    started, cpu_before = time.perf_counter(), time.process_time()
    batches = make(passes).reduce(0, lambda count, element: count + _steps_in(element))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_before
    assert int(batches) >= passes * (num_records // batch_size), "records were left out"
    return Turn(seconds / passes, cpu_seconds / passes)


def _steps_in(element: Any) -> Any:
    """Return how many steps an element has, which a compiled step takes out of it without copying."""
    import tensorflow as tf

    from horovod_train.data.batch_source import Batch

    return tf.shape(element.count)[0] if isinstance(element, Batch) else 1


def _measure_starts(pipeline: Pipeline) -> dict[str, float]:
    """Return seconds until the first batch, at the beginning of an epoch and near its end."""
    seconds = {}
    for percent in (0, 90):
        times = []
        for epoch in range(3):
            started = time.perf_counter()
            next(pipeline.batches(epoch, pipeline.steps_per_epoch * percent // 100))
            times.append(time.perf_counter() - started)
        seconds[f"{percent} %"] = statistics.median(times)
    return seconds


def show_turns(records: Records, turns: Mapping[str, list[Turn]]) -> None:
    """Print the rate of each way to read, how many times as long as the plan it takes, and its CPU time."""
    rows = []
    size = sum(part.size for part in records.source.parts)
    median = {name: statistics.median(turn.seconds for turn in taken) for name, taken in turns.items()}
    titles = ("", "records/s", "slowest", "fastest", "MB/s", *["ratio"] * (len(turns) > 1))
    for name, taken in turns.items():
        times = [turn.seconds for turn in taken]
        rates = [f"{records.num_records / value:,.0f}" for value in (median[name], max(times), min(times))]
        cells = (name, *rates, f"{size / median[name] / 1e6:.1f}", f"{median[name] / median[PLAN]:.2f}")
        rows.append(cells[: len(titles)])
    open_screen().print(build_table(titles, rows, left=("",)))
    cpu = {name: statistics.median(turn.cpu_seconds for turn in taken) for name, taken in turns.items()}
    micros = {name: seconds / records.num_records * 1e6 for name, seconds in cpu.items()}
    print("CPU time per record: " + ", ".join(f"{name} {value:,.1f} µs" for name, value in micros.items()))


class DelayedSource:
    """A RecordSource like another one, but for the delay.

    A late block is late in the thread that loads it, where a file system or an object store would make it wait.
    """

    def __init__(self, source: RecordSource, delay_s: float) -> None:
        self._source, self._delay_s = source, delay_s
        self.blocks, self.parts = source.blocks, source.parts

    def open(self) -> LoadBlock:
        load = self._source.open()

        def load_delayed(block: int) -> LoadedBlock:
            time.sleep(self._delay_s)
            return load(block)

        return load_delayed

    def parser(self, features: dict[str, Feature]) -> Parser:
        return self._source.parser(features)


# --- bench scaling ----------------------------------------------------------------------------------------------


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


def _add_scaling_arguments(parser: argparse.ArgumentParser) -> None:
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


def _measure_scaling(arguments: argparse.Namespace) -> int:
    """Show how fast a config trains on 1, 2, 4 … ranks of this host, and what its exchange costs.

    Each number of ranks is measured beside as many runs of one rank each, at the same time, which do the same work
    without any exchange. All take turns, so that other load on the machine affects each of them; medians over the
    rounds are shown.
    """
    if arguments.steps < 20:
        raise UserError(f"bench scaling: --steps must be at least 20; received {arguments.steps}.")
    if arguments.png:
        import_extra("matplotlib", "report", "bench scaling --png")
    check_new("bench scaling: --json", arguments.json)
    check_new("bench scaling: --png", arguments.png)
    config = measured_config(load_from_arguments([*arguments.config, *arguments.overrides]), arguments.steps)
    way = arguments.way or best_way()[0]
    points = [Point(ranks, [], []) for ranks in sorted(set(arguments.np))]
    for number in range(arguments.rounds):
        for ranks, together, separate in points:
            newest = measure(config, ranks, way)
            together.append(newest)
            separate.append(newest if ranks == 1 else measure(config, ranks, None))
            figures = f"{newest.examples_per_s:,.0f} examples/s, first step after {newest.first_step_s:.1f} s"
            print(f"round {number + 1}, {ranks} ranks: {figures}", file=sys.stderr, flush=True)
    screen = open_screen()
    screen.print(f"started by {way}; medians of {arguments.rounds} rounds\n", *table(points), sep="\n")
    if arguments.json:
        runs = {
            point.ranks: {
                "together": [each._asdict() for each in point.together],
                "apart": [each._asdict() for each in point.separate],
            }
            for point in points
        }
        with Path(arguments.json).open("x", encoding="utf-8") as file:
            file.write(json_text({"way": way, "ranks": runs}, indent=2) + "\n")
    if arguments.png:
        _draw(Path(arguments.png), points)
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
    batch = resolve(config, ranks).data.global_batch(ranks)
    data = dataclasses.replace(config.data, global_batch_size=-(-batch // ranks), batch_size_per_rank=None)
    threads = config.device.intra_op_threads or max(1, usable_cores() // ranks)
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
    with_shares = [row for row in counted if "input_share" in row]
    if not with_shares:
        raise RunError("bench: a run was too short to see what its steps do. Give more --steps.")
    shares = {phase: statistics.fmean(row[f"{phase}_share"] for row in with_shares) for phase in SHARES}
    phases = read_stories(run.run_dir)[0].find("phase")
    compiled = next(entry.time.timestamp() for entry in phases if entry.text.startswith("train"))
    rate = statistics.harmonic_mean([row["examples_per_s"] for row in counted])
    return Measured(rate, shares, compiled - run.began)


KINDS = {
    "input": ("reading, parsing and batching, on one rank", _add_input_arguments, _measure_input),
    "scaling": ("a config on 1, 2, 4 … ranks of this host", _add_scaling_arguments, _measure_scaling),
}
"""name → (one line of help, what adds its arguments, what runs it and returns the exit code)."""
