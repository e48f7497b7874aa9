"""Send small objects between ranks, as bytes over Horovod's exchanges of tensors. serialize says which objects.

Horovod's own broadcast_object and allgather_object unpickle, so the sender could make the receiver run any code.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_train.distributed import serialize
from horovod_train.errors import RunError

MAX_BYTES = 2**31 - 1
"""Horovod counts the bytes of an exchange in 32 bits."""

HOST = "CPU:0"
"""Device on which objects are exchanged: by TensorFlow's default, ranks with and without a GPU would not match."""


def broadcast(value: Any, name: str) -> Any:
    """Collective: return root's value on every rank."""
    is_root = hvd.rank() == 0
    with tf.device(HOST):
        packed = _as_tensor(serialize.dump(value)) if is_root else tf.zeros([0], tf.uint8)
        size = int(hvd.broadcast(tf.constant([packed.shape[0]], tf.int64), root_rank=0, name=f"{name}.size").numpy()[0])
        _check_size(size, name)
        received = hvd.broadcast(packed if is_root else tf.zeros([size], tf.uint8), root_rank=0, name=f"{name}.bytes")
    return value if is_root else _load(received.numpy(), 0)


def gather(value: Any, name: str, process_set: hvd.ProcessSet = hvd.global_process_set) -> list[Any]:
    """Collective: return the values of all ranks of a process set, by rank, on every one of them."""
    with tf.device(HOST):
        packed = _as_tensor(serialize.dump(value))
        size = tf.constant([packed.shape[0]], tf.int64)
        sizes = hvd.allgather(size, name=f"{name}.sizes", process_set=process_set).numpy()
        _check_size(int(sizes.sum()), name)
        gathered = hvd.allgather(packed, name=f"{name}.bytes", process_set=process_set).numpy()
    return [_load(data, rank) for rank, data in enumerate(np.split(gathered, np.cumsum(sizes)[:-1]))]


def _as_tensor(data: bytes) -> tf.Tensor:
    return tf.constant(np.frombuffer(data, np.uint8))


def _load(data: np.ndarray, rank: int) -> Any:
    try:
        return serialize.load(data.tobytes())
    except ValueError as error:
        raise RunError(f"rank {rank} sent {error}. All ranks must run the same horovod_train.") from error


def _check_size(size: int, name: str) -> None:
    """Raise the same error on all ranks, because all know the sizes."""
    if size > MAX_BYTES:
        raise RunError(f"{name}: an exchange carries at most {MAX_BYTES} bytes over all ranks; received {size}.")
