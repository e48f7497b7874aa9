"""`bench input`: records per second of the plan, of TensorFlow's shuffle with whole batches parsed, and of one by one.

All three read the same files, give the same tensors, and are drained inside TensorFlow. One rank. Where records hold
JPEGs, the others are tf.data at its best: random boxes of which no more is decoded than is used. With --delay-ms the
plan is compared with itself, reading from a store with that latency.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import tensorflow as tf

from horovod_train.commands.cli import add_config, build_table, count, load_from_arguments, open_screen
from horovod_train.config.settings import Config, DataConfig
from horovod_train.data.dataset import Records, open_records
from horovod_train.errors import UserError
from horovod_train.output import logs

PLAN = "plan"
PARSE_CALLS = 10
"""Number of parse calls in parallel in the contender that parses records one by one, a usual choice."""


class Turn(NamedTuple):
    """What a pass over the records took, averaged over a turn."""

    seconds: float
    cpu_seconds: float
    """Of all threads, in the system too: a pipeline that leaves cores idle is slower than these say."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", metavar="PATH", help="a folder of records, or a glob")
    add_config(parser, "read what it trains on")
    parser.add_argument("--batch-size", type=count, default=128, help="records a step; default %(default)s")
    parser.add_argument("--rounds", type=count, default=5, help="turns of each; default %(default)s")
    parser.add_argument(
        "--delay-ms", type=float, default=0.0, help="compare with blocks that come so late, instead of other pipelines"
    )
    parser.add_argument("--passes", type=count, default=3, help="over the records in a turn; default %(default)s")


def run(arguments: argparse.Namespace) -> int:
    if bool(arguments.path) == bool(arguments.config):
        raise UserError("bench input: give either the path of records or --config.")
    if arguments.delay_ms < 0:
        raise UserError(f"bench input: --delay-ms must be at least 0; received {arguments.delay_ms:g}.")
    in_folder = Config(data=DataConfig(train=(arguments.path,)))
    config = load_from_arguments(arguments.config) if arguments.config else in_folder
    if config.data.parse:
        raise UserError("bench input: needs features; data.parse cannot be taken apart.")
    # Of files as they are: what training leaves out or repeats concerns no reader.
    data = dataclasses.replace(config.data, train=config.data.paths("train"), fold=None, eval_fraction=None)
    config = dataclasses.replace(config, data=data)
    records = open_records(data, "train")
    logs.load_tensorflow()
    _show(records, _measure(records, config, arguments), _starts(records, config, arguments.batch_size))
    return 0


def _measure(records: Records, config: Config, arguments: argparse.Namespace) -> dict[str, list[Turn]]:
    """Return the turns of each contender. The first turn is a warm-up and is not counted."""

    from horovod_train.commands.bench.pipelines import build_contenders, build_delayed

    if arguments.delay_ms:
        ways = build_delayed(records, config, arguments.batch_size, arguments.delay_ms, PLAN)
    else:
        ways = build_contenders(records, config, arguments.batch_size, PARSE_CALLS, PLAN)
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    for _ in range(arguments.rounds + 1):
        for name, build in ways.items():
            turns[name].append(_drain(build, arguments.passes, records.num_records, arguments.batch_size))
    return {name: taken[1:] for name, taken in turns.items()}


def _drain(build: Callable[[int], tf.data.Dataset], passes: int, num_records: int, batch_size: int) -> Turn:
    started, cpu_before = time.perf_counter(), time.process_time()
    batches = build(passes).reduce(0, lambda count, element: count + _steps_in(element))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_before
    assert int(batches) >= passes * (num_records // batch_size), "a contender left records out"
    return Turn(seconds / passes, cpu_seconds / passes)


def _steps_in(element: Any) -> Any:
    """Return how many steps an element has, which a compiled step takes out of it without copying."""
    import tensorflow as tf

    from horovod_train.data.batch_source import Batch

    return tf.shape(element.count)[0] if isinstance(element, Batch) else 1


def _starts(records: Records, config: Config, batch_size: int) -> dict[str, float]:
    """Return seconds until the first batch, at the beginning of an epoch and near its end."""

    from horovod_train.commands.bench.pipelines import build_trainer_pipeline

    pipeline = build_trainer_pipeline(records, config, batch_size)
    seconds = {}
    for percent in (0, 90):
        times = []
        for epoch in range(3):
            started = time.perf_counter()
            next(pipeline.batches(epoch, pipeline.steps_per_epoch * percent // 100))
            times.append(time.perf_counter() - started)
        seconds[f"{percent} %"] = statistics.median(times)
    return seconds


def _show(records: Records, turns: dict[str, list[Turn]], starts: dict[str, float]) -> None:
    console = open_screen()
    rows = []
    size = sum(part.size for part in records.source.parts)
    median = {name: statistics.median(turn.seconds for turn in taken) for name, taken in turns.items()}
    for name, taken in turns.items():
        times = [turn.seconds for turn in taken]
        rates = [f"{records.num_records / value:,.0f}" for value in (median[name], max(times), min(times))]
        ratio = f"{median[name] / median[PLAN]:.2f}"
        rows.append((name, *rates, f"{size / median[name] / 1e6:.1f}", ratio))
    console.print(build_table(("", "records/s", "slowest", "fastest", "MB/s", "ratio"), rows, left=("",)))
    cpu = {name: statistics.median(turn.cpu_seconds for turn in taken) for name, taken in turns.items()}
    micros = {name: seconds / records.num_records * 1e6 for name, seconds in cpu.items()}
    print("CPU time per record: " + ", ".join(f"{name} {value:,.1f} µs" for name, value in micros.items()))
    delays = ", ".join(f"at {position} of an epoch {value:.2f} s" for position, value in starts.items())
    print(f"the plan's first batch: {delays}")
