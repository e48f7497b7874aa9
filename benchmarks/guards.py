"""What the guards of horovod_train.keras cost in model.fit: runs with and without them, taking turns.

python benchmarks/guards.py --np 2 --rounds 5

Each run trains the convnet of models/convnet.py on made images of 28×28, 64 a rank and step; its first epoch, which
compiles, does not count. Of all epochs the median, and the speed that one in ten exceeds: other work on the machine
disturbs that less.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from typing import Any

from horovod_train.commands.cli import build_table, open_screen
from horovod_train.distributed.launch.local import best_way, run_ranks

BATCH, STEPS, EPOCHS = 64, 25, 13
OFF = {"watch_ranks": False, "check_weights": False}
CONTENDERS: dict[str, dict[str, Any]] = {"without guards": OFF, "with guards": {}}


def train(name: str) -> None:
    """Fit on each rank; root prints images a second over all ranks, for each epoch after the first."""
    import keras
    import numpy as np

    import horovod_train.keras as hvd
    from horovod_train.models import convnet

    ends: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ends.append(time.perf_counter())

    hvd.init(**CONTENDERS[name])
    rng = np.random.default_rng(hvd.rank())
    x = rng.random((BATCH * STEPS, 28, 28, 1), np.float32)
    y = rng.integers(0, 10, len(x))
    model = convnet.build()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Clock()]
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    if hvd.rank() == 0:
        speeds = hvd.size() * len(x) / np.diff(ends)
        print("images/s:", *(f"{speed:.1f}" for speed in speeds), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, metavar="N", help="ranks; default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each; default %(default)s")
    parser.add_argument("--rank", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        train(arguments.rank)
    else:
        compare(arguments.np, arguments.rounds)


def compare(ranks: int, rounds: int) -> None:
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, speeds in found.items():
            finished = run_ranks(best_way()[0], ranks, [sys.executable, __file__, "--rank", name], {}, 600.0)
            told = re.search(r"images/s: ([\d. ]+)", finished.stdout)
            if finished.returncode or not told:
                sys.exit(f"{name}: exit code {finished.returncode}: {finished.stderr[-2000:]}")
            speeds += map(float, told[1].split())
            print(f"{name}: {told[0].strip()}", file=sys.stderr, flush=True)
    marks = {
        name: (statistics.median(speeds), statistics.quantiles(speeds, n=10)[-1]) for name, speeds in found.items()
    }
    base = marks["without guards"]
    rows = [
        (name, f"{median:,.0f}", f"{median / base[0]:.3f}", f"{best:,.0f}", f"{best / base[1]:.3f}")
        for name, (median, best) in marks.items()
    ]
    columns = ("", "images/s, median", "of without", "best tenth", "of without")
    open_screen().print(build_table(columns, rows, left=("",)))


if __name__ == "__main__":
    main()
