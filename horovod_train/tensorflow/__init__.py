"""`import horovod_train.tensorflow as hvd` in place of `import horovod.tensorflow as hvd`, under Keras 3.

The names, arguments and meanings are Horovod's; docs/migrate.md says what differs. Collectives on tensors are
Horovod's, everything that uses Keras is implemented here. All ranks must make the same calls in the same order.
"""

from __future__ import annotations

from typing import Any, NoReturn

from horovod.tensorflow import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    allgather,
    allgather_object,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    broadcast_object,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    reducescatter,
    rocm_built,
    size,
    size_op,
    start_timeline,
    stop_timeline,
)

from horovod_train.distributed.sync_batch_norm import synchronise_batch_norm
from horovod_train.tensorflow import elastic
from horovod_train.tensorflow.broadcasting import broadcast_global_variables, broadcast_model, broadcast_variables
from horovod_train.tensorflow.gradients import Compression, DistributedGradientTape, PartialDistributedGradientTape
from horovod_train.tensorflow.lifetime import add_process_set, barrier, init, remove_process_set, shutdown
from horovod_train.tensorflow.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from horovod_train.tensorflow.sharding import shard

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_model",
    "broadcast_object",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shard",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
    "synchronise_batch_norm",
]

REPLACEMENTS = {
    "BroadcastGlobalVariablesHook": "Estimators are TensorFlow 1: use model.fit and "
    "hvd.callbacks.BroadcastGlobalVariablesCallback of horovod_train.keras",
    "SyncBatchNormalization": "it is a layer of Keras 2: call hvd.synchronise_batch_norm(model) for Keras' own",
    "broadcast_object_fn": "it is for sessions of TensorFlow 1: call hvd.broadcast_object",
}
"""Horovod's names that are not served, and what to use in their place."""


def refuse(module: str, name: str, replacements: dict[str, str]) -> NoReturn:
    """Raise AttributeError that says what to do in place of a name that is not served."""
    advice = f": {replacements[name]}." if name in replacements else ""
    raise AttributeError(f"{module} has no {name!r}{advice}")


def __getattr__(name: str) -> Any:
    refuse(__name__, name, REPLACEMENTS)
