"""Send small objects between ranks, as JSON over Horovod's exchanges of tensors.

Values of these types are restored exactly: None, bool, int, float, str, bytes, list, tuple, dict with str keys, NumPy
numbers and arrays of them. Anything else is refused; convert objects of other classes first. Loading runs no code:
Horovod's own broadcast_object and allgather_object unpickle, so the sender could make the receiver run any.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_train.errors import RunError

MAX_BYTES = 2**31 - 1
"""Horovod counts the bytes of an exchange in 32 bits."""

HOST = "CPU:0"
"""Device on which objects are exchanged: by TensorFlow's default, ranks with and without a GPU would not match."""

_PLAIN = (bool, int, float, str, type(None))


def broadcast(value: Any, name: str) -> Any:
    """Collective: return root's value on every rank."""
    is_root = hvd.rank() == 0
    with tf.device(HOST):
        packed = _as_tensor(dump(value)) if is_root else tf.zeros([0], tf.uint8)
        size = int(hvd.broadcast(tf.constant([packed.shape[0]], tf.int64), root_rank=0, name=f"{name}.size").numpy()[0])
        _check_size(size, name)
        received = hvd.broadcast(packed if is_root else tf.zeros([size], tf.uint8), root_rank=0, name=f"{name}.bytes")
    return value if is_root else _load(received.numpy(), 0)


def gather(value: Any, name: str, process_set: hvd.ProcessSet = hvd.global_process_set) -> list[Any]:
    """Collective: return the values of all ranks of a process set, by rank, on every one of them."""
    with tf.device(HOST):
        packed = _as_tensor(dump(value))
        size = tf.constant([packed.shape[0]], tf.int64)
        sizes = hvd.allgather(size, name=f"{name}.sizes", process_set=process_set).numpy()
        _check_size(int(sizes.sum()), name)
        gathered = hvd.allgather(packed, name=f"{name}.bytes", process_set=process_set).numpy()
    return [_load(data, rank) for rank, data in enumerate(np.split(gathered, np.cumsum(sizes)[:-1]))]


def _as_tensor(data: bytes) -> tf.Tensor:
    return tf.constant(np.frombuffer(data, np.uint8))


def _load(data: np.ndarray, rank: int) -> Any:
    try:
        return load(data.tobytes())
    except ValueError as error:
        raise RunError(f"rank {rank} sent {error}. All ranks must run the same horovod_train.") from error


def _check_size(size: int, name: str) -> None:
    """Raise the same error on all ranks, because all know the sizes."""
    if size > MAX_BYTES:
        raise RunError(f"{name}: an exchange carries at most {MAX_BYTES} bytes over all ranks; received {size}.")


def dump(value: Any) -> bytes:
    """Return the bytes of a value. Raises TypeError, with the place inside the value, for an unsupported type."""
    return json.dumps(_encode(value, "value")).encode()


def load(data: bytes) -> Any:
    """Return the value that `dump` was given. Raises ValueError if `dump` did not make the bytes."""
    try:
        return _decode(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not an object that a rank sent: {error}") from error


def _encode(value: Any, where: str) -> Any:
    """Return a value as JSON stores it. A type that JSON lacks becomes an object with one key, the name of the type."""
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": _encode(list(value), where)}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _encode(item, f"{where}[{key!r}]") for key, item in value.items()}}
    if type(value) is bytes:
        return {"bytes": b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) and _is_numeric(value.dtype):
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {kind: [value.dtype.name, list(value.shape), b64encode(value.tobytes()).decode()]}
    kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    if type(value) is dict:
        kind = "dict with other keys"
    raise TypeError(
        f"{where} is of type {kind}; ranks tell each other None, bool, int, float, str, bytes, list, tuple, dict with "
        "str keys, NumPy numbers and arrays of them. Convert it."
    )


def _decode(encoded: Any) -> Any:
    if type(encoded) in _PLAIN:
        return encoded
    if isinstance(encoded, list):
        return [_decode(item) for item in encoded]
    ((kind, content),) = encoded.items()
    if kind == "tuple":
        return tuple(_decode(item) for item in content)
    if kind == "dict":
        return {key: _decode(item) for key, item in content.items()}
    if kind == "bytes":
        return b64decode(content, validate=True)
    if kind not in ("array", "number"):
        raise ValueError(f"kind {kind!r}")
    name, shape, text = content
    dtype = np.dtype(name)
    if not _is_numeric(dtype):
        raise ValueError(f"an array of {name}")
    array = np.frombuffer(b64decode(text, validate=True), dtype).reshape(shape).copy()
    return array if kind == "array" else array[()]


def _is_numeric(dtype: np.dtype) -> bool:
    """Accept numbers in this machine's byte order that NumPy knows by name; bfloat16 too if TensorFlow is imported."""
    try:
        return not dtype.hasobject and dtype.kind in "biufcV" and np.dtype(dtype.name) == dtype
    except TypeError:
        return False
