"""The parser of every command, which refuses remote paths and reports errors in one line; and which config is meant."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn, TypeVar

from horovod_train.config.loader import Origins, load
from horovod_train.config.numbers import is_number
from horovod_train.config.remote_paths import path_problem, remote_problem, text_problem
from horovod_train.config.settings import Config
from horovod_train.errors import UserError

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit. Subcommands get a parser of the same class."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # For every argument without another type, so that no path escapes the check.
        self.register("type", None, _local)
        self.register("type", float, _finite)
        self._take_options: set[str] = set()

    def takes_options(self, name: str) -> None:
        """Let the value of this argument be another program's option, such as --qos=long."""
        self._take_options.add(name)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Do as argparse does, which would take such a value for an option of ours unless it is joined by `=`."""
        command_line = iter(sys.argv[1:] if args is None else args)
        joined = []
        for word in command_line:
            value = next(command_line, None) if word in self._take_options else None
            joined.append(word if value is None else f"{word}={value}")
        return super().parse_known_args(joined, namespace)

    def error(self, message: str) -> NoReturn:
        command = self.prog.partition(" ")[2]
        raise UserError(f"{command}: " * bool(command) + f"{message.rstrip('.')}. See --help.")

    def add_subparsers(self, **options: Any) -> Any:
        action = super().add_subparsers(**options)
        action.type = str  # the subcommand's own parser checks its arguments and knows their names
        return action


class ConfigParts(NamedTuple):
    """Arguments that make up a config, in the order of `config.loader.load`."""

    files: list[str]
    overrides: list[str]


def count(text: str) -> int:
    """Parse a whole number of at least 1: the `type` of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; received {text!r}")
    return int(text)


def above_0(text: str) -> float:
    """Parse a finite number above 0: the `type` of an argument."""
    if not is_number(text) or not float(text) > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0; received {text!r}")
    return float(text)


def several(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the `type` of an argument that holds several values of another type, such as 1,2,4."""
    return lambda text: [parse(word) for word in text.split(",")]


def add_config(parser: argparse.ArgumentParser, help_line: str, *, required: bool = False) -> None:
    parser.add_argument("--config", nargs="+", action="extend", required=required, metavar="YAML", help=help_line)


def add_config_arguments(
    parser: argparse.ArgumentParser, help_line: str = "config files; later ones win", *, required: bool = True
) -> None:
    add_config(parser, help_line, required=required)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings; they win over the files")
    parser.add_argument("--output-dir", metavar="DIR", help="the run directory; the same as output_dir=DIR")


def config_parts(arguments: argparse.Namespace) -> ConfigParts:
    """Return the files and overrides of `add_config_arguments`. Raises UserError for a stray argument."""
    files, overrides = split_overrides(arguments.config)
    stray, more_overrides = split_overrides(arguments.overrides)
    if stray:
        raise UserError(f"argument {stray[0]!r}: expected section.key=value, or --config before the name of a config.")
    return ConfigParts(files, [*overrides, *more_overrides])


def load_config(arguments: argparse.Namespace) -> tuple[Config, Origins]:
    """Read the config that the arguments of `add_config_arguments` make up. Raises UserError."""
    config, origins = load(*config_parts(arguments))
    if arguments.output_dir is not None:
        key, path = "output_dir", arguments.output_dir
        if problem := text_problem(key, path) or path_problem(key, path):
            raise UserError(f"--output-dir: {problem}")
        config = dataclasses.replace(config, output_dir=arguments.output_dir)
        origins["output_dir"] = "--output-dir"
    return config, origins


def load_from_arguments(arguments: Iterable[str]) -> Config:
    """Read the config that the arguments after --config make up. Raises UserError."""
    config, _ = load(*split_overrides(arguments))
    return config


def require_output_dir(config: Config) -> str:
    if not config.output_dir:
        raise UserError("output_dir: is required: the folder that the run writes to. Give --output-dir DIR.")
    return config.output_dir


def split_overrides(arguments: Iterable[str]) -> ConfigParts:
    """Separate overrides from files: argparse adds overrides that follow `--config FILE` to the files.

    An argument that is an existing path is a file, even if it has a = in it, as runs/lr=0.1 has.
    """
    files: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        (overrides if "=" in argument and not os.path.exists(argument) else files).append(argument)
    return ConfigParts(files, overrides)


def _finite(text: str) -> float:
    if not is_number(text):
        raise argparse.ArgumentTypeError(f"expected a number; received {text!r}")
    return float(text)


def _local(text: str) -> str:
    if problem := remote_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return text
