"""Datasets of Hugging Face as `save_to_disk` writes them: each column is a feature. Uses datasets."""

from __future__ import annotations

import os
from typing import Any

from horovod_train.config.registry import import_extra
from horovod_train.data.random_access.arrow import check_types, to_arrays
from horovod_train.data.random_access.store import FileStore, Request, check_local, even_blocks
from horovod_train.data.source import Arrays
from horovod_train.data.storage import Storage
from horovod_train.errors import UserError, one_line

_STATE, _SPLITS = "state.json", "dataset_dict.json"


class HuggingFaceFolder(FileStore):
    """The records of one split. A Store."""

    def __init__(self, path: str, request: Request) -> None:
        """Raises UserError for a folder of several splits, and for columns of a type that has no tensor."""
        check_local(path, request.setting, "Hugging Face's datasets")
        if os.path.exists(os.path.join(path, _SPLITS)):
            splits = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
            raise UserError(
                f"{request.setting}: {path} holds the splits {', '.join(splits)}. Name one of their folders."
            )
        datasets = import_extra("datasets", "huggingface", f"{request.setting}: {path}")
        try:
            dataset = datasets.load_from_disk(path)
        except Exception as error:  # datasets and pyarrow raise whatever damaged files lead to
            raise UserError(f"{path}: cannot be read as a dataset: {one_line(error)}") from error
        self._names = request.choose(dataset.column_names, path)
        self._dataset = dataset.select_columns(self._names).with_format("arrow")
        check_types(dataset.features.arrow_schema, self._names, path)
        super().__init__(path, sorted(file["filename"] for file in dataset.cache_files))
        self.defaults = {name: _defaults(dataset.features[name], datasets) for name in self._names}
        self.blocks = even_blocks(len(dataset), self.size)

    def read(self, first: int, last: int) -> Arrays:
        for path in self._stamps.stamps:
            self._stamps.check(path)
        return to_arrays(self._dataset[first:last])


def is_hugging_face_folder(path: str, storage: Storage) -> bool:
    return not {_STATE, _SPLITS}.isdisjoint(storage.names(path))


def _defaults(feature: Any, datasets: Any) -> dict[str, Any]:
    if isinstance(feature, datasets.ClassLabel):
        return {"classes": feature.num_classes}
    return {"decode": "image"} if isinstance(feature, datasets.Image) else {}
