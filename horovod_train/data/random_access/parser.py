"""Checks arrays of records against a schema, pads lists and converts dtypes. Needs no TensorFlow.

Casting, scaling and image decoding follow later; see transforms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_train.data.random_access.store import objects, stack
from horovod_train.data.schema import Feature
from horovod_train.data.source import Arrays, Data
from horovod_train.shown_text import listed


class ArraysParser:
    """Parses records that are arrays by name. A Parser."""

    def __init__(self, features: dict[str, Feature]) -> None:
        self._features = features
        self.dtypes = {name: "string" if f.decode == "image" else f.stored_dtype for name, f in features.items()}
        self.shapes = {name: () if f.decode == "image" else f.tensor_shape for name, f in features.items()}

    def parse(self, records: Data) -> Arrays | None:
        parsed = {}
        for name, feature in self._features.items():
            values = self._values(records, name)
            array = None if values is None else _convert(feature, values)
            if values is None or array is None or _value_problem(feature, values, array):
                return None
            parsed[name] = array
        return parsed

    def problem(self, record: Any) -> str | None:
        for name, feature in self._features.items():
            if name not in record:
                return f"feature {name}: the record does not have it; it has {', '.join(record) or 'nothing'}"
            values = stack([record[name]])
            array = _convert(feature, values)
            if array is None:
                actual = _actual_form(values)
                if feature.class_names and (texts := _as_bytes(values)) is not None:
                    actual = ", ".join(repr(text.decode(errors="replace")) for text in texts.ravel()[:3].tolist())
                return f"feature {name}: expected {_expected_form(feature)}; the record holds {actual}"
            if problem := _value_problem(feature, values, array):
                return f"feature {name}: {problem}"
        return None

    def _values(self, records: Data, name: str) -> np.ndarray | None:
        if isinstance(records, dict):
            return records.get(name)
        if any(name not in row for row in records):
            return None
        return stack([row[name] for row in records])


def _convert(feature: Feature, values: np.ndarray) -> np.ndarray | None:
    """Return the values as the schema has them; None if those of some record, taken alone, do not fit."""
    if feature.max_length:
        return _pad(feature, values)
    array = _convert_alike(feature, values)
    if array is None and values.dtype == object:  # they differ in kind, and may fit one by one
        return _join([_convert_alike(feature, stack([value])) for value in values])
    return array


def _convert_alike(feature: Feature, values: np.ndarray) -> np.ndarray | None:
    if feature.stored_dtype == "string" or feature.decode == "image":
        shape = () if feature.decode == "image" else feature.shape
        texts = _as_bytes(values)
        return texts if texts is not None and texts.shape[1:] == shape else None
    if feature.class_names and (texts := _as_bytes(values)) is not None:
        numbers = {name.encode(): number for number, name in enumerate(feature.class_names)}
        found = [numbers.get(text.strip()) for text in texts.ravel()]
        fits = texts.shape[1:] == feature.shape and None not in found
        return np.array(found, np.int64).reshape(texts.shape) if fits else None
    if values.shape[1:] != feature.shape or not _fits_dtype(values.dtype, feature.stored_dtype):
        return None
    return values.astype(feature.stored_dtype, copy=False)


def _pad(feature: Feature, values: np.ndarray) -> np.ndarray | None:
    """Return lists of any length as rows of `max_length`."""
    assert feature.max_length is not None
    lists = [np.asarray(value) for value in values]
    if any(value.ndim == 0 or len(value) > feature.max_length for value in lists):
        return None
    # Each list is converted alone: joined first, numbers among texts would be texts, and integers among floats floats.
    items = _join([_items(feature, value) for value in lists])
    if items is None:
        return None
    padding = b"" if feature.stored_dtype == "string" else feature.padding
    rows = np.full((len(lists), *feature.tensor_shape), padding, items.dtype)
    rows[_is_item(feature.max_length, lists)] = items
    return rows


def _items(feature: Feature, values: np.ndarray) -> np.ndarray | None:
    """Return one list as the schema has it; None if it does not fit. Integers may stand for floats."""
    stored = feature.stored_dtype
    if not len(values):
        return np.zeros((0, *feature.shape), object if stored == "string" else stored)
    if values.shape[1:] != feature.shape:
        return None
    if stored == "string":
        return _as_bytes(values)
    fits = _fits_dtype(values.dtype, stored) or (values.dtype.kind in "iu" and np.dtype(stored).kind == "f")
    return values.astype(stored, copy=False) if fits else None


def _join(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Return arrays as one; None if one is missing."""
    found = [part for part in parts if part is not None]
    return np.concatenate(found) if len(found) == len(parts) else None


def _is_item(max_length: int, lists: Sequence[Any]) -> np.ndarray:
    """Return which places of padded lists are none of the padding: bool [records, max_length]."""
    return np.arange(max_length) < np.array([len(value) for value in lists])[:, None]


def _value_problem(feature: Feature, values: np.ndarray, array: np.ndarray) -> str | None:
    """Return what is wrong with values as classes; padding is none. array: the values as the schema has them."""
    if feature.classes and feature.max_length:
        array = array[_is_item(feature.max_length, list(values))]
    return feature.value_problem(array)


def _as_bytes(values: np.ndarray) -> np.ndarray | None:
    """Return texts as bytes objects; None if some are no texts, or cannot be encoded."""
    if values.dtype.kind == "S":
        return values.astype(object)
    try:
        if values.dtype.kind == "U":
            return np.char.encode(values, "utf-8").astype(object)
        if values.dtype != object:
            return None
        flat = [value.encode() if isinstance(value, str) else value for value in values.ravel()]
    except UnicodeEncodeError:
        return None
    return objects(flat).reshape(values.shape) if all(isinstance(value, bytes) for value in flat) else None


def _fits_dtype(dtype: np.dtype, stored: str) -> bool:
    """Return whether the conversion keeps every value; also True between floats, where it rounds."""
    return dtype.kind != "O" and (
        np.can_cast(dtype, stored, "safe") or (dtype.kind, np.dtype(stored).kind) == ("f", "f")
    )


def _expected_form(feature: Feature) -> str:
    if feature.decode == "image":
        return "the bytes of an image's file"
    if feature.class_names:
        return f"one of {listed(feature.class_names)}, or its number"
    if feature.max_length:
        items = f"values of {feature.stored_dtype}" if not feature.shape else f"items of {_stored_form(feature)}"
        return f"at most {feature.max_length} {items}"
    return _stored_form(feature)


def _stored_form(feature: Feature) -> str:
    return _describe_type("text" if feature.stored_dtype == "string" else feature.stored_dtype, feature.shape)


def _actual_form(values: np.ndarray) -> str:
    (value,) = values
    if value is None:
        return "nothing"
    array = np.asarray(value)
    if array.dtype.kind == "U" and _as_bytes(array) is None:
        return "text with a surrogate, which UTF-8 does not have"
    if isinstance(value, bytes | str) or values.dtype.kind in "SU":
        return _describe_type("text", values.shape[1:])
    if array.dtype == object and any(part is None for part in array.ravel()):
        return "a list that lacks a value"
    return _describe_type("text" if array.dtype.kind in "SUO" else array.dtype.name, array.shape)


def _describe_type(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"
