"""One YAML file is one run: the settings, how they are loaded, overridden, checked and dumped.

Knows the settings' types and the rules between them. Does not look at the data, the model or the machine: the
room that owns a thing checks it. Imports the standard library and yaml only, so a bad config answers at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from horovod_train.errors import UserError

Origins = dict[str, str]
"""Where each value came from: `section.key` → "configs/a.yaml:12" or "command line". An absent key is a default."""


def setting(default: Any, doc: str, *, minimum: float | None = None) -> Any:
    """A dataclass field with the line that documents it and, for numbers, the least value allowed."""
    metadata = {"doc": doc, "minimum": minimum}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Spec:
    """A thing chosen by name, with its keyword arguments. In YAML a bare string is a name without options."""

    name: str
    options: dict[str, Any] = setting({}, "keyword arguments of the thing named")


@dataclass(frozen=True)
class DataConfig:
    train: tuple[str, ...] = setting((), "training records: a folder of *.tfrecord, a glob, or a list of either")
    eval: tuple[str, ...] = setting((), "evaluation records, in the same forms; none: no evaluation")
    features: dict[str, Any] = setting({}, "what a record holds; default: the dataset.json beside the records")
    inputs: tuple[str, ...] = setting((), "features that the model gets; default: as dataset.json says")
    targets: tuple[str, ...] = setting((), "features that the loss gets; default: as dataset.json says")
    index_dir: str | None = setting(None, "folder for indexes; default: beside the records, or else ~/.cache")
    global_batch_size: int | None = setting(None, "records per update over all ranks", minimum=1)
    batch_size_per_rank: int | None = setting(None, "records per update on one rank", minimum=1)
    shuffle: bool = setting(True, "another order every epoch, drawn from (seed, epoch); false: file order")
    shuffle_window: int = setting(10_000, "records over all ranks among which records are mixed", minimum=1)
    drop_remainder: bool = setting(False, "leave out the last partial batch of an epoch")
    prefetch_batches: int | None = setting(None, "batches made ahead; default: as many as pay", minimum=1)
    on_bad_record: Literal["error", "skip"] = setting("error", "error: name it and stop; skip: leave it out, count it")


@dataclass(frozen=True)
class LrScheduleConfig:
    base_lr: float = setting(0.001, "learning rate at base_batch_size, after warm-up, before decay", minimum=0)
    scaling: Literal["none", "linear", "sqrt"] = setting("none", "how the rate grows with the global batch")
    base_batch_size: int | None = setting(None, "global batch that base_lr was chosen for", minimum=1)
    warmup_epochs: float = setting(0.0, "epochs over which the rate rises linearly, step by step", minimum=0)
    decay: Spec = setting(Spec("constant"), "constant, piecewise, exponential, cosine or polynomial")


@dataclass(frozen=True)
class TrainConfig:
    epochs: int | None = setting(None, "passes over the training records", minimum=1)
    max_steps: int | None = setting(None, "updates; with epochs too, whichever comes first", minimum=1)
    steps_per_call: int = setting(10, "updates inside one compiled call", minimum=1)
    accumulate_steps: int = setting(1, "parts a rank's batch is computed in; exchanged and applied once", minimum=1)
    clip_norm: float | None = setting(None, "largest global norm of the averaged gradient", minimum=0)


@dataclass(frozen=True)
class EvalConfig:
    every_epochs: int | None = setting(1, "epochs between evaluations", minimum=1)
    every_steps: int | None = setting(None, "steps between evaluations, besides every_epochs", minimum=1)
    batch_size_per_rank: int | None = setting(None, "default: as in training", minimum=1)


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int | None = setting(None, "steps between checkpoints, besides every_epochs", minimum=1)
    every_epochs: int | None = setting(1, "epochs between checkpoints", minimum=1)
    keep: int = setting(3, "newest checkpoints kept", minimum=1)
    resume: str = setting("auto", "auto: the newest in output_dir if there is one; never; or a checkpoint's path")


@dataclass(frozen=True)
class LogConfig:
    every_steps: int = setting(100, "steps between lines of training metrics", minimum=1)
    tensorboard: bool = setting(True, "write TensorBoard scalars")
    progress: Literal["auto", "bar", "plain"] = setting("auto", "auto: a bar on a terminal, plain lines elsewhere")


@dataclass(frozen=True)
class HorovodConfig:
    op: Literal["average", "sum", "adasum"] = setting("average", "how the ranks' gradients are combined")
    compression: Literal["none", "fp16", "bf16"] = setting("none", "form in which gradients travel")
    cycle_time_ms: float | None = setting(None, "pause between two exchanges; default: Horovod's own", minimum=0)
    fusion_threshold_mb: float | None = setting(None, "most bytes exchanged at once; default: Horovod's", minimum=0)


@dataclass(frozen=True)
class DeviceConfig:
    memory_growth: bool = setting(True, "take GPU memory as it is needed, not all at once")
    intra_op_threads: int | None = setting(None, "threads inside an op; default: cores / ranks on this host", minimum=1)
    inter_op_threads: int | None = setting(None, "ops run at once; default: cores / ranks on this host", minimum=1)
    soft_placement: bool = setting(True, "run an op elsewhere where its device is missing or has no kernel")
    log_placement: bool = setting(False, "log the device of every op")


@dataclass(frozen=True)
class Config:
    output_dir: str | None = setting(None, "the run directory")
    seed: int = setting(1, "of initial weights, dropout and data order", minimum=0)
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = setting("float32", "Keras dtype policy")
    deterministic: bool = setting(False, "bit-equal runs: deterministic ops, no fusion of exchanged tensors")
    data: DataConfig = DataConfig()
    model: Spec = setting(Spec("convnet"), "one of ours, or package.module:function")
    loss: Spec = setting(Spec("sparse_categorical_crossentropy"), "a Keras loss, or package.module:function")
    metrics: tuple[Spec, ...] = setting((), "Keras metrics, or package.module:function")
    optimizer: Spec = setting(Spec("sgd"), "a Keras optimizer, or package.module:function")
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    horovod: HorovodConfig = HorovodConfig()
    device: DeviceConfig = DeviceConfig()


def load(files: Iterable[str], overrides: Iterable[str] = ()) -> tuple[Config, Origins]:
    """Reads and checks a config: YAML files merged left to right, then `section.key=value` overrides.

    Mappings merge; anything else replaces what an earlier file said.
    Raises UserError with the file and line, or the override, of the first thing that is wrong.
    """
    values: dict[str, Any] = {}
    origins: Origins = {}
    for name in files:
        _merge(values, origins, _read_yaml(name), "")
    for override in overrides:
        _merge(values, origins, _parse_override(override), "")
    config = _build(Config, values, "", origins)
    _check_rules(config, origins)
    return config, origins


def resolve(config: Config, size: int) -> Config:
    """The config as `size` ranks run it: the global batch size filled in.

    Raises UserError where some rank would have nothing to do.
    """
    data = config.data
    batch = data.global_batch_size or (data.batch_size_per_rank or 0) * size
    if batch < size:
        raise UserError(
            f"data.global_batch_size must be at least the number of ranks ({size}); received {batch}. "
            "Start fewer ranks or raise it."
        )
    per_rank = -(-batch // size)
    if per_rank % config.train.accumulate_steps:
        raise UserError(
            f"train.accumulate_steps must divide the records of one rank's batch ({per_rank}); "
            f"received {config.train.accumulate_steps}."
        )
    data = dataclasses.replace(data, global_batch_size=batch, batch_size_per_rank=None)
    return dataclasses.replace(config, data=data)


def as_dict(config: Any) -> Any:
    """The config as plain dicts, lists and scalars: what `load` reads back from YAML or JSON."""
    if dataclasses.is_dataclass(config):
        return {f.name: as_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {key: as_dict(value) for key, value in config.items()}
    if isinstance(config, tuple | list):
        return [as_dict(value) for value in config]
    return config


def dump(config: Config, origins: Origins | None = None) -> str:
    """The config as YAML that `load` takes back; with origins, each line says where its value came from."""
    text = yaml.safe_dump(as_dict(config), sort_keys=False, default_flow_style=False, width=1000)
    if origins is None:
        return text
    lines: list[str] = []
    path: list[str] = []
    for line in text.splitlines():
        key, _, rest = line.lstrip().partition(":")
        if key.startswith("-"):
            lines.append(line)
            continue
        path = [*path[: (len(line) - len(line.lstrip())) // 2], key]
        where = _origin(".".join(path), origins) or ("default" if rest else None)
        lines.append(f"{line:<48}  # {where}" if where else line)
    return "\n".join(lines) + "\n"


# --- reading ----------------------------------------------------------------------------------------------------


class _Located(dict[str, tuple[Any, str]]):
    """A mapping whose values carry the place that they were read at."""


def _read_yaml(name: str) -> _Located:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"--config {name}: cannot be read: {reason}.") from error
    return _located(_compose(text, name), name)


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{name}:{line}: not valid YAML: {error.problem}.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{name}: not valid YAML: {' '.join(str(error).split())}.") from error


def _located(node: yaml.Node | None, name: str) -> _Located:
    if node is None:
        return _Located()
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{name}: expected `section: …` mappings, got {_value(node)!r}.")
    tree = _Located()
    for key_node, value_node in node.value:
        where, key = f"{name}:{key_node.start_mark.line + 1}", str(key_node.value)
        if key in tree:
            raise UserError(f"{where}: {key} is given twice; it was set at {tree[key][1]} already.")
        is_section = isinstance(value_node, yaml.MappingNode)
        tree[key] = (_located(value_node, name) if is_section else _value(value_node), where)
    return tree


def _value(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise UserError(f"line {node.start_mark.line + 1}: not a plain value: {error.problem}.") from error
    finally:
        loader.dispose()


def _parse_override(text: str) -> _Located:
    key, equals, value = text.partition("=")
    if not equals or not all(part.isidentifier() for part in key.split(".")):
        raise UserError(f"argument {text!r}: expected section.key=value.")
    node = _compose(value, f"argument {text!r}")
    is_section = isinstance(node, yaml.MappingNode)
    where = "command line"
    content: Any = _located(node, where) if is_section else (None if node is None else _value(node))
    for part in reversed(key.split(".")):
        content = _Located({part: (content, where)})
    return typing.cast(_Located, content)


def _merge(values: dict[str, Any], origins: Origins, tree: _Located, prefix: str) -> None:
    for key, (value, where) in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, _Located):
            old = values.get(key)
            if isinstance(old, str) and value.keys() <= {"name", "options"}:
                old = {"name": old}  # `optimizer: sgd` here and its options there
            values[key] = old if isinstance(old, dict) else {}
            _merge(values[key], origins, value, f"{path}.")
        else:
            for stale in [known for known in origins if known.startswith(f"{path}.")]:
                del origins[stale]
            values[key], origins[path] = value, where


# --- checking ---------------------------------------------------------------------------------------------------


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _origin(path: str, origins: Origins) -> str | None:
    """Where the value at `path`, or the whole value that it is a part of, was given."""
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins.get(path)


def _fail(path: str, origins: Origins, problem: str) -> typing.NoReturn:
    section = path.rpartition(".")[0]
    near = tuple(f"{name}." for name in (path, section) if name)
    inside = (known for known in origins if known.startswith(near))
    where = _origin(path, origins) or origins.get(next(inside, ""))
    raise UserError(f"{where}: {path}: {problem}" if where else f"{path}: {problem}")


def _build(cls: Any, values: Mapping[str, Any], prefix: str, origins: Origins) -> Any:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = _hints(cls)
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=3, cutoff=0.5) or list(fields)
            _fail(f"{prefix}{key}", origins, f"unknown key; known here: {', '.join(near)}.")
    arguments = {}
    for key, value in values.items():
        path, field = f"{prefix}{key}", fields[key]
        if isinstance(field.default, Spec) and isinstance(value, dict):
            value = {"name": field.default.name} | value  # options alone are those of the default
        arguments[key] = converted = _convert(value, hints[key], path, origins)
        minimum = field.metadata.get("minimum")
        if minimum is not None and converted is not None and converted < minimum:
            _fail(path, origins, f"must be at least {minimum}; received {converted}.")
    required = [f.name for f in fields.values() if f.default is f.default_factory is dataclasses.MISSING]
    for key in required:
        if key not in arguments:
            _fail(f"{prefix}{key}", origins, "is required and missing.")
    return cls(**arguments)


def _convert(value: Any, hint: Any, path: str, origins: Origins) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return _convert(value, next(a for a in arguments if a is not type(None)), path, origins)
    if origin is Literal:
        if value not in arguments:
            _fail(path, origins, f"expected one of {', '.join(map(str, arguments))}; received {value!r}.")
        return value
    if origin is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_convert(item, arguments[0], path, origins) for item in items)
    if hint is Spec and isinstance(value, str):
        return Spec(value)
    if dataclasses.is_dataclass(hint) or origin is dict:
        if value is None:
            value = {}
        if not isinstance(value, dict):
            _fail(path, origins, f"expected a mapping of its keys; received {value!r}.")
        return value if origin is dict else _build(hint, value, f"{path}.", origins)
    if hint is float and _is_number(value):
        return float(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    return _fail(path, origins, f"expected {_article(hint.__name__)}; received {value!r}.")


def _is_number(value: Any) -> bool:
    """Also strings like "1e-3", which YAML 1.1 does not take for a number."""
    try:
        return not isinstance(value, bool) and float(value) == float(value)
    except (TypeError, ValueError):
        return False


def _article(name: str) -> str:
    return {"int": "an int", "bool": "true or false", "str": "a string", "float": "a number"}.get(name, name)


def _check_rules(config: Config, origins: Origins) -> None:
    data, train, schedule = config.data, config.train, config.lr_schedule
    if data.global_batch_size and data.batch_size_per_rank:
        _fail("data.batch_size_per_rank", origins, "give either this or data.global_batch_size, not both.")
    if not (data.global_batch_size or data.batch_size_per_rank):
        _fail("data.global_batch_size", origins, "is required (or data.batch_size_per_rank).")
    if not data.train:
        _fail("data.train", origins, "is required: a folder of *.tfrecord files, or a glob.")
    if not (train.epochs or train.max_steps):
        _fail("train.epochs", origins, "is required (or train.max_steps).")
    if schedule.scaling != "none" and not schedule.base_batch_size:
        _fail("lr_schedule.base_batch_size", origins, f"is required with scaling: {schedule.scaling}.")
    if config.eval.every_steps and not data.eval:
        _fail("eval.every_steps", origins, "there is nothing to evaluate: data.eval is not given.")
    if config.deterministic and config.horovod.fusion_threshold_mb:
        _fail("horovod.fusion_threshold_mb", origins, "must be left out with deterministic: true, which sets it to 0.")
