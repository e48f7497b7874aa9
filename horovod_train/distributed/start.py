"""The start of a rank: initialises Horovod as its launcher requires, pins the process to its device, forms the group.

Also what needs another start of Horovod: elastic ranks, a shorter cycle for small models, the timeline. Does not detect
the launcher or choose settings; see launch/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from horovod_train.config.settings import DeviceConfig, HorovodConfig
from horovod_train.distributed import device, objects
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.launch import key_value_store, launcher, network, tuning
from horovod_train.distributed.launch.local import list_slices
from horovod_train.distributed.optimizer import SMALL_BYTES
from horovod_train.errors import FailedElsewhere, UserError
from horovod_train.host import boot_id, environment_kept, sees_gpu, usable_cores
from horovod_train.output.files import free_path, must_be_writable
from horovod_train.shown_text import listed

_OF_A_LAUNCH = re.compile("HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|GLOO_RENDEZVOUS_(ADDR|PORT))")
"""Variables by which Horovod finds other ranks."""
_TIMELINE, _CYCLE = "HOROVOD_TIMELINE", "HOROVOD_CYCLE_TIME"
_MAX_CORES = 8192
"""Linux's own limit, NR_CPUS."""

_OWN_FILES = 512
"""Open files that a rank needs beside its connections to others: of libraries, records and logs."""
_CONNECTIONS = 4
"""To each other rank, at most: the watch's, and those of gloo among all ranks, on the host, and across hosts."""

log = logging.getLogger(__name__)

_GLOO_FAILED = (
    "error: rank 0 ended while Horovod started: the ranks did not find each other over gloo; what it says is above. "
    "See that the hosts of the step reach each other, and start again."
)
_MPI_FAILED = (
    "error: the MPI that Horovod was built with did not start under srun --mpi=pmix; what it says is above. Start with "
    "srun --mpi=none, which needs no MPI."
)


def start(
    horovod: HorovodConfig | None = None,
    devices: DeviceConfig | None = None,
    *,
    deterministic: bool = False,
    environment: Mapping[str, str] | None = None,
) -> WorkerGroup:
    """Collective: initialise Horovod, pin this process to its device and learn which ranks there are.

    horovod, devices: None means the defaults of the config. environment: variables for Horovod and TensorFlow, such as
    stall limits; those that the user has set win.

    Raises UserError if the processes would not find each other, if ranks of one host would share a GPU, and if the
    launcher may change the number of ranks.
    """
    launcher.detect().check()
    started = start_process(horovod, deterministic=deterministic, environment=environment)
    with started.rendezvous:
        return form_group(started, started.pin(devices or DeviceConfig()), deterministic=deterministic)


@dataclass(frozen=True)
class StartedProcess:
    """This process once Horovod runs in it; no TensorFlow operation has run yet."""

    started_by: launcher.Launch
    settings: tuple[tuning.Setting, ...]
    host_cores: int
    """Cores that the ranks of this host may use together."""
    rendezvous: ExitStack
    """Must stay open until the group is formed: ranks that start late still need it."""
    has_run_before: bool
    """Whether Horovod ran already, as in a script that has started it and now trains."""

    def pin(self, devices: DeviceConfig) -> device.Device:
        """Pin this process to its device, see device.pin."""
        return device.pin(devices, hvd.local_rank(), hvd.local_size(), self.host_cores)

    def close(self) -> None:
        """Close what other ranks needed while Horovod ran. Call it once Horovod is shut down."""
        from horovod_train.distributed.launch.rendezvous import close_kept

        self.rendezvous.close()
        close_kept()


def start_process(
    horovod: HorovodConfig | None = None,
    *,
    deterministic: bool = False,
    environment: Mapping[str, str] | None = None,
    process_sets: Sequence[hvd.ProcessSet] | None = None,
) -> StartedProcess:
    """Collective: initialise Horovod, as the first part of `start`. process_sets: further sets of ranks."""
    started_by = launcher.detect()
    started_by.check(may_be_elastic=True)
    has_run_before = bool(hvd.is_initialized())
    settings = tuning.choose(
        horovod or HorovodConfig(),
        os.environ,
        library=_library(started_by),
        has_gpu=sees_gpu(),
        deterministic=deterministic,
        extra_defaults=environment,
    )
    with _environment_kept_if_alone(started_by), ExitStack() as rendezvous:
        # Horovod and MPI read these when they initialise.
        os.environ |= {setting.name: setting.value for setting in settings}
        _allow_open_files(started_by)
        if started_by.step is not None:  # the launcher does not bring the ranks together
            from horovod_train.distributed.launch.rendezvous import open_rendezvous

            rendezvous.enter_context(open_rendezvous(started_by.step))
        cores = initialise(started_by, process_sets)
        _check_rank_and_size(started_by)
        host_cores = usable_cores(len(cores))
        return StartedProcess(started_by, tuple(settings), host_cores, rendezvous.pop_all(), has_run_before)


