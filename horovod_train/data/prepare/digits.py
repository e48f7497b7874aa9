"""Handwritten digits from scikit-learn, in the records of `idx`: 1437 for training, 360 for evaluation.

Scaled from 8×8 to 28×28, so that models for MNIST run on them unchanged. --seed draws which are for evaluation.
"""

from __future__ import annotations

import argparse

import numpy as np

from horovod_train.config.registry import import_extra
from horovod_train.data.prepare.idx import IMAGE_SCHEMA
from horovod_train.data.prepare.writing import encode_rows, split_by_count, write_dataset

EVAL_RECORDS = 360


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=5, help="files a split; default %(default)s")


def run(arguments: argparse.Namespace) -> None:
    images, labels = load_digits()
    splits = split_by_count(len(labels), EVAL_RECORDS, arguments.seed)
    write_dataset(arguments, IMAGE_SCHEMA, splits, encode_rows(IMAGE_SCHEMA, {"image_raw": images, "label": labels}))


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 [1797, 28, 28] and labels int64 [1797]."""
    small, labels = import_extra("sklearn.datasets", "digits", "prepare digits").load_digits(return_X_y=True)
    images = np.stack([_enlarge(image) for image in small.reshape(-1, 8, 8)])
    return np.clip(np.rint(images * (255 / 16)), 0, 255).astype(np.uint8), labels.astype(np.int64)


def _enlarge(image: np.ndarray) -> np.ndarray:
    """Enlarge 8×8 to 28×28: bilinear to 24×24, then a border of 2, as in MNIST."""
    centres = (np.arange(24) + 0.5) / 3 - 0.5
    wide = np.stack([np.interp(centres, np.arange(8), row) for row in image])
    tall = np.stack([np.interp(centres, np.arange(8), column) for column in wide.T]).T
    return np.pad(tall, 2)
