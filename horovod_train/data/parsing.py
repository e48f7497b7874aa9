"""Parses serialized records to arrays, many in one call, and says what is wrong with a record if that fails.

Follows a Schema as far as the stored values: bytes are unpacked, lists padded, ranges checked. Casting, scaling and
image decoding follow later; see transforms. Alternatively calls a user's function, which does all of this.

Records of plain arrays, as `prepare` writes them, have the same bytes in the same places except for the values. Such
records are parsed as one table, which is many times faster if they are small: one record is analysed, the others are
compared with it, and the values of all are cut out together. Records that differ in more are parsed by TensorFlow.
The wire format: https://protobuf.dev/programming-guides/encoding, and tensorflow/core/example/{example,feature}.proto.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from horovod_train.config.registry import load_function, raised_at
from horovod_train.config.settings import DataConfig
from horovod_train.data.schema import Feature, check_weight_kind
from horovod_train.data.source import Arrays, Data, Parser, RecordSource, split_records
from horovod_train.errors import RunError, UserError, kind_of, one_line

_OP_ERRORS = (tf.errors.InvalidArgumentError, tf.errors.DataLossError, tf.errors.UnknownError)
"""Errors that a record causes; decode_compressed, for example, raises the second, and py_function the third."""
_PARSE_ERRORS = (*_OP_ERRORS, UnicodeDecodeError)
"""TensorFlow quotes the record in its message, which Python cannot always decode."""
_KIND_OF_LIST = {"int64_list": "int64", "float_list": "float", "bytes_list": "bytes", None: "nothing"}
_LENGTH_DELIMITED = 2
_KIND_OF_NUMBER = {1: "bytes", 2: "float", 3: "int64"}


def build_parser(source: RecordSource, features: dict[str, Feature], config: DataConfig) -> Parser:
    """Build the source's parser of these features, or that of the function that `data.parse` names.

    Records whose `data.weight` is negative or not finite are bad records. Raises UserError.
    """
    name, weight = config.parse, config.weight
    parser = source.parser(features) if name is None else FunctionParser(load_function(name, "data.parse"), name)
    return parser if weight is None else WeightChecker(parser, weight, features.get(weight))


def zero_rows(parser: Parser, rows: int) -> Arrays:
    """Return zeros, to replace records that cannot be read."""
    shapes = {name: (rows, *shape) for name, shape in parser.shapes.items()}
    return {
        name: np.full(shapes[name], b"", object) if dtype == "string" else np.zeros(shapes[name], dtype)
        for name, dtype in parser.dtypes.items()
    }


class SchemaParser:
    """Parses tf.train.Example or SequenceExample records as a schema says. A Parser.

    They are SequenceExamples if a feature has `sequence`. The other features are then in the context, which is encoded
    as the features of an Example, so the parser of Examples reads them.
    """

    def __init__(self, features: dict[str, Feature]) -> None:
        self._features = features
        self.dtypes = {name: "string" if f.decode == "image" else f.stored_dtype for name, f in features.items()}
        self.shapes = {name: () if f.decode == "image" else f.tensor_shape for name, f in features.items()}
        self._is_plain = all(map(is_plain, features.values()))
        self._layout: FixedLayout | None = None
        self._specs = {name: example_spec(feature) for name, feature in features.items()}

    def parse(self, records: Data) -> Arrays | None:
        arrays = self._parse_fixed_layout(records) if isinstance(records, np.ndarray) and self._is_plain else None
        if arrays is None:
            try:
                with tf.device("cpu:0"):
                    tensors = self._parse_stored(np.array(split_records(records), object))
                    arrays = {name: _unpack(feature, tensors[name]) for name, feature in self._features.items()}
            except _PARSE_ERRORS:
                return None
        # Those of lists are checked before they are padded.
        has_problem = any(f.value_problem(arrays[name]) for name, f in self._features.items() if not f.max_length)
        return None if has_problem else arrays

    def _parse_stored(self, records: np.ndarray) -> dict[str, tf.Tensor | tf.RaggedTensor]:
        lists = {name: spec for name, spec in self._specs.items() if self._features[name].sequence}
        context = {name: spec for name, spec in self._specs.items() if name not in lists}
        parsed = dict(tf.io.parse_example(records, context)) if context else {}
        return parsed | tf.io.parse_sequence_example(records, sequence_features=lists)[1] if lists else parsed

    def _parse_fixed_layout(self, records: np.ndarray) -> Arrays | None:
        """Return the arrays of records that differ only in their values; None if they differ in more."""
        if self._layout is not None and (arrays := self._layout.parse(records)) is not None:
            return arrays
        try:
            self._layout = FixedLayout(records[0], self._features)
        except NotPlain:
            return None
        return self._layout.parse(records)

    def problem(self, record: bytes) -> str | None:
        try:
            stored = tf.train.Example.FromString(record).features.feature
            lists = tf.train.SequenceExample.FromString(record).feature_lists.feature_list
        except Exception:  # protobuf's DecodeError has no public name that all its versions share
            return "it is not a tf.train.Example"
        for name, feature in self._features.items():
            stored_features = lists[name].feature if feature.sequence else [stored[name]] if name in stored else []
            if problem := values_problem(feature, stored_features):
                return f"feature {name}: {problem}"
        return None


class FunctionParser:
    """Parses with a user's function: string tensor [n] → dict of tensors [n, ...] of known shapes. A Parser."""

    def __init__(self, function: Callable[[tf.Tensor], dict[str, tf.Tensor]], name: str) -> None:
        """`name`: the function's name in the config. Raises UserError if the function does not return such tensors."""
        try:
            self._function = tf.function(function).get_concrete_function(tf.TensorSpec([None], tf.string))
        except RunError:
            raise
        except Exception as error:  # the user's code may raise anything
            text = f"{kind_of(error)}: {one_line(error)}{raised_at(error)}"
            raise UserError(f"data.parse: {name} cannot be traced: {text}") from error
        self._name = name
        outputs = self._function.structured_outputs
        if not isinstance(outputs, dict) or not all(
            isinstance(output, tf.Tensor) and output.shape.rank and None not in output.shape[1:]
            for output in outputs.values()
        ):
            raise UserError(
                f"data.parse: {name} must return a dict of tensors [n, ...] whose shapes are known but for n; "
                f"it returns {outputs}."
            )
        self.dtypes = {key: output.dtype.name for key, output in outputs.items()}
        self.shapes = {key: tuple(output.shape[1:]) for key, output in outputs.items()}

    def parse(self, records: Data) -> Arrays | None:
        try:
            arrays = {name: _array(tensor) for name, tensor in self._call(split_records(records)).items()}
        except _PARSE_ERRORS:
            return None
        mismatch = next((name for name, array in arrays.items() if len(array) != len(records)), None)
        if mismatch is None:
            return arrays
        if any(map(self.problem, split_records(records))):
            return None
        raise UserError(
            f"data.parse: {self._name} gives {len(arrays[mismatch])} rows of {mismatch} for {len(records)} records, "
            "and one for each record alone. It must give as many rows as it gets records, in their order."
        )

    def problem(self, record: bytes) -> str | None:
        try:
            for name, tensor in self._call([record]).items():
                if len(tensor) != 1:
                    return f"{self._name} gives {len(tensor)} rows of {name} for it; expected 1"
        except _OP_ERRORS as error:
            return reason_of(error)
        except UnicodeDecodeError:
            return "it cannot be parsed"
        return None

    def _call(self, records: list[bytes]) -> dict[str, tf.Tensor]:
        with tf.device("cpu:0"):
            return self._function(tf.constant(np.array(records, object)))


