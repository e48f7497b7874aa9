"""JPEG, PNG, WebP, BMP and GIF files, in a folder for each class."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NamedTuple

from horovod_train.config.registry import import_extra
from horovod_train.data.files import left_out_note, loose_files
from horovod_train.data.prepare.writing import Kind, Values, add_split_arguments, split_by_fraction, write_dataset
from horovod_train.data.schema import Feature, Schema
from horovod_train.errors import RunError, UserError, one_line, reading
from horovod_train.output.console import to_stdout
from horovod_train.shown_text import listed

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
"""The same, as Pillow calls them."""
NOT_READ = (".tif", ".tiff", ".jfif", ".avif", ".heic", ".jp2", ".ppm", ".pgm")
"""Suffixes of images that are not read. A folder of these is one of images, too, and messages name its files."""


class ImageList(NamedTuple):
    """The images of a folder that has a folder for each class."""

    classes: list[str]
    files: list[Path]
    """In order of the classes' names, and then of their own."""
    note: str
    """What else is there and is not read; "" if nothing."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", required=True, metavar="DIR", help="with a folder for each class")
    parser.add_argument("--eval-images", metavar="DIR", help="images to evaluate on, in folders of the same names")
    parser.add_argument("--size", type=int, default=224, help="height and width the model gets; default %(default)s")
    parser.add_argument("--channels", type=int, choices=(1, 3), default=3, help="1: grey; default %(default)s")
    add_split_arguments(parser, "--images")


def _write(arguments: argparse.Namespace) -> None:
    classes, files, note = list_images(arguments.images)
    eval_files, notes = None, [note]
    if arguments.eval_images:
        eval_classes, eval_files, note = list_images(arguments.eval_images)
        notes.append(note)
        unknown = sorted(set(eval_classes) - set(classes))
        if unknown:
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
            "image/encoded": _read(path, arguments.channels),
            "image/class/label": labels[name],
            "image/class/text": name,
            "image/filename": path.name,
        }

    if arguments.size < 1:
        raise UserError(f"--size must be at least 1; received {arguments.size}.")
    # Images are cut to a square from the centre, and scaled to [-1, 1].
    shape = (arguments.size, arguments.size, arguments.channels)
    image = Feature("bytes", shape, decode="image", resize="crop", scale=1 / 127.5, offset=-1.0)
    features = {"image/encoded": image, "image/class/label": Feature("int64", classes=len(classes))}
    write_dataset(arguments, Schema(features, ("image/encoded",), ("image/class/label",)), splits, encode)


def class_names(folder: str) -> list[str]:
    """Return the names of a folder's subfolders, sorted, without hidden ones."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def list_images(folder: str) -> ImageList:
    """List a folder that has a folder for each class. Raises UserError if there is no image.

    Only regular files are images: reading a named pipe would wait for ever.
    """
    images, others = list[Path](), loose_files(folder)
    with reading(folder):
        classes = class_names(folder)
        for name in classes:
            for entry in sorted(os.scandir(os.path.join(folder, name)), key=lambda entry: entry.name):
                if entry.name.lower().endswith(SUFFIXES) and entry.is_file():
                    images.append(Path(entry.path))
                elif not entry.name.startswith("."):
                    others.append(os.path.join(name, entry.name))
    kinds = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
    if not images:
        found = listed(others, 3) or "none"
        raise UserError(f"{folder}: expected a folder for each class, with {kinds} files; found {found}.")
    return ImageList(classes, images, left_out_note(folder, others, f"{kinds} in its folders"))


def _read(path: Path, channels: int) -> bytes:
    """Return the file's bytes, after Pillow has verified that it is a complete image that TensorFlow can decode."""
    pillow = import_extra("PIL.Image", "images", "prepare images")
    try:
        with pillow.open(path, formats=_FORMATS) as image:
            image.load()
            kind, mode, is_animated = image.format, image.mode, getattr(image, "is_animated", False)
        if channels == 1 and kind in ("WEBP", "BMP", "GIF"):
            raise UserError(f"{path}: TensorFlow decodes {kind} in colours only. Store it as PNG, or use --channels 3.")
        if (kind, is_animated) == ("WEBP", True) or (kind, mode) == ("BMP", "P"):
            what = "an animation" if is_animated else "a palette, which is ignored"
            raise UserError(f"{path}: TensorFlow does not decode a {kind} with {what}. Store it as PNG.")
        return path.read_bytes()
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
    _add_arguments,
    _write,
)
