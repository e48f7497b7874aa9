"""`import horovod_train.keras as hvd` in place of `import horovod.tensorflow.keras as hvd`, or of `horovod.keras`.

The names, arguments and meanings are Horovod's; docs/migrate.md says what differs. All ranks must make the same calls
in the same order.
"""

from __future__ import annotations

from typing import Any

from horovod_train.keras import callbacks, elastic
from horovod_train.keras.saving import load_model
from horovod_train.keras.values import allgather, allreduce, broadcast, reducescatter
from horovod_train.tensorflow import (
    REPLACEMENTS,
    Adasum,
    Average,
    Compression,
    DistributedOptimizer,
    PartialDistributedOptimizer,
    ProcessSet,
    Sum,
    add_process_set,
    allgather_object,
    barrier,
    broadcast_global_variables,
    broadcast_model,
    broadcast_object,
    broadcast_variables,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    refuse,
    remove_process_set,
    rocm_built,
    shard,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    synchronise_batch_norm,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_model",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shard",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronise_batch_norm",
]


def __getattr__(name: str) -> Any:
    refuse(__name__, name, REPLACEMENTS)
