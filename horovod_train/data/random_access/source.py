"""Records that can be read by number, from one or several stores, as a source of records. Knows no format."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from horovod_train.config.settings import DataConfig
from horovod_train.data.features import Feature
from horovod_train.data.files import check_different
from horovod_train.data.random_access.blocks import read_block
from horovod_train.data.random_access.describe import (
    describe,
    images_in_config,
    labels_of,
    names_in_config,
    without_labels,
)
from horovod_train.data.random_access.digests import content_digests
from horovod_train.data.random_access.parser import ArraysParser
from horovod_train.data.random_access.store import FileStamps, Request, Store, describe_error
from horovod_train.data.schema import Schema
from horovod_train.data.source import Arrays, Blocks, LoadBlock, LoadedBlock, Parser, Part
from horovod_train.data.storage.storage import DEFAULT, Storage, map_paths, normalized
from horovod_train.errors import UserError

OpenStore = Callable[[str, Request], Store]
"""Opens one entry of data.train. Raises UserError."""

BuildParser = Callable[[dict[str, Feature]], Parser]

_TRIED_RECORDS = 100


class RandomAccessRecords:
    """The records of some stores, one store after the other. A RecordSource."""

    def __init__(
        self, stores: Sequence[Store], build_parser: BuildParser, index_dir: str | None, storage: Storage = DEFAULT
    ) -> None:
        """Raises UserError if files have to be read to identify them, and cannot be read."""
        self._stores, self._build_parser = stores, build_parser
        columns = [np.concatenate([getattr(store.blocks, name) for store in stores]) for name in ("records", "bytes")]
        self.blocks = Blocks(*columns)
        self._first_block = np.cumsum([0, *(len(store.blocks.records) for store in stores)])
        identities = {store.path: store.identity() for store in stores}
        self._stamps = [identity for identity in identities.values() if isinstance(identity, FileStamps)]
        files = {path: stamps.stamps for path, stamps in identities.items() if isinstance(stamps, FileStamps)}
        digests = {path: digest for path, digest in identities.items() if isinstance(digest, str)}
        # Of a table that names image files, only the table: records may share an image.
        check_different({path: stamps[path]} if path in stamps else stamps for path, stamps in files.items())
        digests |= content_digests(files, index_dir, storage)
        self.parts = [
            Part(normalized(store.path), store.size, store.blocks.num_records, digests[store.path]) for store in stores
        ]

    @property
    def notes(self) -> Sequence[str]:
        """What users should know before a run."""
        return [store.note for store in self._stores if store.note]

    def open(self) -> LoadBlock:
        for stamps in self._stamps:
            stamps.forget_checks()  # remote files may have changed since they were described
        return self._load

    def parser(self, features: dict[str, Feature]) -> Parser:
        return self._build_parser(features)

    def _load(self, block: int) -> LoadedBlock:
        number = int(np.searchsorted(self._first_block, block, side="right")) - 1
        store, block_in_store = self._stores[number], block - int(self._first_block[number])
        return read_block(store, *store.blocks.first_record[block_in_store : block_in_store + 2].tolist())


def open_described(
    paths: Sequence[str], open_store: OpenStore, config: DataConfig, setting: str, *, needs_labels: bool = True
) -> tuple[RandomAccessRecords, Schema]:
    """Open stores, and return their records and the schema that describes them. setting: names them in messages.

    needs_labels: whether targets and weight are used; else they may be missing, and are no inputs where they are there.
    Raises UserError for a store that cannot be read, or whose records differ from those of the first one.
    """
    labels = labels_of(config)
    config = config if needs_labels else without_labels(config)
    storage = Storage(config.retry_s)
    folders = (*config.paths("train"), *config.paths("eval"))
    request = Request(names_in_config(config), images_in_config(config), setting, storage, folders)
    stores = map_paths(lambda path: open_store(path, request), paths)
    nonempty = [store for store in stores if store.blocks.num_records]
    if not nonempty:
        raise UserError(f"{setting}: {', '.join(paths)} holds no record.")
    schema = describe(_first_record(nonempty[0])[1], nonempty[0].defaults, config, nonempty[0].path, labels)
    if config.on_bad_record == "error":
        for store in nonempty:
            _check_first(store, ArraysParser(schema.features))
    return RandomAccessRecords(stores, ArraysParser, config.index_dir, storage), schema


def _check_first(store: Store, parser: Parser) -> None:
    number, arrays = _first_record(store)
    problem = parser.problem({name: values[0] for name, values in arrays.items()})
    if problem:
        raise UserError(f"{store.name(number)}: {problem}.")


def _first_record(store: Store) -> tuple[int, Arrays]:
    """Return the first record that can be read, and its number. Raises UserError if there is none."""
    failure: Exception | None = None
    for record in range(min(store.blocks.num_records, _TRIED_RECORDS)):
        try:
            arrays = store.read(record, record + 1)
        except (UserError, MemoryError):
            raise
        except Exception as error:
            failure = failure or error
            continue
        assert isinstance(arrays, dict), "serialized records do not describe themselves"
        return record, arrays
    assert failure is not None
    reason = describe_error(failure)
    first = store.name(0).removeprefix(f"{store.path}: ")
    raise UserError(f"{store.path}: none of its first records can be read; {first}: {reason}.") from failure
