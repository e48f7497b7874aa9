"""The command `settings`: every setting of a config, with its type, default and meaning.

python -m horovod_train.main settings checkpoint
python -m horovod_train.main settings --json-schema > horovod_train.schema.json
"""

from __future__ import annotations

import argparse
import json
import sys

from horovod_train.commands.cli import build_table, open_screen
from horovod_train.config.reference import entries, json_schema, markdown
from horovod_train.config.registry import suggest
from horovod_train.errors import UserError


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
