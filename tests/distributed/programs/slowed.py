"""Runs that are slow for different reasons, all in one process on each rank: slowed.py OUT.

On two ranks only the reason that no other load on the machine can hide.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
        "inputs": "x",
        "targets": "y",
        "global_batch_size": 12,
        "parse": "user_slow:parse",
        "parallel_parse_calls": 1,
        "prefetch_batches": 1,
    },
    train={"max_steps": 100, "steps_per_call": 2},
    log={"tensorboard": False, "progress": "plain", "every_steps": 20},
    checkpoint={"every_epochs": None},
    device={"inter_op_threads": 3},  # a parser that sleeps must not keep the step from its thread
)
Context = AbstractContextManager[None]
NOTHING: Context = nullcontext()
BURSTS = """
import os, signal, sys, time
rank = int(sys.argv[1])
while os.getppid() == rank:
    os.kill(rank, signal.SIGSTOP)
    time.sleep(0.2)
    os.kill(rank, signal.SIGCONT)
    time.sleep(0.1)
"""


SPINS = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
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


@contextmanager
def on_a_shared_core() -> Iterator[None]:
    """This process has one core, and five others want it too."""
    cores = os.sched_getaffinity(0)
    one = {min(cores)}
    pin(one)
    children = [subprocess.Popen([sys.executable, "-c", SPINS, str(os.getpid())]) for _ in range(5)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()
        pin(cores)


def pin(cores: set[int]) -> None:
    """Bind all threads of this process, and those that they start."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def run(name: str, *words: str, model: dict[str, Any], beside: Context = NOTHING) -> dict[str, Any]:
    """The exit code, and the times that root has written."""
    keras.utils.clear_session()
    given = [
        *("--config", str(CONFIG), "--output-dir", str(OUT / name)),
        *(f"model={json.dumps({'name': 'user_slow:model', 'options': model})}", *words),
    ]
    with beside:
        code = main.main(given)
    lines = (OUT / name / "times.jsonl").read_text().splitlines() if RANK == 0 else []
    return {"code": code, "times": [json.loads(line) for line in lines]}


RARELY = ("data.global_batch_size=3", "log.every_steps=16", "train.max_steps=80")
"""Where there are callbacks each epoch has a line, so it must have enough steps."""


def only_on(rank: int, slows: Callable[[], Context]) -> Context:
    return slows() if rank == RANK else NOTHING


def parsed(parser: str) -> str:
    return f"data.parse=user_slow:{parser}"


SHORT = ("log.every_steps=10", "train.max_steps=50") if RANKS.size == 2 else ()
certain = {"straggler rank 1 in compute": run("c", *SHORT, model={"seconds": 0.1, "on_rank": 1})}
others = RANKS.size > 2 and {
    "compute-bound": run("a", model={"seconds": 0.1}),
    "exchange-bound": run("b", model={"hidden": 1500}),
    "straggler rank 2 in input": run("d", parsed("parse_slowly_on_rank_2"), model={"seconds": 0.005}),
    "straggler rank 0 in .*": run("e", model={"seconds": 0.1}, beside=only_on(0, stopped_in_bursts)),
    "input-bound|straggler rank . in input": run("f", parsed("parse_slowly"), model={"seconds": 0.005}),
    "straggler rank 1 in hook": run("g", *RARELY, "callbacks=[user_slow:Late]", model={"seconds": 0.005}),
    "hook-bound": run("h", "hooks=[user_slow:wait]", model={"seconds": 0.005}),
    "straggler rank 2 in compute": run(
        "i", model={"seconds": 0.02, "works": True}, beside=only_on(2, on_a_shared_core)
    ),
    "straggler rank 0 in input": run(
        "j",
        "data.source=user_slow:LateSource",
        "data.parse=null",
        "data.features={}",
        "data.read_threads=1",
        model={"seconds": 0.005},
    ),
    "(compute|exchange|input)-bound": run("k", model={"seconds": 0.02, "works": True}),
}
leave(RANK, certain | (others or {}))
