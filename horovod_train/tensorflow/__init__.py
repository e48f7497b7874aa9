"""`import horovod_train.tensorflow as hvd` in place of `import horovod.tensorflow as hvd`, under Keras 3.

The names, arguments and meanings are Horovod's; docs/migrate.md says what differs. Collectives on tensors are
Horovod's, with names that are the same on all ranks inside a step of the trainer, and means of integers that keep
their fractions. Everything that uses Keras is implemented here. All ranks must make the same calls in the same order.
"""

# isort: skip_file
# Otherwise each of our own names would be imported by a statement of its own.

from __future__ import annotations

import inspect as _inspect
from typing import Any, NoReturn

import horovod.tensorflow as _horovod
import tensorflow as _tf
from horovod.tensorflow import (
    Adasum as Adasum,
    Average as Average,
    Max as Max,
    Min as Min,
    ProcessSet as ProcessSet,
    Product as Product,
    Sum as Sum,
    allgather_object as allgather_object,
    broadcast_ as broadcast_,
    broadcast_object as broadcast_object,
    ccl_built as ccl_built,
    cross_rank as cross_rank,
    cross_size as cross_size,
    cuda_built as cuda_built,
    ddl_built as ddl_built,
    global_process_set as global_process_set,
    gloo_built as gloo_built,
    gloo_enabled as gloo_enabled,
    is_homogeneous as is_homogeneous,
    is_initialized as is_initialized,
    local_rank as local_rank,
    local_rank_op as local_rank_op,
    local_size as local_size,
    local_size_op as local_size_op,
    mpi_built as mpi_built,
    mpi_enabled as mpi_enabled,
    mpi_threads_supported as mpi_threads_supported,
    nccl_built as nccl_built,
    process_set_included_op as process_set_included_op,
    rank as rank,
    rank_op as rank_op,
    rocm_built as rocm_built,
    size as size,
    size_op as size_op,
    start_timeline as start_timeline,
    stop_timeline as stop_timeline,
)

from horovod_train.distributed.allreduce import gathers_unknown_rows, mean_with_fractions, named_by_call
from horovod_train.distributed.sync_batch_norm import synchronise_batch_norm as synchronise_batch_norm
from horovod_train.tensorflow import elastic as elastic
from horovod_train.tensorflow.broadcasting import (
    broadcast_global_variables as broadcast_global_variables,
    broadcast_model as broadcast_model,
    broadcast_variables as broadcast_variables,
)
from horovod_train.tensorflow.lifetime import (
    add_process_set as add_process_set,
    barrier as barrier,
    init as init,
    join as join,
    remove_process_set as remove_process_set,
    shutdown as shutdown,
)
from horovod_train.tensorflow.gradients import (
    Compression as Compression,
    DistributedGradientTape as DistributedGradientTape,
    DistributedOptimizer as DistributedOptimizer,
    PartialDistributedGradientTape as PartialDistributedGradientTape,
    PartialDistributedOptimizer as PartialDistributedOptimizer,
)
from horovod_train.tensorflow.sharding import shard as shard

allgather = named_by_call(gathers_unknown_rows(_horovod.allgather))
allreduce = mean_with_fractions(named_by_call(_horovod.allreduce))
alltoall = named_by_call(_horovod.alltoall)
broadcast = named_by_call(_horovod.broadcast)
grouped_allgather = named_by_call(gathers_unknown_rows(_horovod.grouped_allgather))
grouped_allreduce = mean_with_fractions(named_by_call(_horovod.grouped_allreduce))
grouped_reducescatter = mean_with_fractions(_horovod.grouped_reducescatter)
reducescatter = mean_with_fractions(named_by_call(_horovod.reducescatter))

# In a script's tf.function AutoGraph would rewrite these and all that they call, as the start of the watch.
globals().update(
    {
        name: _tf.autograph.experimental.do_not_convert(value)
        for name, value in list(globals().items())
        if _inspect.isfunction(value) and not name.startswith("_")
    }
)

REPLACEMENTS = {
    "BroadcastGlobalVariablesHook": "Estimators are TensorFlow 1: use model.fit and "
    "hvd.callbacks.BroadcastGlobalVariablesCallback of horovod_train.keras",
    "SyncBatchNormalization": "it is a layer of Keras 2: call hvd.synchronise_batch_norm(model) for Keras' own",
    "broadcast_object_fn": "it is for sessions of TensorFlow 1: call hvd.broadcast_object",
}
"""Horovod's names that are not served, and what to use in their place."""


def refuse(module: str, name: str) -> NoReturn:
    """Raise AttributeError that says what to do in place of a name that is not served."""
    advice = f": {REPLACEMENTS[name]}." if name in REPLACEMENTS else ""
    raise AttributeError(f"{module} has no {name!r}{advice}")


def __getattr__(name: str) -> Any:
    refuse(__name__, name)
