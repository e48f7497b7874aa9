"""Generated samples for a small MLP: five small integers and a 0/1 label from a rule that --seed draws."""

from __future__ import annotations

import argparse

import numpy as np

from horovod_train.data import counter_rng
from horovod_train.data.prepare import samples
from horovod_train.data.prepare.writing import encode_rows
from horovod_train.data.schema import Feature, Schema

SCHEMA = Schema(
    {"sample": Feature("int64", (5,), cast="float32"), "label": Feature("int64", cast="float32", classes=2)},
    ("sample",),
    ("label",),
)
_SAMPLES, _RULE = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    samples.add_arguments(parser, records=10_000, eval_records=1_000)


def run(arguments: argparse.Namespace) -> None:
    values, labels = make_samples(samples.count(arguments), arguments.seed)
    samples.write(arguments, SCHEMA, encode_rows(SCHEMA, {"sample": values, "label": labels}))


def make_samples(records: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make samples int64 [records, 5] from -4 to 4, and labels: 1 if a weighted sum of a sample is positive."""
    uniforms = counter_rng.uniforms(counter_rng.key(seed, _SAMPLES), np.arange(records), 5)
    values = np.floor(uniforms * 9).astype(np.int64) - 4
    weights = counter_rng.uniforms(counter_rng.key(seed, _RULE), np.arange(1), 5)[0] - 0.5
    return values, (values @ weights > 0).astype(np.int64)
