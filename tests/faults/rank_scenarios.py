"""Two ranks with Horovod: their start by itself, and whole runs."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command_scenarios import TRAIN, broken_run, command, load_tensorflow, make_data
from scenario import ENDED, SENDS, START_AGAIN, Scenario, nothing, own_rank, said_nothing

ABORTED = ENDED | {-signal.SIGABRT}
"""Horovod's C++ knows no other end if the rendezvous fails for good."""


def start_and_end() -> int:
    """All that ranks send while they find each other."""
    from horovod_train.distributed.start import start

    group = start()
    assert float(group.sum([group.rank + 1])[0]) == sum(range(1, group.size + 1))
    group.close()
    return 0


FEW_FILES = (*TRAIN, "log.tensorboard=false", "log.graph=false", "log.histograms_every_steps=null")


def stopped_by_a_signal() -> int:
    """Rank 1 gets SIGTERM once the run has trained for a little; not when it is started again."""
    asked, rows = Path("asked"), Path("run/metrics.jsonl")

    def ask() -> None:
        while not rows.exists():
            time.sleep(0.01)
        asked.touch()
        os.kill(os.getpid(), signal.SIGTERM)

    if own_rank()[0] == 1 and not asked.exists():
        threading.Thread(target=ask, daemon=True).start()
    more = ("train.epochs=60", "train.steps_per_call=1", "checkpoint.every_steps=50", "log.every_steps=20")
    return command(*FEW_FILES, *more)()


def damaged_data() -> int:
    """A record in the middle of a file is damaged, so one rank fails when it comes to it."""
    code = make_data()
    path = Path.cwd().parent / "data/train/0.tfrecord"
    found, at = bytearray(path.read_bytes()), 0
    for _ in range(20):
        at += 16 + struct.unpack_from("<Q", found, at)[0]
    found[at + 12] ^= 1  # the first byte after length and checksum
    path.write_bytes(found)
    return code


def run_scenario(name: str, run: Callable[[], int], prepare: Callable[[], int] = make_data, **more: Any) -> Scenario:
    return Scenario(
        f"ranks: {name}",
        run,
        prepare,
        broken=broken_run,
        untrue=said_nothing,
        ranks=2,
        kinds=SENDS,
        exit_codes=ABORTED,
        load=load_tensorflow,
        **more,
    )


RANK_SCENARIOS = [
    Scenario(
        "start", start_and_end, nothing, ranks=2, kinds=SENDS, exit_codes=ABORTED, resumes=True, load=load_tensorflow
    ),
    run_scenario("done", command(*FEW_FILES), resumes=True),
    run_scenario("a rank fails", command(*FEW_FILES), damaged_data, ends=2),
    run_scenario("SIGTERM", stopped_by_a_signal, ends=START_AGAIN, resumes=True),
]
