"""TFRecord files as a source of records: each holds a serialized tf.train.Example, or what `data.parse` reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from horovod_train.config.settings import DataConfig
from horovod_train.data.features import Feature
from horovod_train.data.source import LoadBlock, Parser, Part, problems_of
from horovod_train.data.storage.storage import DEFAULT, Storage
from horovod_train.data.tfrecord.blocks import TFRecordBlocks
from horovod_train.data.tfrecord.index import Index, open_index
from horovod_train.errors import UserError


class TFRecords:
    """The records of some files. A RecordSource."""

    def __init__(self, index: Index, stage_dir: str | None = None, storage: Storage = DEFAULT) -> None:
        """`stage_dir`: a node-local folder for copies of what is read."""
        self.index, self._stage_dir, self._storage = index, stage_dir, storage
        self.blocks = index.blocks

    @cached_property
    def parts(self) -> list[Part]:
        files = self.index.files
        records = np.bincount(self.index.file, self.blocks.records, len(files)).astype(np.int64).tolist()
        return [
            Part(file.path, file.size, count, file.digest, file.problem)
            for file, count in zip(files, records, strict=True)
        ]

    def open(self) -> LoadBlock:
        return TFRecordBlocks(self.index, self._stage_dir, self._storage).load

    def parser(self, features: dict[str, Feature]) -> Parser:
        from horovod_train.data.parsing.serialized import SchemaParser  # loads TensorFlow

        return SchemaParser(features)


def open_tfrecords(files: Sequence[str], config: DataConfig, *, allow_damage: bool) -> TFRecords:
    """Open TFRecord files by their index. Scans files without a current one: seconds per million records, once."""
    storage = Storage(config.retry_s)
    source = TFRecords(open_index(files, config.index_dir, storage), config.stage_dir, storage)
    problems = problems_of(source.parts)
    if problems and not allow_damage:
        raise UserError(problems[0])
    return source
