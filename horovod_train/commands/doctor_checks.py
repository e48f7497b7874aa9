"""The checks of `doctor`, on hosts, ranks and what lies between. Functions judge_… judge what the ranks have found."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path

import keras
import numpy as np
import psutil
import tensorflow as tf

from horovod_train.commands.cli import installed_version
from horovod_train.commands.doctor import CheckResult, fail, ok, warning
from horovod_train.config.loader import dump
from horovod_train.config.settings import Config
from horovod_train.distributed import consistency
from horovod_train.distributed.device import unseen_gpus
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.horovod_info import (
    Speed,
    clock_offsets_s,
    group_problem,
    horovod_build,
    measure_allreduce,
    mpi_place,
    scheduler_tasks,
)
from horovod_train.distributed.launch.local import driver_gpus, list_gpus
from horovod_train.distributed.launch.network import exchange_interfaces, interfaces
from horovod_train.distributed.optimizer import GradientExchange, distribute
from horovod_train.errors import RanksDisagree
from horovod_train.host import cpu_quota
from horovod_train.output.files import Artifact, remove
from horovod_train.shown_text import counted, listed

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
SLOW_GB_PER_S = 0.1
"""Throughput of a network of 1 Gbit/s."""
MOST_ERROR = 1e-6
MEASURED_S = 2.0
MOST_SKEW_S = 1.0
"""Beyond this, times in logs mislead and other tools misjudge which file is newer."""
VISIBLE_WITHIN_S = 10.0
MIN_FREE_BYTES = 1 << 30
_TO_NAME_ONE = "horovodrun --network-interfaces, HOROVOD_GLOO_IFACE, or NCCL_SOCKET_IFNAME if ranks exchange over NCCL"
_PLACE = Artifact("a folder of doctor's", r"\.doctor-[0-9a-f]{12}", "folder", ("root", r"rank-\d+"))


def run_checks(group: WorkerGroup, config: Config | None, folder: Path) -> Iterator[CheckResult]:
    """Run the checks, in the order in which they are shown. Collective. Each is a phase, for the watchdog."""
    checks: dict[str, Callable[[], CheckResult]] = {
        "versions": check_versions,
        "same everywhere": lambda: check_same(group, config),
        "horovod": lambda: check_build(group),
        "launcher": lambda: check_launcher(group),
        "hosts": lambda: check_hosts(group),
        "devices": lambda: check_devices(group),
        "threads": lambda: check_threads(group),
        "settings": lambda: check_settings(group),
        "averaging": lambda: check_averaging(group),
        "group sums": lambda: check_group(group),
        "exchange speed": lambda: check_speed(group),
        "network": lambda: check_network(group),
        "file system": lambda: check_file_system(group, folder),
        "clocks": lambda: judge_clocks(clock_offsets_s(group), group.hosts),
    }
    for name, check in checks.items():
        with group.heartbeat.phase(name):
            yield check()


def _versions() -> dict[str, str]:
    return consistency.versions() | {name: installed_version(name) or "missing" for name in ("numpy", "mpi4py")}


def check_versions() -> CheckResult:
    """Show the versions of this rank."""
    versions = _versions()
    return ok("versions", ", ".join(f"{name} {value}" for name, value in versions.items()), versions)


def check_same(group: WorkerGroup, config: Config | None) -> CheckResult:
    """Collective: whether all ranks have the same versions, code and config."""
    facts = {f"version of {name}": value for name, value in _versions().items()}
    facts["code of horovod_train"] = consistency.code_digest()
    what = "versions and code"
    if config is not None:
        facts["config"] = consistency.digest(dump(config).encode())
        what = "versions, code and config"
    try:
        consistency.check(group, facts, "now")
    except RanksDisagree as error:
        fix = "Give all hosts the same checkout and .venv, best on a shared file system."
        return fail("same everywhere", str(error), fix)
    ranks = "the only rank" if group.size == 1 else f"all {group.size} ranks"
    return ok("same everywhere", f"{what} are the same on {ranks}")


def check_build(group: WorkerGroup) -> CheckResult:
    """Show what Horovod was built with, and what the ranks use of it."""
    built = horovod_build()
    text = f"Horovod built with {', '.join(built)}; ranks meet over {group.controller}"
    text += f" and exchange gradients over {group.exchange}"
    facts = {"built": built, "controller": group.controller, "exchange": group.exchange}
    computes_on_gpu = any(device.gpu_keys for device in group.devices)
    if computes_on_gpu and group.exchange != "NCCL":
        fix = "`horovod-train build-horovod --gpu-operations NCCL` builds it to exchange between GPUs."
        return warning("horovod", f"{text}, although ranks compute on GPUs", fix, facts)
    return ok("horovod", text, facts)


def check_launcher(group: WorkerGroup) -> CheckResult:
    """Collective: who started the ranks, and whether launcher, Horovod, MPI and scheduler count alike.

    Launcher and Horovod have been compared when the group started.
    """
    by_mpi, scheduler = mpi_place(group), scheduler_tasks()
    counts = {"Horovod": group.size}
    text = f"started by {group.launcher}" if group.launcher != "none" else "started by itself, without a launcher"
    text += f": {counted(group.size, 'rank')} on {len(set(group.hosts))} host(s)"
    if by_mpi is not None:
        counts["MPI"] = by_mpi[1]
        text += f"; {by_mpi[2]}"
    if scheduler is not None:
        counts[scheduler[0]] = scheduler[1]
    mpi_ranks = group.gather(by_mpi[0] if by_mpi else group.rank)
    facts = {"launcher": group.launcher, "counts": counts, "mpi": by_mpi and by_mpi[2]}
    return judge_counts(text, counts, mpi_ranks, facts)


def judge_counts(
    text: str, counts: Mapping[str, int], mpi_ranks: Sequence[int], facts: Mapping[str, object]
) -> CheckResult:
    """counts: numbers of ranks by source. mpi_ranks: MPI's number of each rank."""
    told = ", ".join(f"{who} counts {count}" for who, count in counts.items())
    if counts.get("MPI", len(mpi_ranks)) != len(mpi_ranks) or list(mpi_ranks) != list(range(len(mpi_ranks))):
        fix = "Start with the mpirun of the MPI that Horovod and mpi4py were built with."
        return fail("launcher", f"{text}; {told}", fix, facts)
    by_scheduler = {who: count for who, count in counts.items() if who not in ("Horovod", "MPI")}
    for who, count in by_scheduler.items():
        if count > 1 and len(mpi_ranks) == 1:
            fix = "Each process believes that it is alone; see docs/clusters.md for how to start them together."
            return fail("launcher", f"{text}, but {who} has started {count} tasks", fix, facts)
        if count != len(mpi_ranks):
            fix = "Fine where it is meant; otherwise ask the scheduler for one task a rank."
            return warning("launcher", f"{text}; {told}", fix, facts)
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
    rows = group.gather((group.hosts[group.rank], mine, len(list_gpus()), len(driver_gpus()), unseen_gpus()))
    for rank, (host, *_, unseen) in enumerate(rows):
        if unseen:
            facts = {"gpus": [uuids for _, uuids, *_ in rows]}
            return fail("devices", f"rank {rank} ({host}): {unseen[0]}", unseen[1], facts)
    found = judge_devices([row[:3] for row in rows])
    alone = judge_sight([(host, uuids, driver_count) for host, uuids, _, driver_count, _ in rows])
    return alone if found.level == "ok" and alone is not None else found


