"""Records a second of training from an S3 server on this machine beside training from disk, taking turns.

python benchmarks/object_store.py --records 30000 --rounds 3

Makes TFRecords of grey images 28×28 and trains a small model on them, two epochs on each of --np ranks. The server is
moto's, in a process of its own (tests/s3_server.py). It answers --delay-ms late, and --fail-percent of requests by 500.
It shares this machine's cores with the ranks, which real stores do not: its CPU time is shown apart, and --split-cores
gives it core 0 and the ranks the other cores, from disk too. Needs the extras s3 and dev.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from horovod_train.commands.cli import build_table, open_screen

PROJECT = Path(__file__).parent.parent
CONFIG = """
data: {batch_size_per_rank: 64}
loss: {name: sparse_categorical_crossentropy, options: {from_logits: true}}
lr_schedule: {base_lr: 0.01}
train: {epochs: 2}
log: {every_steps: 100, tensorboard: false}
checkpoint: {every_epochs: 2}
"""


class Seen(NamedTuple):
    """What a run came to."""

    rate: float
    """Records a second, of all ranks, over all steps but the first call's."""
    input_share: float
    """Of the time of these steps, in which ranks waited for input."""
    cpu_s: float
    """CPU time of the ranks, from their start to their end."""
    server_cpu_s: float = 0.0
    requests: int = 0


def prepare(folder: Path, records: int) -> None:
    """Write records of random images with `prepare npz`."""
    import numpy as np

    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (records, 28, 28, 1), np.uint8)
    np.savez(folder / "made.npz", x=images, y=rng.integers(0, 10, records))
    words = ["prepare", "npz", "--file", "made.npz", "--inputs", "x", "--targets", "y", "--out", "images"]
    command = [sys.executable, "-m", "horovod_train.main", *words, "--eval-fraction", "0.02", "--shards", "8"]
    subprocess.run(command, cwd=folder, check=True, env=os.environ | {"PYTHONPATH": str(PROJECT)})
    (folder / "c.yaml").write_text(CONFIG)


def train(folder: Path, name: str, data: str, arguments: argparse.Namespace, environment: dict[str, str]) -> Seen:
    """Train on the records of `data`."""
    python = os.environ.get("PYTHONPATH", "")
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), python)))}
    words = ["--config", "c.yaml", "--output-dir", name, f"data.train={data}/train", "data.index_dir=indexes"]
    words.append(f"model={arguments.model}")
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[1 if arguments.split_cores else 0 :]))
    command = ["taskset", "--cpu-list", cores, "mpirun", "--oversubscribe", "--bind-to", "none"]
    command += ["-np", str(arguments.np), sys.executable]
    command += ["-m", "horovod_train.main", *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, check=True, env=os.environ | paths | environment, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [later["step"] - one["step"] for one, later in itertools.pairwise([{"step": 0}, *rows])]
    took = [row["s_per_step"] * count for row, count in zip(rows, steps, strict=True)]
    records = sum(row["examples_per_s"] * seconds for row, seconds in zip(rows, took, strict=True))
    # Lines of few steps do not say it.
    waited = sum(row.get("input_share", 0.0) * seconds for row, seconds in zip(rows, took, strict=True))
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Seen(records / sum(took), waited / sum(took), cpu_s)


class Server:
    """The server, and the environment by which s3fs finds it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self._said = process.stdout
        self.environment = dict(word.split("=", 1) for word in self._said.readline().split())

    def used(self) -> tuple[float, int]:
        """Return its CPU time so far, in seconds, and the requests."""
        ticks = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        self._process.send_signal(signal.SIGUSR1)
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), int(self._said.readline())


@contextmanager
def serving(folder: Path, arguments: argparse.Namespace) -> Iterator[Server]:
    """Run the server inside the block."""
    words = ["--delay-ms", str(arguments.delay_ms), "--fail-percent", str(arguments.fail_percent)]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: 1 if arguments.split_cores else None]))
    command = ["taskset", "--cpu-list", cores, sys.executable, str(PROJECT / "tests" / "s3_server.py")]
    command += [str(folder / "images"), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield Server(process)
        finally:
            process.terminate()


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, list[Seen]]:
    """Return what the runs of each kind came to, which take turns."""
    found: dict[str, list[Seen]] = {"disk": [], "s3": []}
    with serving(folder, arguments) as server:
        for number in range(arguments.rounds):
            found["disk"].append(train(folder, f"disk-{number}", str(folder / "images"), arguments, {}))
            cpu_s, requests = server.used()
            seen = train(folder, f"s3-{number}", "s3://bucket/images", arguments, server.environment)
            now_cpu_s, now_requests = server.used()
            found["s3"].append(seen._replace(server_cpu_s=now_cpu_s - cpu_s, requests=now_requests - requests))
    return found


def rows_of(found: dict[str, list[Seen]]) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for each kind of run: medians."""
    of_disk = statistics.median(seen.rate for seen in found["disk"])
    for where, runs in found.items():
        rates = [seen.rate for seen in runs]
        median = Seen(*(statistics.median(values) for values in zip(*runs, strict=True)))
        yield (
            where,
            f"{median.rate:,.0f}",
            f"{min(rates):,.0f}",
            f"{max(rates):,.0f}",
            f"{median.rate / of_disk:.2f}",
            f"{median.input_share:.1%}",
            f"{median.cpu_s:.1f}",
            f"{median.server_cpu_s:.1f}",
            f"{median.requests:.0f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=30_000)
    parser.add_argument("--model", default="convnet", help="one of the project's, for images; image_mlp is quicker")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--delay-ms", type=float, default=50)
    parser.add_argument("--fail-percent", type=float, default=5)
    parser.add_argument("--split-cores", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, arguments.records)
        found = measure(folder, arguments)
    columns = (
        "",
        "records/s",
        "slowest",
        "fastest",
        "of disk",
        "waiting",
        "ranks' CPU s",
        "server's CPU s",
        "requests",
    )
    open_screen().print(build_table(columns, list(rows_of(found)), left=("",)))


if __name__ == "__main__":
    main()
