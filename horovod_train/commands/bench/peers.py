"""`bench peers`: the same small training by this project, by stock Horovod, tf.distribute and PyTorch, taking turns.

python -m horovod_train.main bench peers --np 2
python -m horovod_train.main bench peers --np 1 --system mlp

The convnet of models/convnet.py on made images of 28×28, 64 a rank, or the tiny perceptron of models/mlp.py on made
samples, 100 a rank. This project trains as a user starts it, from TFRecords, with its checks and its watchdog; the
others train from main memory, see peer_programs. The ceiling is this project as runs of one rank each at the same time,
which exchange nothing; with one rank, a hand-written loop. Each contender runs once in each round.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from horovod_train.commands.bench import peer_run
from horovod_train.commands.bench.peer_programs.timing import SYSTEMS
from horovod_train.commands.bench.peer_run import Contender, Workload
from horovod_train.commands.bench.scaling import measure, measured_config
from horovod_train.commands.cli import check_new, count, open_screen
from horovod_train.config.settings import (
    Config,
    DataConfig,
    LossSpec,
    LrScheduleConfig,
    ModelSpec,
    OptimizerSpec,
    TrainConfig,
)
from horovod_train.distributed.launch.local import Way, mpi_problem
from horovod_train.errors import UserError

if TYPE_CHECKING:
    from horovod_train.data.schema import Schema

CEILING = "this project without any exchange: the ceiling"
BARE = "TensorFlow in a hand-written loop: the ceiling"
"""Of one rank."""
PROJECT = "this project"
_YIELDING = {"OMPI_MCA_mpi_yield_when_idle": "1"}
"""A rank that waits in MPI leaves its core to those that compute."""
_NO_PAUSE = {"HOROVOD_CYCLE_TIME": "0"}
"""Faster for a tiny model; keeps a core of each rank busy."""
_STEPS = {"convnet": 400, "mlp": 20_000}
_RECORDS = {"convnet": 60_000, "mlp": 10_000}


class Prepared(NamedTuple):
    """workload: for the programs of others; config: of this project, for the same records as TFRecords."""

    workload: Workload
    config: Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--np", type=count, default=2, metavar="N", help="ranks; default %(default)s")
    parser.add_argument("--rounds", type=count, default=3, help="runs of each; default %(default)s")
    parser.add_argument("--system", choices=SYSTEMS, default="convnet", help="what is trained; default %(default)s")
    parser.add_argument("--steps", type=int, help="in each run; the first fifth is not timed; default 400, mlp: 20000")
    parser.add_argument("--records", type=int, help="made records; default 60000, mlp: 10000")
    parser.add_argument("--only", metavar="TEXT", action="append", help="contenders whose names hold this")
    parser.add_argument("--json", metavar="FILE", help="write the figures of every run there")


def run(arguments: argparse.Namespace) -> int:
    name, ranks = arguments.system, arguments.np
    steps = _STEPS[name] if arguments.steps is None else arguments.steps
    records = _RECORDS[name] if arguments.records is None else arguments.records
    _check(arguments, steps, records)
    chosen = _choose(name, ranks, arguments.only)
    rates: dict[str, list[float]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        prepared = _prepare(Path(folder), name, records, steps, ranks)
        for number in range(arguments.rounds):
            for who, contender in chosen.items():
                rates[who].append(_train(contender, prepared, ranks))
                print(f"round {number + 1}, {who}: {rates[who][-1]:,.0f} records/s", file=sys.stderr, flush=True)
    batch = SYSTEMS[name].batch
    title = f"{name}, {ranks} ranks, {batch} records a rank and step; medians of {arguments.rounds} runs\n"
    open_screen().print(title, *table(rates, ranks * batch), sep="\n", markup=False)
    if arguments.json:
        with Path(arguments.json).open("x", encoding="utf-8") as file:
            file.write(json.dumps({"system": name, "ranks": ranks, "records_per_s": rates}, indent=2) + "\n")
    return 0


def _check(arguments: argparse.Namespace, steps: int, records: int) -> None:
    # Metrics come ten times in a run, at the end of a call.
    min_steps = 10 * SYSTEMS[arguments.system].steps_per_call
    if steps < min_steps:
        raise UserError(f"bench peers: --steps must be at least {min_steps}; received {steps}.")
    min_records = arguments.np * SYSTEMS[arguments.system].batch
    if records < min_records:
        raise UserError(f"bench peers: --records must be at least {min_records}, a batch for each rank.")
    check_new("bench peers: --json", arguments.json)


def _train(contender: Contender, prepared: Prepared, ranks: int) -> float:
    """Train once; return records per second over all ranks."""
    if contender.program is None:
        return measure(prepared.config, ranks, contender.way).examples_per_s
    return peer_run.run(contender, prepared.workload, ranks)


def contenders(system: str, ranks: int, ways: Mapping[Way, str]) -> Iterator[tuple[str, Contender]]:
    """Yield all contenders by name. ways: those that work here, with the names of what ranks exchange over."""
    if ranks == 1:
        yield BARE, Contender("one_process")
        yield PROJECT, Contender()
        return
    yield CEILING, Contender()
    yield from ((f"{PROJECT} over {name}", Contender(way=way)) for way, name in ways.items())
    for way, name in ways.items():
        yield f"stock Horovod in a hand-written loop, over {name}", Contender("stock_horovod", way)
        grouped = f"stock Horovod, tuned and grouped, over {name}"
        if way == "mpirun":  # over gloo its defaults are the best that there are, but for a tiny model
            yield f"stock Horovod, tuned, over {name}", Contender("stock_horovod", way, environment=_YIELDING)
        if way == "mpirun" or system == "mlp":
            yield grouped, Contender("stock_horovod", way, ["--grouped"], _YIELDING | _NO_PAUSE)
    yield "tf.distribute MultiWorkerMirroredStrategy", Contender("multi_worker")
    if importlib.util.find_spec("torch") is None:
        print("without PyTorch DDP: torch is not installed", file=sys.stderr)
    else:
        yield "PyTorch DDP over gloo", Contender("ddp")


def _choose(system: str, ranks: int, only: Sequence[str] | None) -> dict[str, Contender]:
    """Return the contenders that can run here and that `only` asks for; the ceiling always."""
    problem = mpi_problem() if ranks > 1 else None
    if problem:
        print(f"without MPI: {problem}", file=sys.stderr)
    ways: dict[Way, str] = {"horovodrun": "gloo"} if problem else {"mpirun": "MPI", "horovodrun": "gloo"}
    known = dict(contenders(system, ranks, ways))
    chosen = {name: each for name, each in known.items() if not only or any(text in name for text in only)}
    if not chosen:
        raise UserError(f"bench peers: --only {only}: no contender's name holds it; there are {'; '.join(known)}.")
    ceiling = next(iter(known))
    return {ceiling: known[ceiling], **chosen}


class _Records(NamedTuple):
    """inputs, targets: what the programs of others train on; schema, arrays: the same as TFRecords."""

    inputs: np.ndarray
    targets: np.ndarray
    schema: Schema
    arrays: dict[str, np.ndarray]
    loss: LossSpec


def _make_images(count: int) -> _Records:
    from horovod_train.data.prepare import idx

    rng = np.random.default_rng(1)
    pixels, labels = rng.integers(0, 256, (count, 28, 28, 1), np.uint8), rng.integers(0, 10, count)
    loss = LossSpec("sparse_categorical_crossentropy", {"from_logits": True})
    return _Records(pixels, labels, idx.IMAGE_SCHEMA, {"image_raw": pixels, "label": labels}, loss)


def _make_samples(count: int) -> _Records:
    from horovod_train.data.prepare import mlp_samples

    values, labels = mlp_samples.make_samples(count, seed=1)
    inputs, targets = values.astype(np.float32), labels.astype(np.float32)[:, None]
    loss = LossSpec("binary_crossentropy", {"from_logits": True})
    return _Records(inputs, targets, mlp_samples.SCHEMA, {"sample": values, "label": labels}, loss)


def _prepare(folder: Path, system: str, count: int, steps: int, ranks: int) -> Prepared:
    """Make records from a fixed seed, as an .npz file and as TFRecords."""
    # Imported here, because it loads TensorFlow.
    from horovod_train.data.prepare.writing import encode_rows, write_dataset

    records = _make_samples(count) if system == "mlp" else _make_images(count)
    np.savez(folder / "records.npz", inputs=records.inputs, targets=records.targets)
    places = argparse.Namespace(out=str(folder / "records"), shards=4, force=False)
    with contextlib.redirect_stdout(sys.stderr):
        encode = encode_rows(records.schema, records.arrays)
        write_dataset(places, records.schema, {"train": np.arange(count)}, encode)
    batch, steps_per_call, rate, momentum = SYSTEMS[system]
    config = Config(
        data=DataConfig(
            train=(str(folder / "records" / "train"),),
            global_batch_size=ranks * batch,
            cache="memory" if system == "mlp" else "none",  # as configs/mlp_synchronous.yaml
        ),
        model=ModelSpec(system),
        loss=records.loss,
        optimizer=OptimizerSpec("sgd", {"momentum": momentum, "nesterov": True} if momentum else {}),
        lr_schedule=LrScheduleConfig(base_lr=rate),
        train=TrainConfig(max_steps=steps, steps_per_call=steps_per_call),
    )
    return Prepared(Workload(system, folder / "records.npz", steps), measured_config(config, steps))


def table(measured: Mapping[str, Sequence[float]], records: int) -> Iterator[str]:
    """Yield the lines of a Markdown table, the fastest first; the last column: over this project's fastest.

    measured: records per second, the ceiling first. records: of a step.
    """
    medians = {name: statistics.median(rates) for name, rates in measured.items()}
    ceiling = next(iter(medians.values()))
    best = max((rate for name, rate in medians.items() if name.startswith(PROJECT) and name != CEILING), default=None)
    yield "| | records/s | steps/s | slowest to fastest, records/s | of the ceiling | of this project |"
    yield "|---|--:|--:|--:|--:|--:|"
    for name in sorted(medians, key=lambda name: -medians[name]):
        rates, median = measured[name], medians[name]
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        ratios = [f"{median / ceiling:.2f}", f"{median / best:.2f}" if best else "—"]
        yield f"| {' | '.join([name, f'{median:,.0f}', f'{median / records:,.1f}', spread, *ratios])} |"
