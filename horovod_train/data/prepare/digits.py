"""Handwritten digits from scikit-learn, in the records of `idx`: 1437 for training, 360 for evaluation.

Scaled from 8×8 to 28×28, so that models for MNIST run on them unchanged. --seed draws which are for evaluation.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from horovod_train.data.prepare.idx import IMAGE_SCHEMA
from horovod_train.data.prepare.writing import (
    DEFAULT_SEED,
    Encode,
    Splits,
    encode_rows,
    split_by_count,
    write_dataset,
    write_once,
)

EVAL_RECORDS = 360
SHARDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=SHARDS, help="files a split; default %(default)s")


def run(arguments: argparse.Namespace) -> None:
    write_dataset(arguments, IMAGE_SCHEMA, *_records(arguments.seed))


def prepare_once(folder: Path) -> None:
    """Do as `prepare digits --out folder`, if there is no such dataset yet. Several processes may call this at a time.

    Raises OSError.
    """
    write_once(folder, IMAGE_SCHEMA, lambda: _records(DEFAULT_SEED), SHARDS)


def _records(seed: int) -> tuple[Splits, Encode]:
    images, labels = load_digits()
    encode = encode_rows(IMAGE_SCHEMA, {"image_raw": images, "label": labels})
    return split_by_count(len(labels), EVAL_RECORDS, seed), encode


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 [1797, 28, 28] and labels int64 [1797]."""
    from sklearn import datasets  # takes a second, which only those who read the digits need to wait

    small, labels = datasets.load_digits(return_X_y=True)
    images = np.stack([_enlarge(image) for image in small.reshape(-1, 8, 8)])
    return np.clip(np.rint(images * (255 / 16)), 0, 255).astype(np.uint8), labels.astype(np.int64)


def _enlarge(image: np.ndarray) -> np.ndarray:
    """Enlarge 8×8 to 28×28: bilinear to 24×24, then a border of 2, as in MNIST."""
    centres = (np.arange(24) + 0.5) / 3 - 0.5
    wide = np.stack([np.interp(centres, np.arange(8), row) for row in image])
    tall = np.stack([np.interp(centres, np.arange(8), column) for column in wide.T]).T
    return np.pad(tall, 2)
