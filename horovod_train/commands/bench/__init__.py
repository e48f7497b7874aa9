"""The command `bench`: measures a part of the trainer against other ways to do the same, taking turns.

python -m horovod_train.main bench input data/digits/train
"""

from __future__ import annotations

import argparse
import importlib

KINDS = {
    "input": ("horovod_train.commands.bench.input", "reading, parsing and batching, on one rank"),
    "exchange": ("horovod_train.commands.bench.exchange", "ways for the ranks of this host to exchange gradients"),
    "scaling": ("horovod_train.commands.bench.scaling", "a config on 1, 2, 4 … ranks of this host"),
    "peers": ("horovod_train.commands.bench.peers", "stock Horovod, tf.distribute and PyTorch beside this project"),
}
"""name → (module with add_arguments(parser) and run(arguments) → exit code, one line of help)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (module, line) in KINDS.items():
        importlib.import_module(module).add_arguments(kinds.add_parser(name, help=line, description=line))


def run(arguments: argparse.Namespace) -> int:
    return int(importlib.import_module(KINDS[arguments.kind][0]).run(arguments))
