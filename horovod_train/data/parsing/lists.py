"""Lists of any length in serialized records: pads them, and says what is wrong with one. See parsing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_train.data.features import Feature


def pad_lists(feature: Feature, stored: tf.RaggedTensor) -> tf.Tensor:
    """Return lists as [records, max_length, *shape]. Raises InvalidArgumentError if some list or item does not fit.

    stored: the values of each record, [records, (values)]; of a SequenceExample [records, (items), (values)].
    """
    each = values_per_item(feature)
    if feature.sequence:
        tf.debugging.assert_equal(stored.values.row_lengths(), tf.cast(each, stored.values.row_splits.dtype))
        splits, flat = stored.row_splits, stored.flat_values
    else:
        tf.debugging.assert_equal(stored.row_lengths() % each, tf.zeros([], stored.row_splits.dtype))
        splits, flat = stored.row_splits // each, stored.flat_values
    if feature.decode == "raw":
        tf.debugging.assert_equal(tf.strings.length(flat), raw_bytes(feature))
        flat = tf.io.decode_raw(flat, feature.raw_dtype)
    items = tf.RaggedTensor.from_row_splits(tf.reshape(flat, [-1, *feature.shape]), splits, validate=False)
    tf.debugging.assert_less_equal(items.row_lengths(), tf.cast(feature.max_length, items.row_splits.dtype))
    padding = "" if items.dtype == tf.string else tf.cast(feature.padding, items.dtype)
    return items.to_tensor(padding, shape=[None, feature.max_length, *feature.shape])


def values_per_item(feature: Feature) -> int:
    """Return how many stored values an item of a list has."""
    return 1 if feature.decode == "raw" else int(np.prod(feature.shape, dtype=np.int64))


def raw_bytes(feature: Feature) -> int:
    """Return the bytes of a value that is decoded."""
    return int(np.prod(feature.shape, dtype=np.int64)) * np.dtype(feature.raw_dtype).itemsize


def wrong_items(feature: Feature, items: Sequence[Sequence[Any]]) -> str | None:
    """Return what is wrong with the items of a SequenceExample's list; None if nothing is."""
    assert feature.max_length is not None
    each = values_per_item(feature)
    if len(items) > feature.max_length:
        return f"expected at most {feature.max_length} items; the record holds {len(items)}"
    for number, values in enumerate(items):
        if len(values) != each:
            return f"expected {each} values in each item; item {number} holds {len(values)}"
    return _wrong_bytes(feature, [value for values in items for value in values])


def wrong_list(feature: Feature, values: Sequence[Any]) -> str | None:
    """Return what is wrong with the values of an Example's list; None if nothing is."""
    assert feature.max_length is not None
    each = values_per_item(feature)
    if len(values) % each:
        return f"expected {each} values an item for shape {list(feature.shape)}; the record holds {len(values)} values"
    if len(values) > feature.max_length * each:
        what = "values" if each == 1 else f"items of {each} values"
        return f"expected at most {feature.max_length} {what}; the record holds {len(values) // each}"
    return _wrong_bytes(feature, values)


def _wrong_bytes(feature: Feature, values: Sequence[Any]) -> str | None:
    for value in values if feature.decode == "raw" else ():
        if len(value) != raw_bytes(feature):
            shape = f"{feature.raw_dtype}{list(feature.shape)}"
            return f"expected {raw_bytes(feature)} bytes for {shape} in each item; one holds {len(value)}"
    return None
