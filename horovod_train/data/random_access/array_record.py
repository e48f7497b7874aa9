"""ArrayRecord files: serialized records, as in TFRecord files, that can be read by number. Uses array_record."""

from __future__ import annotations

import os
from collections.abc import Sequence

from horovod_train.config.registry import import_extra
from horovod_train.config.settings import DataConfig
from horovod_train.data.random_access.source import RandomAccessRecords
from horovod_train.data.random_access.store import FileStore, check_local, even_blocks
from horovod_train.data.source import parser_of_examples
from horovod_train.errors import UserError, reading
from horovod_train.host import Opened, OpenFiles

_NO_READAHEAD = "readahead_buffer_size:0"


class ArrayRecordFile(FileStore):
    """The records of an ArrayRecord file."""

    def __init__(self, path: str, files: OpenFiles) -> None:
        """files: those of all stores together. Raises UserError for a file of another format."""
        check_local(path, "data", "ArrayRecord files")
        super().__init__(path, [path])
        self._files = files
        with reading(path), files.opened(path, _open_reader) as reader:
            self.blocks = even_blocks(reader.num_records(), self.size)

    def read(self, first: int, last: int) -> list[bytes]:
        self.check(self.path)
        with self._files.opened(self.path, _open_reader) as reader:
            records: list[bytes] = reader.read(first, last)
        return records


def _open_reader(path: str) -> Opened:
    """Open a file. Raises OSError, and UserError for a file of another format."""
    module = import_extra("array_record.python.array_record_module", "array_record", f"data: {path}")
    try:
        reader = module.ArrayRecordReader(path, _NO_READAHEAD)
        is_good = reader.ok() and reader.num_records() is not None
    except Exception:  # its library raises whatever a damaged file leads to
        is_good = False
    if not is_good:
        os.close(os.open(path, os.O_RDONLY))  # raises what the library does not say, such as too many open files
        raise UserError(f"{path}: is not an ArrayRecord file, or is not complete.")
    return reader, reader.close


def open_array_records(files: Sequence[str], config: DataConfig) -> RandomAccessRecords:
    """Open ArrayRecord files. Damaged records are found when they are read. Raises UserError."""
    if config.stage_dir:
        raise UserError(f"data.stage_dir: keeps blocks of TFRecords; {files[0]} is an ArrayRecord file. Leave it out.")
    open_files = OpenFiles()
    stores = [ArrayRecordFile(path, open_files) for path in files]
    return RandomAccessRecords(stores, parser_of_examples, config.index_dir)
