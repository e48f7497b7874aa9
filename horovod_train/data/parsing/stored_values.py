"""The values of one feature in serialized records: pads lists of any length, and says what is wrong with a record's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_train.data.features import Feature

_KINDS = {"int64_list": "int64", "float_list": "float", "bytes_list": "bytes", None: "nothing"}


def pad_lists(feature: Feature, stored: tf.RaggedTensor) -> tf.Tensor:
    """Return lists as [records, max_length, *shape]. Raises InvalidArgumentError if some list or item does not fit.

    stored: the values of each record, [records, (values)]; of a SequenceExample [records, (items), (values)].
    """
    item_values = values_per_item(feature)
    if feature.sequence:
        tf.debugging.assert_equal(stored.values.row_lengths(), tf.cast(item_values, stored.values.row_splits.dtype))
        splits, flat = stored.row_splits, stored.flat_values
    else:
        tf.debugging.assert_equal(stored.row_lengths() % item_values, tf.zeros([], stored.row_splits.dtype))
        splits, flat = stored.row_splits // item_values, stored.flat_values
    if feature.decode == "raw":
        tf.debugging.assert_equal(tf.strings.length(flat), raw_bytes(feature))
        flat = tf.io.decode_raw(flat, feature.raw_dtype)
    items = tf.RaggedTensor.from_row_splits(tf.reshape(flat, [-1, *feature.shape]), splits, validate=False)
    tf.debugging.assert_less_equal(items.row_lengths(), tf.cast(feature.max_length, items.row_splits.dtype))
    padding = "" if items.dtype == tf.string else tf.cast(feature.padding, items.dtype)
    return items.to_tensor(padding, shape=[None, feature.max_length, *feature.shape])


def values_per_item(feature: Feature) -> int:
    """Return how many stored values a feature has, or if it is a list, each of its items."""
    return 1 if feature.decode != "none" else int(np.prod(feature.shape, dtype=np.int64))


def raw_bytes(feature: Feature) -> int:
    """Return the bytes of a value that is decoded."""
    return int(np.prod(feature.shape, dtype=np.int64)) * np.dtype(feature.raw_dtype).itemsize


def values_problem(feature: Feature, stored: Sequence[tf.train.Feature]) -> str | None:
    """Return what is wrong with a feature in one record; None if nothing is.

    stored: of an Example the feature, if it has it; of a SequenceExample each item.
    """
    if not stored:
        return None if feature.max_length else f"expected {feature.type}; the record does not have it"
    kinds = [value.WhichOneof("kind") for value in stored]
    if kinds == [None] and feature.max_length and not feature.sequence:
        return None
    wrong_kind = next((_KINDS[kind] for kind in kinds if _KINDS[kind] != feature.type), None)
    if wrong_kind:
        return f"expected {feature.type}; the record holds {wrong_kind}"
    items = [getattr(value, kind).value for value, kind in zip(stored, kinds, strict=True)]
    size, is_raw = values_per_item(feature), feature.decode == "raw"
    if feature.max_length and not feature.sequence:
        items = [items[0][first : first + size] for first in range(0, len(items[0]), size)]
    if problem := _size_problem(feature, items, size):
        return problem
    values = [value for item in items for value in item]
    wrong_value = next((value for value in values if is_raw and len(value) != raw_bytes(feature)), None)
    if wrong_value is not None:
        expected = f"{raw_bytes(feature)} bytes for {feature.raw_dtype}{list(feature.shape)}"
        return (
            f"expected {expected}{' in each item' if feature.max_length else ''}; the record holds {len(wrong_value)}"
        )
    return feature.value_problem(np.frombuffer(b"".join(values), feature.raw_dtype) if is_raw else np.array(values))


def _size_problem(feature: Feature, items: Sequence[Sequence[Any]], size: int) -> str | None:
    """Return the problem of too many items, or of one that has not `size` values; None if there is none."""
    if feature.max_length and len(items) > feature.max_length:
        what = "items" if feature.sequence else "values" if size == 1 else f"items of {size} values"
        return f"expected at most {feature.max_length} {what}; the record holds {len(items)}"
    number = next((number for number, item in enumerate(items) if len(item) != size), None)
    if number is None:
        return None
    if feature.max_length:
        return f"expected {size} values in each item; item {number} holds {len(items[number])}"
    return f"expected {size} values for shape {list(feature.shape)}; the record holds {len(items[number])}"
