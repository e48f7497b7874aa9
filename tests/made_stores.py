"""Writes the same records in each form that can be read by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
from array_record.python.array_record_module import ArrayRecordWriter

Arrays = dict[str, Any]


def write_npy(folder: Path, arrays: Arrays) -> Path:
    (folder / "arrays").mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / "arrays" / f"{name}.npy", array)
    return folder / "arrays"


def write_npz(folder: Path, arrays: Arrays) -> Path:
    np.savez(folder / "stored.npz", **arrays)
    return folder / "stored.npz"


def write_packed_npz(folder: Path, arrays: Arrays) -> Path:
    np.savez_compressed(folder / "packed.npz", **arrays)
    return folder / "packed.npz"


def write_hdf5(folder: Path, arrays: Arrays, lists: Sequence[Sequence[int]] | None = None) -> Path:
    with h5py.File(folder / "a.h5", "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, chunks=(min(50, len(array)), *array.shape[1:]), compression="gzip")
        if lists is not None:
            words = file.create_dataset("words", (len(lists),), h5py.vlen_dtype(np.int32))
            for number, values in enumerate(lists):
                words[number] = values
    return folder / "a.h5"


def as_table(arrays: Arrays, lists: Sequence[Sequence[int]] | None = None) -> Any:
    """Arrays [n, …] become fixed-size lists of lists."""
    columns: dict[str, Any] = {}
    for name, array in arrays.items():
        column = pa.array(array.ravel())
        for size in array.shape[:0:-1]:
            column = pa.FixedSizeListArray.from_arrays(column, size)
        columns[name] = column
    if lists is not None:
        columns["words"] = pa.array(list(lists), pa.list_(pa.int32()))
    return pa.table(columns)


def write_parquet(folder: Path, arrays: Arrays, lists: Sequence[Sequence[int]] | None = None) -> Path:
    pa.parquet.write_table(as_table(arrays, lists), folder / "a.parquet", row_group_size=60)
    return folder / "a.parquet"


def write_feather(folder: Path, arrays: Arrays, lists: Sequence[Sequence[int]] | None = None) -> Path:
    pa.feather.write_feather(as_table(arrays, lists), folder / "a.feather", chunksize=60)
    return folder / "a.feather"


def write_hugging_face(folder: Path, arrays: Arrays, lists: Sequence[Sequence[int]] | None = None) -> Path:
    features: dict[str, Any] = {name: _hugging_face_feature(array) for name, array in arrays.items()}
    columns: dict[str, Any] = {name: list(array) for name, array in arrays.items()}
    if lists is not None:
        features["words"] = datasets.List(datasets.Value("int32"))
        columns["words"] = [list(values) for values in lists]
    made = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    made.save_to_disk(str(folder / "saved"))
    return folder / "saved"


def _hugging_face_feature(array: np.ndarray) -> Any:
    shape, dtype = array.shape[1:], array.dtype.name
    kinds = {2: datasets.Array2D, 3: datasets.Array3D}
    return kinds[len(shape)](shape=shape, dtype=dtype) if shape else datasets.Value(dtype)


def write_array_record(path: Path, records: Sequence[bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


WRITERS: dict[str, Callable[[Path, Arrays], Path]] = {
    "npy": write_npy,
    "npz": write_npz,
    "packed npz": write_packed_npz,
    "hdf5": write_hdf5,
    "parquet": write_parquet,
    "feather": write_feather,
    "hugging face": write_hugging_face,
}
WITH_LISTS: dict[str, Callable[..., Path]] = {
    "hdf5": write_hdf5,
    "parquet": write_parquet,
    "feather": write_feather,
    "hugging face": write_hugging_face,
}