def _environment_kept_if_alone(started_by: launcher.Launch) -> AbstractContextManager[None]:
    """Undo, in a process that no launcher started, what is set for Horovod inside the block, where Horovod reads it.

    Ranks that such a process starts, as a notebook does, would take it for what the user has set.
    """
    is_alone = started_by.launcher == "none"
    return environment_kept(lambda name: is_alone and name.startswith("HOROVOD_"))


def _allow_open_files(started_by: launcher.Launch) -> None:
    """Raise the soft limit of open files, 1024 in most shells, to what the connections of all ranks need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OWN_FILES + _CONNECTIONS * started_by.size
    if needed <= soft or soft == resource.RLIM_INFINITY:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < _OWN_FILES + started_by.size and started_by.rank == 0:
        log.warning(
            f"{socket.gethostname()}: a process may open {allowed} files (ulimit -Hn); {started_by.size} ranks need "
            f"{needed} for their connections. Raise the limit, or logs and checkpoints may fail."
        )


def _library(started_by: launcher.Launch) -> tuning.Library:
    if started_by.launcher == "none":
        return "alone"
    return "MPI" if started_by.uses_mpi else "elastic" if started_by.is_elastic else "gloo"


def form_group(started: StartedProcess, rank_device: device.Device, *, deterministic: bool = False) -> WorkerGroup:
    """Collective: learn which ranks there are, as the last part of `start`.

    rank_device: this rank's device. Raises UserError if ranks of one host would share a GPU.
    """
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    facts = objects.gather((socket.gethostname(), boot_id(), dataclasses.astuple(rank_device)), "group.start")
    controller = "MPI" if hvd.mpi_enabled() else "gloo"
    group = WorkerGroup(
        rank=hvd.rank(),
        size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
        launcher=started.started_by.launcher,
        exchange="NCCL" if rank_device.gpu_keys and hvd.nccl_built() else controller,
        controller=controller,
        hosts=tuple(network.host_names([(host, boot) for host, boot, _ in facts])),
        devices=tuple(device.Device(*fields) for _, _, fields in facts),
        settings=started.settings,
        deterministic=deterministic,
        keeps_horovod=started.has_run_before,
    )
    with group.raise_together():
        check_devices(group)
        check_slices(group)
    return group


def check_devices(group: WorkerGroup) -> None:
    """Raise UserError if ranks of one host have a GPU in common, or only some ranks have one for NCCL."""
    without_gpu = [group.name(rank) for rank, rank_device in enumerate(group.devices) if not rank_device.gpu_keys]
    if 0 < len(without_gpu) < group.size and hvd.nccl_built():
        raise UserError(
            f"{len(without_gpu)} of {group.size} ranks see no GPU, though the others do: {listed(without_gpu, 4)}. "
            "Look at nvidia-smi there, leave those hosts out, or hide all GPUs with CUDA_VISIBLE_DEVICES=."
        )
    holders: dict[tuple[str, str], int] = {}
    for rank, (host, rank_device) in enumerate(zip(group.hosts, group.devices, strict=True)):
        for key in rank_device.gpu_keys:
            holder = holders.setdefault((host, key), rank)
            # A script may mean it, and a GPU serve two ranks that exchange in main memory.
            if holder != rank and (rank_device.is_pinned or hvd.nccl_built()):
                raise UserError(
                    f"ranks {holder} and {rank} on {host} would both use GPU {key}; expected one GPU for "
                    "each rank. Have each task see all GPUs of its host (srun --gpus-per-node=N --gpu-bind=none), "
                    "start fewer ranks there, or have a script that chooses its GPUs call tf.config."
                    "set_visible_devices with number hvd.local_rank()."
                )


def check_slices(group: WorkerGroup) -> None:
    """Raise UserError if ranks of this host have slices of one GPU, for NCCL. Asks the driver only if there are any."""
    here = [rank for rank, host in enumerate(group.hosts) if host == group.hosts[group.rank]]
    slices = [(rank, key) for rank in here for key in group.devices[rank].gpu_keys if key.startswith("MIG-")]
    if len({rank for rank, _ in slices}) < 2 or not hvd.nccl_built():
        return
    parents, holders = list_slices(), dict[str, int]()
    for rank, key in slices:
        holder = holders.setdefault(parents.get(key, key), rank)
        if holder != rank:
            raise UserError(
                f"ranks {holder} and {rank} on {group.hosts[rank]} have slices (MIG) of one GPU, {parents[key]}, "
                "between which NCCL does not exchange. Start one rank for each GPU, or take a Horovod without NCCL."
            )


@contextmanager
def horovod_alone() -> Iterator[None]:
    """Run Horovod for this process alone inside the block: what is built there may ask for the rank and the size.

    Does nothing if Horovod runs already. Raises UserError under a launcher, whose ranks would have to take part.
    """
    if hvd.is_initialized():
        yield
        return
    started_by = launcher.detect()
    if started_by.launcher != "none":
        raise UserError(f"this command is for one process; {started_by.launcher} started {started_by.size}.")
    with _environment_kept_if_alone(started_by):
        initialise(started_by)
    try:
        yield
    finally:
        hvd.shutdown()


def initialise(started_by: launcher.Launch, process_sets: Sequence[hvd.ProcessSet] | None = None) -> set[int]:
    """Collective: start Horovod; return the cores that the ranks of this host may use together.

    process_sets: sets of ranks that exchange among themselves, besides all ranks together.

    A launcher may have bound each rank to different cores. TensorFlow cannot be used for this exchange yet.
    """
    hvd.gpu_available = _computes_on_gpu
    rank_cores = os.sched_getaffinity(0)
    if started_by.launcher == "none":
        # If built with MPI, Horovod would start MPI for this process alone, which needs a working mpirun.
        os.environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
        # gloo wants an address even for one rank, and aborts where the host's own name has none; by what is left over
        # of another launch it would wait for ranks, or abort.
        os.environ["HOROVOD_GLOO_IFACE"] = "lo"
        for name in [name for name in os.environ if _OF_A_LAUNCH.fullmatch(name)]:
            del os.environ[name]
    if started_by.is_elastic:
        connect()
        return rank_cores  # the ranks of a host do not start together
    if not started_by.uses_mpi:
        reports_abort = started_by.step is not None and started_by.rank == 0
        with _report_abort(_GLOO_FAILED) if reports_abort else nullcontext():
            hvd.init(process_sets=process_sets)
        return key_value_store.cores_of_host(rank_cores, hvd.local_rank(), hvd.local_size())
    return _initialise_over_mpi(started_by, process_sets, rank_cores)


def _computes_on_gpu(_extension: str, _verbose: bool = False) -> bool:
    """Answer Horovod's question when an Adasum is traced.

    Horovod 0.28.1 would fork this process and ask TensorFlow there. CUDA does not work in a fork of a process that
    uses it, and the question might never be answered.
    """
    return bool(tf.config.get_visible_devices("GPU"))


def _initialise_over_mpi(
    started_by: launcher.Launch, process_sets: Sequence[hvd.ProcessSet] | None, rank_cores: set[int]
) -> set[int]:
    """Collective: `initialise` for ranks that find each other by MPI. rank_cores: those of this process."""
    if not hvd.mpi_built():
        _refuse(
            started_by,
            f"{started_by.launcher} started {started_by.size} ranks, but Horovod was built without MPI. Start with "
            f"{_command_without_mpi(started_by)}, or build Horovod with MPI: horovod-train build-horovod --mpi wheel.",
        )
    reports_abort = started_by.launcher == "srun-pmix" and started_by.rank == 0
    with _report_abort(_MPI_FAILED) if reports_abort else nullcontext(), warnings.catch_warnings():
        # _check_rank_and_size reports this once, with what to do.
        warnings.filterwarnings("ignore", "suspicious MPI execution environment")
        from mpi4py import MPI

    hvd.init(comm=MPI.COMM_WORLD, process_sets=process_sets)
    host_ranks = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    if (host_ranks.rank, host_ranks.size) != (hvd.local_rank(), hvd.local_size()):
        raise UserError(
            f"{socket.gethostname()}: MPI says local rank {host_ranks.rank} of {host_ranks.size}, Horovod says "
            f"{hvd.local_rank()} of {hvd.local_size()}; both must use one MPI: "
            "MPI=system make install builds Horovod with the one on PATH."
        )
    # A buffer, because mpi4py pickles objects.
    cores = np.zeros(_MAX_CORES, np.uint8)
    cores[sorted(rank_cores)] = 1
    host_ranks.Allreduce(MPI.IN_PLACE, cores, op=MPI.MAX)
    return {int(core) for core in np.flatnonzero(cores)}


@contextmanager
def _report_abort(message: str) -> Iterator[None]:
    """Print `message` from another process if this one ends inside the block.

    Open MPI ends this process if it finds no PMIx that it supports. Horovod aborts it if the rendezvous fails.
    """
    script = 'read -r done || echo "$1" >&2'
    sentinel = subprocess.Popen(["sh", "-c", script, "sh", message], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        sentinel.communicate(b"done\n")


def _check_rank_and_size(started_by: launcher.Launch) -> None:
    """Check rank and size without an exchange, because a process whose size is wrongly 1 cannot reach the others."""
    if started_by.is_elastic or (hvd.rank(), hvd.size()) == (started_by.rank, started_by.size):
        return
    _refuse(
        started_by,
        f"{started_by.launcher} started {started_by.size} ranks, but the MPI that Horovod was built with finds "
        f"{hvd.size()}: they do not belong together. Start with {_command_without_mpi(started_by)}, which needs no "
        "MPI, or build Horovod with the launcher's: MPI=system make install.",
    )


def _command_without_mpi(started_by: launcher.Launch) -> str:
    return "srun --mpi=none" if started_by.launcher == "srun-pmix" else "horovodrun --gloo"


def _refuse(started_by: launcher.Launch, message: str) -> NoReturn:
    """Raise UserError on rank 0 and later FailedElsewhere on the others, which rank 0 cannot reach."""
    if started_by.rank != 0:
        time.sleep(launcher.ROOT_REPORTS_FIRST_S)
        raise FailedElsewhere("rank 0 reports that the ranks do not find each other", UserError.exit_code)
    raise UserError(message)


_connections: dict[int, str] = {}
"""File descriptors of Horovod's connections, and the socket of each: a descriptor may be reused for another socket."""


