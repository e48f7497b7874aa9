"""CSV files with a header: each column is a feature. A column of image files' names becomes the files' bytes."""

from __future__ import annotations

import os

from horovod_train.data.prepare.tables import load_table
from horovod_train.data.random_access.store import FileStore, Request, check_local, even_blocks, objects, single_blocks
from horovod_train.data.source import Arrays
from horovod_train.errors import UserError


class CSVTable(FileStore):
    """The lines of a CSV file, kept in memory.

    Names of image files are relative to the folder of the CSV file.
    """

    def __init__(self, path: str, request: Request) -> None:
        """Raises UserError for a file that is no table, and for a line whose image does not exist."""
        self._columns = load_table(
            path,
            request.storage,
            request.class_names,
            request.texts,
            choose=lambda names: request.choose(names, path),
            may_be_empty=True,
        )
        self._images = [name for name in self._columns if name in request.images]
        if self._images:
            check_local(path, request.setting, f"the image files of column {self._images[0]}")
        for name in self._images:
            column = self._columns[name]
            if column.dtype != object:
                raise UserError(f"{path}: column {name} must hold names of image files; it holds {column.dtype}.")
            paths = [os.path.join(os.path.dirname(path), file) for file in column.tolist()]
            for record, file in enumerate(paths):
                if not os.path.isfile(file):
                    raise UserError(f"{path}: record {record}: {name}: {file} does not exist.")
            self._columns[name] = objects(paths)
        files = [file for name in self._images for file in self._columns[name]]
        super().__init__(path, [path, *files], request.storage)
        records = len(next(iter(self._columns.values())))
        if not records:
            self.note = f"{path}: has a header and no record"
        if self._images and records:
            self.blocks = single_blocks(records, self.size / records)
        else:
            self.blocks = even_blocks(records, self.size)

    def read(self, first: int, last: int) -> Arrays:
        arrays = {name: column[first:last] for name, column in self._columns.items()}
        for name in self._images:
            arrays[name] = objects(list(map(self.read_file, arrays[name])))
        return arrays

    def name(self, record: int) -> str:
        files = ", ".join(str(self._columns[name][record]) for name in self._images)
        return f"{super().name(record)}{files and f' ({files})'}"
