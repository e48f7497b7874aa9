"""Describes one feature of a record, and checks that its settings fit together. Does not read records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from horovod_train.config.loader import build
from horovod_train.config.settings import setting
from horovod_train.errors import UserError

RawDtype = Literal["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64"]
Dtype = Literal[RawDtype, "bfloat16", "bool"]


@dataclass(frozen=True)
class Feature:
    """One feature of a record. `type` is what the record stores; the other fields say how it becomes a tensor."""

    type: Literal["int64", "float", "bytes"]
    shape: tuple[int, ...] = setting((), "of the tensor, without the batch; of a list, that of each item", minimum=1)
    max_length: int | None = setting(None, "a list of up to so many items, padded: [max_length, *shape]", minimum=1)
    padding: int | float = setting(0, "what a list is padded with")
    sequence: bool = setting(False, "a list in the feature_lists of a tf.train.SequenceExample")
    decode: Literal["none", "raw", "image"] = setting("none", "raw: bytes are numbers, row-major; image: JPEG or PNG")
    raw_dtype: RawDtype = setting("uint8", "of raw numbers, little-endian")
    resize: Literal["none", "stretch", "crop"] = setting("none", "how an image of another size comes to `shape`")
    crop_fraction: float = setting(1.0, "height of the crop, of the largest that fits; usual: 0.875", maximum=1)
    dct_method: Literal["fast", "accurate"] = setting("fast", "of JPEGs: arithmetic of the inverse transform")
    interpolation: Literal["bilinear", "nearest"] = setting("bilinear", "of resized images; nearest for class numbers")
    cast: Dtype | None = setting(None, "dtype of the tensor")
    scale: float | None = setting(None, "tensor = value * scale + offset, computed in `cast`, or in float32")
    offset: float | None = setting(None, "see scale")
    classes: int | None = setting(None, "values must be in [0, classes)", minimum=1)

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

    def value_problem(self, values: np.ndarray) -> str | None:
        """Return what is wrong with stored values as classes; those of an image are checked after decoding."""
        if self.decode == "image" or not self.classes or not values.size:
            return None
        low, high = values.min(), values.max()
        if low >= 0 and high < self.classes:
            return None
        return f"expected a value from 0 to {self.classes - 1}; the record holds {low if low < 0 else high}"


def parse_feature(value: Any, where: str) -> Feature:
    """Build a feature from plain values; a string is its type. Raises UserError that begins with `where`."""
    feature = build(Feature, {"type": value} if isinstance(value, str) else value, where)
    problem = _contradiction(feature)
    if problem:
        raise UserError(f"{where}: {problem}")
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
    return None