def reason_of(error: tf.errors.OpError) -> str:
    """Return why an operation has failed, in one line: what follows the stack of where it was made.

    TensorFlow names its node, and quotes what a user's Python function raised with its traceback.
    """
    text = re.sub(r"\{\{[^{}]*\}\}", "", str(error.message)).strip()
    text = re.sub(r"^Error in user-defined function passed to .*? iterator: \S+: ", "", text)
    if text.startswith("Graph execution error"):
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("[[")]
        return one_line(lines[-1]) if lines else one_line(text)
    return text.splitlines()[0].strip() if text else ""


def example_spec(feature: Feature) -> tf.io.FixedLenFeature | tf.io.RaggedFeature:
    """Return the spec with which tf.io.parse_example reads a feature."""
    dtype = {"int64": tf.int64, "float": tf.float32, "bytes": tf.string}[feature.type]
    if feature.max_length:
        return tf.io.RaggedFeature(dtype)
    return tf.io.FixedLenFeature(() if feature.decode != "none" else feature.shape, dtype)


def _unpack(feature: Feature, tensor: tf.Tensor | tf.RaggedTensor) -> np.ndarray | tf.Tensor:
    """Return the stored values as an array. Raises InvalidArgumentError if some row has another size."""
    if feature.max_length:
        return _array(pad_lists(feature, tensor))
    if feature.decode == "raw":
        tf.debugging.assert_equal(tf.strings.length(tensor), raw_bytes(feature))
        tensor = tf.reshape(tf.io.decode_raw(tensor, feature.raw_dtype), [-1, *feature.shape])
    return _array(tensor)


