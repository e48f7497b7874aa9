"""Files in the format of MNIST (idx, gzipped or not), as records with image_raw, bytes, and label, int64."""

from __future__ import annotations

import argparse
import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from horovod_train.data.prepare.arrays import Arrays, join_splits
from horovod_train.data.prepare.writing import add_split_arguments, encode_rows, write_dataset
from horovod_train.data.schema import Feature, Schema
from horovod_train.errors import UserError


def image_schema(height: int, width: int, classes: int) -> Schema:
    """Return a schema: pixels as raw bytes, scaled to x / 255 - 0.5; one label."""
    image = Feature("bytes", (height, width, 1), decode="raw", cast="float32", scale=1 / 255, offset=-0.5)
    return Schema({"image_raw": image, "label": Feature("int64", classes=classes)}, ("image_raw",), ("label",))


IMAGE_SCHEMA = image_schema(28, 28, 10)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", required=True, metavar="FILE", help="for example train-images-idx3-ubyte.gz")
    parser.add_argument("--labels", required=True, metavar="FILE", help="for example train-labels-idx1-ubyte.gz")
    parser.add_argument("--eval-images", metavar="FILE", help="to evaluate on; default: a fraction of --images")
    parser.add_argument("--eval-labels", metavar="FILE", help="their labels")
    add_split_arguments(parser, "--images")


def run(arguments: argparse.Namespace) -> None:
    if bool(arguments.eval_images) != bool(arguments.eval_labels):
        raise UserError("--eval-images and --eval-labels: give both or neither.")
    arrays = load_pair(arguments.images, arguments.labels)
    eval_arrays = load_pair(arguments.eval_images, arguments.eval_labels) if arguments.eval_images else None
    arrays, splits = join_splits(arguments, arrays, eval_arrays, arguments.eval_images)
    _, height, width = arrays["image_raw"].shape
    schema = image_schema(height, width, int(arrays["label"].max()) + 1)
    write_dataset(arguments, schema, splits, encode_rows(schema, arrays))


def load_pair(image_file: str, label_file: str) -> Arrays:
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
        data = Path(path).read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path}: the gzip file is broken: {error}.") from error
    start = 4 + 4 * dimensions
    if data[:4] != bytes([0, 0, 8, dimensions]) or len(data) < start:
        raise UserError(f"{path}: is no idx file of uint8 with {dimensions} dimensions: it begins {data[:4].hex()}.")
    shape = struct.unpack(f">{dimensions}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise UserError(f"{path}: {shape} needs {math.prod(shape)} bytes of data; the file has {len(data) - start}.")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
