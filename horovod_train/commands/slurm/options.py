"""The options of `slurm`, which a site can also set for all its users in a file. Parses them; chooses nothing.

The file is slurm.yaml in $XDG_CONFIG_HOME/horovod_train (~/.config/horovod_train): `option: value`, as on the command
line. What the command line gives wins; options for sbatch are merged by name.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from horovod_train.commands.cli import Parser, count
from horovod_train.config.loader import CLOCK, compose, plain_value
from horovod_train.config.registry import suggest
from horovod_train.errors import UserError

CPUS_PER_GPU = 8
"""Default number of threads that read and decode for one GPU: what eight-GPU hosts can spare for each."""

LAUNCHES = ("srun", "srun-pmix", "mpirun", "horovodrun")

GIVE_HERE = {"nodes", "gpus-per-node", "cpus-per-task", "gres", "mem", "time", "partition", "account"}
"""Options of sbatch that are options of this command too."""
FIXED = {"ntasks", "ntasks-per-node", "tasks-per-node", "export", "signal", "requeue", "no-requeue"}
"""Options of sbatch that the script depends on."""


def _line(word: str) -> str:
    if not word.strip() or not word.isprintable():
        raise argparse.ArgumentTypeError(f"expected text on one line; received {word!r}")
    return word


def _like(pattern: str, expected: str) -> Callable[[str], str]:
    """Return what accepts a word that matches a pattern as a whole."""

    def parse(word: str) -> str:
        if not re.fullmatch(pattern, word):
            raise argparse.ArgumentTypeError(f"expected {expected}; received {word!r}")
        return word

    return parse


_name = _like(r"[\w.,:@/+-]+", "a name without spaces and quotes")


def _command(word: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(_line(word)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a command on one line; received {word!r}: {error}") from error


def _image(word: str) -> str:
    if not Path(word).is_file():
        raise argparse.ArgumentTypeError(f"expected a container's image; there is no file {word}")
    return _line(word)


def _sbatch(word: str) -> str:
    option = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.+)?", word)
    if not option or not word.isprintable():
        raise argparse.ArgumentTypeError(f"expected one option of sbatch, --NAME or --NAME=VALUE; received {word!r}")
    if option[1] in GIVE_HERE:
        raise argparse.ArgumentTypeError(f"give {word} to this command itself, not through --sbatch")
    if option[1] in FIXED:
        raise argparse.ArgumentTypeError(f"must not set --{option[1]}, because the script depends on its own")
    return word


class Option(NamedTuple):
    parse: Callable[[str], Any]
    metavar: str
    help: str
    many: bool = False


OPTIONS = {
    "nodes": Option(count, "N", "hosts (1)"),
    "gpus_per_node": Option(
        lambda word: 0 if word == "0" else count(word), "N", "GPUs of a host, all used (0: on CPUs)"
    ),
    "tasks_per_node": Option(count, "N", "ranks on a host; default: GPUs / device.per_rank, or 1"),
    "cpus_per_task": Option(count, "N", f"default: {CPUS_PER_GPU} for a GPU, else 1"),
    "gres": Option(_name, "NAME[:TYPE]:N", "in place of --gpus-per-node, such as gpu:a100:4; also others"),
    "mem": Option(
        _like(r"\d+[KMGT]?", "a size such as 64G"), "SIZE", "memory of a host, such as 64G; default: the cluster's"
    ),
    "time": Option(_like(CLOCK, "[D-]HH:MM:SS"), "[D-]HH:MM:SS", "how long the job may take; required"),
    "partition": Option(_name, "NAME", "default: the cluster's"),
    "account": Option(_name, "NAME", "default: yours"),
    "sbatch": Option(_sbatch, "OPTION", "further option of sbatch, such as '--qos=long'; can be repeated", many=True),
    "modules": Option(_name, "MODULE", "environment module to load, such as cuda/12; can be repeated", many=True),
    "launch": Option(
        _like("|".join(LAUNCHES), f"one of {', '.join(LAUNCHES)}"),
        "LAUNCHER",
        f"what starts the ranks: {', '.join(LAUNCHES)} (srun)",
    ),
    "image": Option(_image, "FILE.sif", "run in this container, by apptainer exec"),
    "container": Option(_command, "COMMAND", 'the same with a command of yours: "podman run … image"'),
}
"""By their names in the site's file; on the command line with dashes."""


def add_options(parser: Parser) -> None:
    for name, option in OPTIONS.items():
        action = "append" if option.many else "store"
        parser.add_argument(
            _flag(name), action=action, type=option.parse, metavar=option.metavar, help=option.help.replace("%", "%%")
        )
    parser.takes_options("--sbatch")


def site_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.config"), "horovod_train", "slurm.yaml")


def merge_site_options(options: argparse.Namespace, file: Path) -> list[str]:
    """Set options that the command line leaves open to the site's; return these as `name=value`. Raises UserError."""
    site = _read(file)
    if options.image or options.container:
        site = {name: value for name, value in site.items() if name not in ("image", "container")}
    if options.gpus_per_node is not None or gpus_in(options.gres):
        site.pop("gpus_per_node", None)
        if gpus_in(site.get("gres")):
            del site["gres"]
    sbatch = options.sbatch or []
    names = {option.partition("=")[0] for option in sbatch}
    site_sbatch = [option for option in site.pop("sbatch", []) if option.partition("=")[0] not in names]
    used = {name: value for name, value in site.items() if getattr(options, name) is None}
    for name, value in used.items():
        setattr(options, name, value)
    options.sbatch = [*site_sbatch, *sbatch]
    used |= {"sbatch": site_sbatch} if site_sbatch else {}
    return [f"{name}={shlex.join(value) if isinstance(value, list | tuple) else value}" for name, value in used.items()]


def gpus_in(gres: str | None) -> int:
    """Return the GPUs of a host that --gres asks for: `gpu:4`, `gpu:a100:4` and `gpu` are 4, 4 and 1."""
    parts = [part.split(":") for part in (gres or "").split(",")]
    return sum(int(part[-1]) if part[-1].isdecimal() else 1 for part in parts if part[0] == "gpu")


def _read(file: Path) -> dict[str, Any]:
    try:
        node = compose(file.read_text(encoding="utf-8"), str(file))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}.") from error
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{file}:1: expected `option: value` lines; received {plain_value(node)!r}.")
    options: dict[str, Any] = {}
    for key, value in node.value:
        where, name = f"{file}:{key.start_mark.line + 1}", str(key.value).replace("-", "_")
        if name not in OPTIONS:
            raise UserError(f"{where}: {key.value}: unknown option; {suggest(name, list(OPTIONS))}")
        if name in options:  # with - and with _
            raise UserError(f"{where}: {key.value} is given twice.")
        try:
            options[name] = _parse(OPTIONS[name], value)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{where}: {key.value}: {error}.") from error
    return options


def _parse(option: Option, node: yaml.Node) -> Any:
    """Parse the text of a value as the command line does: YAML takes 12:00:00 for a number."""
    items = node.value if option.many and isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(item, yaml.ScalarNode) for item in items):
        raise argparse.ArgumentTypeError(f"expected {'a list of values' if option.many else 'one value'}")
    values = [option.parse(item.value) for item in items]
    return values if option.many else values[0]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
