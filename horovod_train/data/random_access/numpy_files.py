"""Arrays of numpy: a folder of NAME.npy files, or an npz archive. Each array is a feature, with a row for each record.

Rows are read from the file when they are needed. Arrays of a compressed archive, or in Fortran order, are kept in
memory whole.
"""

from __future__ import annotations

import functools
import math
import os
import struct
import zipfile
from collections.abc import Callable
from io import BufferedReader
from typing import BinaryIO, NamedTuple

import numpy as np

from horovod_train.config.paths import is_remote
from horovod_train.data.files import check_regular, fits, left_out_note, loose_files
from horovod_train.data.random_access.store import (
    FileStore,
    Request,
    check_lengths,
    even_blocks,
    opening,
    raise_if_of_the_system,
)
from horovod_train.data.source import Arrays
from horovod_train.data.storage import Pages, RemoteFile, Storage
from horovod_train.errors import UserError, reading
from horovod_train.shown_text import listed

_ZIP_HEADER = struct.Struct("<26xHH")  # of a member: the lengths of its name and of its extra field


class _Rows(NamedTuple):
    """Rows of an array that lie in a file one after the other."""

    path: str
    read_at: Callable[[int, int], bytes]
    """(offset, length) → bytes of the file."""
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, first: int, last: int) -> np.ndarray:
        row_bytes = _row_bytes(self)
        length = (last - first) * row_bytes
        data = self.read_at(self.offset + first * row_bytes, length)
        if len(data) < length:
            raise UserError(f"{self.path}: {length} bytes expected for rows {first} to {last - 1}, {len(data)} came.")
        return np.frombuffer(data, self.dtype).reshape(last - first, *self.shape[1:])


class NumpyArrays(FileStore):
    """The records of a folder of npy files, or of an npz archive."""

    def __init__(self, path: str, request: Request) -> None:
        """Raises UserError for files that hold no rows of numbers or text."""
        with opening(path, "an npz archive of arrays, or a folder of npy files"), reading(path):
            by_name, files = (_open_folder if request.storage.is_folder(path) else _open_archive)(path, request)
        super().__init__(path, files, request.storage)
        if not is_remote(path) and os.path.isdir(path):
            others = [name for name in loose_files(path) if not _is_array(name)]
            self.note = left_out_note(path, others, "*.npy, each a feature")
        self._arrays = by_name
        for name, array in by_name.items():
            if not array.shape or array.dtype.kind not in "biufSU":
                raise UserError(
                    f"{path}: {name} is {array.dtype}{list(array.shape)}; expected rows of numbers or text."
                )
        records = check_lengths({name: array.shape[0] for name, array in by_name.items()}, path, request.setting)
        self.blocks = even_blocks(records, sum(_row_bytes(array) for array in by_name.values()) * records)

    def damage(self) -> str:
        if self.path not in self.stamps:  # a folder
            return ""
        with reading(self.path), _opened(self.path, self._storage) as file, zipfile.ZipFile(file) as archive:
            bad = [name for name in archive.namelist() if not self._matches_checksum(archive, name)]
        does = "does not match its checksum" if len(bad) == 1 else "do not match their checksums"
        return f"{self.path}: damaged: {listed(bad)} {does}. Make it again." if bad else ""

    def _matches_checksum(self, archive: zipfile.ZipFile, name: str) -> bool:
        try:
            with archive.open(name) as member:
                while member.read(1 << 20):
                    pass
        except Exception as error:  # a damaged member raises nearly any error
            raise_if_of_the_system(error, f"{self.path}: {name}")
            return False
        return True

    def read(self, first: int, last: int) -> Arrays:
        for path in self.stamps:
            self.check(path)
        return {
            name: array.read(first, last) if isinstance(array, _Rows) else array[first:last]
            for name, array in self._arrays.items()
        }


def refuse_one_array(path: str, request: Request) -> NumpyArrays:
    """Raise UserError: which other arrays belong to the records is not known."""
    folder = os.path.dirname(path) or "."
    raise UserError(f"{request.setting}: {path} is one array. Name its folder, whose NAME.npy are features: {folder}")


def is_numpy_folder(path: str, storage: Storage) -> bool:
    return any(map(_is_array, storage.names(path)))


def _is_array(name: str) -> bool:
    return fits(name, "*.npy") and not name.startswith(".")


def _row_bytes(array: _Rows | np.ndarray) -> int:
    return math.prod(array.shape[1:]) * array.dtype.itemsize


def _open_folder(path: str, request: Request) -> tuple[dict[str, _Rows | np.ndarray], list[str]]:
    names = {name[: -len(".npy")]: name for name in filter(_is_array, request.storage.names(path))}
    files = {name: os.path.join(path, names[name]) for name in request.choose(list(names), path)}
    for file in files.values():
        check_regular(file)
    return {name: _find_rows(file, 0, request.storage) for name, file in files.items()}, list(files.values())


def _open_archive(path: str, request: Request) -> tuple[dict[str, _Rows | np.ndarray], list[str]]:
    arrays: dict[str, _Rows | np.ndarray] = {}
    with _opened(path, request.storage) as file, zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        for name in request.choose(list(members), path):
            info = members[name]
            if info.compress_type == zipfile.ZIP_STORED:
                file.seek(info.header_offset)
                header = file.read(_ZIP_HEADER.size)
                start = info.header_offset + _ZIP_HEADER.size + sum(_ZIP_HEADER.unpack(header))
                arrays[name] = _find_rows(path, start, request.storage)
            else:
                with archive.open(info) as member:
                    arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
    return arrays, [path]


def _opened(path: str, storage: Storage) -> BinaryIO:
    """Open a file that seeks, local or remote."""
    return BufferedReader(RemoteFile(Pages(storage, path))) if is_remote(path) else open(path, "rb")


def _find_rows(path: str, start: int, storage: Storage) -> _Rows | np.ndarray:
    """Return where the rows of an array are, or all of them if they do not lie one after the other.

    start: the byte at which the array begins. Raises ValueError.
    """
    with _opened(path, storage) as file:
        file.seek(start)
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(file)
        if any(size < 0 for size in shape):
            raise ValueError(f"{path} declares the shape {list(shape)}")
        if is_fortran and len(shape) > 1:
            file.seek(start)
            return np.ascontiguousarray(np.lib.format.read_array(file, allow_pickle=False))
        read_at = Pages(storage, path).read if is_remote(path) else functools.partial(storage.read, path)
        rows = _Rows(path, read_at, file.tell(), shape, dtype)
        expected, size = rows.offset + shape[0] * _row_bytes(rows) if shape else 0, file.seek(0, os.SEEK_END)
        if size < expected:
            raise UserError(f"{path}: is not complete: {expected} bytes expected, {size} there. Copy it again.")
        return rows
