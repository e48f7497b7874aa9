"""Synthetic samples in S1's format: five small integers and a 0/1 label from a rule that --seed draws."""

from __future__ import annotations

import argparse

import numpy as np

from horovod_train.data import counter_rng
from horovod_train.data.features import Feature
from horovod_train.data.prepare.writing import split_by_count, write_dataset
from horovod_train.data.schema import Schema
from horovod_train.errors import UserError

SCHEMA = Schema(
    {"sample": Feature("int64", (5,), cast="float32"), "label": Feature("int64", cast="float32", classes=2)},
    ("sample",),
    ("label",),
)
_SAMPLES, _RULE = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=int, default=10_000, help="to train on; default %(default)s")
    parser.add_argument("--eval-records", type=int, default=1_000, help="to evaluate; default %(default)s")
    parser.add_argument("--shards", type=int, default=4, help="files a split; default %(default)s")


def run(arguments: argparse.Namespace) -> None:
    if arguments.records < 1 or arguments.eval_records < 0:
        raise UserError("--records must be at least 1 and --eval-records at least 0.")
    samples, labels = make_samples(arguments.records + arguments.eval_records, arguments.seed)
    write_dataset(
        arguments.out,
        SCHEMA,
        split_by_count(len(labels), arguments.eval_records, arguments.seed),
        lambda record: {"sample": samples[record], "label": labels[record]},
        shards=arguments.shards,
        force=arguments.force,
    )


def make_samples(records: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make samples int64 [records, 5] from -4 to 4, and labels: 1 if a weighted sum of a sample is positive."""
    uniforms = counter_rng.uniforms(counter_rng.key(seed, _SAMPLES), np.arange(records), 5)
    samples = np.floor(uniforms * 9).astype(np.int64) - 4
    weights = counter_rng.uniforms(counter_rng.key(seed, _RULE), np.arange(1), 5)[0] - 0.5
    return samples, (samples @ weights > 0).astype(np.int64)