def _array(tensor: tf.Tensor) -> np.ndarray | tf.Tensor:
    # Strings stay in TensorFlow: as Python's they would be copied twice more, under the interpreter's lock.
    return tensor if tensor.dtype == tf.string else tensor.numpy()


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
    if feature.classes:
        tf.debugging.Assert(feature.value_problem(flat.numpy()) is None, [flat])
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
    wrong_kind = next((_KIND_OF_LIST[kind] for kind in kinds if _KIND_OF_LIST[kind] != feature.type), None)
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


class NotPlain(ValueError):
    """The record must be parsed in the usual way."""


class _Field(NamedTuple):
    """A field of a message: its number, and where its value starts and ends."""

    number: int
    start: int
    end: int


class FixedLayout:
    """The layout of one record, and the features to read from all records with the same layout."""

    def __init__(self, record: np.ndarray, features: dict[str, Feature]) -> None:
        """Analyse `record` uint8 [length]. Raises NotPlain if it is not of the plain kind, or lacks a feature."""
        self._record, self._features = record, features
        self._values = _parse_example(record.tobytes())
        are_fixed, are_of_integers = np.ones(len(record), bool), np.zeros(len(record), bool)
        for kind, start, end in self._values.values():
            are_fixed[start:end] = False
            are_of_integers[start:end] = kind == "int64"
        self._fixed, self._integers = np.flatnonzero(are_fixed), np.flatnonzero(are_of_integers)
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
    if feature.type == "bytes":
        return "bytes", raw_bytes(feature)
    return feature.type, values_per_item(feature) * (4 if feature.type == "float" else 1)


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


def _parse_example(data: bytes) -> dict[str, tuple[str, int, int]]:
    """Return the value of each feature of a tf.train.Example. Raises NotPlain for anything unusual."""
    values: dict[str, tuple[str, int, int]] = {}
    (features,) = _fields(data, 0, len(data), (1,))
    for entry in _fields(data, features.start, features.end):
        key, feature = _fields(data, entry.start, entry.end, (1, 2))
        value_list, *extra = _fields(data, feature.start, feature.end) or [_Field(0, 0, 0)]
        (value,) = _fields(data, value_list.start, value_list.end, (1,))
        name = data[key.start : key.end].decode(errors="replace")
        if entry.number != 1 or value_list.number not in _KIND_OF_NUMBER or extra or name in values:
            raise NotPlain(name)
        values[name] = (_KIND_OF_NUMBER[value_list.number], value.start, value.end)
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


class WeightChecker:
    """Parses as another parser does, and finds weights that are negative or not finite. A Parser."""

    def __init__(self, parser: Parser, name: str, feature: Feature | None) -> None:
        """feature: as the schema describes it; None if a user's function parses. Raises UserError."""
        self._parser, self._name, self._feature = parser, name, feature
        self.dtypes, self.shapes = parser.dtypes, parser.shapes
        if name not in self.dtypes:
            raise UserError(f"data.weight: data.parse gives {', '.join(self.dtypes)}; there is no {name}.")
        check_weight_kind(name, self.shapes[name], self.dtypes[name])

    def parse(self, records: Data) -> Arrays | None:
        arrays = self._parser.parse(records)
        return arrays if arrays is None or self._find_invalid(arrays) is None else None

    def problem(self, record: Any) -> str | None:
        if problem := self._parser.problem(record):
            return problem
        arrays = self._parser.parse([record])
        invalid = None if arrays is None else self._find_invalid(arrays)
        return None if invalid is None else f"feature {self._name}: expected a weight of 0 or more; it is {invalid:g}"

    def _find_invalid(self, arrays: Arrays) -> float | None:
        """Return the first value that is no weight; None if all are weights."""
        values = np.asarray(arrays[self._name], np.float64)
        if self._feature is not None:
            values = values * (1 if self._feature.scale is None else self._feature.scale) + (self._feature.offset or 0)
        invalid = values[~(np.isfinite(values) & (values >= 0))]
        return float(invalid[0]) if invalid.size else None
