"""Collectives on one value of any kind that converts to a tensor, as Horovod's Keras module has them."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_train.errors import UserError


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = hvd.Compression.none,
) -> tf.Tensor:
    """Collective: return the value combined over all ranks, by default its mean.

    value: the same shape on every rank. average: the older form of op=hvd.Average (True) or hvd.Sum (False).
    """
    if average is not None and op is not None:
        raise UserError("hvd.allreduce: give op or average, not both.")
    op = op if op is not None else hvd.Sum if average is False else hvd.Average
    return hvd.allreduce(
        tf.convert_to_tensor(value),
        op=op,
        name=name,
        compression=compression,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Collective: return all values, by rank, along the first axis, whose length may differ by rank."""
    return hvd.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Collective: return root_rank's value. value: the same shape on every rank."""
    return hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: Any = hvd.Average) -> tf.Tensor:
    """Collective: return this rank's part, along the first axis, of the value combined over all ranks."""
    return hvd.reducescatter(tf.convert_to_tensor(value), op=op, name=name)
