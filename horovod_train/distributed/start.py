"""The start of a rank: initialises Horovod, pins the process to its device, and learns which ranks there are."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_train.config.settings import DeviceConfig, HorovodConfig
from horovod_train.distributed import device, objects
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.launch import initialize, launcher, tuning
from horovod_train.errors import UserError

_MAX_SHOWN = 4


@dataclass(frozen=True)
class StartedProcess:
    """This process once Horovod runs in it; no TensorFlow operation has run yet."""

    started_by: launcher.Launch
    settings: tuple[tuning.Setting, ...]
    host_cores: int
    """Cores that the ranks of this host may use together."""
    rendezvous: ExitStack
    """Must stay open until the group is formed: ranks that start late still need it."""

    def pin(self, devices: DeviceConfig) -> device.Device:
        """Pin this process to its device, see device.pin."""
        return device.pin(devices, hvd.local_rank(), hvd.local_size(), self.host_cores)


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
    settings = tuning.choose(
        horovod or HorovodConfig(),
        os.environ,
        library=_library(started_by),
        has_gpu=tuning.sees_gpu(),
        deterministic=deterministic,
        extra_defaults=environment,
    )
    # Horovod and MPI read these when they initialise.
    os.environ |= {setting.name: setting.value for setting in settings}
    with ExitStack() as rendezvous:
        if started_by.step is not None:  # the launcher does not bring the ranks together
            from horovod_train.distributed.launch.rendezvous import open_rendezvous

            rendezvous.enter_context(open_rendezvous(started_by.step))
        cores = initialize.initialise(started_by, process_sets)
        initialize.check_rank_and_size(started_by)
        return StartedProcess(started_by, tuple(settings), len(cores), rendezvous.pop_all())


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
    initialize.initialise(started_by)
    try:
        yield
    finally:
        hvd.shutdown()


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
    facts = objects.gather((socket.gethostname(), dataclasses.astuple(rank_device)), "group.start")
    group = WorkerGroup(
        rank=hvd.rank(),
        size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
        launcher=started.started_by.launcher,
        exchange="NCCL" if rank_device.gpu_keys and hvd.nccl_built() else "MPI" if hvd.mpi_enabled() else "gloo",
        hosts=tuple(host for host, _ in facts),
        devices=tuple(device.Device(*fields) for _, fields in facts),
        settings=started.settings,
        deterministic=deterministic,
    )
    with group.raise_together():
        check_devices(group)
    return group


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


def check_devices(group: WorkerGroup) -> None:
    """Raise UserError if ranks of one host have a GPU in common, or only some ranks have one for NCCL."""
    without_gpu = [group.name(rank) for rank, rank_device in enumerate(group.devices) if not rank_device.gpu_keys]
    if 0 < len(without_gpu) < group.size and hvd.nccl_built():
        examples = ", ".join(without_gpu[:_MAX_SHOWN]) + (", …" if len(without_gpu) > _MAX_SHOWN else "")
        raise UserError(
            f"{len(without_gpu)} of {group.size} ranks see no GPU, though the others do: {examples}. Look at "
            "nvidia-smi there, leave those hosts out, or hide all GPUs with CUDA_VISIBLE_DEVICES=."
        )
    holders: dict[tuple[str, str], int] = {}
    for rank, (host, rank_device) in enumerate(zip(group.hosts, group.devices, strict=True)):
        for key in rank_device.gpu_keys:
            holder = holders.setdefault((host, key), rank)
            if holder != rank:
                raise UserError(
                    f"ranks {holder} and {rank} on {host} would both use GPU {key}; expected one GPU for "
                    "each rank. Ask the scheduler for one GPU a task, or start fewer ranks there."
                )