def connect() -> None:
    """Collective: start Horovod. Raises HorovodInternalError if a rank is lost meanwhile."""
    sys.stdout.flush()  # a rank whose host has left the list of hosts ends inside hvd.init
    before = _sockets()
    try:
        hvd.init()
    except ValueError as error:  # the reason is only in Horovod's log
        raise HorovodInternalError("the ranks did not meet") from error
    _connections.clear()
    _connections.update(_sockets().items() - before.items())


def disconnect() -> None:
    """Stop Horovod, so that ranks waiting for this one notice. The ranks may call this at different times.

    After a lost rank Horovod 0.28.1 leaves its connections open until the process ends. A rank that waits for data on
    one of them would wait until gloo's time limit if the sender has noticed the loss and left.
    """
    hvd.shutdown()
    still_open = _sockets()
    for descriptor, target in _connections.items():
        if still_open.get(descriptor) == target:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    _connections.clear()


def _sockets() -> dict[int, str]:
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                sockets[int(name)] = target
    return sockets


def suit_cycle(group: WorkerGroup, gradient_bytes: int) -> str | None:
    """Collective: shorten Horovod's pause between exchanges if gradients have few bytes: steps mostly wait for it.

    Returns what was done and why, None if nothing. The pause can only be chosen when Horovod starts, and the model is
    built later, so Horovod starts again. Only over MPI between CPUs: over gloo the ranks would find the addresses of
    the first start, and the threads of a short cycle take more time from the steps than they wait. A pause that the
    user has set stays, and a Horovod that the caller has started. No exchange may be under way.
    """
    if group.size == 1 or group.exchange != "MPI" or any(device.gpu_keys for device in group.devices):
        return None
    may_change = any(setting.name == _CYCLE and setting.origin == "default" for setting in group.settings)
    # A second start would overwrite the timeline, and end what the caller has started.
    may_change = may_change and _TIMELINE not in os.environ and not group.keeps_horovod
    votes = group.gather(may_change and gradient_bytes <= SMALL_BYTES)
    if not all(votes):
        return None
    # Without a pause at all, threads that wait would take the cores from those that compute, unless they yield.
    yields = all(group.gather(os.environ.get(tuning.YIELDS) == "1"))
    from mpi4py import MPI

    hvd.shutdown()
    os.environ[_CYCLE] = tuning.SMALL_MODEL_CYCLE_MS[yields]
    hvd.init(comm=MPI.COMM_WORLD)
    return f"{_CYCLE}={os.environ[_CYCLE]} (ms; a step's gradients have only {gradient_bytes} bytes)"


def timeline_environment(run_dir: Path, *, is_root: bool) -> dict[str, str]:
    """Return the variable that makes Horovod write a timeline, on rank 0, to a new file in the run directory.

    Call it on every rank, before Horovod initialises: `hvd.start_timeline`, which takes the file later, ends the
    process by a failed assertion if another rank has announced a tensor before. On root it creates the folder.

    Raises UserError if the folder cannot be created, or the environment names another file.
    """
    if _TIMELINE in os.environ:
        raise UserError(
            f"horovod.timeline: the environment has {_TIMELINE}={os.environ[_TIMELINE]} too. Unset it, or leave the "
            "setting out."
        )
    # Ranks must agree that there is one, but only root's file is written. DYNAMIC names none.
    return {_TIMELINE: str(_new_file(run_dir / "timeline")) if is_root else "DYNAMIC"}


def forget_timeline() -> None:
    """Remove the variable when the run is over: another start of Horovod in this process would write over the file."""
    os.environ.pop(_TIMELINE, None)


def _new_file(folder: Path) -> Path:
    """Return a free path, named by the present time in UTC."""
    with must_be_writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return free_path(folder / time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime()), ".json")