def judge_sight(rows: Sequence[tuple[str, tuple[str, ...], int]]) -> CheckResult | None:
    """Return a warning if ranks of a host do not see each other's GPUs, even those that CUDA_VISIBLE_DEVICES hides.

    rows: for each rank its host, its GPUs, and how many the driver lists. NCCL looks for NVLink between GPUs that the
    process sees: NVIDIA/nccl issue 1066.
    """
    hosts = Counter(host for host, *_ in rows)
    for host, uuids, listed_count in rows:
        if uuids and hosts[host] > 1 and listed_count == len(uuids) and not uuids[0].startswith("MIG-"):
            text = f"each of the {hosts[host]} ranks on {host} sees its own GPU alone, so NCCL may not find NVLink"
            do = (
                "Ask for the GPUs of a host, not of a task: srun --gpus-per-node=N --ntasks-per-node=N --gpu-bind=none."
            )
            return warning("devices", text, do, {"gpus": [uuids for _, uuids, _ in rows]})
    return None


def judge_devices(rows: Sequence[tuple[str, tuple[str, ...], int]]) -> CheckResult:
    """rows: for each rank its host, the UUIDs of its GPUs, and how many it may use by the driver and the environment.

    That ranks do not share a GPU has been checked when the group started.
    """
    facts = {"gpus": [uuids for _, uuids, _ in rows]}
    on_gpu = sum(bool(uuids) for _, uuids, _ in rows)
    if on_gpu == 0:
        return ok("devices", "no GPU here: all ranks compute on CPU", facts)
    if on_gpu < len(rows):
        lone = next(rank for rank, row in enumerate(rows) if not row[1])
        text = f"{on_gpu} ranks compute on GPUs, {len(rows) - on_gpu} on CPU, rank {lone} ({rows[lone][0]}) the first"
        return fail("devices", text, "Fix that host's driver, or leave it out: the GPUs would wait for it.", facts)
    used: Counter[str] = Counter()
    for host, uuids, _ in rows:
        used[host] += len(uuids)
    idle = {host: count - used[host] for host, _, count in rows if count > used[host]}
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


