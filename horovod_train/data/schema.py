"""What a record holds and what becomes of it: the features, and which are inputs and which targets.

Read from `dataset.json` beside the records or one folder up, or from `data.features` in the config. Says nothing about
how records are read or parsed. Docs: docs/data.md.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from horovod_train.errors import UserError

DATASET_NAME = "dataset.json"
Number = int | float


@dataclass(frozen=True)
class Feature:
    """One feature of a record. `type` is what the record stores; the rest says how it becomes a tensor."""

    type: Literal["int64", "float", "bytes"]
    shape: tuple[int, ...] = ()
    """Of the tensor, without the batch."""
    max_length: int | None = None
    """Any number of values up to this many, padded to it with `padding`; shape is then [max_length]."""
    padding: Number = 0
    decode: Literal["none", "raw", "image"] = "none"
    """What the bytes are: raw, numbers of `raw_dtype` in row-major little-endian order; image, a JPEG or PNG."""
    raw_dtype: str = "uint8"
    resize: Literal["none", "stretch", "crop"] = "none"
    """Of an image that has not `shape`: none, an error; crop, the largest centred part with the same aspect."""
    cast: str | None = None
    scale: Number | None = None
    """The tensor is value * scale + offset, computed in `cast`, float32 by default."""
    offset: Number | None = None
    classes: int | None = None
    """Values must be in [0, classes)."""

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        return (self.max_length,) if self.max_length else self.shape

    @property
    def stored_dtype(self) -> str:
        """Of the values before `cast`, as TensorFlow names it."""
        if self.decode != "none":
            return "uint8" if self.decode == "image" else self.raw_dtype
        return {"int64": "int64", "float": "float32", "bytes": "string"}[self.type]

    @property
    def tensor_dtype(self) -> str:
        """Of the tensor that the model gets."""
        scaled = self.scale is not None or self.offset is not None
        return self.cast or ("float32" if scaled else self.stored_dtype)


@dataclass(frozen=True)
class Schema:
    features: dict[str, Feature]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    """Records per split folder, as `prepare` wrote them; empty where nobody counted."""
    where: str = ""
    """The file or config key that it comes from, for messages."""


def find_schema(files: Sequence[str], features: Mapping[str, Any], inputs: Sequence[str], targets: Sequence[str],
                setting: str) -> Schema:  # fmt: skip
    """The schema of these files: `features` from the config where given, else the dataset.json next to the files.

    `inputs` and `targets`, where given, win over the file's. `setting` names the files in messages. Raises UserError.
    """
    if features:
        return parse_schema({"features": features, "inputs": list(inputs), "targets": list(targets)}, "data.features")
    found = {folder: _find_json(folder) for folder in {os.path.dirname(name) for name in files}}
    for folder, place in found.items():
        if place is None:
            raise UserError(
                f"{setting}: {folder or '.'} has no {DATASET_NAME}, in it or above it, and there is no data.features; "
                'one of them must say what a record holds, like data.features="{label: {type: int64}}".'
            )
    places = sorted({place for place in found.values() if place})
    schemas = [load_schema(place) for place in places]
    for place, other in zip(places[1:], schemas[1:], strict=True):
        name = _first_difference(schemas[0], other)
        if name:
            raise UserError(
                f"{setting}: {places[0]} and {place} differ in {name}; records of two kinds cannot be mixed. "
                "Name folders of one kind, or say what to read from both in data.features."
            )
    chosen = {"inputs": tuple(inputs) or schemas[0].inputs, "targets": tuple(targets) or schemas[0].targets}
    return _checked(dataclasses.replace(schemas[0], **chosen), "data" if inputs or targets else schemas[0].where)


def load_schema(path: str) -> Schema:
    """Reads one dataset.json. Raises UserError."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}.") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON: {error.msg}.") from error
    return parse_schema(content, path)


def dump_schema(schema: Schema) -> str:
    """The text of a dataset.json that `load_schema` takes back."""
    default = {f.name: f.default for f in dataclasses.fields(Feature)}
    features = {
        name: {key: value for key, value in dataclasses.asdict(feature).items() if value != default[key]}
        for name, feature in schema.features.items()
    }
    content = {"features": features, "inputs": schema.inputs, "targets": schema.targets, "counts": schema.counts}
    return json.dumps(content, indent=2) + "\n"


