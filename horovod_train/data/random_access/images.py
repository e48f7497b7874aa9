"""Image files in a folder for each class: features `image`, the file, and `label`, the number of its folder."""

from __future__ import annotations

import os

import numpy as np

from horovod_train.config.paths import is_remote
from horovod_train.data.prepare.images import NOT_READ, SUFFIXES, class_names, list_images
from horovod_train.data.random_access.store import FileStamps, FileStore, Request, objects, single_blocks
from horovod_train.data.source import Arrays
from horovod_train.data.storage import Storage
from horovod_train.errors import UserError


class ImageFolder(FileStore):
    """The images below a folder, in the order of their names. A Store."""

    def __init__(self, path: str, request: Request) -> None:
        """Raises UserError if there are none."""
        classes, files, self.note = list_images(path)
        _check_same_classes(path, classes, request)
        labels = {name: label for label, name in enumerate(classes)}
        self._files = [str(file) for file in files]
        self._labels = np.array([labels[file.parent.name] for file in files])
        self._names = request.choose(["image", "label"], path)
        super().__init__(path, self._files)
        self.defaults = {"image": {"decode": "image"}, "label": {"class_names": classes}}
        sizes = np.array([stamp.size for stamp in self._stamps.stamps.values()])
        self.blocks = single_blocks(len(files), sizes)

    def name(self, record: int) -> str:
        return self._files[record]

    def read(self, first: int, last: int) -> Arrays:
        arrays = {"label": self._labels[first:last]}
        if "image" in self._names:
            arrays["image"] = objects([read_file(file, self._stamps) for file in self._files[first:last]])
        return {name: arrays[name] for name in self._names}


def _check_same_classes(path: str, classes: list[str], request: Request) -> None:
    """Raise UserError if a label would stand for different classes in two folders of data.train and data.eval."""
    for other in request.entries:
        if not os.path.isdir(other) or not is_image_folder(other, request.storage):
            continue
        differing = sorted(set(classes) ^ set(class_names(other)))
        if differing:
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
    folders = [entry.path for entry in os.scandir(path) if entry.is_dir()]
    return any(name.lower().endswith(SUFFIXES + NOT_READ) for folder in folders for name in os.listdir(folder))


def read_file(path: str, stamps: FileStamps) -> bytes:
    """Return what a file holds. Raises UserError if it has changed since it was listed."""
    stamps.check(path)
    with open(path, "rb") as file:
        return file.read()
