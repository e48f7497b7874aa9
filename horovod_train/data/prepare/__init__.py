"""The command `prepare`: makes TFRecords with their dataset.json and index from other forms of data.

Each kind has a file here; this module knows only the command line.
"""

from __future__ import annotations

import argparse

from horovod_train.data.prepare import (
    arrays,
    csv_table,
    digits,
    idx,
    imagenet_samples,
    images,
    mlp_samples,
    token_samples,
)
from horovod_train.data.prepare.writing import DEFAULT_SEED

KINDS = {
    "digits": digits,
    "idx": idx,
    "npz": arrays,
    "csv": csv_table,
    "images": images,
    "mlp-samples": mlp_samples,
    "token-samples": token_samples,
    "imagenet-samples": imagenet_samples,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, module in KINDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        kind = kinds.add_parser(name, help=summary, description=module.__doc__)
        kind.add_argument("--out", required=True, metavar="DIR", help="folder to make")
        kind.add_argument("--force", action="store_true", help="replace DIR if it exists")
        kind.add_argument("--seed", type=int, default=DEFAULT_SEED, help="of every random choice; default %(default)s")
        module.add_arguments(kind)


def run(arguments: argparse.Namespace) -> int:
    KINDS[arguments.kind].run(arguments)
    return 0
