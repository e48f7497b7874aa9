"""The parser of every command: it refuses remote paths, and reports errors in one line."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from horovod_train.config.loader import remote_problem
from horovod_train.errors import UserError


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit. Subcommands get a parser of the same class."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # For every argument without another type, so that no path escapes the check.
        self.register("type", None, _local)

    def error(self, message: str) -> NoReturn:
        command = self.prog.partition(" ")[2]
        raise UserError(f"{command}: " * bool(command) + f"{message.rstrip('.')}. See --help.")

    def add_subparsers(self, **options: Any) -> Any:
        action = super().add_subparsers(**options)
        action.type = str  # the subcommand's own parser checks its arguments and knows their names
        return action


def _local(text: str) -> str:
    if problem := remote_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return text