def _distributed(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Make an optimizer combine its gradients as training does; return it."""
    combine = GradientExchange(owner="doctor").combine_each
    distribute(
        optimizer,
        lambda optimizer, gradients, variables: optimizer.apply_combined(combine(gradients, "doctor"), variables),
    )
    return optimizer


def _step(group: WorkerGroup, *, distributed: bool) -> np.ndarray:
    """Return the weights after one compiled step on this rank's data, float32 [12]."""
    kernel = keras.initializers.RandomNormal(seed=3)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, kernel_initializer=kernel)])
    optimizer = keras.optimizers.SGD(0.1)
    if distributed:
        optimizer = _distributed(optimizer)
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


def check_group(group: WorkerGroup) -> CheckResult:
    """Collective: whether tensors that Horovod exchanges together have the right sums; the averaging packs its own."""
    if problem := group_problem(group):
        return fail("group sums", *problem)
    return ok("group sums", "tensors that Horovod exchanges together have the right sums")


def check_speed(group: WorkerGroup) -> CheckResult:
    """Collective: the time of an allreduce by its size."""
    return judge_speed(measure_allreduce(group, SIZES, MEASURED_S), group.size, len(set(group.hosts)))


def judge_speed(speeds: Sequence[Speed], ranks: int, hosts: int) -> CheckResult:
    """Return the time and throughput of one allreduce by its size, compared with MPI alone if MPI runs."""
    rows = ["       bytes      time     GB/s" + ("   MPI alone" if speeds[-1].mpi_s is not None else "")]
    for speed in speeds:
        alone = "" if speed.mpi_s is None else f"   {_time(speed.mpi_s):>9}"
        rows.append(f"{speed.bytes:>12,} {_time(speed.seconds):>9} {speed.gb_per_s:>8.3f}{alone}")
    latency, most = speeds[0].seconds, speeds[-1].gb_per_s
    facts = {"allreduce": [{**speed._asdict(), "gb_per_s": speed.gb_per_s} for speed in speeds]}
    text = f"allreduce over {counted(ranks, 'rank')}: {_time(latency)} at least, {most:.2f} GB/s at most"
    if ranks > 1 and most < SLOW_GB_PER_S:
        where = "the network between the hosts" if hosts > 1 else "this host's cores: are they busy with other work?"
        return warning("exchange speed", text, f"Look at {where}.", facts, rows)
    return ok("exchange speed", text, facts, rows)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def check_network(group: WorkerGroup) -> CheckResult:
    """Collective: the interfaces of each host, and those that the ranks were told to use."""
    told = exchange_interfaces(over_nccl=group.exchange == "NCCL") if group.size > 1 else []
    by_rank = group.gather((list_interfaces(), told))
    return judge_network([(host, *row) for host, row in zip(group.hosts, by_rank, strict=True)])


