"""Describes one feature of a record, and checks that its settings fit together. Does not read records."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from horovod_train.errors import UserError

Number = int | float


@dataclass(frozen=True)
class Feature:
    """One feature of a record. `type` is what the record stores; the other fields say how it becomes a tensor."""

    type: Literal["int64", "float", "bytes"]
    shape: tuple[int, ...] = ()
    """Of the tensor, without the batch."""
    max_length: int | None = None
    """The feature has up to this many values and is padded to it with `padding`; shape is then [max_length]."""
    padding: Number = 0
    decode: Literal["none", "raw", "image"] = "none"
    """Meaning of the bytes: raw, numbers of `raw_dtype` in row-major little-endian order; image, a JPEG or PNG."""
    raw_dtype: str = "uint8"
    resize: Literal["none", "stretch", "crop"] = "none"
    """For an image not of `shape`: none, an error; stretch, the whole image; crop, a centred part of that aspect."""
    crop_fraction: Number = 1.0
    """How much of the largest such part to use, by height; 0.875 is usual if training crops at random."""
    interpolation: Literal["bilinear", "nearest"] = "bilinear"
    """How to resize an image, also in augmentation; nearest if pixels are class numbers."""
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
        """The dtype of the values before `cast`, as TensorFlow names it."""
        if self.decode != "none":
            return "uint8" if self.decode == "image" else self.raw_dtype
        return {"int64": "int64", "float": "float32", "bytes": "string"}[self.type]

    @property
    def tensor_dtype(self) -> str:
        """The dtype of the tensor that the model gets."""
        scaled = self.scale is not None or self.offset is not None
        return self.cast or ("float32" if scaled else self.stored_dtype)


def parse_feature(value: Any, where: str) -> Feature:
    value = dict(check_mapping({"type": value} if isinstance(value, str) else value, where, "type, shape, decode, …"))
    hints = typing.get_type_hints(Feature)
    check_known_keys(value, tuple(hints), where)
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
    for key in ("scale", "offset", "padding", "crop_fraction"):
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
    if feature.raw_dtype != Feature.raw_dtype and feature.decode != "raw":
        return f"raw_dtype: {feature.raw_dtype} has no effect without decode: raw."
    if feature.crop_fraction != 1 and feature.resize != "crop":
        return f"crop_fraction: {feature.crop_fraction} has no effect without resize: crop."
    if feature.padding != 0 and not feature.max_length:
        return f"padding: {feature.padding} has no effect without max_length."
    if feature.interpolation != "bilinear" and len(feature.shape) != 3:
        return f"interpolation is for shape [height, width, channels]; received {list(feature.shape)}."
    if feature.classes and feature.resize != "none" and feature.interpolation != "nearest":
        return f"resize: {feature.resize} would mix numbers of classes; give interpolation: nearest."
    if not 0 < feature.crop_fraction <= 1:
        return f"crop_fraction must be above 0 and at most 1; received {feature.crop_fraction}."
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


def check_mapping(value: Any, where: str, of: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: expected a mapping of {of}; received {value!r}.")
    return value


def check_known_keys(value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3, cutoff=0.5) or known
            raise UserError(f"{where}: unknown key {key}; known here: {', '.join(near)}.")
