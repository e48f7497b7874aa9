"""Reads a Config from YAML files and `section.key=value` overrides, and writes YAML. Keeps the origin of each value.

Values are restricted to those that JSON can hold; numbers and durations may be written as people and schedulers do.
Does not know what the settings mean; see settings.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from yaml.constructor import SafeConstructor

from horovod_train.config.paths import did_you_mean, path_problem, remote_problem, takes_remote_paths, text_problem
from horovod_train.config.registry import suggest
from horovod_train.config.rules import broken_rules, lookup
from horovod_train.config.settings import Config, Seconds, Spec
from horovod_train.errors import UserError, one_line, unreadable

T = TypeVar("T")
Origins = dict[str, str]
"""Origin of each value: `section.key` → "configs/a.yaml:12" or "command line". An absent key is a default."""
COMMAND_LINE = "command line"
BUILT_IN = Path(__file__).parents[1] / "configs"
"""Configs that come with the package: the folder `configs` of a checkout."""
CLOCK = r"(?:(\d+)-)?(\d+):(\d{2}):(\d{2})"
"""Pattern of a scheduler's [D-]HH:MM:SS."""
_LARGEST_INT = 2**53
"""Beyond this, some JSON readers return a different number."""
_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
_NOT_PLAIN = {"timestamp": "a date", "binary": "binary data"}
_IN_WORDS = {int: "an int", bool: "true or false", str: "a string"}
_MOST_CHARACTERS = 1_000_000
_MOST_VALUES = 1_000_000
"""With each alias counted as what it stands for."""
_MOST_LEVELS = 100
_TOO_DEEP = f"expected values within values at most {_MOST_LEVELS} deep; received deeper ones"
_OTHER_NAMES = {
    "batch_size": "data.global_batch_size",
    "global_batch": "data.global_batch_size",
    "lr": "lr_schedule.base_lr",
    "learning_rate": "lr_schedule.base_lr",
    "num_epochs": "train.epochs",
    "n_epochs": "train.epochs",
    "steps": "train.max_steps",
    "num_steps": "train.max_steps",
    "momentum": "optimizer.options.momentum",
    "weight_decay": "optimizer.options.weight_decay",
    "warmup": "lr_schedule.warmup_epochs",
    "fp16": "precision",
    "mixed_precision": "precision",
    "checkpoint_dir": "output_dir",
    "logdir": "output_dir",
}
"""Names that other tools give to settings."""
_FORMS = {"data.fold": "k/K, like 1/5, or data.eval_fraction for a fraction"}
"""What settings hold that are strings of a form."""
_hints = functools.cache(typing.get_type_hints)


def load(files: Iterable[str | Mapping[str, Any]], overrides: Iterable[str] = ()) -> tuple[Config, Origins]:
    """Read and check a config: YAML files merged left to right, then `section.key=value` overrides.

    Mappings merge, except if one sets another `name`: then the old options do not apply. Any other value replaces the
    earlier one. A mapping stands for the content of a file. A name without folder and ending, such as mnist_mlp, is
    that file, or else the built-in config.

    Raises UserError with the file and line, or the override, of the first problem.
    """
    values: dict[str, Any] = {}
    origins: Origins = {}
    for name in files:
        tree = _read_yaml(name) if isinstance(name, str) else _from_mapping(name)
        _merge(values, origins, tree, "")
    for override in overrides:
        _merge(values, origins, _parse_override(override), "")
    _check_texts(values, "", origins)
    config = _build(Config, values, "", origins)
    if config.data.eval_fraction and not config.data.eval:
        data = dataclasses.replace(config.data, eval=config.data.paths("train"))
        config, origins["data.eval"] = dataclasses.replace(config, data=data), "a part of data.train"
    for key, problem in broken_rules(config):
        _fail(key, origins, problem)
    return config, origins


def build(cls: type[T], value: Any, where: str) -> T:
    """Build a dataclass from plain values, by the same rules as a section of the config; a string is a Spec's name.

    Raises UserError that begins with `where` and names the key.
    """
    if issubclass(cls, Spec) and isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        known = ", ".join(field.name for field in dataclasses.fields(typing.cast(Any, cls)))
        raise UserError(f"{where}: expected a mapping of {known}; received {value!r}.")
    return typing.cast(T, _build(cls, value, f"{where}: ", {}))


