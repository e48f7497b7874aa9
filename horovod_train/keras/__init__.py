"""`import horovod_train.keras as hvd` in place of `import horovod.tensorflow.keras as hvd`, or of `horovod.keras`.

The names, arguments and meanings are Horovod's; docs/migrate.md says what differs. All ranks must make the same calls
in the same order.
"""

# isort: skip_file
# Otherwise each of our own names would be imported by a statement of its own.

from __future__ import annotations

from typing import Any

from horovod_train.keras import callbacks as callbacks, elastic as elastic
from horovod_train.keras.values import (
    allgather as allgather,
    allreduce as allreduce,
    broadcast as broadcast,
    load_model as load_model,
    reducescatter as reducescatter,
)
from horovod_train.tensorflow import (
    REPLACEMENTS,
    Adasum as Adasum,
    Average as Average,
    Compression as Compression,
    DistributedOptimizer as DistributedOptimizer,
    PartialDistributedOptimizer as PartialDistributedOptimizer,
    ProcessSet as ProcessSet,
    Sum as Sum,
    add_process_set as add_process_set,
    allgather_object as allgather_object,
    barrier as barrier,
    broadcast_global_variables as broadcast_global_variables,
    broadcast_model as broadcast_model,
    broadcast_object as broadcast_object,
    broadcast_variables as broadcast_variables,
    ccl_built as ccl_built,
    cross_rank as cross_rank,
    cross_size as cross_size,
    cuda_built as cuda_built,
    ddl_built as ddl_built,
    global_process_set as global_process_set,
    gloo_built as gloo_built,
    gloo_enabled as gloo_enabled,
    init as init,
    is_homogeneous as is_homogeneous,
    is_initialized as is_initialized,
    local_rank as local_rank,
    local_size as local_size,
    mpi_built as mpi_built,
    mpi_enabled as mpi_enabled,
    mpi_threads_supported as mpi_threads_supported,
    nccl_built as nccl_built,
    rank as rank,
    refuse,
    remove_process_set as remove_process_set,
    rocm_built as rocm_built,
    shard as shard,
    shutdown as shutdown,
    size as size,
    start_timeline as start_timeline,
    stop_timeline as stop_timeline,
    synchronise_batch_norm as synchronise_batch_norm,
)


def __getattr__(name: str) -> Any:
    refuse(__name__, name, REPLACEMENTS)
