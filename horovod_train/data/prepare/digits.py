"""Small grey images with one label each: files in the format of MNIST, and the handwritten digits of scikit-learn."""

from __future__ import annotations

import argparse
import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from horovod_train.data.prepare.tables import Arrays, join_splits
from horovod_train.data.prepare.writing import (
    DEFAULT_SEED,
    Encode,
    Kind,
    Splits,
    add_split_arguments,
    encode_rows,
    split_by_count,
    write_dataset,
    write_once,
)
from horovod_train.data.schema import Feature, Schema
from horovod_train.errors import UserError, reading

_EVAL_RECORDS = 360
_SHARDS = 5


def _image_schema(height: int, width: int, classes: int) -> Schema:
    """Return a schema: pixels as raw bytes, scaled to x / 255 - 0.5; one label."""
    image = Feature("bytes", (height, width, 1), decode="raw", cast="float32", scale=1 / 255, offset=-0.5)
    return Schema({"image_raw": image, "label": Feature("int64", classes=classes)}, ("image_raw",), ("label",))


IMAGE_SCHEMA = _image_schema(28, 28, 10)

# --- the digits of scikit-learn ---------------------------------------------------------------------------------


def _add_digits_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=_SHARDS, help="files a split; default %(default)s")


def _write_digits(arguments: argparse.Namespace) -> None:
    write_dataset(arguments, IMAGE_SCHEMA, *_digits(arguments.seed))


def prepare_once(folder: Path) -> None:
    """Do as `prepare digits --out folder`, if there is no such dataset yet. Several processes may call this at a time.

    Raises OSError.
    """
    write_once(folder, IMAGE_SCHEMA, lambda: _digits(DEFAULT_SEED), _SHARDS)


def _digits(seed: int) -> tuple[Splits, Encode]:
    images, labels = load_digits()
    encode = encode_rows(IMAGE_SCHEMA, {"image_raw": images, "label": labels})
    return split_by_count(len(labels), _EVAL_RECORDS, seed), encode


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


DIGITS = Kind(
    """Handwritten digits from scikit-learn, in the records of `idx`: 1437 for training, 360 for evaluation.

    Scaled from 8×8 to 28×28, so that models for MNIST run on them unchanged. --seed draws which are for evaluation.
    """,
    _add_digits_arguments,
    _write_digits,
)

# --- files in the format of MNIST -------------------------------------------------------------------------------


def _add_idx_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", required=True, metavar="FILE", help="for example train-images-idx3-ubyte.gz")
    parser.add_argument("--labels", required=True, metavar="FILE", help="for example train-labels-idx1-ubyte.gz")
    parser.add_argument("--eval-images", metavar="FILE", help="to evaluate on; default: a fraction of --images")
    parser.add_argument("--eval-labels", metavar="FILE", help="their labels")
    add_split_arguments(parser, "--images")


def _write_idx(arguments: argparse.Namespace) -> None:
    if bool(arguments.eval_images) != bool(arguments.eval_labels):
        raise UserError("--eval-images and --eval-labels: give both or neither.")
    arrays = _load_pair(arguments.images, arguments.labels)
    eval_arrays = _load_pair(arguments.eval_images, arguments.eval_labels) if arguments.eval_images else None
    arrays, splits = join_splits(arguments, arrays, eval_arrays, arguments.eval_images)
    _, height, width = arrays["image_raw"].shape
    schema = _image_schema(height, width, int(arrays["label"].max()) + 1)
    write_dataset(arguments, schema, splits, encode_rows(schema, arrays))


def _load_pair(image_file: str, label_file: str) -> Arrays:
    """Return image_raw uint8 [n, height, width] and label uint8 [n]. Raises UserError."""
    images, labels = load_idx(image_file, 3), load_idx(label_file, 1)
    if not len(images):
        raise UserError(f"{image_file}: holds no image.")
    if len(images) != len(labels):
        raise UserError(f"{image_file} holds {len(images)} images, {label_file} {len(labels)} labels; they must match.")
    return {"image_raw": images, "label": labels}


def load_idx(path: str, dimensions: int) -> np.ndarray:
    """Read one idx file: two zero bytes, type 8 (uint8), the number of dimensions, their big-endian sizes, the data."""
    try:
        with reading(path):
            data = Path(path).read_bytes()
            data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path}: the gzip file is broken: {error}.") from error
    start = 4 + 4 * dimensions
    if data[:4] != bytes([0, 0, 8, dimensions]) or len(data) < start:
        raise UserError(f"{path}: is no idx file of uint8 with {dimensions} dimensions: it begins {data[:4].hex()}.")
    shape = struct.unpack(f">{dimensions}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise UserError(f"{path}: {shape} needs {math.prod(shape)} bytes of data; the file has {len(data) - start}.")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


IDX = Kind(
    "Files in the format of MNIST (idx, gzipped or not), as records with image_raw, bytes, and label, int64.",
    _add_idx_arguments,
    _write_idx,
)
