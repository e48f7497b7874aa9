"""The command `bench`: measures how fast a user's data is read, and a user's config trains, on this host.

python -m horovod_train.main bench input data/digits/train
python -m horovod_train.main bench scaling --config configs/digits_convnet.yaml --np 1,2
"""

from __future__ import annotations

import argparse
import importlib

KINDS = {
    "input": ("horovod_train.commands.bench.input", "reading, parsing and batching, on one rank"),
    "scaling": ("horovod_train.commands.bench.scaling", "a config on 1, 2, 4 … ranks of this host"),
}
"""name → (module with add_arguments(parser) and run(arguments) → exit code, one line of help)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (module, line) in KINDS.items():
        importlib.import_module(module).add_arguments(kinds.add_parser(name, help=line, description=line))


def run(arguments: argparse.Namespace) -> int:
    return int(importlib.import_module(KINDS[arguments.kind][0]).run(arguments))
