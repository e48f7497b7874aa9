"""Turn a small object into bytes and back: JSON, followed by the bytes of arrays. Loading runs no code.

Values of these types are restored exactly: None, bool, int, float, str, bytes, list, tuple, dict with str keys, NumPy
numbers and arrays of them. Anything else is refused; convert objects of other classes first. Does not send; see
objects.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

_LENGTH = struct.Struct("!Q")
_PLAIN = (bool, int, float, str, type(None))


def dump(value: Any) -> bytes:
    """Return the bytes of a value. Raises TypeError, with the place inside the value, for an unsupported type."""
    blobs: list[bytes] = []
    text = json.dumps(_encode(value, "value", blobs)).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *blobs])


def load(data: bytes) -> Any:
    """Return the value that `dump` was given. Raises ValueError if `dump` did not make the bytes."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + length
        if start > len(data):
            raise ValueError(f"{length} bytes of JSON expected, {len(data) - _LENGTH.size} received")
        value, end = _decode(json.loads(data[_LENGTH.size : start]), data, start)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
        raise ValueError(f"not an object that a rank sent: {error}") from error
    if end != len(data):
        raise ValueError(f"not an object that a rank sent: {len(data) - end} bytes too many")
    return value


def _encode(value: Any, where: str, blobs: list[bytes]) -> Any:
    """Return a value as JSON stores it. A type that JSON lacks becomes an object with one key, the name of the type."""
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [_encode(item, f"{where}[{index}]", blobs) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": _encode(list(value), where, blobs)}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _encode(item, f"{where}[{key!r}]", blobs) for key, item in value.items()}}
    if type(value) is bytes:
        blobs.append(value)
        return {"bytes": len(value)}
    if isinstance(value, np.ndarray) and _is_numeric(value.dtype):
        blobs.append(np.ascontiguousarray(value).tobytes())
        return {"array": [value.dtype.name, list(value.shape)]}
    if isinstance(value, np.generic) and _is_numeric(value.dtype):
        blobs.append(value.tobytes())
        return {"number": value.dtype.name}
    kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    if type(value) is dict:
        kind = "dict with other keys"
    raise TypeError(
        f"{where} is of type {kind}; ranks tell each other None, bool, int, float, str, bytes, list, tuple, dict with "
        "str keys, NumPy numbers and arrays of them. Convert it."
    )


def _decode(encoded: Any, data: bytes, offset: int) -> tuple[Any, int]:
    """Return the value, and the offset in `data` where the bytes of the next array begin."""
    if type(encoded) in _PLAIN:
        return encoded, offset
    if isinstance(encoded, list):
        items = []
        for item in encoded:
            value, offset = _decode(item, data, offset)
            items.append(value)
        return items, offset
    ((kind, content),) = encoded.items()
    if kind == "tuple":
        items, offset = _decode(list(content), data, offset)
        return tuple(items), offset
    if kind == "dict":
        values, offset = _decode(list(content.values()), data, offset)
        return dict(zip(content, values, strict=True)), offset
    if kind == "bytes":
        return _cut(data, offset, content), offset + content
    if kind == "number":
        array, offset = _decode({"array": [content, []]}, data, offset)
        return array[()], offset
    if kind == "array":
        name, shape = content
        dtype = np.dtype(name)
        if not _is_numeric(dtype) or any(type(length) is not int or length < 0 for length in shape):
            raise ValueError(f"an array of {name} {shape}")
        size = dtype.itemsize * int(np.prod(shape, dtype=object))
        return np.frombuffer(_cut(data, offset, size), dtype).reshape(shape).copy(), offset + size
    raise ValueError(f"kind {kind!r}")


def _cut(data: bytes, offset: int, size: int) -> bytes:
    if not 0 <= size <= len(data) - offset:
        raise ValueError(f"{size} bytes expected, {len(data) - offset} received")
    return data[offset : offset + size]


def _is_numeric(dtype: np.dtype) -> bool:
    """Accept numbers in this machine's byte order that NumPy knows by name; bfloat16 too if TensorFlow is imported."""
    try:
        return not dtype.hasobject and dtype.kind in "biufcV" and np.dtype(dtype.name) == dtype
    except TypeError:
        return False
