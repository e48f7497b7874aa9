"""Parses records that differ only in their values as one table, which is many times faster for small records.

Records of plain arrays, as `prepare` writes them, have the same bytes in the same places except for the values. One
record is analysed, the others are compared with it, and the values of all are cut out together. Records that differ in
more are reported, and are then parsed in the usual way.

The wire format: https://protobuf.dev/programming-guides/encoding, and tensorflow/core/example/{example,feature}.proto.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from horovod_train.data.schema import Feature

_LENGTH_DELIMITED = 2
_KINDS = {1: "bytes", 2: "float", 3: "int64"}


class NotPlain(ValueError):
    """The record must be parsed in the usual way."""


class _Field(NamedTuple):
    """A field of a message: its number, and where its value starts and ends."""

    number: int
    start: int
    end: int


class _Value(NamedTuple):
    kind: str
    start: int
    end: int


class FixedLayout:
    """The layout of one record, and the features to read from all records with the same layout."""

    def __init__(self, record: np.ndarray, features: dict[str, Feature]) -> None:
        """Analyse `record` uint8 [length]. Raises NotPlain if it is not of the plain kind, or lacks a feature."""
        self._record, self._features = record, features
        self._values = _parse_example(record.tobytes())
        fixed = np.ones(len(record), bool)
        for value in self._values.values():
            fixed[value.start : value.end] = False
        self._fixed = np.flatnonzero(fixed)
        self._integers = np.concatenate(
            [np.zeros(0, np.int64)]
            + [np.arange(value.start, value.end) for value in self._values.values() if value.kind == "int64"]
        )
        for name, feature in features.items():
            if name not in self._values or self._size(name) != _size(feature):
                raise NotPlain(name)

    def parse(self, table: np.ndarray) -> dict[str, np.ndarray] | None:
        """Return all records' values, uint8 [records, length], by feature; None if one differs in more than values."""
        if table.shape[1] != len(self._record):
            return None
        if (table[:, self._fixed] != self._record[self._fixed]).any():
            return None
        # The high bit of a byte says whether its integer continues. It must be the same too, so that integers end at
        # the same bytes.
        if ((table[:, self._integers] ^ self._record[self._integers]) & 0x80).any():
            return None
        return {name: self._cut(name, table).reshape(-1, *feature.shape) for name, feature in self._features.items()}

    def _cut(self, name: str, table: np.ndarray) -> np.ndarray:
        feature, (kind, start, end) = self._features[name], self._values[name]
        part = np.ascontiguousarray(table[:, start:end])
        if kind == "bytes":
            return part.view(np.dtype(feature.raw_dtype).newbyteorder("<"))
        return part.view("<f4") if kind == "float" else _decode_integers(part, self._record[start:end])

    def _size(self, name: str) -> tuple[str, int]:
        kind, start, end = self._values[name]
        return kind, int((self._record[start:end] < 0x80).sum()) if kind == "int64" else end - start


def _size(feature: Feature) -> tuple[str, int]:
    """Return the kind of the value in a record and its length: in bytes, or in integers."""
    count = int(np.prod(feature.shape, dtype=np.int64))
    if feature.type == "bytes":
        return "bytes", count * np.dtype(feature.raw_dtype).itemsize
    return feature.type, count * 4 if feature.type == "float" else count


def is_plain(feature: Feature) -> bool:
    """Return whether the feature's values can be cut out of a table of records."""
    return not feature.max_length and (feature.type != "bytes" or feature.decode == "raw")


def _decode_integers(part: np.ndarray, example: np.ndarray) -> np.ndarray:
    """Decode int64 [records, integers] from bytes with seven bits each, lowest first; ends as in `example`."""
    ends = np.flatnonzero(example < 0x80) + 1
    columns = []
    for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        value = np.zeros(len(part), np.uint64)
        for index in range(start, end):
            value |= (part[:, index] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * (index - start))
        columns.append(value.view(np.int64))
    return np.stack(columns, axis=1)


# --- the layout of one record -----------------------------------------------------------------------------------


def _parse_example(data: bytes) -> dict[str, _Value]:
    """Return the value of each feature of a tf.train.Example. Raises NotPlain for anything unusual."""
    values: dict[str, _Value] = {}
    (features,) = _fields(data, 0, len(data), (1,))
    for entry in _fields(data, features.start, features.end):
        key, feature = _fields(data, entry.start, entry.end, (1, 2))
        value_list, *extra = _fields(data, feature.start, feature.end) or [_Field(0, 0, 0)]
        (value,) = _fields(data, value_list.start, value_list.end, (1,))
        name = data[key.start : key.end].decode(errors="replace")
        if entry.number != 1 or value_list.number not in _KINDS or extra or name in values:
            raise NotPlain(name)
        values[name] = _Value(_KINDS[value_list.number], value.start, value.end)
    return values


def _fields(data: bytes, start: int, end: int, numbers: tuple[int, ...] | None = None) -> list[_Field]:
    """Return the fields of a message, all length-delimited; with `numbers`, exactly these, in this order."""
    fields = []
    while start < end:
        tag, at = _varint(data, start)
        if tag & 7 != _LENGTH_DELIMITED:
            raise NotPlain("an integer that is not packed, or no tf.train.Example")
        length, at = _varint(data, at)
        start = at + length
        fields.append(_Field(tag >> 3, at, start))
    if start > end or (numbers is not None and tuple(field.number for field in fields) != numbers):
        raise NotPlain("more, less or something else than a plain record has")
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer, and where it ends."""
    value = shift = 0
    while True:
        if at >= len(data):
            raise NotPlain("a length that does not end")
        value |= (data[at] & 0x7F) << shift
        if data[at] < 0x80:
            return value, at + 1
        at, shift = at + 1, shift + 7
