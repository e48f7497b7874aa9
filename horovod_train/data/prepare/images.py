"""Images with one label each: files in a folder for each class, files in the format of MNIST, scikit-learn's digits."""

from __future__ import annotations

import argparse
import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from horovod_train.config.registry import import_extra
from horovod_train.data.files import left_out_note, loose_files
from horovod_train.data.prepare.tables import Arrays, join_splits
from horovod_train.data.prepare.writing import (
    DEFAULT_SEED,
    Encode,
    Kind,
    Splits,
    Values,
    add_split_arguments,
    encode_rows,
    split_by_count,
    split_by_fraction,
    write_dataset,
    write_once,
)
from horovod_train.data.schema import Feature, Schema
from horovod_train.errors import RunError, UserError, one_line, reading
from horovod_train.output.console import to_stdout
from horovod_train.shown_text import listed

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
"""The same, as Pillow calls them."""
NOT_READ = (".tif", ".tiff", ".jfif", ".avif", ".heic", ".jp2", ".ppm", ".pgm")
"""Suffixes of images that are not read. A folder of these is one of images, too, and messages name its files."""
MADE_BY_PROGRAMS = {"@eaDir", "__MACOSX", "__pycache__", "lost+found"}
"""Folders that programs make beside a user's: for thumbnails, by archives of macOS, by Python, by file systems."""
_EVAL_DIGITS = 360
_DIGITS_SHARDS = 5

# --- JPEG, PNG, WebP, BMP and GIF files, in a folder for each class ---------------------------------------------


class ImageList(NamedTuple):
    """The images of a folder that has a folder for each class."""

    classes: list[str]
    files: list[Path]
    """In order of the classes' names, and then of their own."""
    note: str
    """What else is there and is not read; "" if nothing."""


def _add_folder_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", required=True, metavar="DIR", help="with a folder for each class")
    parser.add_argument("--eval-images", metavar="DIR", help="images to evaluate on, in folders of the same names")
    parser.add_argument("--size", type=int, default=224, help="height and width the model gets; default %(default)s")
    parser.add_argument("--channels", type=int, choices=(1, 3), default=3, help="1: grey; default %(default)s")
    add_split_arguments(parser, "--images")


def _write_folders(arguments: argparse.Namespace) -> None:
    classes, files, note = list_images(arguments.images)
    eval_files, notes = None, [note]
    if arguments.eval_images:
        eval_classes, eval_files, note = list_images(arguments.eval_images)
        notes.append(note)
        if unknown := sorted(set(eval_classes) - set(classes)):
            raise UserError(f"--eval-images {arguments.eval_images}: {unknown[0]} is no class of {arguments.images}.")
    for note in filter(None, notes):
        to_stdout(f"note: {note}")
    splits = split_by_fraction(len(files), arguments, None if eval_files is None else len(eval_files))
    files += eval_files or []
    labels = {name: label for label, name in enumerate(classes)}

    def encode(record: int) -> Values:
        path = files[record]
        name = path.parent.name
        return {
            "image/encoded": _read(path, image),
            "image/class/label": labels[name],
            "image/class/text": name,
            "image/filename": path.name,
        }

    if arguments.size < 1:
        raise UserError(f"--size must be at least 1; received {arguments.size}.")
    # Images are cut to a square from the centre, and scaled to [-1, 1].
    shape = (arguments.size, arguments.size, arguments.channels)
    image = Feature("bytes", shape, decode="image", resize="crop", scale=1 / 127.5, offset=-1.0)
    label = Feature("int64", classes=len(classes), class_names=tuple(classes))
    features = {"image/encoded": image, "image/class/label": label}
    write_dataset(arguments, Schema(features, ("image/encoded",), ("image/class/label",)), splits, encode)


def class_names(folder: str) -> list[str]:
    """Return the names of a folder's subfolders, sorted, without hidden ones and those that programs make unasked."""
    names = (entry.name for entry in os.scandir(folder) if entry.is_dir())
    return sorted(name for name in names if not name.startswith(".") and name not in MADE_BY_PROGRAMS)


def list_images(folder: str) -> ImageList:
    """List a folder that has a folder for each class. Raises UserError if there is no image.

    Only regular files are images: reading a named pipe would wait for ever.
    """
    images, others = list[Path](), loose_files(folder)
    with reading(folder):
        classes = class_names(folder)
        for name in classes:
            for entry in sorted(os.scandir(os.path.join(folder, name)), key=lambda entry: entry.name):
                if entry.name.startswith("."):  # as macOS writes beside files on disks of others: ._1.jpg
                    continue
                if entry.name.lower().endswith(SUFFIXES) and entry.is_file():
                    images.append(Path(entry.path))
                else:
                    others.append(os.path.join(name, entry.name))
    kinds = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
    if not images:
        found = listed(others, 3) or "none"
        raise UserError(f"{folder}: expected a folder for each class, with {kinds} files; found {found}.")
    return ImageList(classes, images, left_out_note(folder, others, f"{kinds} in its folders"))


