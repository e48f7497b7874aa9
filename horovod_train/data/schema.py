"""What a record holds and how it is used: the features, and which are inputs and which targets.

Read from `dataset.json` in the folder of the records or its parent, or from `data.features` in the config. Checks that
the settings of a feature fit together. Does not say how records are read or parsed. Docs: docs/data.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from horovod_train.config.loader import build
from horovod_train.config.paths import is_remote
from horovod_train.config.settings import DataConfig, setting
from horovod_train.data.storage import DEFAULT, Storage, parent
from horovod_train.errors import UserError, one_line, reading

log = logging.getLogger(__name__)

DATASET_NAME = "dataset.json"
NO_SCALE = "no scale"
RawDtype = Literal["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64"]
Dtype = Literal[RawDtype, "bfloat16", "bool"]


@dataclass(frozen=True)
class Schema:
    features: dict[str, Feature]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    """Records per split folder, as `prepare` wrote them; empty if they were not counted."""
    where: str = ""
    """The file or config key that the schema comes from, for messages."""
    expected: dict[str, ExpectedCount] = dataclasses.field(default_factory=dict, compare=False)
    """By folder of the files that the schema describes: the count in the folder's dataset.json."""

    @property
    def class_names(self) -> dict[str, tuple[str, ...]]:
        """The names of classes, by feature; of those that have names."""
        return {name: feature.class_names for name, feature in self.features.items() if feature.class_names}


@dataclass(frozen=True)
class _Content:
    """What a dataset.json has, before its features are parsed."""

    features: dict[str, Any]
    inputs: tuple[str, ...] | None = None
    targets: tuple[str, ...] | None = None
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


class ExpectedCount(NamedTuple):
    """How many records a folder must hold, and the dataset.json that says so."""

    records: int
    where: str


def find_schema(
    files: Sequence[str], config: DataConfig, setting: str, storage: Storage = DEFAULT, advice: str = ""
) -> Schema:
    """Return the schema of these files: data.features, and the dataset.json next to them for what that leaves out.

    data.inputs and data.targets, if set, replace the file's. setting: names the files in messages. advice: for the
    error of files that nothing describes. Raises UserError.
    """
    features, inputs, targets = config.features, config.inputs, config.targets
    is_whole = _is_whole(features, (*inputs, *targets))
    folders = set() if is_whole else {os.path.dirname(name) for name in files}
    json_paths = {folder: _find_json(folder, storage) for folder in folders}
    if features and (is_whole or not json_paths or None in json_paths.values()):
        if not inputs:
            raise UserError(f"data.inputs: must name the features that the model gets, of {', '.join(features)}.")
        return parse_schema({"features": features, "inputs": list(inputs), "targets": list(targets)}, "data.features")
    for folder, json_path in json_paths.items():
        if json_path is None:
            raise UserError(
                f"{setting}: {folder or '.'} has no {DATASET_NAME}, in it or above it, and there is no data.features; "
                'one of them must say what a record holds, like data.features="{label: {type: int64}}".'
                f"{advice and ' '}{advice}"
            )
    schemas = {path: load_schema(path, storage) for path in sorted({path for path in json_paths.values() if path})}
    first, *further = schemas.values()
    for other in further:
        if name := _first_difference(first, other):
            raise UserError(
                f"{setting}: {first.where} and {other.where} differ in {name}; records of two kinds cannot be mixed. "
                "Name folders of one kind, or say what to read from both in data.features."
            )
    expected = {}
    for folder, path in json_paths.items():
        name = os.path.basename(folder if is_remote(folder) else os.path.abspath(folder))
        count = schemas[path].counts.get(name) if path else None
        if path and count is not None:
            expected[folder] = ExpectedCount(count, path)
    stored = {**first.features, **_changed(first, features)}
    inputs_of, targets_of = tuple(inputs) or first.inputs, tuple(targets) or first.targets
    chosen = dataclasses.replace(first, features=stored, inputs=inputs_of, targets=targets_of, expected=expected)
    return _check_roles(chosen, "data" if inputs or targets else first.where)


