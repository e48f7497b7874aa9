"""Send small objects between ranks, as bytes over Horovod's exchanges of tensors: JSON, then the bytes of arrays.

Values of these types are restored exactly: None, bool, int, float, str, bytes, list, tuple, dict with str keys, NumPy
numbers and arrays of them. Anything else is refused; convert objects of other classes first. Loading runs no code:
Horovod's own broadcast_object and allgather_object unpickle, so the sender could make the receiver run any.
"""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_train.errors import RunError

MAX_BYTES = 2**31 - 1
"""Horovod counts the bytes of an exchange in 32 bits."""

HOST = "CPU:0"
"""Device on which objects are exchanged: by TensorFlow's default, ranks with and without a GPU would not match."""

_LENGTH = struct.Struct("!Q")
_PLAIN = (bool, int, float, str, type(None))


def broadcast(value: Any, name: str, root_rank: int = 0) -> Any:
    """Collective: return the value of root_rank on every rank."""
    is_root = hvd.rank() == root_rank
    with tf.device(HOST):
        packed = _as_tensor(dump(value)) if is_root else tf.zeros([0], tf.uint8)
        sent = tf.constant([packed.shape[0]], tf.int64)
        size = int(hvd.broadcast(sent, root_rank, name=f"{name}.size").numpy()[0])
        _check_size(size, name)
        received = hvd.broadcast(packed if is_root else tf.zeros([size], tf.uint8), root_rank, name=f"{name}.bytes")
    return value if is_root else _load(received.numpy(), root_rank)


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
    blobs: list[bytes] = []
    text = json.dumps(_encode(value, "value", blobs)).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *blobs])


def load(data: bytes) -> Any:
    """Return the value that `dump` was given. Raises ValueError if `dump` did not make the bytes."""
    file = io.BytesIO(data)
    try:
        (length,) = _LENGTH.unpack(_cut(file, _LENGTH.size))
        value = json.loads(_cut(file, length), object_hook=lambda tag: _decode(tag, file))
        if left := len(file.read()):
            raise ValueError(f"{left} bytes too many")
        return value
    # np.dtype parses some names as Python, ",loat64" too.
    except (ValueError, TypeError, KeyError, OverflowError, SyntaxError, RecursionError) as error:
        raise ValueError(f"not an object that a rank sent: {error}") from error


def _encode(value: Any, where: str, blobs: list[bytes]) -> Any:
    """Return a value as JSON stores it. A type that JSON lacks becomes an object with one key, the name of the type."""
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [_encode(item, f"{where}[{index}]", blobs) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": _encode(list(value), where, blobs)}
    if type(value) is dict and all(type(key) is str for key in value):
        # As pairs, because load takes every object of the text for a tag.
        return {"dict": [[key, _encode(item, f"{where}[{key!r}]", blobs)] for key, item in value.items()]}
    if type(value) is bytes:
        blobs.append(value)
        return {"bytes": len(value)}
    if isinstance(value, np.ndarray) and _is_numeric(value.dtype):
        blobs.append(np.ascontiguousarray(value).tobytes())
        return {"array": [value.dtype.name, list(value.shape)]}
    if isinstance(value, np.generic) and _is_numeric(value.dtype):
        return {"number": _encode(np.asarray(value), where, blobs)}
    kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    if type(value) is dict:
        kind = "dict with other keys"
    raise TypeError(
        f"{where} is of type {kind}; ranks tell each other None, bool, int, float, str, bytes, list, tuple, dict with "
        "str keys, NumPy numbers and arrays of them. Convert it."
    )


def _decode(tag: dict[str, Any], file: io.BytesIO) -> Any:
    """Return what an object of the text stands for. They come in the order of `_encode`; `file` is at its bytes."""
    ((kind, content),) = tag.items()
    if kind == "tuple":
        return tuple(content)
    if kind == "dict" and all(type(key) is str for key, _ in content):
        return dict(content)
    if kind == "number" and content.shape == ():
        return content[()]
    if kind == "bytes":
        return _cut(file, content)
    if kind == "array":
        name, shape = content
        dtype = np.dtype(name)
        if not _is_numeric(dtype) or any(type(length) is not int or length < 0 for length in shape):
            raise ValueError(f"an array of {name} {shape}")
        size = dtype.itemsize * int(np.prod(shape, dtype=object))
        return np.frombuffer(_cut(file, size), dtype).reshape(shape).copy()
    raise ValueError(f"kind {kind!r}")


def _cut(file: io.BytesIO, size: int) -> bytes:
    data = file.read(max(size, 0))
    if len(data) != size:
        raise ValueError(f"{size} bytes expected, {len(data)} received")
    return data


def _is_numeric(dtype: np.dtype) -> bool:
    """Accept numbers in this machine's byte order that NumPy knows by name; bfloat16 too if TensorFlow is imported."""
    try:
        return not dtype.hasobject and dtype.kind in "biufcV" and np.dtype(dtype.name) == dtype
    except TypeError:
        return False
