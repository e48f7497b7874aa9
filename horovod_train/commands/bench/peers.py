"""`bench peers`: the same small training by this project, by stock Horovod, tf.distribute and PyTorch, taking turns.

python -m horovod_train.main bench peers --np 2

The convnet of models/convnet.py on made images of 28×28, 64 a rank. This project trains as a user starts it, from
TFRecords, with its checks and its watchdog; the others train from main memory, see peer_programs. The ceiling is this
project as runs of one rank each at the same time, which exchange nothing. Each contender runs once in each round.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from horovod_train.commands.bench.peer_run import run_apart, run_launched
from horovod_train.commands.bench.scaling_run import measure, measured_config
from horovod_train.commands.tables import open_screen
from horovod_train.config.settings import Config, DataConfig, LossSpec, OptimizerSpec, TrainConfig
from horovod_train.distributed.launch.local import Way, mpi_problem
from horovod_train.errors import UserError

CEILING = "this project without any exchange: the ceiling"
OURS = "this project"
LEAST_STEPS = 50
_BATCH = 64


class Prepared(NamedTuple):
    """images: an .npz file for the programs of others; config: of this project, for the same images as TFRecords."""

    images: Path
    config: Config
    steps: int


Contender = Callable[[Prepared], float]
"""Trains once; returns images per second over all ranks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--np", type=int, default=2, metavar="N", help="ranks; default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; default %(default)s")
    parser.add_argument("--steps", type=int, default=400, help="in each; the first fifth is not timed; %(default)s")
    parser.add_argument("--images", type=int, default=60_000, help="made images; default %(default)s")
    parser.add_argument("--only", metavar="TEXT", action="append", help="contenders whose names hold this")
    parser.add_argument("--json", metavar="FILE", help="write the figures of every run there")


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    chosen = _choose(arguments.np, arguments.only)
    found: dict[str, list[float]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        prepared = _prepare(Path(folder), arguments.images, arguments.steps, arguments.np)
        for number in range(arguments.rounds):
            for name, contender in chosen.items():
                found[name].append(contender(prepared))
                print(f"round {number + 1}, {name}: {found[name][-1]:,.0f} images/s", file=sys.stderr, flush=True)
    title = f"{arguments.np} ranks, {_BATCH} images of 28×28 a rank and step; medians of {arguments.rounds} runs\n"
    open_screen().print(title, *table(found), sep="\n", markup=False)
    if arguments.json:
        with Path(arguments.json).open("x", encoding="utf-8") as file:
            file.write(json.dumps({"ranks": arguments.np, "images_per_s": found}, indent=2) + "\n")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.np < 2 or arguments.rounds < 1:
        raise UserError("bench peers: --np must be at least 2, --rounds at least 1.")
    if arguments.steps < LEAST_STEPS:
        raise UserError(f"bench peers: --steps must be at least {LEAST_STEPS}; received {arguments.steps}.")
    if arguments.images < arguments.np * _BATCH:
        raise UserError(f"bench peers: --images must be at least {arguments.np * _BATCH}, a batch for each rank.")
    if arguments.json and (Path(arguments.json).exists() or not Path(arguments.json).parent.is_dir()):
        raise UserError(f"bench peers: --json {arguments.json}: expected a new file in a folder that exists.")


def contenders(ranks: int, ways: Mapping[Way, str]) -> Iterator[tuple[str, Contender]]:
    """Yield all contenders by name. ways: those that work here, with the names of what ranks exchange over."""

    def ours(way: Way) -> Contender:
        return lambda prepared: measure(prepared.config, ranks, way).examples_per_s

    def stock(way: Way) -> Contender:
        return lambda prepared: run_launched(way, ranks, "stock_horovod", prepared.images, prepared.steps)

    def apart(program: str) -> Contender:
        return lambda prepared: run_apart(ranks, program, prepared.images, prepared.steps)

    first = next(iter(ways))
    yield CEILING, lambda prepared: measure(prepared.config, ranks, first, apart=True).examples_per_s
    for way, name in ways.items():
        yield f"{OURS} over {name}", ours(way)
    for way, name in ways.items():
        yield f"stock Horovod in a hand-written loop, over {name}", stock(way)
    yield "tf.distribute MultiWorkerMirroredStrategy", apart("multi_worker")
    if importlib.util.find_spec("torch") is None:
        print("without PyTorch DDP: torch is not installed", file=sys.stderr)
    else:
        yield "PyTorch DDP over gloo", apart("ddp")


def _choose(ranks: int, only: Sequence[str] | None) -> dict[str, Contender]:
    """Return the contenders that can run here and that `only` asks for; the ceiling always."""
    problem = mpi_problem()
    if problem:
        print(f"without MPI: {problem}", file=sys.stderr)
    ways: dict[Way, str] = {"horovodrun": "gloo"} if problem else {"mpirun": "MPI", "horovodrun": "gloo"}
    known = dict(contenders(ranks, ways))
    found = {name: each for name, each in known.items() if not only or any(text in name for text in only)}
    if not found:
        raise UserError(f"bench peers: --only {only}: no contender's name holds it; there are {'; '.join(known)}.")
    return {CEILING: known[CEILING], **found}


def _prepare(folder: Path, images: int, steps: int, ranks: int) -> Prepared:
    """Make images and labels from a fixed seed, as an .npz file and as TFRecords."""
    # Imported here, because it loads TensorFlow.
    from horovod_train.data.prepare.idx import IMAGE_SCHEMA, encode_image
    from horovod_train.data.prepare.writing import write_dataset

    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (images, 28, 28, 1), np.uint8)
    labels = rng.integers(0, 10, images)
    np.savez(folder / "images.npz", images=pixels, labels=labels)
    places = argparse.Namespace(out=str(folder / "records"), shards=4, force=False)
    with contextlib.redirect_stdout(sys.stderr):
        splits = {"train": np.arange(images)}
        write_dataset(places, IMAGE_SCHEMA, splits, lambda n: encode_image(pixels[n], labels[n]))
    config = Config(
        data=DataConfig(train=(str(folder / "records" / "train"),), global_batch_size=ranks * _BATCH),
        loss=LossSpec("sparse_categorical_crossentropy", {"from_logits": True}),
        optimizer=OptimizerSpec("sgd", {"momentum": 0.9, "nesterov": True}),
        train=TrainConfig(max_steps=steps, steps_per_call=10),
    )
    return Prepared(folder / "images.npz", measured_config(config, steps), steps)


def table(found: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, the fastest first. of ours: of this project's fastest way."""
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    ours = max((rate for name, rate in medians.items() if name.startswith(f"{OURS} over")), default=None)
    yield "| | images/s | slowest to fastest | of the ceiling | of this project |"
    yield "|---|--:|--:|--:|--:|"
    for name in sorted(medians, key=lambda name: -medians[name]):
        rates = found[name]
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        ratios = [f"{medians[name] / medians[CEILING]:.2f}", f"{medians[name] / ours:.2f}" if ours else "—"]
        yield f"| {' | '.join([name, f'{medians[name]:,.0f}', spread, *ratios])} |"
