"""Checks of `doctor` on ranks: launcher, hosts, devices, threads, settings; is their mean right, and how fast?"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence, Set

import keras
import numpy as np
import tensorflow as tf

from horovod_train.commands.doctor import CheckResult, fail, ok, warning
from horovod_train.distributed.device import cpu_quota
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.horovod_info import Speed, measure_allreduce, mpi_place, scheduler_tasks
from horovod_train.distributed.launch.local import list_gpus
from horovod_train.shown_text import listed
from horovod_train.tensorflow import DistributedOptimizer

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
SLOW_GB_PER_S = 0.1
"""Throughput of a network of 1 Gbit/s."""
MOST_ERROR = 1e-6
MEASURED_S = 2.0


def check_launcher(group: WorkerGroup) -> CheckResult:
    """Collective: who started the ranks, and whether launcher, Horovod, MPI and scheduler count alike.

    Launcher and Horovod have been compared when the group started.
    """
    by_mpi, scheduler = mpi_place(group), scheduler_tasks()
    counts = {"Horovod": group.size}
    text = f"started by {group.launcher}" if group.launcher != "none" else "started by itself, without a launcher"
    text += f": {group.size} rank{'s' * (group.size > 1)} on {len(set(group.hosts))} host(s)"
    if by_mpi is not None:
        counts["MPI"] = by_mpi[1]
        text += f"; {by_mpi[2]}"
    if scheduler is not None:
        counts[scheduler[0]] = scheduler[1]
    places = group.gather((group.rank, by_mpi[0] if by_mpi else group.rank))
    facts = {"launcher": group.launcher, "counts": counts, "mpi": by_mpi and by_mpi[2]}
    return judge_counts(text, counts, places, facts)


def judge_counts(
    text: str, counts: Mapping[str, int], places: Sequence[tuple[int, int]], facts: Mapping[str, object]
) -> CheckResult:
    """counts: numbers of ranks by source. places: for each rank Horovod's number and MPI's."""
    counted = ", ".join(f"{who} counts {count}" for who, count in counts.items())
    if [rank for rank, _ in places] != list(range(len(places))):
        return fail("launcher", f"{text}; ranks are numbered {[rank for rank, _ in places]}", "Report this.", facts)
    if counts.get("MPI", len(places)) != len(places) or any(rank != by_mpi for rank, by_mpi in places):
        fix = "Start with the mpirun of the MPI that Horovod and mpi4py were built with."
        return fail("launcher", f"{text}; {counted}", fix, facts)
    by_scheduler = {who: count for who, count in counts.items() if who not in ("Horovod", "MPI")}
    for who, count in by_scheduler.items():
        if count > 1 and len(places) == 1:
            fix = "Each process believes that it is alone; see docs/clusters.md for how to start them together."
            return fail("launcher", f"{text}, but {who} has started {count} tasks", fix, facts)
        if count != len(places):
            fix = "Fine where it is meant; otherwise ask the scheduler for one task a rank."
            return warning("launcher", f"{text}; {counted}", fix, facts)
    return ok("launcher", text, facts)


def check_hosts(group: WorkerGroup) -> CheckResult:
    """Show ranks by host; with an uneven spread the hosts with fewer ranks wait."""
    spread = Counter(group.hosts)
    text = f"ranks by host: {listed((f'{host}: {count}' for host, count in spread.items()), 8)}"
    if len(set(spread.values())) > 1:
        fix = "Give each host as many ranks: those that share a host with more of them are slower."
        return warning("hosts", text, fix, {"ranks_by_host": dict(spread)})
    return ok("hosts", text, {"ranks_by_host": dict(spread)})


def check_devices(group: WorkerGroup) -> CheckResult:
    """Collective: whether each rank has its own GPUs, by UUID; or why there are none."""
    mine = group.devices[group.rank].gpu_keys
    visible = len(tf.config.list_physical_devices("GPU"))
    return judge_devices(group.gather((group.hosts[group.rank], mine, len(list_gpus()), visible)))


def judge_devices(rows: Sequence[tuple[str, tuple[str, ...], int, int]]) -> CheckResult:
    """rows: for each rank its host, the UUIDs of its GPUs, the GPUs that the driver lists and those TensorFlow sees."""
    facts = {"gpus": [list(uuids) for _, uuids, _, _ in rows]}
    for rank, (host, uuids, driver_count, visible) in enumerate(rows):
        if not uuids and driver_count and not visible:
            fix = "Install with TENSORFLOW='tensorflow[and-cuda]' make install, or load the cluster's CUDA module."
            return fail("devices", f"rank {rank} ({host}): TensorFlow sees none of the {driver_count} GPUs", fix, facts)
    holders: dict[tuple[str, str], int] = {}
    for rank, (host, uuids, _, _) in enumerate(rows):
        for uuid in uuids:
            if (first_rank := holders.setdefault((host, uuid), rank)) != rank:
                fix = "Start at most one rank for each GPU, or ask the scheduler for one GPU a task."
                return fail("devices", f"ranks {first_rank} and {rank} on {host} share GPU {uuid}", fix, facts)
    on_gpu = sum(bool(uuids) for _, uuids, _, _ in rows)
    if on_gpu == 0:
        return ok("devices", "no GPU here: all ranks compute on CPU", facts)
    if on_gpu < len(rows):
        lone = next(rank for rank, row in enumerate(rows) if not row[1])
        text = f"{on_gpu} ranks compute on GPUs, {len(rows) - on_gpu} on CPU, rank {lone} ({rows[lone][0]}) the first"
        return fail("devices", text, "Fix that host's driver, or leave it out: the GPUs would wait for it.", facts)
    used: Counter[str] = Counter()
    for host, uuids, _, _ in rows:
        used[host] += len(uuids)
    idle = {host: count - used[host] for host, _, count, _ in rows if count > used[host]}
    if idle:
        text = f"{on_gpu} ranks, each with its own GPU; idle: {idle}"
        return warning("devices", text, "Start as many ranks on a host as it has GPUs.", facts)
    return ok("devices", f"{on_gpu} ranks, each with its own GPU", facts)


def check_threads(group: WorkerGroup) -> CheckResult:
    """Collective: the ranks' threads against the cores of their host, its quota and their binding."""
    mine = tf.config.threading.get_intra_op_parallelism_threads()
    bound = sorted(os.sched_getaffinity(0))
    rows = group.gather((group.hosts[group.rank], mine, bound, os.cpu_count() or 1, cpu_quota()))
    return judge_threads([(host, threads, set(cores), *limits) for host, threads, cores, *limits in rows])


