"""`import horovod_train.keras as hvd` in place of `import horovod.tensorflow.keras as hvd`, or of `horovod.keras`.

The names, arguments and meanings are Horovod's; docs/migrate.md says what differs. All ranks must make the same calls
in the same order. A value given to a collective may be of any kind that converts to a tensor.
"""

# isort: skip_file
# Otherwise each of our own names would be imported by a statement of its own.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import horovod_train.tensorflow as _collectives
from horovod_train.errors import UserError
from horovod_train.keras import callbacks as callbacks, elastic as elastic
from horovod_train.tensorflow import (
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


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> tf.Tensor:
    """Collective: return the value combined over all ranks, by default its mean.

    value: the same shape on every rank; the mean of integers is a float64. average: the older form of op=hvd.Average
    (True) or hvd.Sum (False).
    """
    if average is not None and op is not None:
        raise UserError("hvd.allreduce: give op or average, not both.")
    op = op if op is not None else Sum if average is False else Average
    return _collectives.allreduce(
        tf.convert_to_tensor(value),
        op=op,
        name=name,
        compression=compression,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Collective: return all values, by rank, along the first axis, whose length may differ by rank."""
    return _collectives.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Collective: return root_rank's value. value: the same shape on every rank."""
    return _collectives.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> tf.Tensor:
    """Collective: return this rank's part, along the first axis, of the value combined over all ranks."""
    return _collectives.reducescatter(tf.convert_to_tensor(value), op=op, name=name)


def load_model(
    filepath: str | Path,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model and make its optimizer distributed; its state is that of the file.

    filepath: of model.save, with or without DistributedOptimizer. A model saved without an optimizer is returned as it
    is. custom_optimizers: classes of optimizers that are not Keras'. compression: of gradients.

    Raises UserError for legacy_opts=True: Keras 3 has none of the optimizers of Keras 2.
    """
    if legacy_opts:
        raise UserError("hvd.load_model: Keras 3 has no legacy optimizers. Leave legacy_opts out.")
    optimizer_classes = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**optimizer_classes, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        distributed: Any = DistributedOptimizer(model.optimizer, compression=compression)
        if distributed is not model.optimizer:  # under mixed_float16, of a model compiled without a loss scale
            model.optimizer = distributed
    return model


def __getattr__(name: str) -> Any:
    refuse(__name__, name)
