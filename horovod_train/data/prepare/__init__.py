"""The command `prepare`: makes TFRecords with their dataset.json and index from other forms of data.

KINDS lists what it makes records from; each kind is defined where its records are made.
"""

from __future__ import annotations

import argparse

from horovod_train.data.prepare import images, samples, tables
from horovod_train.data.prepare.writing import DEFAULT_SEED

KINDS = {
    "digits": images.DIGITS,
    "idx": images.IDX,
    "npz": tables.NPZ,
    "csv": tables.CSV,
    "images": images.IMAGES,
    "mlp-samples": samples.MLP,
    "token-samples": samples.TOKENS,
    "imagenet-samples": samples.IMAGENET,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, kind in KINDS.items():
        kind_parser = kinds.add_parser(name, help=kind.about.splitlines()[0], description=kind.about)
        kind_parser.add_argument("--out", required=True, metavar="DIR", help="folder to make")
        kind_parser.add_argument("--force", action="store_true", help="replace DIR if it exists")
        kind_parser.add_argument(
            "--seed", type=int, default=DEFAULT_SEED, help="of every random choice; default %(default)s"
        )
        kind.add_arguments(kind_parser)


def run(arguments: argparse.Namespace) -> int:
    KINDS[arguments.kind].run(arguments)
    return 0
