"""Parquet and Arrow files, and datasets of Hugging Face as `save_to_disk` writes them: each column is a feature.

Reads row groups, or record batches, whole. Uses pyarrow, and datasets for those of Hugging Face.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_train.config.paths import is_remote
from horovod_train.config.registry import import_extra
from horovod_train.data.random_access.store import (
    FileStore,
    Request,
    UnreadableFrom,
    blocks_of,
    check_local,
    even_blocks,
    objects,
    opening,
    raise_if_of_the_system,
)
from horovod_train.data.source import Arrays
from horovod_train.data.storage import Pages, RemoteFile, Storage
from horovod_train.errors import RunError, UserError

_PANDAS_INDEX = re.compile(r"__index_level_\d+__")
"""A column in which pandas keeps the index of a table whose rows were chosen or shuffled."""


def _choose(request: Request, stored: Sequence[str], path: str) -> list[str]:
    """Return the columns to read; the index of pandas only if it is asked for."""
    return request.choose([name for name in stored if name in request.names or not _PANDAS_INDEX.fullmatch(name)], path)


class _Batches(FileStore):
    """A file whose records are stored in batches: a row group of Parquet, a record batch of Arrow."""

    form = "Arrow"

    def __init__(self, path: str, request: Request) -> None:
        """Raises UserError for a file of another format, or for columns of a type that has no tensor."""
        import_extra("pyarrow", "parquet", f"{request.setting}: {path}")
        super().__init__(path, [path], request.storage)
        self._pages = Pages(request.storage, path) if is_remote(path) else None
        with opening(path, self.form):
            schema, counts, size = self._open()
            self._names = _choose(request, schema.names, path)
            check_types(schema, self._names, path)
        self.blocks = blocks_of([count for count in counts if count], size)
        self._numbers = [number for number, count in enumerate(counts) if count]

    def read(self, first: int, last: int) -> Arrays:
        self.check(self.path)
        batch, end = self.blocks.containing(np.array([first, last - 1])).tolist()
        assert batch == end, "asked for records of two batches"
        found = self._try(batch, first, last)
        if isinstance(found, dict):
            return found
        # Each record is read with all before it: find how many of the batch's first ones can be read.
        readable = start = int(self.blocks.first_record[batch])
        while last - readable > 1:
            middle = (readable + last) // 2
            if isinstance(self._try(batch, start, middle), dict):
                readable = middle
            else:
                last = middle
        raise UnreadableFrom(max(readable, first)) from found

    def _try(self, batch: int, first: int, last: int) -> Arrays | Exception:
        """Return the records [first, last) of a batch, or what was raised because it is damaged before `last`."""
        start = int(self.blocks.first_record[batch])
        try:
            return to_arrays(self._read_batch(self._numbers[batch], last - start).slice(first - start))
        except (RunError, MemoryError):
            raise
        except Exception as error:  # of pyarrow, and of what it reads through
            raise_if_of_the_system(error, self.name(first))
            return error

    @property
    def _source(self) -> str | RemoteFile:
        """Return the file in the form that pyarrow opens, for one thread."""
        return self.path if self._pages is None else RemoteFile(self._pages)

    @abstractmethod
    def _open(self) -> tuple[Any, Sequence[int], int]:
        """Return the schema, the number of records of each batch, and the bytes of all in memory."""

    @abstractmethod
    def _read_batch(self, number: int, count: int) -> Any:
        """Return the first records of a batch, with the columns that are used."""


class ParquetFile(_Batches):
    """The records of a Parquet file, a row group a block."""

    form = "Parquet"

    def _open(self) -> tuple[Any, Sequence[int], int]:
        from pyarrow import parquet

        with parquet.ParquetFile(self._source) as file:
            self._metadata, groups = file.metadata, range(file.metadata.num_row_groups)
            sizes = [self._metadata.row_group(group).total_byte_size for group in groups]
            return file.schema_arrow, [self._metadata.row_group(group).num_rows for group in groups], sum(sizes)

    def _read_batch(self, number: int, count: int) -> Any:
        from pyarrow import Table, parquet

        # Opened again for each row group, because an open file is not for several threads.
        with parquet.ParquetFile(self._source, metadata=self._metadata, page_checksum_verification=True) as file:
            if count < self._metadata.row_group(number).num_rows:
                # Reads little more than these: the first record of many files is read at the start.
                batches = file.iter_batches(count, row_groups=[number], columns=self._names, use_threads=False)
                table = Table.from_batches([next(batches)])
                if table.num_rows == count:
                    return table
            return file.read_row_group(number, columns=self._names, use_threads=False).slice(0, count)


class ArrowFile(_Batches):
    """The records of an Arrow file (Feather 2), a record batch a block."""

    def _open(self) -> tuple[Any, Sequence[int], int]:
        """Count records and bytes of a local file that is not compressed without reading it: it is mapped to memory.

        Of others, whose batches are read whole where they are opened, only the narrowest column is read. The bytes are
        estimated then: by the largest batch, and for a remote file by its size.
        """
        from pyarrow import ipc, memory_map

        with memory_map(self.path) if self._pages is None else RemoteFile(self._pages) as file:
            with ipc.open_file(file) as reader:
                schema, numbers = reader.schema, range(reader.num_record_batches)
                if not len(schema) or not numbers:
                    return schema, [], 0
                if self._pages is None and _is_mapped(reader.get_batch(0), file):
                    sizes = [(batch.num_rows, batch.nbytes) for batch in map(reader.get_batch, numbers)]
                    return schema, [count for count, _ in sizes], sum(size for _, size in sizes)
            narrowest = min(range(len(schema)), key=lambda number: _width(schema.field(number).type))
            options = ipc.IpcReadOptions(included_fields=[narrowest])
            with ipc.open_file(file, options=options) as reader:
                counts = [reader.get_batch(number).num_rows for number in numbers]
            if self._pages is not None:
                return schema, counts, self.size
            with ipc.open_file(file) as reader:
                largest = reader.get_batch(counts.index(max(counts)))
        return schema, counts, largest.nbytes * sum(counts) // max(1, largest.num_rows)

    def _read_batch(self, number: int, count: int) -> Any:
        from pyarrow import OSFile, ipc, table

        with (
            OSFile(self.path) if self._pages is None else RemoteFile(self._pages) as file,
            ipc.open_file(file) as reader,
        ):
            batch = reader.get_batch(number)
            return table({name: batch.column(name) for name in self._names}).slice(0, count)


def _is_mapped(batch: Any, file: Any) -> bool:
    """Return whether a batch lies in a memory-mapped file itself, as one does that is not compressed."""
    file.seek(0)
    whole = file.read_buffer()
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None]
    return all(whole.address <= buffer.address < whole.address + whole.size for buffer in buffers if buffer.size)


def _width(kind: Any) -> float:
    """Return the bits of a value; inf for values of any length."""
    try:
        return float(kind.bit_width)
    except ValueError:
        return math.inf


def check_types(schema: Any, names: Sequence[str], path: str) -> None:
    """Raise UserError for columns of a type that has no tensor, and for a name that two columns have."""
    for name in names:
        if schema.names.count(name) > 1:
            raise UserError(f"{path}: {schema.names.count(name)} columns are named {name}. Give each another name.")
        if not _is_supported(schema.field(name).type):
            raise UserError(
                f"{path}: column {name} is {schema.field(name).type}; expected numbers, text, or lists of numbers. "
                "Name the columns to read in data.inputs and data.targets."
            )


def to_arrays(table: Any) -> Arrays:
    """Return the columns of an Arrow table as arrays; text, lists of any length and nulls as objects."""
    return {name: _join_chunks(table.column(name)) for name in table.column_names}


def _join_chunks(column: Any) -> np.ndarray:
    """Return the values of all chunks; as objects if those of one are, as where it has nulls.

    Arrow itself cannot join chunks of 2 GiB of text: it counts their bytes in int32.
    """
    chunks = [_to_array(chunk) for chunk in column.chunks if len(chunk)] or [_to_array(column.combine_chunks())]
    if len(chunks) == 1:
        return chunks[0]
    if any(chunk.dtype == object for chunk in chunks):
        return objects(list(itertools.chain.from_iterable(chunks)))
    return np.concatenate(chunks)


def _is_supported(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_supported(kind.value_type)
    if _is_file(kind) or _is_text(kind) or _is_tensor(kind):
        return True
    if types.is_fixed_size_list(kind):
        return _is_supported(kind.value_type) and not _is_text(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind):
        return _is_supported(kind.value_type) and not types.is_nested(kind.value_type)
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kinds = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return _is_view(kind) or any(is_kind(kind) for is_kind in kinds)


def _is_view(kind: Any) -> bool:
    """Return whether it is text in the newer layout of Arrow, which Polars writes."""
    return str(kind) in ("string_view", "binary_view")


def _is_file(kind: Any) -> bool:
    """Return whether it is a struct with the bytes of a file, as Hugging Face stores images."""
    from pyarrow import types

    return bool(types.is_struct(kind)) and kind.get_field_index("bytes") >= 0


def _is_tensor(kind: Any) -> bool:
    """Return whether each value is an array of one shape: Arrow's own type, or Hugging Face's Array2D and so on."""
    from pyarrow import BaseExtensionType

    return isinstance(kind, BaseExtensionType) and None not in getattr(kind, "shape", [None])


def _to_array(column: Any) -> np.ndarray:
    import pyarrow as arrow

    kind = column.type
    if _is_view(kind):
        return _to_array(column.cast(arrow.large_string() if str(kind) == "string_view" else arrow.large_binary()))
    if arrow.types.is_dictionary(kind):
        long = {arrow.string(): arrow.large_string(), arrow.binary(): arrow.large_binary()}  # see _join_chunks
        values = column.dictionary.cast(long.get(kind.value_type, kind.value_type))
        return _to_array(arrow.DictionaryArray.from_arrays(column.indices, values).dictionary_decode())
    if column.null_count:
        values = objects([None] * len(column))
        values[column.is_valid().to_numpy(zero_copy_only=False)] = objects(list(_to_array(column.drop_null())))
        return values
    if _is_file(kind):
        return _to_array(column.field("bytes"))
    lacks = _rows_with_nulls(column)
    if lacks.any():  # only these records are bad, not those that are read with them
        values = objects([None] * len(column))
        lacking = column.filter(arrow.array(lacks))
        rows = getattr(lacking, "storage", lacking).to_pylist()
        values[lacks] = objects([np.array(row, object) for row in rows])
        values[~lacks] = objects(list(_to_array(column.filter(arrow.array(~lacks)))))
        return values
    if _is_tensor(kind):
        return column.to_numpy_ndarray() if hasattr(column, "to_numpy_ndarray") else column.to_numpy()
    if arrow.types.is_fixed_size_list(kind):
        values = _to_array(column.flatten())
        return values.reshape(len(column), kind.list_size, *values.shape[1:])
    if arrow.types.is_list(kind) or arrow.types.is_large_list(kind):
        values = _to_array(column.flatten())
        ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
        return objects(np.split(values, ends[:-1]))
    return column.to_numpy(zero_copy_only=False)


def _rows_with_nulls(column: Any) -> np.ndarray:
    """Return for each row whether it, or a list in it, lacks a value."""
    from pyarrow import ExtensionArray, compute, types

    if isinstance(column, ExtensionArray):  # of tensors, whose type hides the lists of their values
        column = column.storage
    lacks = np.asarray(column.is_null())
    if types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
        ends = np.cumsum(compute.list_value_length(column).fill_null(0).to_numpy())
        before = np.concatenate([[0], np.cumsum(_rows_with_nulls(column.flatten()))])
        lacks = lacks | (before[ends] > before[np.concatenate([[0], ends[:-1]])])
    return lacks


_STATE, _SPLITS = "state.json", "dataset_dict.json"
_CHECKED_PER_READ = 8


class HuggingFaceFolder(FileStore):
    """The records of one split."""

    def __init__(self, path: str, request: Request) -> None:
        """Raises UserError for a folder of several splits, and for columns of a type that has no tensor."""
        check_local(path, request.setting, "Hugging Face's datasets")
        if os.path.exists(os.path.join(path, _SPLITS)):
            splits = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
            raise UserError(
                f"{request.setting}: {path} holds the splits {', '.join(splits)}. Name one of their folders."
            )
        datasets = import_extra("datasets", "huggingface", f"{request.setting}: {path}")
        with opening(path, "a dataset"):
            dataset = datasets.load_from_disk(path)
        self._names = _choose(request, dataset.column_names, path)
        self._dataset = dataset.select_columns(self._names).with_format("arrow")
        check_types(dataset.features.arrow_schema, self._names, path)
        super().__init__(path, sorted(file["filename"] for file in dataset.cache_files))
        self._to_check = itertools.cycle(self.stamps)
        self.defaults = {name: _defaults(dataset.features[name], datasets) for name in self._names}
        self.blocks = even_blocks(len(dataset), self.size)

    def read(self, first: int, last: int) -> Arrays:
        # A few files in turn: each costs a request to a file server, and a set may have thousands.
        for path in itertools.islice(self._to_check, min(len(self.stamps), _CHECKED_PER_READ)):
            self.check(path)
        return to_arrays(self._dataset[first:last])


def is_hugging_face_folder(path: str, storage: Storage) -> bool:
    return not {_STATE, _SPLITS}.isdisjoint(storage.names(path))


def _defaults(feature: Any, datasets: Any) -> dict[str, Any]:
    if isinstance(feature, datasets.ClassLabel):
        return {"class_names": feature.names}
    return {"decode": "image"} if isinstance(feature, datasets.Image) else {}
