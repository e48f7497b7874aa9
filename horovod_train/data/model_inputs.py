"""What a model gets of a record: its inputs, and what becomes of the stored values before. Needs no TensorFlow.

Every checkpoint keeps it, so that `export` can tell it where the records are not at hand. Does not transform anything;
see transforms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from horovod_train.config.settings import DataConfig
from horovod_train.data.schema import Feature, find_schema, settings_of
from horovod_train.errors import UserError

_SHOWN = ("max_length", "padding", "decode", "resize", "crop_fraction", "interpolation", "scale", "offset")
"""Settings of a feature without which the same stored values would be other inputs, in the order of their use."""


class Input(NamedTuple):
    """One tensor that a model takes."""

    name: str
    """Of the feature, or its key in the dict that the model gets; "" where nothing names it."""
    dtype: str
    """As TensorFlow names it."""
    shape: tuple[int | None, ...]
    """[records, …]; None: of any size."""

    def __str__(self) -> str:
        return f"{self.name or 'a tensor'}: {self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a model, and how a run makes them of its records."""

    inputs: tuple[Input, ...]
    is_dict: bool
    """Whether the model gets them by name, also if it is one; else it gets the only one alone."""
    features: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """The features that they are made of, with those of their settings in data.features that are not defaults."""
    preprocess: str | None = None
    """data.preprocess, which makes the inputs of the features."""

    def pack(self) -> dict[str, Any]:
        """Return what JSON can hold, for `unpack`."""
        return {**dataclasses.asdict(self), "inputs": [one._asdict() for one in self.inputs]}

    def changes(self, name: str) -> str:
        """Return what is done to stored values before they are this input, in the words of data.features; "": nothing.

        name: of an input; if the model has one only, any.
        """
        if self.preprocess:
            before = [f"{feature} ({said})" for feature in self.features if (said := self._settings(feature))]
            return ", ".join([*before, f"data.preprocess: {self.preprocess}"])
        if name not in self.features and len(self.inputs) == len(self.features) == 1:
            (name,) = self.features
        return self._settings(name)

    def _settings(self, feature: str) -> str:
        settings = self.features.get(feature, {})
        shown = {key: settings[key] for key in _SHOWN if key in settings}
        if shown.get("decode") == "raw":  # the same numbers in another form
            del shown["decode"]
        return ", ".join(f"{key}: {value}" for key, value in shown.items())


def unpack(packed: Mapping[str, Any]) -> ModelInputs | None:
    """Return what `ModelInputs.pack` was called on; None for {}, of checkpoints that did not keep it."""
    if not packed:
        return None
    inputs = tuple(Input(one["name"], one["dtype"], tuple(one["shape"])) for one in packed["inputs"])
    return ModelInputs(inputs, packed["is_dict"], packed["features"], packed["preprocess"])


def describe_inputs(
    specs: Any,
    names: Sequence[str] = (),
    features: Mapping[str, Feature] | None = None,
    preprocess: str | None = None,
) -> ModelInputs:
    """Return what a model gets of a source of batches.

    specs: a tf.TensorSpec [rows, …], or a dict of them. names: of the features that they are made of.
    """
    is_dict = isinstance(specs, Mapping)
    alone = names[0] if len(names) == 1 and not preprocess else ""
    by_name = specs if is_dict else {alone: specs}
    inputs = tuple(Input(name, spec.dtype.name, (None, *spec.shape[1:])) for name, spec in by_name.items())
    known = features or {}
    return ModelInputs(inputs, is_dict, {name: settings_of(known[name]) for name in names if name in known}, preprocess)


def inputs_in_config(config: DataConfig) -> ModelInputs | None:
    """Return what the model gets if the config alone says so, by data.features; None if the records have to say it."""
    if not config.features or config.preprocess or config.bucket_by_length:
        return None
    try:
        schema = find_schema([], config, "data.train")
    except UserError:  # files that describe their records need no type in data.features
        return None
    features = {name: schema.features[name] for name in schema.inputs}
    inputs = tuple(Input(name, one.tensor_dtype, (None, *one.tensor_shape)) for name, one in features.items())
    return ModelInputs(inputs, len(inputs) > 1, {name: settings_of(one) for name, one in features.items()})
