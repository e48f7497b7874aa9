"""The command `settings`: every setting of a config, with its type, default and meaning, read from the dataclasses.

python -m horovod_train.main settings checkpoint
python -m horovod_train.main settings --json-schema > horovod_train.schema.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from horovod_train.commands.cli import build_table, open_screen
from horovod_train.config.loader import CLOCK, is_section
from horovod_train.config.registry import suggest
from horovod_train.config.rules import NEEDS
from horovod_train.config.settings import Config, Seconds, Spec, default_of
from horovod_train.errors import UserError

_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean"}
_WORDS = {"minimum": "at least", "maximum": "at most"}
"""Bounds of a setting, as the schema calls them, in words."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", nargs="?", default="", metavar="KEY", help="only this section or setting")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="the page docs/configuration.md")
    form.add_argument("--json-schema", action="store_true", help="for completion and checks in an editor")


def run(arguments: argparse.Namespace) -> int:
    if arguments.prefix and (arguments.markdown or arguments.json_schema):
        raise UserError(
            f"settings {arguments.prefix}: --markdown and --json-schema show all settings; leave out the key."
        )
    if arguments.markdown:
        sys.stdout.write(markdown())
    elif arguments.json_schema:
        print(json.dumps(json_schema(), indent=2))
    else:
        _show(arguments.prefix)
    return 0


def _show(prefix: str) -> None:
    chosen = [entry for entry in entries() if f"{entry.key}.".startswith(f"{prefix}.") or not prefix]
    if not chosen:
        known = suggest(prefix, [entry.key for entry in entries()])
        raise UserError(f"settings: there is no setting or section {prefix!r}; {known}")
    rows = [(entry.key, entry.type.replace("`", ""), entry.default, entry.meaning) for entry in chosen]
    titles = ("setting", "type", "default", "meaning")
    open_screen().print(build_table(titles, rows, left=titles))


@dataclass(frozen=True)
class Entry:
    """One setting, as `section.key`."""

    key: str
    type: str
    default: str
    meaning: str


def entries(cls: type = Config, prefix: str = "") -> Iterator[Entry]:
    """Yield every setting in the order of the dataclasses, sections spread out into their keys."""
    hints = typing.get_type_hints(cls)
    of_all_specs = {field.name for field in dataclasses.fields(Spec)} if issubclass(cls, Spec) else set()
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if field.name in of_all_specs:
            continue
        if is_section(hint):
            yield from entries(hint, f"{prefix}{field.name}.")
        else:
            key = f"{prefix}{field.name}"
            limits = [f"{_WORDS[bound]} {limit:.10g}" for bound, limit in _bounds(field).items()]
            needs = "".join(f"; needs {need}" for need in NEEDS.get(key, ()))
            yield Entry(key, ", ".join([_type_name(hint), *limits]), _default(field), field.metadata["doc"] + needs)
            if isinstance(field.default, Spec) and type(field.default) is not Spec:
                yield from entries(type(field.default), f"{key}.")


def markdown() -> str:
    """Return docs/configuration.md."""
    lines = [
        "# Configuration reference",
        "",
        "<!-- Made by `python -m horovod_train.main settings --markdown`. A test keeps it current; do not edit it. -->",
        "",
        "One YAML file is one run. `--config A.yaml B.yaml section.key=value` merges them from left to right.",
        "`--print-config` shows the merged values and where each came from. `name + options` takes a bare name, or",
        "`{name: …, options: {…}}` with the keyword arguments of what is named. Another name, or a bare one, leaves",
        "out the options that an earlier file gave: `model=nets:build model.options.classes=10` gives some again.",
        "",
        "A short config, which trains the default model on records that say what they hold; the rest has defaults:",
        "",
        "```yaml",
        "output_dir: runs/first",
        "data: {train: data/digits/train, global_batch_size: 64}",
        "loss: {name: sparse_categorical_crossentropy, options: {from_logits: true}}",
        "optimizer: adam",
        "train: {epochs: 5}",
        "```",
        "",
        "Editors that use yaml-language-server (VS Code's YAML extension, Neovim, Emacs, Helix and others) complete",
        "keys, show their meaning and underline what a run would refuse. Write the schema to a file",
        "",
        "```bash",
        "python -m horovod_train.main settings --json-schema > horovod_train.schema.json",
        "```",
        "",
        "and name it in the first line of a config, relative to the config's folder:",
        "",
        "```yaml",
        "# yaml-language-server: $schema=horovod_train.schema.json",
        "```",
    ]
    sections: dict[str, list[Entry]] = {}
    for entry in entries():
        sections.setdefault(entry.key.rpartition(".")[0], []).append(entry)
    for section, members in sections.items():
        title = f"`{section}`" if section else "The run"
        lines += ["", f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for entry in members:
            cells = (f"`{entry.key}`", entry.type, f"`{entry.default}`", entry.meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def json_schema() -> dict[str, Any]:
    """Return a JSON Schema (draft 2020-12) of a config file; unknown keys are errors in it, as they are in a run."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "horovod_train config",
        **_object(Config),
    }


def _default(field: dataclasses.Field[Any]) -> str:
    value = default_of(field)
    if isinstance(value, Spec):
        value = value.name
    if isinstance(value, tuple):
        value = list(value)
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def _type_name(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if argument is type(None) else _type_name(argument) for argument in arguments)
    if origin is Literal:
        return " | ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    if hint is Seconds:
        return "seconds or `[D-]HH:MM:SS`"
    if dataclasses.is_dataclass(hint):
        return (
            "name + options"
            if issubclass(typing.cast(type, hint), Spec)
            else "mapping of " + ", ".join(f"`{field.name}`" for field in dataclasses.fields(hint))
        )
    return _SCALARS[hint]


def _object(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    properties = {}
    for field in dataclasses.fields(cls):
        shape = _with_bounds(_shape(hints[field.name]), _bounds(field))
        properties[field.name] = shape | ({"description": field.metadata["doc"]} if "doc" in field.metadata else {})
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _bounds(field: dataclasses.Field[Any]) -> dict[str, float]:
    """Return the minimum and the maximum of a setting, as far as it has them."""
    return {key: field.metadata[key] for key in _WORDS if field.metadata.get(key) is not None}


def _with_bounds(shape: dict[str, Any], bounds: dict[str, float]) -> dict[str, Any]:
    if "anyOf" in shape:
        return {"anyOf": [_with_bounds(choice, bounds) for choice in shape["anyOf"]]}
    return shape | bounds if shape.get("type") in ("integer", "number") else shape


def _shape(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_shape(argument) for argument in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:  # a single value means a list of one
        return {"anyOf": [{"type": "array", "items": _shape(arguments[0])}, _shape(arguments[0])]}
    if origin is dict:
        return {"type": ["object", "null"]}
    if hint is type(None):
        return {"type": "null"}
    if hint is Seconds:
        return {"anyOf": [{"type": "number"}, {"type": "string", "pattern": f"^{CLOCK}$"}]}
    if dataclasses.is_dataclass(hint):
        section = _object(hint)
        return {"anyOf": [{"type": "string"}, section]} if issubclass(typing.cast(type, hint), Spec) else section
    return {"type": _SCALARS[hint]}
