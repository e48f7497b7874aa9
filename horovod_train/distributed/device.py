"""Pin this process to its devices before TensorFlow starts: one GPU or several, or its share of the host's cores.

Also finds the host's names of those GPUs. Does not start TensorFlow's runtime: everything here must happen before the
first op.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from horovod_train.config.settings import DeviceConfig
from horovod_train.distributed.launch.local import driver_problem, find_uuid, list_gpus, naming_problem, visible_gpus
from horovod_train.errors import UserError
from horovod_train.output.console import to_stderr
from horovod_train.shown_text import counted

TO_SEE_GPUS = "Install with TENSORFLOW='tensorflow[and-cuda]' make install, or load the cluster's CUDA module."
"""What helps where the driver lists GPUs and TensorFlow sees none: it lacks CUDA's libraries."""
TO_NAME_GPUS = "`nvidia-smi -L` lists the GPUs; name some, unset the variable, or set it to -1 to hide all."
TO_HAVE_GPUS = (
    "A container needs --gpus all (docker) or --nv (apptainer); on the host the driver may be out of step with its "
    "kernel module. CUDA_VISIBLE_DEVICES=-1 says that CPUs are meant."
)


@dataclass(frozen=True)
class Device:
    """The devices that this rank computes on, in words and in TensorFlow's names."""

    name: str
    host_summary: str
    gpu_keys: tuple[str, ...]
    """The host's names of this rank's GPUs; two ranks of a host that share a GPU have a name in common. Empty on CPU.
    """
    logical: tuple[str, ...]
    """TensorFlow's names in this process of the devices it computes on: "GPU:0", … or "CPU:0", …"""
    is_pinned: bool = True
    """Whether `pin` has chosen them, and not a script."""


def choose_gpus(gpu_count: int, local_rank: int, local_size: int, per_rank: int = 1) -> range:
    """Return the indices of this rank's GPUs among those its process sees; none if it sees none.

    A scheduler that binds GPUs shows each process only its own GPUs; all of these are chosen, whatever the local rank.
    Raises UserError if all ranks of the host see the same GPUs and these are too few.
    """
    if gpu_count in (0, per_rank):
        return range(gpu_count)
    if gpu_count < local_size * per_rank:
        needed = "one GPU" if per_rank == 1 else f"{per_rank} GPUs (device.per_rank)"
        max_ranks = gpu_count // per_rank
        advice = f"Start at most {max_ranks} ranks on a host" if max_ranks else "Lower device.per_rank"
        raise UserError(
            f"{local_size} ranks on this host see {gpu_count} GPUs; expected {needed} for each rank. "
            f"{advice}, ask the scheduler for more (srun --gpus-per-node={local_size * per_rank}), or hide the GPUs "
            "with CUDA_VISIBLE_DEVICES=."
        )
    return range(local_rank * per_rank, (local_rank + 1) * per_rank)


