"""Runs that are slow for different reasons, all in one process on each rank: slowed.py OUT.

On two ranks only the reason that no other load on the machine can hide.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras
from facts import leave
from small_run import config_of

from horovod_train import main
from horovod_train.distributed.launch import launcher

OUT = Path(sys.argv[1])
RANKS = launcher.detect()
RANK = RANKS.rank
CONFIG = config_of(
    OUT,
    RANK == 0,
    num_records=48,
    unused_bytes=1_000_000,  # so that few records are parsed in one call
    data={
        "train": str(OUT / "data"),
        "parse": "user_slow:parse",
        "inputs": "x",
        "targets": "y",
        "global_batch_size": 12,
        "parallel_parse_calls": 1,
        "prefetch_batches": 1,
    },
    train={"max_steps": 100, "steps_per_call": 2},
    log={"tensorboard": False, "progress": "plain", "every_steps": 20},
    checkpoint={"every_epochs": None},
    device={"inter_op_threads": 3},  # a parser that sleeps must not keep the step from its thread
)
BURSTS = """
import os, signal, sys, time
rank = int(sys.argv[1])
while os.getppid() == rank:
    os.kill(rank, signal.SIGSTOP)
    time.sleep(0.2)
    os.kill(rank, signal.SIGCONT)
    time.sleep(0.1)
"""


@contextmanager
def stopped_in_bursts() -> Iterator[None]:
    """This process stands still for two thirds of the time."""
    child = subprocess.Popen([sys.executable, "-c", BURSTS, str(os.getpid())])
    try:
        yield
    finally:
        child.kill()  # cannot happen while this process stands still
        child.wait()


def run(name: str, parse: str = "parse", *, model: dict[str, Any], frozen: int | None = None) -> dict[str, Any]:
    """The exit code, and the times that root has written."""
    keras.utils.clear_session()
    words = [
        *("--config", str(CONFIG), "--output-dir", str(OUT / name)),
        *(f"data.parse=user_slow:{parse}", f"model={json.dumps({'name': 'user_slow:model', 'options': model})}"),
    ]
    with stopped_in_bursts() if frozen == RANK else nullcontext():
        code = main.main(words)
    lines = (OUT / name / "times.jsonl").read_text().splitlines() if RANK == 0 else []
    return {"code": code, "times": [json.loads(line) for line in lines]}


certain = {"straggler rank 1 in compute": run("c", model={"seconds": 0.1, "on_rank": 1})}
others = RANKS.size > 2 and {
    "compute-bound": run("a", model={"seconds": 0.1}),
    "exchange-bound": run("b", model={"hidden": 1500}),
    "straggler rank 2 in input": run("d", "parse_slowly_on_rank_2", model={"seconds": 0.005}),
    "straggler rank 0 in .*": run("e", model={"seconds": 0.01}, frozen=0),
}
leave(RANK, certain | (others or {}))
