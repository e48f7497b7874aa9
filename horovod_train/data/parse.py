"""Serialized tf.train.Example records to arrays, many at once, and what is wrong with one where that fails.

Follows a Schema as far as the stored values: bytes are unpacked, lists padded, ranges checked. Casting, scaling and
image decoding come after; see pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from horovod_train.data.schema import Feature, Schema

Arrays = dict[str, np.ndarray]


class Parser:
    """Parses batches of records into one array a feature, with rows as first axis."""

    def __init__(self, schema: Schema) -> None:
        used = {*schema.inputs, *schema.targets}
        self.features = {name: feature for name, feature in schema.features.items() if name in used}
        self.dtypes = {name: "string" if f.decode == "image" else f.stored_dtype for name, f in self.features.items()}
        """Of the arrays that parse returns; an image is its file's bytes still."""
        self.shapes = {name: () if f.decode == "image" else f.tensor_shape for name, f in self.features.items()}
        """Of one row of them."""
        self._specs = {name: _spec(feature) for name, feature in self.features.items()}

    def parse(self, records: Sequence[bytes]) -> Arrays | None:
        """The stored values of all features that are inputs or targets; None if some record does not fit."""
        try:
            with tf.device("cpu:0"):
                tensors = tf.io.parse_example(np.array(records, object), self._specs)
                arrays = {name: _unpack(feature, tensors[name]) for name, feature in self.features.items()}
        except tf.errors.InvalidArgumentError:
            return None
        found = {name: array for name, array in arrays.items() if array is not None}
        return found if len(found) == len(arrays) else None

    def blank(self, rows: int) -> Arrays:
        """Zeros in the place of records that cannot be read."""
        shapes = {name: (rows, *shape) for name, shape in self.shapes.items()}
        return {
            name: np.full(shapes[name], b"", object) if dtype == "string" else np.zeros(shapes[name], dtype)
            for name, dtype in self.dtypes.items()
        }

    def problem(self, record: bytes) -> str | None:
        """What is wrong with one record, naming the feature; None if nothing is."""
        try:
            stored = tf.train.Example.FromString(record).features.feature
        except Exception:  # protobuf's DecodeError has no public name that all its versions share
            return "it is not a tf.train.Example"
        for name, feature in self.features.items():
            wrong = _wrong(feature, stored[name]) if name in stored else _wrong_if_missing(feature)
            if wrong:
                return f"feature {name}: {wrong}"
        return None


def _spec(feature: Feature) -> tf.io.FixedLenFeature | tf.io.RaggedFeature:
    dtype = {"int64": tf.int64, "float": tf.float32, "bytes": tf.string}[feature.type]
    if feature.max_length:
        return tf.io.RaggedFeature(dtype)
    return tf.io.FixedLenFeature(() if feature.decode != "none" else feature.shape, dtype)


def _unpack(feature: Feature, tensor: tf.Tensor | tf.RaggedTensor) -> np.ndarray | None:
    """The stored values as an array; None if some row has another size or a value out of range."""
    if feature.max_length:
        if tensor.shape[0] and int(tf.reduce_max(tensor.row_lengths())) > feature.max_length:
            return None
        padding = "" if feature.type == "bytes" else feature.padding
        tensor = tensor.to_tensor(padding, [None, feature.max_length])
    if feature.decode == "raw":
        if bool(tf.reduce_any(tf.strings.length(tensor) != _raw_bytes(feature))):
            return None
        tensor = tf.reshape(tf.io.decode_raw(tensor, feature.raw_dtype), [-1, *feature.shape])
    array: np.ndarray = tensor.numpy()
    if feature.classes and array.size and (array.min() < 0 or array.max() >= feature.classes):
        return None
    return array


def _raw_bytes(feature: Feature) -> int:
    return int(np.prod(feature.shape, dtype=np.int64)) * np.dtype(feature.raw_dtype).itemsize


# --- naming what is wrong ---------------------------------------------------------------------------------------

_KINDS = {"int64_list": "int64", "float_list": "float", "bytes_list": "bytes", None: "nothing"}


def _wrong_if_missing(feature: Feature) -> str | None:
    return None if feature.max_length else f"expected {feature.type}; the record does not have it"


def _wrong(feature: Feature, stored: tf.train.Feature) -> str | None:
    kind = stored.WhichOneof("kind")
    if kind is None and feature.max_length:
        return None
    if _KINDS[kind] != feature.type:
        return f"expected {feature.type}; the record holds {_KINDS[kind]}"
    values = getattr(stored, kind).value
    if feature.max_length:
        if len(values) > feature.max_length:
            return f"expected at most {feature.max_length} values; the record holds {len(values)}"
        return _wrong_value(feature, np.array(values)) if feature.type != "bytes" else None
    expected = 1 if feature.decode != "none" else int(np.prod(feature.shape, dtype=np.int64))
    if len(values) != expected:
        return f"expected {expected} values for shape {list(feature.shape)}; the record holds {len(values)}"
    if feature.decode == "raw":
        if len(values[0]) != _raw_bytes(feature):
            shape = f"{feature.raw_dtype}{list(feature.shape)}"
            return f"expected {_raw_bytes(feature)} bytes for {shape}; the record holds {len(values[0])}"
        return _wrong_value(feature, np.frombuffer(values[0], feature.raw_dtype))
    return _wrong_value(feature, np.array(values)) if feature.type != "bytes" else None


def _wrong_value(feature: Feature, values: np.ndarray) -> str | None:
    if not feature.classes:
        return None
    out = values[(values < 0) | (values >= feature.classes)]
    return f"expected a value from 0 to {feature.classes - 1}; the record holds {out[0]}" if out.size else None
