"""The same small training by this project, by stock Horovod, tf.distribute and PyTorch, taking turns on this host.

python benchmarks/peers.py --np 2
python benchmarks/peers.py --np 1 --system mlp

The convnet of models/convnet.py on made images of 28×28, 64 a rank, or the tiny perceptron of models/mlp.py on made
samples, 100 a rank. This project trains as a user starts it, with its checks and its watchdog; the others: see
rank_programs. All train from main memory: this project reads TFRecords in its first epoch, and keeps them. By default
that epoch ends in the first fifth of the steps, which is not timed. With --cache none it reads them in each epoch.
The ceiling is this project as runs of one rank each at the same time, which exchange nothing; with one rank, a
hand-written loop. Each contender runs once in each round.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from rank_programs.timing import SEARCH_PATH, SYSTEMS

from horovod_train.commands.bench import measure, measured_config
from horovod_train.commands.cli import count, open_screen
from horovod_train.config.settings import (
    Config,
    DataConfig,
    LossSpec,
    LrScheduleConfig,
    ModelSpec,
    OptimizerSpec,
    TrainConfig,
)
from horovod_train.distributed.launch.local import Way, launch_command, mpi_problem, start_program, wait_for_all
from horovod_train.errors import RunError

CEILING = "this project without any exchange: the ceiling"
BARE = "TensorFlow in a hand-written loop: the ceiling"
"""Of one rank."""
PROJECT = "this project"
YIELDING = {"OMPI_MCA_mpi_yield_when_idle": "1"}
"""A rank that waits in MPI leaves its core to those that compute."""
NO_PAUSE = {"HOROVOD_CYCLE_TIME": "0"}
"""Faster for a tiny model; keeps a core of each rank busy."""
STEPS = {"convnet": 400, "mlp": 20_000}
RECORDS = 5_000
TIMEOUT_S = 1800.0


class Contender(NamedTuple):
    """A way to train."""

    program: Sequence[str] = ()
    """A module of rank_programs, and which of its ways; empty: this project."""
    launcher: Way | None = None
    """None: each rank is started alone. So are the ranks of this project that exchange nothing."""
    environment: Mapping[str, str] | None = None


class Workload(NamedTuple):
    """What all train. records: an .npz file of inputs and targets. config: of this project, for the same records."""

    system: str
    ranks: int
    steps: int
    records: Path
    config: Config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=count, default=2, metavar="N", help="ranks; default %(default)s")
    parser.add_argument("--rounds", type=count, default=3, help="runs of each; default %(default)s")
    parser.add_argument("--system", choices=SYSTEMS, default="convnet", help="what is trained; default %(default)s")
    parser.add_argument("--steps", type=count, help="in each run; a fifth is not timed; default 400, mlp: 20000")
    parser.add_argument("--records", type=count, default=RECORDS, help="made; default %(default)s")
    parser.add_argument("--cache", choices=("memory", "none"), default="memory", help="data.cache of this project")
    parser.add_argument("--only", metavar="TEXT", action="append", help="contenders whose names hold this")
    parser.add_argument("--json", action="store_true", help="print the records/s of every run as one JSON object")
    arguments = parser.parse_args()
    name, ranks = arguments.system, arguments.np
    steps, records = arguments.steps or STEPS[name], arguments.records
    # Metrics come ten times in a run, at the end of a call.
    if steps < (min_steps := 10 * SYSTEMS[name].steps_per_call):
        parser.error(f"--steps must be at least {min_steps}; received {steps}.")
    if records < (min_records := ranks * SYSTEMS[name].batch):
        parser.error(f"--records must be at least {min_records}, a batch for each rank; received {records}.")
    known = dict(contenders(name, ranks))
    chosen = {who: each for who, each in known.items() if any(text in who for text in arguments.only or [""])}
    if not chosen:
        parser.error(f"--only {arguments.only}: no contender's name holds it; there are {'; '.join(known)}.")
    ceiling = next(iter(known))
    rates: dict[str, list[float]] = {who: [] for who in {ceiling: known[ceiling], **chosen}}
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        workload = prepare(Path(folder), name, ranks, steps, records, arguments.cache)
        for number in range(arguments.rounds):
            for who, measured in rates.items():
                try:
                    measured.append(train(known[who], workload))
                except RunError as error:
                    sys.exit(f"error: {who}: {error}")
                print(f"round {number + 1}, {who}: {measured[-1]:,.0f} records/s", file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps({"system": name, "ranks": ranks, "records_per_s": rates}, indent=2))
        return
    batch = SYSTEMS[name].batch
    title = f"{name}, {ranks} ranks, {batch} records a rank and step; medians of {arguments.rounds} runs\n"
    open_screen().print(title, *table(rates, ranks * batch), sep="\n", markup=False)


def contenders(system: str, ranks: int) -> Iterator[tuple[str, Contender]]:
    """Yield all that can run here, by name, the ceiling first."""
    if ranks == 1:
        yield BARE, Contender(["tensorflow_loops", "one_process"])
        yield PROJECT, Contender()
        return
    launchers: dict[Way, str] = {"mpirun": "MPI", "horovodrun": "gloo"}
    if problem := mpi_problem():
        print(f"without MPI: {problem}", file=sys.stderr)
        del launchers["mpirun"]
    each_exchanged, grouped = ["tensorflow_loops", "horovod"], ["tensorflow_loops", "horovod_grouped"]
    yield CEILING, Contender()
    yield from ((f"{PROJECT} over {name}", Contender(launcher=launcher)) for launcher, name in launchers.items())
    for launcher, name in launchers.items():
        yield f"stock Horovod in a hand-written loop, over {name}", Contender(each_exchanged, launcher)
        if launcher == "mpirun":  # over gloo its defaults are the best that there are, but for a tiny model
            yield f"stock Horovod, tuned, over {name}", Contender(each_exchanged, launcher, YIELDING)
        if launcher == "mpirun" or system == "mlp":
            yield f"stock Horovod, tuned and grouped, over {name}", Contender(grouped, launcher, YIELDING | NO_PAUSE)
    yield "tf.distribute MultiWorkerMirroredStrategy", Contender(["tensorflow_loops", "multi_worker"])
    if importlib.util.find_spec("torch") is None:
        print("without PyTorch DDP: torch is not installed", file=sys.stderr)
    else:
        yield "PyTorch DDP over gloo", Contender(["ddp", "gloo"])


def prepare(
    folder: Path, system: str, ranks: int, steps: int, count: int, cache: Literal["memory", "none"]
) -> Workload:
    """Make so many records from a fixed seed, as an .npz file and as TFRecords."""
    # Imported here, because it loads TensorFlow.
    from horovod_train.data.prepare.images import GREY_SCHEMA
    from horovod_train.data.prepare.samples import MLP_SCHEMA, make_mlp_samples
    from horovod_train.data.prepare.writing import encode_rows, write_dataset

    if system == "mlp":
        values, labels = make_mlp_samples(count, seed=1)
        inputs: np.ndarray = values.astype(np.float32)
        targets: np.ndarray = labels.astype(np.float32)[:, None]
        schema, arrays, loss = MLP_SCHEMA, {"sample": values, "label": labels}, "binary_crossentropy"
    else:
        rng = np.random.default_rng(1)
        inputs, targets = rng.integers(0, 256, (count, 28, 28, 1), np.uint8), rng.integers(0, 10, count)
        schema, arrays = GREY_SCHEMA, {"image_raw": inputs, "label": targets}
        loss = "sparse_categorical_crossentropy"
    np.savez(folder / "records.npz", inputs=inputs, targets=targets)
    places = argparse.Namespace(out=str(folder / "records"), shards=4, force=False)
    with contextlib.redirect_stdout(sys.stderr):
        write_dataset(places, schema, {"train": np.arange(count)}, encode_rows(schema, arrays))
    batch, steps_per_call, rate, momentum = SYSTEMS[system]
    config = Config(
        data=DataConfig(
            train=(str(folder / "records" / "train"),),
            global_batch_size=ranks * batch,
            cache=cache,
        ),
        model=ModelSpec(system),
        loss=LossSpec(loss, {"from_logits": True}),
        optimizer=OptimizerSpec("sgd", {"momentum": momentum, "nesterov": True} if momentum else {}),
        lr_schedule=LrScheduleConfig(base_lr=rate),
        train=TrainConfig(max_steps=steps, steps_per_call=steps_per_call),
    )
    return Workload(system, ranks, steps, folder / "records.npz", measured_config(config, steps))


def train(contender: Contender, workload: Workload) -> float:
    """Train once; return records per second over all ranks. Raises RunError."""
    ranks = workload.ranks
    if not contender.program:
        return measure(workload.config, ranks, contender.launcher).examples_per_s
    program, way = contender.program
    environment = {**SEARCH_PATH, **(contender.environment or {})}
    with tempfile.TemporaryDirectory() as folder:
        task = [way, workload.system, str(workload.records), folder, str(workload.steps), str(ranks)]
        command = [sys.executable, "-m", f"rank_programs.{program}", *task]
        if contender.launcher:
            processes = [start_program([*launch_command(contender.launcher, ranks), *command], environment)]
        else:
            processes = [start_program(command, environment | place) for place in places_of(ranks)]
        if problem := wait_for_all(processes, TIMEOUT_S):
            raise RunError(problem)
        return read_speed(Path(folder), ranks)


def places_of(ranks: int) -> list[dict[str, str]]:
    """Return what MultiWorkerMirroredStrategy and PyTorch read, for each rank."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(ranks)]
        ports = [each.getsockname()[1] for each in sockets]
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    tasks = [{"cluster": cluster, "task": {"type": "worker", "index": rank}} for rank in range(ranks)]
    return [shared | {"RANK": str(rank), "TF_CONFIG": json.dumps(task)} for rank, task in enumerate(tasks)]


def read_speed(folder: Path, ranks: int) -> float:
    """Return what the ranks have measured. Raises RunError if they have not trained one model."""
    results = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    if len({each["weights_sha256"] for each in results}) > 1:
        raise RunError(f"its ranks have ended with different weights: they train {ranks} models.")
    return float(results[0]["records_per_s"])


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


if __name__ == "__main__":
    main()