def share_of_cores(cores: int, local_size: int) -> int:
    """Return the number of threads for one of `local_size` ranks that share `cores`: at least one."""
    return max(1, cores // local_size)


def chosen_before() -> DeviceConfig:
    """Return what a script has set by itself, in TensorFlow or in its environment, as `pin` takes it."""

    def threads(chosen: int, name: str) -> int | None:
        variable = os.environ.get(name, "")  # TensorFlow reads it only where nothing is set
        return chosen or (int(variable) if variable.isdecimal() else 0) or None

    return DeviceConfig(
        intra_op_threads=threads(tf.config.threading.get_intra_op_parallelism_threads(), "TF_NUM_INTRAOP_THREADS"),
        inter_op_threads=threads(tf.config.threading.get_inter_op_parallelism_threads(), "TF_NUM_INTEROP_THREADS"),
        soft_placement=tf.config.get_soft_device_placement(),
        log_placement=tf.debugging.get_log_device_placement(),
    )


def pin(config: DeviceConfig, local_rank: int, local_size: int, host_cores: int) -> Device:
    """Make this rank's devices the only ones that TensorFlow uses, and set its numbers of threads.

    Warns, on one rank of a host, if there seem to be GPUs that TensorFlow does not see.

    host_cores: see host.usable_cores.
    """
    gpus = tf.config.list_physical_devices("GPU")
    rank_gpus = [gpus[index] for index in choose_gpus(len(gpus), local_rank, local_size, config.per_rank)]
    if rank_gpus:
        tf.config.set_visible_devices(rank_gpus, "GPU")
        for gpu in rank_gpus:
            # A script may have limited its memory before, or said whether it may grow.
            is_limited = tf.config.get_logical_device_configuration(gpu) is not None
            if not is_limited and tf.config.experimental.get_memory_growth(gpu) is None:
                tf.config.experimental.set_memory_growth(gpu, config.memory_growth)
    else:
        _split_cpu(config.per_rank)
    if local_rank == 0 and (unseen := unseen_gpus()):
        problem, do = unseen
        to_stderr(f"warning: {socket.gethostname()}: {problem}, so ranks compute on CPU here. {do}")
    threads = share_of_cores(host_cores, local_size)
    tf.config.threading.set_intra_op_parallelism_threads(config.intra_op_threads or threads)
    tf.config.threading.set_inter_op_parallelism_threads(config.inter_op_threads or threads)
    tf.config.set_soft_device_placement(config.soft_placement)
    tf.debugging.set_log_device_placement(config.log_placement)
    shared = f"{counted(host_cores, 'core')} for {counted(local_size, 'rank')} of this host"
    summary = f"{counted(len(gpus), 'GPU')}; {shared}"
    if not rank_gpus:
        parts = f" as {config.per_rank} devices" if config.per_rank > 1 else ""
        name = f"CPU{parts}, {counted(config.intra_op_threads or threads, 'thread')}"
        return Device(name, summary, (), _names("CPU", config.per_rank))
    return _device_of_gpus(rank_gpus, gpus, local_rank, summary)


def unseen_gpus() -> tuple[str, str] | None:
    """Return what is wrong, and what to do, if TensorFlow sees no GPU where there should be some; otherwise None."""
    if tf.config.list_physical_devices("GPU"):
        return None
    if problem := naming_problem():
        return problem, TO_NAME_GPUS
    if unseen := list_gpus():
        return f"TensorFlow sees none of the {counted(len(unseen), 'GPU')}", TO_SEE_GPUS
    if problem := driver_problem():
        return problem, TO_HAVE_GPUS
    return None


def in_use(local_rank: int) -> Device:
    """Return the devices that TensorFlow uses in this process, also where a script has chosen them and not `pin`."""
    rank_gpus = tf.config.get_visible_devices("GPU")
    if not rank_gpus:
        return Device("CPU", "", (), _names("CPU", 1), is_pinned=False)
    device = _device_of_gpus(rank_gpus, tf.config.list_physical_devices("GPU"), local_rank, "")
    return replace(device, is_pinned=False)


def _device_of_gpus(
    rank_gpus: Sequence[tf.config.PhysicalDevice],
    gpus: Sequence[tf.config.PhysicalDevice],
    local_rank: int,
    host_summary: str,
) -> Device:
    """Return the Device of a rank's GPUs. gpus: all that its process sees."""
    indices = [gpus.index(gpu) for gpu in rank_gpus]
    gpu_keys = host_keys(indices, len(gpus), local_rank, visible_gpus() or (), list_gpus())
    return Device(f"GPU {', '.join(map(str, indices))}", host_summary, gpu_keys, _names("GPU", len(indices)))


def pin_to_cpu(per_rank: int) -> Device:
    """Split the CPU into as many devices as a rank has, to build a run without training it. GPUs must be hidden."""
    _split_cpu(per_rank)
    return Device("CPU", "", (), _names("CPU", per_rank))


def _split_cpu(parts: int) -> None:
    if parts > 1:
        configurations = [tf.config.LogicalDeviceConfiguration()] * parts
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], configurations)


def _names(kind: str, count: int) -> tuple[str, ...]:
    return tuple(f"{kind}:{index}" for index in range(count))


def traced_memory_environment() -> dict[str, str]:
    """Return variables that make TensorFlow trace each CPU allocation, as on a GPU. Set them before the first op.

    TensorFlow's BFC allocator traces allocations, the system's does not. Without a limit, given as a number, it would
    be 64 GiB.
    """
    mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    return {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(mib)}


def host_keys(
    indices: Sequence[int],
    visible_count: int,
    local_rank: int,
    visible_names: Sequence[str],
    uuids: Mapping[int, str],
) -> tuple[str, ...]:
    """Return names of the GPUs that have `indices` in this process. Ranks of a host that share a GPU get a common name.

    visible_count: how many GPUs the process sees. visible_names: from visible_gpus. uuids: from list_gpus. The name is
    the UUID if there is one. A number is ambiguous if the process sees only its own GPUs: when the scheduler hides the
    others (SLURM's ConstrainDevices), every task counts from 0. The name then contains local_rank.
    """
    keys = []
    for index in indices:
        name = visible_names[index] if index < len(visible_names) else str(index)
        key = find_uuid(name, uuids) or name
        keys.append(f"{key} of local rank {local_rank}" if key.isdigit() and visible_count == len(indices) else key)
    return tuple(keys)