def judge_network(rows: Sequence[tuple[str, Mapping[str, tuple[str, int]], Sequence[str]]]) -> CheckResult:
    """rows: for each rank its host, what list_interfaces returns there, and the interfaces that it was told to use.

    There are none without a setting. horovodrun tells all ranks the same; under plain srun each rank finds its own,
    because hosts may use different names.
    """
    hosts = {host: interfaces for host, interfaces, _ in rows}
    shown = "; ".join(
        f"{host}: " + ", ".join(f"{name} {address}{_speed(speed)}" for name, (address, speed) in table.items())
        for host, table in list(hosts.items())[:4]
    )
    chosen = sorted({(name, host) for host, _, names in rows for name in names})
    used = sorted({name for name, _ in chosen})
    text = f"{shown}{'; …' if len(hosts) > 4 else ''}; used: {', '.join(used) or 'left to Horovod and MPI'}"
    facts = {"interfaces": hosts, "used": used}
    for name in used:
        lacking = [host for chosen_name, host in chosen if chosen_name == name and name not in hosts[host]]
        if lacking:
            fix = f"Name one that all hosts have up: {_TO_NAME_ONE}."
            return fail("network", f"interface {name} is not up on {', '.join(lacking[:4])}", fix, facts)
        stays = any(hosts[host][name][0].startswith("127.") for chosen_name, host in chosen if chosen_name == name)
        if len(hosts) > 1 and stays:
            fix = f"Name the interface of the network: {_TO_NAME_ONE}."
            return fail("network", f"{len(hosts)} hosts cannot meet over {name}, which stays on its host", fix, facts)
    if len(hosts) > 1 and all(len(interfaces) < 2 for interfaces in hosts.values()):
        return fail("network", text, "The hosts have no network interface that is up.", facts)
    return ok("network", text, facts)


def list_interfaces() -> dict[str, tuple[str, int]]:
    """Return the IPv4 address of each interface of this host that is up and has one, and its Mbit/s; 0: not known."""
    # Drivers of virtual devices report 65535 or nothing.
    speeds = {name: state.speed for name, state in psutil.net_if_stats().items()}
    return {
        name: (address, speeds[name] if 0 < speeds.get(name, 0) < 65535 else 0)
        for name, address in interfaces().items()
    }


def _speed(mbit_per_s: int) -> str:
    return f" {mbit_per_s / 1000:g} Gbit/s" if mbit_per_s else ""


