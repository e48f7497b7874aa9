"""Pins this process to its device before TensorFlow starts: one GPU, or its share of the host's cores.

Does not start TensorFlow's runtime: everything here must happen before the first op.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from horovod_train.config import DeviceConfig
from horovod_train.errors import UserError


@dataclass(frozen=True)
class Device:
    """What this rank computes on, in words and in TensorFlow's name."""

    name: str
    found: str
    shared_key: str | None
    """Equal on two ranks of a host exactly where both would compute on one GPU; None on CPU."""


def choose_gpu(gpu_count: int, local_rank: int, local_size: int) -> int | None:
    """Index of this rank's GPU among those its process sees; None without GPUs.

    A scheduler that binds GPUs shows each process its own one only: then it is that one, whatever the local rank.
    Raises UserError where the host's ranks outnumber the GPUs that they all see.
    """
    if gpu_count == 0:
        return None
    if gpu_count == 1:
        return 0
    if gpu_count < local_size:
        raise UserError(
            f"{local_size} ranks on this host see {gpu_count} GPUs; expected one GPU for each rank. "
            f"Start at most {gpu_count} ranks on a host, or hide the GPUs with CUDA_VISIBLE_DEVICES=."
        )
    return local_rank


def share_of_cores(cores: int, local_size: int) -> int:
    """Threads for one of `local_size` ranks that share `cores`: at least one."""
    return max(1, cores // local_size)


def pin(config: DeviceConfig, local_rank: int, local_size: int, host_cores: int) -> Device:
    """Makes the one device of this rank the only one that TensorFlow will use, and sets its threads.

    host_cores: cores that the ranks of this host may use together.
    """
    gpus = tf.config.list_physical_devices("GPU")
    index = choose_gpu(len(gpus), local_rank, local_size)
    if index is not None:
        tf.config.set_visible_devices(gpus[index], "GPU")
        tf.config.experimental.set_memory_growth(gpus[index], config.memory_growth)
    threads = share_of_cores(host_cores, local_size)
    tf.config.threading.set_intra_op_parallelism_threads(config.intra_op_threads or threads)
    tf.config.threading.set_inter_op_parallelism_threads(config.inter_op_threads or threads)
    tf.config.set_soft_device_placement(config.soft_placement)
    tf.debugging.set_log_device_placement(config.log_placement)
    found = f"{len(gpus)} GPU, {host_cores} cores for {local_size} ranks of this host"
    if index is None:
        return Device(f"CPU, {config.intra_op_threads or threads} threads", found, None)
    return Device(f"GPU {index}", found, _gpu_key(index, os.environ.get("CUDA_VISIBLE_DEVICES")))


def traced_memory_environment() -> dict[str, str]:
    """What makes TensorFlow trace each allocation on the CPU, as it does on a GPU; to be set before the first op.

    Its BFC allocator traces, the system's does not. Its limit is a number; without one it would be 64 GiB.
    """
    mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    return {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(mib)}


def _gpu_key(index: int, visible: str | None) -> str:
    """The host's name for the GPU that this process calls `index`."""
    names: Sequence[str] = [name.strip() for name in visible.split(",")] if visible else []
    return names[index] if index < len(names) else str(index)