def _read(path: Path, feature: Feature) -> bytes:
    """Return the file's bytes, after Pillow and TensorFlow have decoded it. Raises UserError if training could not."""
    from horovod_train.data.transforms import image_problem  # loads TensorFlow

    pillow = import_extra("PIL.Image", "images", "prepare images")
    try:
        with pillow.open(path, formats=_FORMATS) as image:
            image.load()
            kind, mode, is_animated = image.format, image.mode, getattr(image, "is_animated", False)
        if feature.shape[2] == 1 and kind in ("WEBP", "BMP", "GIF"):
            raise UserError(f"{path}: TensorFlow decodes {kind} in colours only. Store it as PNG, or use --channels 3.")
        if (kind, is_animated) == ("WEBP", True) or (kind, mode) == ("BMP", "P"):
            what = "an animation" if is_animated else "a palette, which is ignored"
            raise UserError(f"{path}: TensorFlow does not decode a {kind} with {what}. Store it as PNG.")
        content = path.read_bytes()
        if problem := image_problem(feature, content):
            raise UserError(f"{path}: {problem}.")
        return content
    except pillow.UnidentifiedImageError as error:
        raise UserError(f"{path}: is no JPEG, PNG, WebP, BMP or GIF. Remove it or put an image there.") from error
    except (RunError, MemoryError):
        raise
    except Exception as error:  # Pillow raises whatever a damaged file, or one with much beside its pixels, leads to
        raise UserError(f"{path}: cannot be read as an image: {one_line(error)}.") from error


IMAGES = Kind(
    """Image files, one folder per class, as records with ImageNet's names: image/encoded and image/class/label.

    Labels count from 0, in the order of the folders' names. Files are stored
    unchanged: JPEG, PNG, WebP, BMP and GIF.
    """,
    _add_folder_arguments,
    _write_folders,
)

# --- files in the format of MNIST -------------------------------------------------------------------------------


def _grey_schema(height: int, width: int, classes: int) -> Schema:
    """Return a schema of grey images: pixels as raw bytes, scaled to x / 255 - 0.5; one label."""
    image = Feature("bytes", (height, width, 1), decode="raw", cast="float32", scale=1 / 255, offset=-0.5)
    return Schema({"image_raw": image, "label": Feature("int64", classes=classes)}, ("image_raw",), ("label",))


GREY_SCHEMA = _grey_schema(28, 28, 10)


def _add_idx_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", required=True, metavar="FILE", help="for example train-images-idx3-ubyte.gz")
    parser.add_argument("--labels", required=True, metavar="FILE", help="for example train-labels-idx1-ubyte.gz")
    parser.add_argument("--eval-images", metavar="FILE", help="to evaluate on; else --eval-fraction of --images")
    parser.add_argument("--eval-labels", metavar="FILE", help="their labels")
    add_split_arguments(parser, "--images")


def _write_idx(arguments: argparse.Namespace) -> None:
    if bool(arguments.eval_images) != bool(arguments.eval_labels):
        raise UserError("--eval-images and --eval-labels: give both or neither.")
    arrays = _load_pair(arguments.images, arguments.labels)
    eval_arrays = _load_pair(arguments.eval_images, arguments.eval_labels) if arguments.eval_images else None
    arrays, splits = join_splits(arguments, arrays, eval_arrays, arguments.eval_images)
    _, height, width = arrays["image_raw"].shape
    schema = _grey_schema(height, width, int(arrays["label"].max()) + 1)
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

# --- the digits of scikit-learn ---------------------------------------------------------------------------------


def _add_digits_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=_DIGITS_SHARDS, help="files a split; default %(default)s")


def _write_digits(arguments: argparse.Namespace) -> None:
    write_dataset(arguments, GREY_SCHEMA, *_digits(arguments.seed))


def prepare_digits_once(folder: Path) -> None:
    """Do as `prepare digits --out folder`, if there is no such dataset yet. Several processes may call this at a time.

    Raises OSError.
    """
    write_once(folder, GREY_SCHEMA, lambda: _digits(DEFAULT_SEED), _DIGITS_SHARDS)


def _digits(seed: int) -> tuple[Splits, Encode]:
    images, labels = load_digits()
    encode = encode_rows(GREY_SCHEMA, {"image_raw": images, "label": labels})
    return split_by_count(len(labels), _EVAL_DIGITS, seed), encode


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
