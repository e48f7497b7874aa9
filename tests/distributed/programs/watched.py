"""A run under watch that goes on until something happens to it: watched.py OUT VICTIM TROUBLE WARN_S STOP_S.

As in every run, a signal is no end by itself: horovodrun sends SIGTERM 0.05 s after a rank has gone, which may be
before the others have heard of it, and leaves them 5 s.

TROUBLE is what rank VICTIM does after a while: `none`; `slow-input`; `raise`, while the last rank is where it hears
nothing of it; `raise-alike`, which all do; `unwatched`, which is `none` with the watch off. What befalls a rank from
outside is up to the test, which finds `pid-N` in OUT once rank N trains.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_train.config.settings import DeviceConfig, HorovodConfig, WatchConfig
from horovod_train.data.batch_source import Feed
from horovod_train.distributed.start import start
from horovod_train.distributed.watchdog.watchdog import RunEnd, open_watchdog
from horovod_train.errors import AlreadySaid
from horovod_train.output import logs, rank_log
from horovod_train.output.console import to_stderr
from horovod_train.training.steps.step import PhaseVariable
from horovod_train.training.stopping import collected_signals

OUT, VICTIM, TROUBLE = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
LIMITS = WatchConfig(
    enabled=TROUBLE != "unwatched",
    warn_after_s=float(sys.argv[4]),
    stop_after_s=float(sys.argv[5]),
    first_step_after_s=600.0,
)
TROUBLE_AT_STEP = 30

group = start(HorovodConfig(), DeviceConfig())
is_victim = group.rank == VICTIM
rank_log.make_folder(OUT if group.is_root else None)
group.barrier()
host = group.hosts[group.rank]
said = rank_log.introduction(group.rank, group.size, group.launcher, host)
log = rank_log.open_rank_log(OUT, group.rank, host, start_text=said)
run_end = RunEnd(group, log, open_watchdog(group, log, LIMITS))

step = tf.Variable(0, dtype=tf.int64)
phase_variable = PhaseVariable(step)
weight = tf.Variable(tf.zeros([8]))


def inputs() -> Iterator[tuple[np.ndarray]]:
    for number in range(1_000_000):
        if is_victim and TROUBLE == "slow-input" and number == TROUBLE_AT_STEP:
            with (OUT / "train-00031.tfrecord").open("wb"):
                time.sleep(600)
        time.sleep(0.02)
        yield (np.array(number, np.float32),)


feed = Feed(inputs(), [tf.TensorSpec([], tf.float32)], on_failure=print, free_queues=[])


@tf.function
def train(steps: tf.Tensor) -> None:
    for _ in tf.range(steps):
        tf.autograph.experimental.set_loop_options(parallel_iterations=1)
        with tf.control_dependencies([phase_variable.enter("input")]):
            batch = feed.queue.dequeue()
        phase_variable.enter("compute", after=batch)
        gradient = weight * 0.5 + batch
        phase_variable.enter("exchange", after=gradient)
        combined = hvd.allreduce(gradient, name="gradient")
        weight.assign_sub(0.1 * combined)
        with tf.control_dependencies([combined]):
            step.assign_add(1)


def run() -> None:
    feed.start()
    group.heartbeat.phase("compile")
    group.heartbeat.set_probe(phase_variable)
    train(tf.constant(5))
    (OUT / f"pid-{group.rank}").write_text(str(os.getpid()))
    while True:
        group.heartbeat.phase("train")
        group.heartbeat.has_stepped = True
        train(tf.constant(5))
        if is_victim and TROUBLE == "raise" and int(step) >= TROUBLE_AT_STEP:
            raise ValueError(f"no luck on rank {group.rank}")
        if TROUBLE == "raise-alike" and int(step) >= TROUBLE_AT_STEP:
            raise ValueError("no luck on any rank")
        if TROUBLE == "raise" and group.rank == group.size - 1 and int(step) >= TROUBLE_AT_STEP:
            group.heartbeat.phase("evaluate")
            time.sleep(600)


try:
    with collected_signals(), logs.to_console(group.is_root, show=to_stderr), logs.to_file(log.write), run_end:
        run()
except AlreadySaid as error:
    sys.exit(error.exit_code)
