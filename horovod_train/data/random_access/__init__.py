"""Records that can be read by number: arrays, HDF5, Parquet, images and other files, and a user's own class.

Start with `source.open_described`. Each kind of file has a module with a Store, and a line in FILES or FOLDERS.
"""

from __future__ import annotations

from collections.abc import Callable

from horovod_train.data.random_access.arrow import ArrowFile, HuggingFaceFolder, ParquetFile, is_hugging_face_folder
from horovod_train.data.random_access.csv_table import CSVTable
from horovod_train.data.random_access.hdf5 import HDF5File
from horovod_train.data.random_access.images import ImageFolder, is_image_folder
from horovod_train.data.random_access.numpy_files import NumpyArrays, is_numpy_folder, refuse_one_array
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