def parse_schema(content: Any, where: str) -> Schema:
    """A schema from plain dicts and lists. Raises UserError naming the key."""
    content = _mapping(content, where, "features, inputs, targets")
    _known_keys(content, ("features", "inputs", "targets", "counts"), where)
    features = _mapping(content.get("features"), f"{where}: features", "feature names")
    if not features:
        raise UserError(f"{where}: features must name at least one feature.")
    parsed = {str(name): _parse_feature(value, f"{where}: {name}") for name, value in features.items()}
    inputs, targets = _names(content, "inputs", where), _names(content, "targets", where)
    counts = _mapping(content.get("counts") or {}, f"{where}: counts", "split folders")
    return _checked(Schema(parsed, inputs, targets, counts, where), where)


# --- checking ---------------------------------------------------------------------------------------------------


def _parse_feature(value: Any, where: str) -> Feature:
    value = dict(_mapping({"type": value} if isinstance(value, str) else value, where, "type, shape, decode, …"))
    hints = typing.get_type_hints(Feature)
    _known_keys(value, tuple(hints), where)
    if "type" not in value:
        raise UserError(f"{where}: type is required: int64, float or bytes.")
    if isinstance(value.get("shape"), list):
        value["shape"] = tuple(value["shape"])
    for key, given in value.items():
        choices = typing.get_args(hints[key])
        if typing.get_origin(hints[key]) is Literal and given not in choices:
            raise UserError(f"{where}: {key} must be one of {', '.join(choices)}; received {given!r}.")
    feature = Feature(**value)
    problem = _problem(feature)
    if problem:
        raise UserError(f"{where}: {problem}")
    return feature


def _problem(feature: Feature) -> str | None:
    sizes = feature.shape if isinstance(feature.shape, tuple) else (None,)
    if not all(_is_count(size) for size in sizes):
        return f"shape must be a list of sizes of at least 1; received {feature.shape!r}."
    for key in ("max_length", "classes"):
        value = getattr(feature, key)
        if value is not None and not _is_count(value):
            return f"{key} must be an int of at least 1; received {value!r}."
    for key in ("scale", "offset", "padding"):
        value = getattr(feature, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            return f"{key} must be a number; received {value!r}."
    for key, known in (("cast", _CASTS), ("raw_dtype", _RAW_DTYPES)):
        value = getattr(feature, key)
        if value is not None and value not in known:
            return f"{key} must be one of {', '.join(known)}; received {value!r}."
    return _contradiction(feature)


_RAW_DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64")
_CASTS = (*_RAW_DTYPES, "bfloat16", "bool")


def _contradiction(feature: Feature) -> str | None:
    if feature.decode != "none" and feature.type != "bytes":
        return f"decode: {feature.decode} is for type bytes; this one is {feature.type}."
    if feature.decode == "image" and (len(feature.shape) != 3 or feature.shape[2] not in (1, 3)):
        return f"an image needs shape [height, width, channels], channels 1 or 3; received {list(feature.shape)}."
    if feature.resize != "none" and feature.decode != "image":
        return "resize is for decode: image."
    if feature.max_length and (feature.shape or feature.decode != "none"):
        return "max_length is for lists of values, without shape and decode."
    as_strings = feature.type == "bytes" and feature.decode == "none"
    if as_strings and (feature.cast or feature.scale or feature.offset or feature.classes or feature.padding):
        return "bytes that are not decoded have no cast, scale, offset, classes or padding."
    if feature.classes and not feature.stored_dtype.startswith(("int", "uint")):
        return f"classes is for integers; this one is {feature.stored_dtype}."
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _checked(schema: Schema, where: str) -> Schema:
    if not schema.inputs:
        raise UserError(f"{where}: inputs must name the features that the model gets, of {', '.join(schema.features)}.")
    for key in ("inputs", "targets"):
        for name in getattr(schema, key):
            if name not in schema.features:
                raise UserError(f"{where}: {key}: there is no feature {name}; there are {', '.join(schema.features)}.")
    return schema


def _mapping(value: Any, where: str, of: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: expected a mapping of {of}; received {value!r}.")
    return value


def _known_keys(value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3, cutoff=0.5) or known
            raise UserError(f"{where}: unknown key {key}; known here: {', '.join(near)}.")


def _names(content: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = content.get(key) or []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{where}: {key} must be feature names; received {value!r}.")
    return tuple(names)


def _find_json(folder: str) -> str | None:
    for place in (folder, os.path.dirname(os.path.abspath(folder))):
        path = os.path.join(place, DATASET_NAME)
        if os.path.exists(path):
            return path
    return None


def _first_difference(one: Schema, other: Schema) -> str | None:
    for name in {**one.features, **other.features}:
        if one.features.get(name) != other.features.get(name):
            return f"feature {name}"
    if (one.inputs, one.targets) != (other.inputs, other.targets):
        return "inputs or targets"
    return None