def as_dict(config: Any) -> Any:
    """Return the config as plain dicts, lists and scalars: what `load` reads back from YAML or JSON."""
    if dataclasses.is_dataclass(config):
        return {f.name: as_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {key: as_dict(value) for key, value in config.items()}
    if isinstance(config, tuple | list):
        return [as_dict(value) for value in config]
    return config


def by_key(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `section.key` and value. Mappings with keys that are no names, such as patterns, are values."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value and all(re.fullmatch(r"\w+", str(inner)) for inner in value):
            yield from by_key(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def dump(config: Config, origins: Origins | None = None) -> str:
    """Return the config as YAML for `load`; with origins, each line says where its value came from."""
    text = yaml.safe_dump(as_dict(config), sort_keys=False, default_flow_style=False, width=1000)
    if origins is None:
        return text
    lines = text.splitlines()
    for path, line, is_value in _keys_of(yaml.compose(text, Loader=yaml.SafeLoader)):
        if where := _origin(path, origins) or ("default" if is_value else None):
            lines[line] = f"{lines[line]:<48}  # {where!r}" if "\n" in where else f"{lines[line]:<48}  # {where}"
    return "\n".join(lines) + "\n"


def _keys_of(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int, bool]]:
    """Yield for each key of a mapping its path, the line for its comment, and whether its value ends there."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        path, is_value = f"{prefix}{key.value}", value.start_mark.line == key.start_mark.line
        yield path, (value.end_mark if is_value else key.start_mark).line, is_value
        yield from _keys_of(value, f"{path}.")


class _Located(dict[str, tuple[Any, str]]):
    """A mapping whose values carry the place where they were read."""


def _read_yaml(name: str) -> _Located:
    built_in = BUILT_IN / f"{name}.yaml"
    is_built_in = re.fullmatch(r"\w+", name) and built_in.is_file() and not Path(name).is_file()
    try:
        text = (built_in if is_built_in else Path(name)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        if setting_like(name) == name and "." in name:
            raise UserError(f"argument {name!r}: expected section.key=value, without blanks: {name}=VALUE.") from error
        hint = did_you_mean(name) if isinstance(error, FileNotFoundError) else ""
        raise unreadable(error)(f"--config {name}: cannot be read: {reason}.{hint}") from error
    return _located(compose(text, name), name)


def _from_mapping(content: Mapping[str, Any]) -> _Located:
    try:
        text = yaml.safe_dump(dict(content), sort_keys=False)
    except yaml.YAMLError as error:
        raise UserError(f"config: expected what YAML can hold; received {one_line(error)}.") from error
    return _located(compose(text, "config"), "config")


def _located(node: yaml.Node | None, name: str) -> _Located:
    if node is None:
        return _Located()
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{name}: expected `section: …` mappings, got {plain_value(node)!r}.")
    _take_merged(node, name)
    tree = _Located()
    for key_node, value_node in node.value:
        where, key = f"{name}:{key_node.start_mark.line + 1}", str(key_node.value)
        is_section = isinstance(value_node, yaml.MappingNode)
        tree[key] = (_located(value_node, name) if is_section else plain_value(value_node), where)
    return tree


def _take_merged(node: yaml.MappingNode, name: str) -> None:
    """Put the keys that `<<` names into a mapping itself; a key that it has already wins. Raises UserError."""
    try:
        SafeConstructor().flatten_mapping(node)  # before its own keys
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{name}:{node.start_mark.line + 1}: not valid YAML: {error.problem}.") from error


def _parse_override(text: str) -> _Located:
    key, equals, value = text.partition("=")
    if not equals or not all(re.fullmatch(r"[^\s.=]+", part) for part in key.split(".")):
        raise UserError(f"argument {text!r}: expected section.key=value.")
    node = compose(value, f"argument {text!r}")
    is_section = isinstance(node, yaml.MappingNode)
    where = COMMAND_LINE
    content: Any = _located(node, where) if is_section else (None if node is None else plain_value(node))
    for part in reversed(key.split(".")):
        content = _Located({part: (content, where)})
    return typing.cast(_Located, content)


def _merge(values: dict[str, Any], origins: Origins, tree: _Located, prefix: str) -> None:
    for key, (value, where) in tree.items():
        path, old = f"{prefix}{key}", values.get(key)
        if isinstance(value, _Located):
            if isinstance(old, str) and value.keys() <= _keys_of_spec(path):
                old = {"name": old}  # `optimizer: sgd` here, and its options there
            if not isinstance(old, dict) or _names_another(value, old):
                _forget(origins, path, old)
                if isinstance(old, dict) and "options" not in value:
                    _note_left_out(origins, path, old, value["name"][1])
                old = {}
            if not value and _is_mapping(path):  # {} stands for nothing; for a section it says nothing
                _forget(origins, path, old)
                old, origins[path] = {}, where
            values[key] = old
            _merge(values[key], origins, value, f"{path}.")
        else:
            _forget(origins, path, old)
            values[key], origins[path] = value, where
            if isinstance(value, str) and isinstance(old, dict):
                _note_left_out(origins, path, old, where)


def _is_mapping(path: str) -> bool:
    """Return whether the setting at `path` takes any keys, as options do."""
    try:
        return isinstance(lookup(Config(), path), Mapping)
    except AttributeError:  # of a part of one
        return False


def _note_left_out(origins: Origins, path: str, old: Mapping[str, Any], where: str) -> None:
    """Note that a name on the command line replaces `old`, with options of a file."""
    if where == COMMAND_LINE and old.get("options"):
        options = json.dumps(old["options"], ensure_ascii=False)
        origins[f"{path}.options"] = f"{where}, which leaves out the file's {options}"


def left_out_options(config: Config, origins: Origins) -> Iterator[str]:
    """Yield a sentence for each name on the command line that leaves a file's options out, if it has none now."""
    for name in _settings_of(Config):
        spec, where = lookup(config, name), origins.get(f"{name}.options", "")
        if isinstance(spec, Spec) and not spec.options and where.startswith(f"{COMMAND_LINE}, "):
            said = where.replace(COMMAND_LINE, f"{name}={spec.name}", 1)
            yield f"{said}. If they are meant, give {name}.options too."


def _keys_of_spec(key: str) -> set[str]:
    """Return the keys of the Spec at `key`; those of any Spec if the key is inside a list or an option."""
    default = next((field.default for field in dataclasses.fields(Config) if field.name == key), None)
    return {field.name for field in dataclasses.fields(default if isinstance(default, Spec) else Spec)}


def _names_another(tree: _Located, old: Mapping[str, Any]) -> bool:
    return "name" in tree and "name" in old and tree["name"][0] != old["name"]


def _forget(origins: Origins, path: str, old: Any) -> None:
    """Forget where the values inside `old`, the mapping at `path`, were set."""
    for key, inner in old.items() if isinstance(old, dict) else ():
        origins.pop(f"{path}.{key}", None)
        _forget(origins, f"{path}.{key}", inner)


def _origin(path: str, origins: Origins) -> str | None:
    """Return where the value at `path`, or a mapping that contains it, was set."""
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins.get(path)


def _fail(path: str, origins: Origins, problem: str) -> typing.NoReturn:
    section = path.rpartition(".")[0]
    near = [f"{name}." for name in (path, section) if name]
    inside = (known for prefix in near for known in origins if known.startswith(prefix))
    where = _origin(path, origins) or origins.get(next(inside, ""))
    raise UserError(f"{where}: {path}: {problem}" if where else f"{path}: {problem}")


def _check_texts(value: Any, path: str, origins: Origins) -> None:
    """Raise UserError for text that no setting may hold, in values, keys, and options of things that we do not know."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_texts(str(key), path, origins)
            _check_texts(inner, f"{path}.{key}".lstrip("."), origins)
    elif isinstance(value, list):
        for inner in value:
            _check_texts(inner, path, origins)
    elif isinstance(value, str) and (problem := text_problem(path, value)):
        _fail(path, origins, problem)


def _build(cls: Any, values: Mapping[str, Any], prefix: str, origins: Origins) -> Any:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = _hints(cls)
    for key in values:
        if key not in fields:
            # A part of a setting, such as an entry of data.train, has only its own keys.
            meant = _place_of(str(key), list(fields)) if prefix.count(".") < 2 else suggest(str(key), list(fields))
            _fail(f"{prefix}{key}", origins, f"unknown key; {meant}")
    arguments = {}
    for key, value in values.items():
        path, field = f"{prefix}{key}", fields[key]
        if isinstance(field.default, Spec) and isinstance(value, dict):
            value = {"name": field.default.name} | value  # options alone belong to the default name
        arguments[key] = converted = _convert(value, hints[key], path, origins)
        minimum, maximum = field.metadata.get("minimum"), field.metadata.get("maximum")
        for number in converted if isinstance(converted, tuple) else [converted]:
            if minimum is not None and number is not None and number < minimum:
                _fail(path, origins, f"must be at least {minimum}; received {number}.")
            if maximum is not None and number is not None and number > maximum:
                _fail(path, origins, f"must be at most {maximum:.10g}; received {number}.")
    required = [f.name for f in fields.values() if f.default is f.default_factory is dataclasses.MISSING]
    for key in (name for name in required if name not in arguments):
        _fail(f"{prefix}{key}", origins, "is required and missing.")
    return cls(**arguments)


def setting_like(name: str) -> str | None:
    """Return the setting that a name without, or with another, section means; None if there is none or several."""
    name = name.strip("-").replace("-", "_")
    if name in (known := list(_settings_of(Config))):
        return name
    last = name.rpartition(".")[2]
    found = [path for path in known if path.rpartition(".")[2] == last]
    return found[0] if len(found) == 1 else _OTHER_NAMES.get(last)


def is_section(hint: Any) -> bool:
    """Return whether a setting of this type consists of settings with names of their own."""
    return dataclasses.is_dataclass(hint) and not issubclass(typing.cast(type, hint), Spec)


def _settings_of(cls: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(cls):
        hint = _hints(cls)[field.name]
        yield f"{prefix}{field.name}"
        yield from _settings_of(hint, f"{prefix}{field.name}.") if is_section(hint) else ()


def _place_of(key: str, siblings: list[str]) -> str:
    """Return the end of a message about an unknown key: a sibling, or the setting of another section that it means."""
    near = suggest(key, siblings)
    elsewhere = setting_like(key)
    is_close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
    return f"did you mean {elsewhere}?" if elsewhere and not is_close else near


def _convert(value: Any, hint: Any, path: str, origins: Origins) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return _convert(value, _member(value, arguments), path, origins)
    if origin is Literal:
        if value not in arguments:
            _fail(path, origins, f"expected one of {', '.join(map(str, arguments))}; received {value!r}.")
        return value
    if origin is tuple:
        items = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(_convert(item, arguments[0], path, origins) for item in items)
    if isinstance(hint, type) and issubclass(hint, Spec) and isinstance(value, str):
        return hint(_convert(value, str, path, origins))
    if dataclasses.is_dataclass(hint) or origin is dict:
        if value is None:
            value = {}
        if not isinstance(value, dict):
            _fail(path, origins, f"expected a mapping of its keys; received {value!r}.")
        return value if origin is dict else _build(hint, value, f"{path}.", origins)
    if hint is Seconds:
        try:
            return seconds_of(value)
        except ValueError as error:
            _fail(path, origins, str(error))
    if hint is float:
        if is_number(value):
            return float(value)
        _fail(path, origins, f"expected a number; received {value!r}.")
    # Every string: most strings are paths, and no setting is an address. Those of records: rules, for data.source.
    is_checked = hint is str and isinstance(value, str) and not takes_remote_paths(path)
    if is_checked and (problem := remote_problem(value) or path_problem(path, value)):
        _fail(path, origins, problem)
    if hint is int and isinstance(value, int) and abs(value) > _LARGEST_INT:
        _fail(path, origins, f"must be at most {_LARGEST_INT}; received {value}.")
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    expected = _FORMS.get(path) or _IN_WORDS.get(hint, hint.__name__)
    quoted = " YAML takes yes, no, on and off for true and false; put words in quotes." if hint is str else ""
    return _fail(path, origins, f"expected {expected}; received {value!r}.{quoted if isinstance(value, bool) else ''}")


def _member(value: Any, members: Sequence[Any]) -> Any:
    """Return the member of a union that a value is meant as."""
    if type(value) in members:
        return type(value)
    sections = [member for member in members if dataclasses.is_dataclass(member) and isinstance(value, dict)]
    return next(member for member in [*sections, *members] if member is not type(None))


def compose(text: str, name: str) -> yaml.Node | None:
    """Return the one document in a text, or None. Raises UserError with `name` and the line of the problem."""
    if len(text) > _MOST_CHARACTERS:
        raise UserError(
            f"{name}: expected settings, of at most {_MOST_CHARACTERS} characters; received {len(text)}. Keep data in "
            "a file that your function reads."
        )
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _check_plain(node, name, inside=(), checked={})
        return node
    except RecursionError as error:
        raise UserError(f"{name}: {_TOO_DEEP}.") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{name}:{line}: not valid YAML: {error.problem}.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{name}: not valid YAML: {one_line(error)}.") from error


def _check_plain(node: yaml.Node, name: str, inside: tuple[yaml.Node, ...], checked: dict[yaml.Node, int]) -> int:
    """Raise UserError for values that JSON cannot hold, because checkpoints store the config as JSON.

    Return the number of values in a node. checked: those of nodes that are known to be plain.
    """
    where = f"{name}:{node.start_mark.line + 1}"
    if node in inside:
        raise UserError(f"{where}: expected values; received one that contains itself.")
    if node in checked:
        return checked[node]
    if len(inside) > _MOST_LEVELS:
        raise UserError(f"{where}: {_TOO_DEEP}.")
    count = 1
    if node.tag not in _PLAIN:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        text = f"{node.value} is " if isinstance(node, yaml.ScalarNode) else ""
        raise UserError(
            f"{where}: expected what JSON can hold; {text}{_NOT_PLAIN.get(kind, kind)}. "
            "Put it in quotes to have a string."
        )
    if node.tag.endswith(":float") and not math.isfinite(plain_value(node)):
        raise UserError(f"{where}: expected a finite number; received {node.value}.")
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            count += _check_plain(item, name, (*inside, node), checked)
    if isinstance(node, yaml.MappingNode):
        is_in_list = any(isinstance(outer, yaml.SequenceNode) for outer in inside)
        places: dict[str, str] = {}
        for key, value in node.value:
            place = f"{name}:{key.start_mark.line + 1}"
            # Outside lists a key becomes a string, whatever it looks like.
            if not isinstance(key, yaml.ScalarNode) or (is_in_list and not key.tag.endswith((":str", ":merge"))):
                raise UserError(f"{place}: expected a string as key; put it in quotes.")
            if key.value in places:
                first = places[key.value]
                raise UserError(f"{place}: {key.value} is given twice; it was set at {first} already.")
            places[key.value] = place
            count += _check_plain(value, name, (*inside, node), checked)
    if count > _MOST_VALUES:
        raise UserError(f"{where}: expected at most {_MOST_VALUES} values; received {count}, with those of aliases.")
    checked[node] = count
    return count


def plain_value(node: yaml.Node) -> Any:
    """Convert a node to Python. Raises UserError for a tag that is not plain YAML."""
    try:
        return SafeConstructor().construct_document(node)
    except (yaml.MarkedYAMLError, ValueError) as error:  # ValueError: 0x_ is an int to YAML, but not to Python
        problem = getattr(error, "problem", error)
        raise UserError(f"line {node.start_mark.line + 1}: not a plain value: {problem}.") from error


def seconds_of(value: Any) -> float:
    """Return a number of seconds, or that of [D-]HH:MM:SS. Raises ValueError."""
    if isinstance(value, str) and (clock := re.fullmatch(CLOCK, value.strip())):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if not is_number(value):
        raise ValueError(f"expected seconds or [D-]HH:MM:SS; received {value!r}.")
    return float(value)


def is_number(value: Any) -> bool:
    """Whether it is a finite number; also strings like "1e-3", which YAML 1.1 does not read as a number."""
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False
