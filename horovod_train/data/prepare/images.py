"""JPEG and PNG files, one folder per class, as records with ImageNet's names: image/encoded and image/class/label.

Labels count from 0, in the order of the folders' names. Files are stored unchanged.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from horovod_train.config.registry import import_extra
from horovod_train.data.features import Feature
from horovod_train.data.prepare.writing import Values, add_split_arguments, split_by_fraction, write_dataset
from horovod_train.data.schema import Schema
from horovod_train.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", required=True, metavar="DIR", help="with a folder for each class")
    parser.add_argument("--eval-images", metavar="DIR", help="images to evaluate on, in folders of the same names")
    parser.add_argument("--size", type=int, default=224, help="height and width the model gets; default %(default)s")
    parser.add_argument("--channels", type=int, choices=(1, 3), default=3, help="1: grey; default %(default)s")
    add_split_arguments(parser, "--images")


def run(arguments: argparse.Namespace) -> None:
    classes, files = list_images(arguments.images)
    eval_files = None
    if arguments.eval_images:
        eval_classes, eval_files = list_images(arguments.eval_images)
        unknown = sorted(set(eval_classes) - set(classes))
        if unknown:
            raise UserError(f"--eval-images {arguments.eval_images}: {unknown[0]} is no class of {arguments.images}.")
    splits = split_by_fraction(len(files), arguments, None if eval_files is None else len(eval_files))
    files += eval_files or []
    labels = {name: label for label, name in enumerate(classes)}

    def encode(record: int) -> Values:
        path = files[record]
        name = path.parent.name
        return {
            "image/encoded": _read(path),
            "image/class/label": labels[name],
            "image/class/text": name,
            "image/filename": path.name,
        }

    schema = image_folder_schema(arguments.size, arguments.channels, len(classes))
    write_dataset(arguments, schema, splits, encode)


def image_folder_schema(size: int, channels: int, classes: int) -> Schema:
    """Return a schema: images cut to a square of `size` from the centre, and scaled to [-1, 1]."""
    if size < 1:
        raise UserError(f"--size must be at least 1; received {size}.")
    image = Feature("bytes", (size, size, channels), decode="image", resize="crop", scale=1 / 127.5, offset=-1.0)
    features = {"image/encoded": image, "image/class/label": Feature("int64", classes=classes)}
    return Schema(features, ("image/encoded",), ("image/class/label",))


def class_names(folder: str) -> list[str]:
    """Return the names of a folder's subfolders, sorted, without hidden ones."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def list_images(folder: str) -> tuple[list[str], list[Path]]:
    """Return the classes, and the images of all of them, in order of names. Raises UserError."""
    try:
        classes = class_names(folder)
        files = [path for name in classes for path in sorted(Path(folder, name).iterdir())]
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}.") from error
    images = [path for path in files if path.suffix.lower() in SUFFIXES]
    if not images:
        raise UserError(f"{folder}: expected a folder for each class, with {', '.join(SUFFIXES)} files; found none.")
    return classes, images


def _read(path: Path) -> bytes:
    """Return the file's bytes, after Pillow has verified that it is a complete image."""
    pillow = import_extra("PIL.Image", "images", "prepare images")
    try:
        with pillow.open(path) as image:
            image.load()
        return path.read_bytes()
    except pillow.UnidentifiedImageError as error:
        raise UserError(f"{path}: is neither JPEG nor PNG. Remove it or put an image there.") from error
    except (OSError, SyntaxError, pillow.DecompressionBombError) as error:
        raise UserError(f"{path}: cannot be read as an image: {error}.") from error
