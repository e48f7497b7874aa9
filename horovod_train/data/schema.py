"""What a record holds and how it is used: the features, and which are inputs and which targets.

Read from `dataset.json` in the folder of the records or its parent, or from `data.features` in the config. Does not say
how records are read or parsed. Docs: docs/data.md.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from horovod_train.config.loader import build
from horovod_train.config.remote_paths import is_remote
from horovod_train.config.settings import DataConfig
from horovod_train.data.features import Feature, parse_feature
from horovod_train.data.storage.storage import DEFAULT, Storage, parent
from horovod_train.errors import UserError, one_line

DATASET_NAME = "dataset.json"


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


def find_schema(files: Sequence[str], config: DataConfig, setting: str, storage: Storage = DEFAULT) -> Schema:
    """Return the schema of these files: data.features if the config has them, else the dataset.json next to the files.

    data.inputs and data.targets, if set, replace the file's. setting: names the files in messages. Raises UserError.
    """
    features, inputs, targets = config.features, config.inputs, config.targets
    if features and not inputs:
        raise UserError(f"data.inputs: must name the features that the model gets, of {', '.join(features)}.")
    if features:
        return parse_schema({"features": features, "inputs": list(inputs), "targets": list(targets)}, "data.features")
    json_paths = {folder: _find_json(folder, storage) for folder in {os.path.dirname(name) for name in files}}
    for folder, json_path in json_paths.items():
        if json_path is None:
            raise UserError(
                f"{setting}: {folder or '.'} has no {DATASET_NAME}, in it or above it, and there is no data.features; "
                'one of them must say what a record holds, like data.features="{label: {type: int64}}".'
            )
    schemas = {path: load_schema(path, storage) for path in sorted({path for path in json_paths.values() if path})}
    first, *further = schemas.values()
    for other in further:
        name = _first_difference(first, other)
        if name:
            raise UserError(
                f"{setting}: {first.where} and {other.where} differ in {name}; records of two kinds cannot be mixed. "
                "Name folders of one kind, or say what to read from both in data.features."
            )
    expected = {
        folder: ExpectedCount(count, path)
        for folder, path in json_paths.items()
        if path and (count := schemas[path].counts.get(_folder_name(folder))) is not None
    }
    chosen = dataclasses.replace(
        first, inputs=tuple(inputs) or first.inputs, targets=tuple(targets) or first.targets, expected=expected
    )
    return _check_roles(chosen, "data" if inputs or targets else first.where)


def schema_of_names(inputs: Sequence[str], targets: Sequence[str]) -> Schema:
    """Return a schema for a user's parse function: names only."""
    if not inputs:
        raise UserError("data.inputs: is required with data.parse: which of its tensors does the model get?")
    return Schema({}, tuple(inputs), tuple(targets), where="data.parse")


def load_schema(path: str, storage: Storage = DEFAULT) -> Schema:
    """Read one dataset.json. Raises UserError."""
    try:
        content = json.loads(storage.read_all(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}.") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON: {error.msg}.") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; values too deep
        raise UserError(f"{path}: cannot be read as JSON: {one_line(error)}.") from error
    return parse_schema(content, path)


def dump_schema(schema: Schema) -> str:
    """Return the text of a dataset.json that `load_schema` can read."""
    default = {f.name: f.default for f in dataclasses.fields(Feature)}
    features = {
        name: {key: value for key, value in dataclasses.asdict(feature).items() if value != default[key]}
        for name, feature in schema.features.items()
    }
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


def _folder_name(folder: str) -> str:
    return os.path.basename(folder if is_remote(folder) else os.path.abspath(folder))


def _find_json(folder: str, storage: Storage) -> str | None:
    for location in (folder, parent(folder)):
        path = None if location is None else os.path.join(location, DATASET_NAME)
        try:
            if path and storage.exists(path):
                return path
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    return None


def _first_difference(first: Schema, other: Schema) -> str | None:
    for name in {**first.features, **other.features}:
        if first.features.get(name) != other.features.get(name):
            return f"feature {name}"
    if (first.inputs, first.targets) != (other.inputs, other.targets):
        return "inputs or targets"
    return None
