"""Checks of `doctor` on the exchange: whether the mean is right, and how fast it is."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from horovod_train.commands.doctor.check_result import CheckResult, fail, ok, warning
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.horovod_info import Speed, measure_allreduce
from horovod_train.distributed.optimizer import DistributedOptimizer

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
SLOW_GB_PER_S = 0.1
"""Throughput of a network of 1 Gbit/s."""
MOST_ERROR = 1e-6
MEASURED_S = 2.0


def check_averaging(group: WorkerGroup) -> CheckResult:
    """Collective: one step of a DistributedOptimizer on different data per rank, against the mean computed here.

    The same step of the plain optimizer must give the ranks different weights; otherwise the check proves nothing.
    """
    alone, exchanged = _step(group, distributed=False), _step(group, distributed=True)
    by_rank = group.gather((alone, exchanged))
    return judge_averaging([alone for alone, _ in by_rank], [exchanged for _, exchanged in by_rank], keras.__version__)


def judge_averaging(alone: Sequence[np.ndarray], exchanged: Sequence[np.ndarray], version: str) -> CheckResult:
    """alone, exchanged: each rank's weights after a step without and with the exchange; from the same weights."""
    expected = np.mean(alone, axis=0)  # plain SGD: the mean of the ranks' weights is a step along the mean gradient
    error = float(max(np.max(np.abs(weights - expected)) for weights in exchanged))
    differ = len({weights.tobytes() for weights in alone})
    facts = {"error": error, "different_without_exchange": differ}
    if any(weights.tobytes() != exchanged[0].tobytes() for weights in exchanged) or not error <= MOST_ERROR:
        text = f"after one step under Keras {version} weights are off the mean by {error:.1g}"
        return fail("averaging", text, "Do not train here: install again with make install, and report this.", facts)
    if len(alone) == 1:
        return ok("averaging", f"a step under Keras {version} is right; one rank has nothing to average", facts)
    if differ < len(alone):
        text = "inconclusive: ranks agree without an exchange too"
        return fail("averaging", text, "Report this.", facts)
    text = (
        f"a step under Keras {version} ends at the mean on all ranks, to {error:.0e}; without the exchange it does not"
    )
    return ok("averaging", text, facts)


def _step(group: WorkerGroup, *, distributed: bool) -> np.ndarray:
    """Return the weights after one compiled step on this rank's data, float32 [12]."""
    kernel = keras.initializers.RandomNormal(seed=3)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, kernel_initializer=kernel)])
    optimizer = keras.optimizers.SGD(0.1)
    if distributed:
        optimizer = DistributedOptimizer(optimizer)
    optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(group.rank)
    inputs, targets = (tf.constant(rng.normal(size=(8, width)), tf.float32) for width in (5, 2))

    @tf.function(autograph=False)
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step()
    return np.concatenate([weight.numpy().ravel() for weight in model.weights])


def check_speed(group: WorkerGroup) -> CheckResult:
    """Collective: time and throughput of one allreduce by its size, compared with MPI alone if MPI runs."""
    return judge_speed(measure_allreduce(group, SIZES, MEASURED_S), group.size, len(set(group.hosts)))


def judge_speed(speeds: Sequence[Speed], ranks: int, hosts: int) -> CheckResult:
    rows = ["       bytes      time     GB/s" + ("   MPI alone" if speeds[-1].mpi_s is not None else "")]
    for speed in speeds:
        alone = "" if speed.mpi_s is None else f"   {_time(speed.mpi_s):>9}"
        rows.append(f"{speed.bytes:>12,} {_time(speed.seconds):>9} {speed.gb_per_s:>8.3f}{alone}")
    latency, most = speeds[0].seconds, speeds[-1].gb_per_s
    facts = {"allreduce": [{**speed._asdict(), "gb_per_s": speed.gb_per_s} for speed in speeds]}
    text = f"allreduce over {ranks} rank{'s' * (ranks > 1)}: {_time(latency)} at least, {most:.2f} GB/s at most"
    if ranks > 1 and most < SLOW_GB_PER_S:
        where = "the network between the hosts" if hosts > 1 else "this host's cores: are they busy with other work?"
        return warning("exchange speed", text, f"Look at {where}.", facts, rows)
    return ok("exchange speed", text, facts, rows)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