def _is_whole(features: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return whether data.features has each of these names, and says what is stored of all that it has."""
    typed = (not isinstance(settings, Mapping) or "type" in settings for settings in features.values())
    return bool(features) and features.keys() >= set(names) and all(typed)


def _changed(schema: Schema, features: Mapping[str, Any]) -> dict[str, Feature]:
    """Return what data.features says of features: all with a type, else what it changes of the schema's."""
    changed = {}
    for name, settings in features.items():
        if isinstance(settings, Mapping) and "type" not in settings and name in schema.features:
            settings = {**settings_of(schema.features[name]), **settings}
        changed[name] = parse_feature(settings, f"data.features: {name}")
    return changed


def schema_of_names(inputs: Sequence[str], targets: Sequence[str]) -> Schema:
    """Return a schema for a user's parse function: names only."""
    if not inputs:
        raise UserError("data.inputs: is required with data.parse: which of its tensors does the model get?")
    return Schema({}, tuple(inputs), tuple(targets), where="data.parse")


def load_schema(path: str, storage: Storage = DEFAULT) -> Schema:
    """Read one dataset.json. Raises UserError."""
    with reading(path, text=True):
        text = storage.read_all(path).decode()
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON: {error.msg}.") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; values too deep
        raise UserError(f"{path}: cannot be read as JSON: {one_line(error)}.") from error
    return parse_schema(content, path)


def dump_schema(schema: Schema) -> str:
    """Return the text of a dataset.json that `load_schema` can read."""
    features = {name: settings_of(feature) for name, feature in schema.features.items()}
    content = {"features": features, "inputs": schema.inputs, "targets": schema.targets, "counts": schema.counts}
    return json.dumps(content, indent=2) + "\n"


def parse_schema(content: Any, where: str) -> Schema:
    """Build a schema from plain dicts and lists. Raises UserError that names the key."""
    parts = build(_Content, content, where)
    if not parts.features:
        raise UserError(f"{where}: features must name at least one feature.")
    features = {str(name): parse_feature(value, f"{where}: {name}") for name, value in parts.features.items()}
    return _check_roles(Schema(features, parts.inputs or (), parts.targets or (), parts.counts, where), where)


# --- checking ---------------------------------------------------------------------------------------------------


def _check_roles(schema: Schema, where: str) -> Schema:
    """Return the schema. Raise UserError unless its inputs and targets are features."""
    if not schema.inputs:
        raise UserError(f"{where}: inputs must name the features that the model gets, of {', '.join(schema.features)}.")
    for key in ("inputs", "targets"):
        for name in getattr(schema, key):
            if name not in schema.features:
                raise UserError(f"{where}: {key}: there is no feature {name}; there are {', '.join(schema.features)}.")
    return schema


def _find_json(folder: str, storage: Storage) -> str | None:
    for location in (folder, parent(folder)):
        path = None if location is None else os.path.join(location, DATASET_NAME)
        if path:
            with reading(path):
                if storage.exists(path):
                    return path
    return None


def _first_difference(first: Schema, other: Schema) -> str | None:
    for name in {**first.features, **other.features}:
        if first.features.get(name) != other.features.get(name):
            return f"feature {name}"
    if (first.inputs, first.targets) != (other.inputs, other.targets):
        return "inputs or targets"
    return None


def check_same_classes(
    named: Mapping[str, Sequence[str]],
    where: str,
    others: Mapping[str, Sequence[str]],
    other: str,
    advice: str = "Give both the same classes in one order, also those of which one has no record.",
) -> None:
    """Raise UserError if a label stands for another class in other records. named, others: their classes by feature."""
    for name in named:
        expected, found = tuple(named[name]), tuple(others.get(name, ()))
        if not expected or not found or expected == found:
            continue
        pairs = itertools.zip_longest(found, expected, fillvalue="no class")
        number, (here, there) = next((number, pair) for number, pair in enumerate(pairs) if pair[0] != pair[1])
        raise UserError(
            f"{other}: {name} {number} is {here}; in {where} it is {there}, so labels would stand for other classes. "
            f"{advice}"
        )


def warn_of_names_of_numbers(names: Sequence[str], where: str) -> None:
    """Warn of names that are numbers, but not those of their labels. For records whose labels are numbers."""
    try:
        numbers = list(map(int, names))
    except ValueError:
        return
    label = next((label for label, number in enumerate(numbers) if label != number), None)
    if label is not None:
        log.warning(
            f"{where}: class_names: label {label} is named {names[label]}, because labels are numbers here, which "
            "count the names from 0; only text is looked up. If a label is meant to be its name, store it as text, or "
            "name them 0, 1, 2, … in this order."
        )


def check_weight(name: str | None, schema: Schema) -> None:
    """Raise UserError if there is no feature of that name, or if it is not one number a record. None: no weights."""
    if name is None:
        return
    if name not in schema.features:
        raise UserError(f"data.weight: there is no feature {name}; there are {', '.join(schema.features)}.")
    feature = schema.features[name]
    check_weight_kind(name, feature.tensor_shape, feature.tensor_dtype)


def check_weight_kind(name: str, shape: tuple[int, ...], dtype: str) -> None:
    if shape or dtype == "string":
        kind = "of strings" if dtype == "string" else f"{dtype}{list(shape)}"
        raise UserError(f"data.weight: expected one number a record, shape []; feature {name} is {kind}.")


@dataclass(frozen=True)
class Feature:
    """One feature of a record. `type` is what the record stores; the other fields say how it becomes a tensor."""

    type: Literal["int64", "float", "bytes"]
    shape: tuple[int, ...] = setting((), "of the tensor, without the batch; of a list, that of each item", minimum=1)
    max_length: int | None = setting(None, "a list of up to so many items, padded: [max_length, *shape]", minimum=1)
    padding: int | float = setting(0, "what a list is padded with")
    sequence: bool = setting(False, "a list in the feature_lists of a tf.train.SequenceExample")
    decode: Literal["none", "raw", "image"] = setting(
        "none", "raw: bytes are numbers, row-major; image: JPEG, PNG, WebP, BMP, GIF"
    )
    raw_dtype: RawDtype = setting("uint8", "of raw numbers, little-endian")
    resize: Literal["none", "stretch", "crop"] = setting("none", "how an image of another size comes to `shape`")
    crop_fraction: float = setting(1.0, "height of the crop, of the largest that fits; usual: 0.875", maximum=1)
    dct_method: Literal["fast", "accurate"] = setting("fast", "of JPEGs: arithmetic of the inverse transform")
    interpolation: Literal["bilinear", "nearest"] = setting("bilinear", "of resized images; nearest for class numbers")
    cast: Dtype | None = setting(None, "dtype of the tensor")
    scale: float | None = setting(None, "tensor = value * scale + offset, in float32, or as exact as `cast` is")
    offset: float | None = setting(None, "see scale")
    classes: int | None = setting(None, "values must be in [0, classes)", minimum=1)
    class_names: tuple[str, ...] = setting((), "of the numbers from 0, one each; records may hold them as text")

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        return (self.max_length, *self.shape) if self.max_length else self.shape

    @property
    def stored_dtype(self) -> str:
        """The dtype of the values before `cast`, as TensorFlow names it."""
        if self.decode != "none":
            return "uint8" if self.decode == "image" else self.raw_dtype
        return {"int64": "int64", "float": "float32", "bytes": "string"}[self.type]

    @property
    def tensor_dtype(self) -> str:
        """The dtype of the tensor that the model gets."""
        scaled = self.scale is not None or self.offset is not None
        return self.cast or ("float32" if scaled else self.stored_dtype)

    def scale_settings(self) -> str:
        """Return in words what makes tensors of values; NO_SCALE for the values themselves."""
        given = [f"{key}: {value:g}" for key in ("scale", "offset") if (value := getattr(self, key)) is not None]
        return ", ".join(given) or NO_SCALE

    def value_problem(self, values: np.ndarray) -> str | None:
        """Return what is wrong with stored values as classes; those of an image are checked after decoding."""
        if self.decode == "image" or not self.classes or not values.size:
            return None
        low, high = values.min(), values.max()
        if low >= 0 and high < self.classes:
            return None
        return f"expected a value from 0 to {self.classes - 1}; the record holds {low if low < 0 else high}"


def settings_of(feature: Feature) -> dict[str, Any]:
    """Return the settings of a feature that are not their defaults, as dataset.json and data.features hold them."""
    default = {field.name: field.default for field in dataclasses.fields(Feature)}
    return {key: value for key, value in dataclasses.asdict(feature).items() if value != default[key]}


def parse_feature(value: Any, where: str) -> Feature:
    """Build a feature from plain values; a string is its type. Raises UserError that begins with `where`."""
    feature = build(Feature, {"type": value} if isinstance(value, str) else value, where)
    if problem := _contradiction(feature):
        raise UserError(f"{where}: {problem}")
    if feature.class_names and not feature.classes:
        return dataclasses.replace(feature, classes=len(feature.class_names))
    return feature


def _holds(dtype: str, value: float) -> bool:
    """Return whether a dtype can hold a value. True for every float dtype, although it may round."""
    if dtype == "string" or dtype.startswith("float"):
        return True
    limits = np.iinfo(dtype)
    return value == int(value) and limits.min <= value <= limits.max


def _contradiction(feature: Feature) -> str | None:
    if feature.decode != "none" and feature.type != "bytes":
        return f"decode: {feature.decode} is for type bytes; this one is {feature.type}."
    if feature.decode == "image" and (len(feature.shape) != 3 or feature.shape[2] not in (1, 3)):
        return f"an image needs shape [height, width, channels], channels 1 or 3; received {list(feature.shape)}."
    if feature.resize != "none" and feature.decode != "image":
        return "resize is for decode: image."
    if feature.raw_dtype != Feature.raw_dtype and feature.decode != "raw":
        return f"raw_dtype: {feature.raw_dtype} has no effect without decode: raw."
    if feature.crop_fraction != 1 and feature.resize != "crop":
        return f"crop_fraction: {feature.crop_fraction} has no effect without resize: crop."
    if feature.dct_method != "fast" and feature.decode != "image":
        return f"dct_method: {feature.dct_method} has no effect without decode: image."
    if feature.padding != 0 and not feature.max_length:
        return f"padding: {feature.padding} has no effect without max_length."
    if feature.interpolation != "bilinear" and len(feature.shape) != 3:
        return f"interpolation is for shape [height, width, channels]; received {list(feature.shape)}."
    if feature.classes and feature.resize != "none" and feature.interpolation != "nearest":
        return f"resize: {feature.resize} would mix numbers of classes; give interpolation: nearest."
    if feature.crop_fraction <= 0:
        return f"crop_fraction must be above 0; received {feature.crop_fraction}."
    if feature.max_length and feature.decode == "image":
        return "max_length is for lists of values or of raw bytes, not of images."
    if feature.sequence and not feature.max_length:
        return "sequence: true needs max_length: the most items that a record has."
    if feature.max_length and not _holds(feature.stored_dtype, feature.padding):
        return f"padding: {feature.padding} is no {feature.stored_dtype}."
    as_strings = feature.type == "bytes" and feature.decode == "none"
    if as_strings and (feature.cast or feature.scale or feature.offset or feature.classes or feature.padding):
        return "bytes that are not decoded have no cast, scale, offset, classes or padding."
    if feature.classes and not feature.stored_dtype.startswith(("int", "uint")):
        return f"classes is for integers; this one is {feature.stored_dtype}."
    if feature.classes and feature.cast and not _holds(feature.cast, feature.classes - 1):
        return f"cast: {feature.cast} does not hold {feature.classes} classes."
    names = feature.class_names
    if names and feature.type != "int64":
        kind = feature.raw_dtype if feature.decode == "raw" else feature.type
        return f"class_names is for type int64, also where records hold the names; this one is {kind}."
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        return f"class_names: {twice!r} is given twice."
    if names and feature.classes not in (None, len(names)):
        return f"class_names: has {len(names)} names, and classes is {feature.classes}."
    return None
