"""The kinds of files that can be read by number, by their names. Each has one file here."""

from __future__ import annotations

from collections.abc import Callable

from horovod_train.data.random_access.formats.arrow import ArrowFile, ParquetFile
from horovod_train.data.random_access.formats.csv_table import CSVTable
from horovod_train.data.random_access.formats.hdf5 import HDF5File
from horovod_train.data.random_access.formats.hugging_face import HuggingFaceFolder, is_hugging_face_folder
from horovod_train.data.random_access.formats.images import ImageFolder, is_image_folder
from horovod_train.data.random_access.formats.numpy_files import NumpyArrays, is_numpy_folder, refuse_one_array
from horovod_train.data.random_access.source import OpenStore
from horovod_train.data.storage import Storage

FILES: dict[str, OpenStore] = {
    "*.npz": NumpyArrays,
    "*.npy": refuse_one_array,
    "*.h5": HDF5File,
    "*.hdf5": HDF5File,
    "*.parquet": ParquetFile,
    "*.arrow": ArrowFile,
    "*.feather": ArrowFile,
    "*.csv": CSVTable,
}
"""Names of files, as a pattern → what opens one. A folder stands for those of its files that fit one pattern."""

FOLDERS: list[tuple[Callable[[str, Storage], bool], OpenStore]] = [
    (is_hugging_face_folder, HuggingFaceFolder),
    (is_numpy_folder, NumpyArrays),
    (is_image_folder, ImageFolder),
]
"""Kinds of folders that are one entry: (whether a folder is of the kind, what opens it)."""
