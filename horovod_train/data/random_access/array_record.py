"""ArrayRecord files: serialized records, as in TFRecord files, that can be read by number. Uses array_record."""

from __future__ import annotations

from collections.abc import Sequence

from horovod_train.config.registry import import_extra
from horovod_train.config.settings import DataConfig
from horovod_train.data.random_access.source import RandomAccessRecords
from horovod_train.data.random_access.store import FileStore, check_local, even_blocks
from horovod_train.data.source import parser_of_examples
from horovod_train.errors import UserError

_NO_READAHEAD = "readahead_buffer_size:0"


class ArrayRecordFile(FileStore):
    """The records of an ArrayRecord file. A Store."""

    def __init__(self, path: str) -> None:
        """Raises UserError for a file of another format."""
        check_local(path, "data", "ArrayRecord files")
        module = import_extra("array_record.python.array_record_module", "array_record", f"data: {path}")
        super().__init__(path, [path])
        try:
            self._reader = module.ArrayRecordReader(path, _NO_READAHEAD)
            records = self._reader.num_records() if self._reader.ok() else None
        except Exception:  # its library raises whatever a damaged file leads to
            records = None
        if records is None:
            raise UserError(f"{path}: is not an ArrayRecord file, or is not complete.")
        self.blocks = even_blocks(records, self.size)

    def read(self, first: int, last: int) -> list[bytes]:
        self._stamps.check(self.path)
        records: list[bytes] = self._reader.read(first, last)
        return records


def open_array_records(files: Sequence[str], config: DataConfig) -> RandomAccessRecords:
    """Open ArrayRecord files. Damaged records are found when they are read. Raises UserError."""
    if config.stage_dir:
        raise UserError(f"data.stage_dir: keeps blocks of TFRecords; {files[0]} is an ArrayRecord file. Leave it out.")
    stores = [ArrayRecordFile(path) for path in files]
    return RandomAccessRecords(stores, parser_of_examples, config.index_dir)