def judge_threads(rows: Sequence[tuple[str, int, Set[int], int, float]]) -> CheckResult:
    """rows: for each rank host, threads, cores it is bound to, number of the host's cores, and its quota of them."""
    per_host = Counter(host for host, *_ in rows)
    threads_of_cores = sorted({f"{threads} of {min(cores, quota):g} cores" for _, threads, _, cores, quota in rows})
    text = f"threads of a rank: {', '.join(threads_of_cores)}; {max(per_host.values())} rank(s) on a host"
    facts = {"threads": [threads for _, threads, *_ in rows], "cores": [cores for _, _, _, cores, _ in rows]}
    for rank, (host, threads, bound, cores, quota) in enumerate(rows):
        if threads > len(bound):
            text = f"rank {rank} ({host}) has {threads} threads bound to {len(bound)} of {cores} cores"
            return warning("threads", text, "Start it with mpirun --bind-to none, or srun --cpus-per-task.", facts)
        host_threads = sum(count for name, count, *_ in rows if name == host)
        available = min(cores, quota)
        if host_threads > math.ceil(available):
            text = f"{host}: {per_host[host]} ranks with {host_threads} threads share {available:g} cores"
            return warning("threads", text, "Start fewer ranks there, or ask for more cores.", facts)
        host_cores = set().union(*(bound_cores for name, _, bound_cores, *_ in rows if name == host))
        share = min(quota, len(host_cores)) / per_host[host]
        if 2 * threads <= share:
            text = f"rank {rank} ({host}) has {threads} threads, though its share of the host's cores is {share:g}"
            return warning("threads", text, "Fine where it is meant; otherwise see device.intra_op_threads.", facts)
    return ok("threads", text, facts)


def check_settings(group: WorkerGroup) -> CheckResult:
    """Show the settings of Horovod and MPI, and where each comes from."""
    rows = tuple(
        f"{setting.name}={setting.value}  ({setting.origin}{f': {setting.why}' if setting.why else ''})"
        for setting in group.settings
    )
    changed = sum(setting.origin != "default" for setting in group.settings)
    text = f"{len(group.settings)} settings of Horovod and MPI, {changed} of them not the defaults of this place"
    return ok("settings", text, {"settings": [setting._asdict() for setting in group.settings]}, rows)


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
