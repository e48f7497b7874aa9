"""What the kinds of generated samples share: how many to generate, and the draw of those for evaluation."""

from __future__ import annotations

import argparse

from horovod_train.data.prepare.writing import Encode, split_by_count, write_dataset
from horovod_train.data.schema import Schema
from horovod_train.errors import UserError


def add_arguments(parser: argparse.ArgumentParser, *, records: int, eval_records: int) -> None:
    parser.add_argument("--records", type=int, default=records, help="to train on; default %(default)s")
    parser.add_argument("--eval-records", type=int, default=eval_records, help="to evaluate; default %(default)s")
    parser.add_argument("--shards", type=int, default=4, help="files a split; default %(default)s")


def count(arguments: argparse.Namespace, **minimums: int) -> int:
    """Return the number of records to generate. Raises UserError for an argument below its minimum."""
    for name, minimum in {"records": 1, "eval_records": 0, **minimums}.items():
        value = getattr(arguments, name)
        if value < minimum:
            raise UserError(f"--{name.replace('_', '-')} must be at least {minimum}; received {value}.")
    return arguments.records + arguments.eval_records


def write(arguments: argparse.Namespace, schema: Schema, encode: Encode) -> None:
    """Write as many records as `count` says."""
    splits = split_by_count(count(arguments), arguments.eval_records, arguments.seed)
    write_dataset(arguments, schema, splits, encode)
