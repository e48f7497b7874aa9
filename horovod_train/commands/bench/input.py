"""`bench input`: how fast records are read, parsed and batched as training reads them, on one rank.

Shows records per second of whole passes, drained inside TensorFlow; the CPU time of a record; and how long the first
batch takes. With --delay-ms the same again with every block late, as from a store with that latency.
benchmarks/tfrecords.py compares with pipelines of tf.data.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from horovod_train.commands.cli import add_config, build_table, count, load_from_arguments, open_screen
from horovod_train.config.settings import Config, DataConfig
from horovod_train.data.dataset import Records, open_records
from horovod_train.data.schema import Feature
from horovod_train.data.source import LoadBlock, LoadedBlock, Parser, RecordSource
from horovod_train.errors import UserError
from horovod_train.output import logs

if TYPE_CHECKING:
    import tensorflow as tf

    from horovod_train.data.pipeline import Pipeline

PLAN = "plan"


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
    parser.add_argument("--delay-ms", type=float, default=0.0, help="compare with blocks that come so late")
    parser.add_argument("--passes", type=count, default=3, help="over the records in a turn; default %(default)s")


def run(arguments: argparse.Namespace) -> int:
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
    logs.load_tensorflow()
    ways = {PLAN: passes_of(build(records, config, arguments.batch_size))}
    if arguments.delay_ms:
        late = dataclasses.replace(records, source=DelayedSource(records.source, arguments.delay_ms / 1e3))
        ways[f"{PLAN}, blocks {arguments.delay_ms:g} ms late"] = passes_of(build(late, config, arguments.batch_size))
    show(records, measure(ways, records.num_records, arguments))
    starts = _measure_starts(build(records, config, arguments.batch_size))
    print("the plan's first batch: " + ", ".join(f"at {place} of an epoch {s:.2f} s" for place, s in starts.items()))
    return 0


def build(records: Records, config: Config, batch_size: int) -> Pipeline:
    """Build the pipeline of a run with one rank."""
    from horovod_train.data.pipeline import Ranks, build_pipeline

    ranks = Ranks(0, 1)
    return build_pipeline(records, config.data, ranks, seed=config.seed, training=True, global_batch_size=batch_size)


def passes_of(pipeline: Pipeline) -> Callable[[int], tf.data.Dataset]:
    """Return a function: so many passes over the records, each time of other epochs → chunks of batches."""
    epochs = itertools.count()
    return lambda passes: pipeline.chunks(next(epochs) * passes, epochs=passes)


def measure(
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


def show(records: Records, turns: Mapping[str, list[Turn]]) -> None:
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
