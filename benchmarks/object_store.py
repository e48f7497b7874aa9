"""Records a second of training from an S3 server on this machine beside training from disk, taking turns.

python benchmarks/object_store.py --records 30000 --rounds 3

Makes TFRecords of grey images 28×28 and trains a small convnet on them, two epochs on each of --np ranks. The server is
moto's, in a process of its own (tests/s3_server.py). It answers --delay-ms late, and --fail-percent of requests by 500.
It shares this machine's cores with the ranks, which real stores do not. Needs the extras s3 and dev.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from horovod_train.commands.tables import build_table, open_screen

PROJECT = Path(__file__).parent.parent
CONFIG = """
data: {batch_size_per_rank: 64}
model: convnet
loss: {name: sparse_categorical_crossentropy, options: {from_logits: true}}
lr_schedule: {base_lr: 0.01}
train: {epochs: 2}
log: {every_steps: 100, tensorboard: false}
checkpoint: {every_epochs: 2}
"""


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


def train(folder: Path, name: str, data: str, ranks: int, environment: dict[str, str]) -> float:
    """Return the records a second, of all ranks, over all steps but the first call's."""
    python = os.environ.get("PYTHONPATH", "")
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), python)))}
    words = ["--config", "c.yaml", "--output-dir", name, f"data.train={data}/train", "data.index_dir=indexes"]
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), sys.executable]
    command += ["-m", "horovod_train.main", *words]
    subprocess.run(command, cwd=folder, check=True, env=os.environ | paths | environment, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [later["step"] - one["step"] for one, later in itertools.pairwise([{"step": 0}, *rows])]
    seconds = sum(row["s_per_step"] * count for row, count in zip(rows, steps, strict=True))
    records = sum(row["examples_per_s"] * row["s_per_step"] * count for row, count in zip(rows, steps, strict=True))
    return records / seconds


def serve(folder: Path, arguments: argparse.Namespace) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Start the server; return it, and the environment by which s3fs finds it."""
    words = ["--delay-ms", str(arguments.delay_ms), "--fail-percent", str(arguments.fail_percent)]
    command = [sys.executable, str(PROJECT / "tests" / "s3_server.py"), str(folder / "images"), *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    return server, dict(word.split("=", 1) for word in server.stdout.readline().split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--delay-ms", type=float, default=50)
    parser.add_argument("--fail-percent", type=float, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, arguments.records)
        server, environment = serve(folder, arguments)
        try:
            found: dict[str, list[float]] = {"disk": [], "s3": []}
            for number in range(arguments.rounds):
                for where, data in (("disk", str(folder / "images")), ("s3", "s3://bucket/images")):
                    rate = train(folder, f"{where}-{number}", data, arguments.np, environment)
                    found[where].append(rate)
        finally:
            server.terminate()
            server.wait()
    median = {where: statistics.median(rates) for where, rates in found.items()}
    rows = [
        (
            where,
            f"{median[where]:,.0f}",
            f"{min(rates):,.0f}",
            f"{max(rates):,.0f}",
            f"{median[where] / median['disk']:.2f}",
        )
        for where, rates in found.items()
    ]
    open_screen().print(build_table(("", "records/s", "slowest", "fastest", "of disk"), rows, left=("",)))


if __name__ == "__main__":
    main()