def check_file_system(group: WorkerGroup, folder: Path) -> CheckResult:
    """Collective: whether all ranks see what root writes and syncs, and root what each rank writes. Leaves no files."""
    token = group.broadcast_object(f".doctor-{secrets.token_hex(6)}")
    place = folder / token
    began, problem = time.perf_counter(), ""
    if group.is_root:
        problem = _try(place.mkdir) or _try(lambda: _write(place / "root", token))
        if problem:
            _remove(place)
    written_s = time.perf_counter() - began
    problem = group.broadcast_object(problem)
    if problem:
        fix = "Choose a folder that can be written to with --dir."
        return fail("file system", f"root cannot write to {folder}: {problem}", fix)
    began = time.perf_counter()
    is_visible = _can_read(place / "root", token)
    seen_s = time.perf_counter() - began
    problem = _try(lambda: _write(place / f"rank-{group.rank}", token)) if is_visible else "does not see root's file"
    rows = group.gather((problem, seen_s))
    missing: list[int] = []
    if group.is_root:
        wrote = [rank for rank, (problem, _) in enumerate(rows) if not problem]
        missing = [rank for rank in wrote if not _can_read(place / f"rank-{rank}", token)]
        _remove(place)
    missing = group.broadcast_object(missing)
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    problems = [f"{group.name(rank)} {problem}" for rank, (problem, _) in enumerate(rows) if problem]
    problems += [f"root does not see what {group.name(rank)} wrote" for rank in missing]
    seen_s = max(seen_s for _, seen_s in rows)
    return judge_file_system(folder, problems, written_s, seen_s, group.broadcast_object(free))


def judge_file_system(folder: Path, problems: Sequence[str], written_s: float, seen_s: float, free: int) -> CheckResult:
    """problems: sentences; free: bytes left."""
    facts = {"folder": str(folder), "written_s": written_s, "seen_s": seen_s, "free_bytes": free}
    if problems:
        text = f"{folder} is not one folder for all ranks: {problems[0]}"
        suffix = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        return fail("file system", f"{text}{suffix}", "Take a folder on a shared file system; see --dir.", facts)
    text = f"{folder}: written and synced in {written_s * 1e3:.0f} ms, seen by all after {seen_s * 1e3:.0f} ms"
    text += f"; {free / 1e9:.0f} GB free"
    if free < MIN_FREE_BYTES:
        return warning("file system", text, "Make room: a save that fails is lost.", facts)
    if max(written_s, seen_s) > 2:
        return warning("file system", text, "Saves and starts will take long; look at its server's load.", facts)
    return ok("file system", text, facts)


def _remove(place: Path) -> None:
    with contextlib.suppress(OSError):
        remove(place, _PLACE)


def _write(path: Path, text: str) -> None:
    with path.open("x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _try(action: Callable[[], object]) -> str:
    """Return the file system's error; empty if the action succeeds."""
    try:
        action()
    except OSError as error:
        return f"cannot write there: {error.strerror or error}"
    return ""


def _can_read(path: Path, text: str) -> bool:
    """Return whether the file holds the text; retry for a while, because network file systems show new files late."""
    until = time.monotonic() + VISIBLE_WITHIN_S
    while True:
        with contextlib.suppress(OSError):
            if path.read_text() == text:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.05)


def judge_clocks(offsets_s: Sequence[float], hosts: Sequence[str]) -> CheckResult:
    """offsets_s: each rank's clock minus root's, which may be the wrong one itself: most hosts are right."""
    offset_of: dict[str, float] = {}
    for host, offset in zip(hosts, offsets_s, strict=True):
        offset_of.setdefault(host, offset)
    low, high = min(offset_of, key=offset_of.__getitem__), max(offset_of, key=offset_of.__getitem__)
    facts = {"offsets_s": [round(offset, 6) for offset in offsets_s]}
    skew = offset_of[high] - offset_of[low]
    if skew > MOST_SKEW_S:
        middle = statistics.median_low(offset_of.values())
        worst = max(offset_of, key=lambda host: abs(offset_of[host] - middle))
        text = f"{worst} is {offset_of[worst] - middle:+.1f} s from the median of the hosts' clocks"
        if statistics.median_high(offset_of.values()) - middle > MOST_SKEW_S:  # there is no majority
            first, second = sorted((low, high), key=hosts.index)
            text = f"{first} and {second} are {skew:.1f} s apart"
        return warning("clocks", text, "Start chrony or ntpd there: times in logs mislead.", facts)
    return ok("clocks", f"within {max(skew * 1e3, 0.1):.1f} ms of one another", facts)
