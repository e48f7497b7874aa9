"""Image files in a folder for each class: features `image`, the file, and `label`, the number of its folder.

Without labels, as `predict` reads them: the images of a folder, of a glob, or one file.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from horovod_train.config.paths import is_remote
from horovod_train.data.files import is_no_record, left_out_note
from horovod_train.data.globs import matching
from horovod_train.data.prepare.images import MADE_BY_PROGRAMS, NOT_READ, SUFFIXES, class_names, list_images
from horovod_train.data.random_access.store import FileStore, Request, objects, single_blocks
from horovod_train.data.source import Arrays
from horovod_train.data.storage import Storage
from horovod_train.errors import UserError, unreadable
from horovod_train.shown_text import listed


class _Images(FileStore):
    """Image files, a record each."""

    are_files = True

    def __init__(self, path: str, files: list[str]) -> None:
        super().__init__(path, files)
        self._files = files
        self.blocks = single_blocks(len(files), np.array([stamp.size for stamp in self.stamps.values()]))

    def name(self, record: int) -> str:
        return self._files[record]

    def _images(self, first: int, last: int) -> np.ndarray:
        return objects(list(map(self.read_file, self._files[first:last])))


class ImageFolder(_Images):
    """The images below a folder, in the order of their names."""

    def __init__(self, path: str, request: Request) -> None:
        """Raises UserError if there are none."""
        classes, files, self.note = list_images(path)
        _check_same_classes(path, classes, request)
        labels = {name: label for label, name in enumerate(classes)}
        self._labels = np.array([labels[file.parent.name] for file in files])
        self._names = request.choose(["image", "label"], path)
        super().__init__(path, list(map(str, files)))
        self.defaults = {"image": {"decode": "image"}, "label": {"class_names": classes}}

    def read(self, first: int, last: int) -> Arrays:
        arrays = {"label": self._labels[first:last]}
        if "image" in self._names:
            arrays["image"] = self._images(first, last)
        return {name: arrays[name] for name in self._names}


class UnlabelledImages(_Images):
    """The images in a folder and its folders, or of a glob, in the order of their paths, part by part; or one file.

    The feature is the one that the config calls an image, or else `image`.
    """

    def __init__(self, path: str, request: Request) -> None:
        """Raises UserError if there are none."""
        files, others = images_at(path)
        kinds = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
        if not files:
            raise UserError(f"{path}: expected {kinds} files; found {listed(others, 3) or 'none'}.")
        self.note = left_out_note(path, others, kinds) if os.path.isdir(path) else ""
        (self._name,) = request.images if len(request.images) == 1 else ("image",)
        request.choose([self._name], path)
        super().__init__(path, files)
        self.defaults = {self._name: {"decode": "image"}}

    def identity(self) -> str:
        """Return a digest of names and sizes: enough to see that all ranks have the same files, and quickly made."""
        facts = [(os.path.basename(name), stamp.size) for name, stamp in self.stamps.items()]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def read(self, first: int, last: int) -> Arrays:
        return {self._name: self._images(first, last)}


def _raise(error: OSError) -> None:
    raise error


def images_at(path: str) -> tuple[list[str], list[str]]:
    """Return the image files that a local path stands for, and the other files of a folder; hidden ones aside."""
    try:
        if os.path.isdir(path):
            found = sorted(_files_below(path), key=lambda file: Path(file).parts)  # as those of a folder for each class
        else:
            found = [path] if os.path.isfile(path) else matching(path)
        found = list(filter(_is_regular, found))
    except OSError as error:
        raise unreadable(error)(f"{error.filename}: cannot be read: {error.strerror}.") from error
    return [file for file in found if _is_image(file)], [file for file in found if not _is_image(file)]


def _files_below(path: str) -> Iterator[str]:
    """Yield the files in a folder and its folders, without hidden ones, and what programs put there unasked."""
    for folder, inner, names in os.walk(path, onerror=_raise):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in MADE_BY_PROGRAMS]
        yield from (os.path.join(folder, name) for name in names if not name.startswith(".") and not is_no_record(name))


def _is_regular(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:  # a link to nothing
        return False


def are_images(paths: Sequence[str]) -> bool:
    """Return whether each of these paths is a folder with images, an image, or a glob of images alone."""
    return bool(paths) and all(not is_remote(path) and _has_images(path) for path in paths)


def _has_images(path: str) -> bool:
    images, others = images_at(path)
    unread = any(Path(file).suffix.lower() in NOT_READ for file in others)
    return bool(images or unread) if os.path.isdir(path) else bool(images) and not others


def _is_image(path: str) -> bool:
    return path.lower().endswith(SUFFIXES)


def _check_same_classes(path: str, classes: list[str], request: Request) -> None:
    """Raise UserError if a label would stand for different classes in two folders of data.train and data.eval."""
    for other in request.entries:
        if not os.path.isdir(other) or not is_image_folder(other, request.storage):
            continue
        if differing := sorted(set(classes) ^ set(class_names(other))):
            without, having = (path, other) if differing[0] not in classes else (other, path)
            raise UserError(
                f"{request.setting}: {having} has the class {differing[0]}, and {without} does not, so their labels "
                f"would count differently. Give both the same folders; {os.path.join(without, differing[0])} may be "
                "empty."
            )


def is_image_folder(path: str, storage: Storage) -> bool:
    """Return whether a folder's folders have images. False for remote ones, where asking would take long."""
    if is_remote(path):
        return False
    folders = [os.path.join(path, name) for name in class_names(path)]
    return any(name.lower().endswith(SUFFIXES + NOT_READ) for folder in folders for name in os.listdir(folder))
