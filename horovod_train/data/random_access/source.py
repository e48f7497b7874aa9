"""Records that can be read by number, from one or several stores, as a source of records. Knows no format.

What `data.features` does not say of the records is described from the first of them.

Files are identified by a digest over the CRC32C of each piece of 4 MiB, as TFRecord files are over their checksums: it
detects accidental changes, not forgery. Digests are saved in `digests.json`; see files. A saved digest is valid while
the file's size and modification time are the same. The time is not part of the digest, so copies are equal whatever
their dates.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from horovod_train.config.paths import is_remote
from horovod_train.config.settings import DataConfig
from horovod_train.data.files import check_different, paths_beside, save_to_first
from horovod_train.data.random_access.store import (
    ArraysParser,
    FileStore,
    Request,
    Store,
    describe_error,
    read_block,
    try_read,
)
from horovod_train.data.schema import Feature, Schema, check_same_classes, parse_feature, warn_of_names_of_numbers
from horovod_train.data.source import Arrays, Blocks, LoadBlock, LoadedBlock, Parser, Part
from horovod_train.data.storage import DEFAULT, Stamps, Storage, map_paths, normalized
from horovod_train.errors import UserError, reading
from horovod_train.host import usable_cores
from horovod_train.output.console import track
from horovod_train.output.files import Artifact, read_json, write_atomically

OpenStore = Callable[[str, Request], Store]
"""Opens one entry of data.train. Raises UserError."""

BuildParser = Callable[[dict[str, Feature]], Parser]

_TRIED_RECORDS = 100
_STORED_AS = {"bool": "uint8", "uint32": "int64"}
"""Dtypes that no feature can have → the smallest dtype that holds their values."""
_RAW = ("uint8", "int8", "uint16", "int16", "int32", "float16", "float64")
_IN_LISTS = {**dict.fromkeys("biu", "int64"), "f": "float", **dict.fromkeys("OSU", "bytes")}
"""numpy's kind of the values in lists → the type as which they are read."""
NAME = "digests.json"
_PIECE = 1 << 22
_REMOTE_FILES = 8  # read at the same time
_FORMAT = "horovod_train digests 1"


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
        files = {path: stamps for path, stamps in identities.items() if not isinstance(stamps, str)}
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
        return [text for store in self._stores for text in (store.note, store.unwritten) if text]

    @property
    def unwritten(self) -> Sequence[str]:
        """Those of the notes that are faults of the files."""
        return [store.unwritten for store in self._stores if store.unwritten]

    def damage(self) -> list[str]:
        """Return what checksums over whole files find: a sentence for each store that is damaged."""
        return [text for store in self._stores if (text := store.damage())]

    def files(self) -> list[str]:
        """Return the file of each record, where each is a file; else nothing."""
        if not all(store.are_files for store in self._stores):
            return []
        return [store.name(record) for store in self._stores for record in range(store.blocks.num_records)]

    def open(self) -> LoadBlock:
        for store in self._stores:
            if isinstance(store, FileStore):
                store.forget_checks()  # remote files may have changed since they were described
        return self._load

    def parser(self, features: dict[str, Feature]) -> Parser:
        return self._build_parser(features)

    def _load(self, block: int) -> LoadedBlock:
        number = int(np.searchsorted(self._first_block, block, side="right")) - 1
        store, block_in_store = self._stores[number], block - int(self._first_block[number])
        return read_block(store, *store.blocks.first_record[block_in_store : block_in_store + 2].tolist())


def open_described(
    paths: Sequence[str], open_store: OpenStore, config: DataConfig, setting: str, *, needs_labels: bool
) -> tuple[RandomAccessRecords, Schema]:
    """Open stores, and return their records and the schema that describes them. setting: names them in messages.

    needs_labels: whether targets and weight are used; else they may be missing, and are no inputs where they are there.
    Raises UserError for a store that cannot be read, or whose records differ from those of the first one.
    """
    labels = labels_of(config)
    config = config if needs_labels else without_labels(config)
    storage = Storage(config.retry_s)
    entries = (*config.paths("train"), *config.paths("eval")) if needs_labels else ()
    request = _request(config, setting, storage, entries, frozenset(() if needs_labels else labels))
    stores = map_paths(lambda path: open_store(path, request), paths)
    nonempty = [store for store in stores if store.blocks.num_records]
    if not nonempty:
        raise UserError(f"{setting}: {', '.join(paths)} holds no record.")
    first, arrays = _first_readable(nonempty if config.on_bad_record == "skip" else nonempty[:1])
    schema = describe(arrays, first.defaults, config, first.path, labels)
    for store in nonempty:
        named = {name: defaults.get("class_names", ()) for name, defaults in store.defaults.items()}
        check_same_classes(schema.class_names, first.path, named, store.path)
    if config.on_bad_record == "error":
        for store in nonempty:
            number, arrays = next(_first_records(store))
            problem = ArraysParser(schema.features).problem({name: values[0] for name, values in arrays.items()})
            if problem:
                raise UserError(f"{store.name(number)}: {problem}.")
    return RandomAccessRecords(stores, ArraysParser, config.index_dir, storage), schema


def _first_readable(stores: Sequence[Store]) -> tuple[Store, Arrays]:
    """Return the first store of which a record can be read, and its first of which each value says of what kind it is.

    If there is none among its first ones, the first is returned. Raises UserError if no record can be read.
    """
    failures: list[UserError] = []
    for store in stores:
        records = (arrays for _, arrays in _first_records(store))
        try:
            first = next(records)
        except UserError as error:
            failures.append(error)
            continue
        return store, next((each for each in itertools.chain([first], records) if not _says_too_little(each)), first)
    raise failures[0]


def _first_records(store: Store) -> Iterator[tuple[int, Arrays]]:
    """Yield records that can be read, and their numbers: of the first ones, and of the first of each block.

    Raises UserError if there is none.
    """
    failures: list[BaseException] = []
    has_any = False
    firsts = [*range(min(store.blocks.num_records, _TRIED_RECORDS)), *store.blocks.first_record[:-1].tolist()]
    for record in dict.fromkeys(firsts[: 2 * _TRIED_RECORDS]):
        found = try_read(store, record, record + 1)
        if isinstance(found, dict):
            has_any = True
            yield record, found
            continue
        assert isinstance(found, BaseException), "serialized records do not describe themselves"
        failures.append(found)
    if not has_any:
        reason = describe_error(failures[0])
        first = store.name(0).removeprefix(f"{store.path}: ")
        raise UserError(f"{store.path}: none of its first records can be read; {first}: {reason}.") from failures[0]


def _says_too_little(arrays: Arrays) -> bool:
    """Return whether values are nulls, or empty lists in which numpy sees float64, whatever others hold."""

    def is_empty(value: Any) -> bool:
        if isinstance(value, np.ndarray) and value.dtype == object and value.size:
            return any(map(is_empty, value.flat))
        if isinstance(value, np.ndarray):
            return not value.size and value.dtype == np.float64
        return value is None or (isinstance(value, list) and not value)

    return any(map(is_empty, arrays.values()))


def _request(
    config: DataConfig, setting: str, storage: Storage, entries: tuple[str, ...], left_out: frozenset[str]
) -> Request:
    """Return what the config asks of each record."""
    features = {name: of if isinstance(of, Mapping) else {"type": of} for name, of in config.features.items()}
    return Request(
        tuple(dict.fromkeys((*config.inputs, *labels_of(config), *features))) if config.inputs else (),
        left_out=left_out,
        images=frozenset(name for name, of in features.items() if of.get("decode") == "image"),
        texts=frozenset(name for name, of in features.items() if of.get("type") == "bytes"),
        class_names=class_names_in_config(config),
        setting=setting,
        storage=storage,
        entries=entries,
    )


def class_names_in_config(config: DataConfig) -> dict[str, Sequence[str]]:
    """Return the names of classes in data.features, by feature. What is no list of texts is left to the schema."""
    declared = {name: of.get("class_names") for name, of in config.features.items() if isinstance(of, Mapping)}
    return {
        name: names
        for name, names in declared.items()
        if isinstance(names, list | tuple) and names and all(isinstance(each, str) for each in names)
    }


def labels_of(config: DataConfig) -> tuple[str, ...]:
    """Return the features that no model gets, unless data.inputs names them: the targets and the weight."""
    return (*config.targets, *_weight(config))


def without_labels(config: DataConfig) -> DataConfig:
    """Return the config for records that need no targets and no weight.

    data.inputs stays as it is: where it is left to its default, `describe` must know which features were labels.
    """
    labels = {*labels_of(config)} - {*config.inputs}
    features = {name: value for name, value in config.features.items() if name not in labels}
    return dataclasses.replace(config, targets=(), weight=None, features=features)


def describe(
    first: Arrays,
    defaults: Mapping[str, Mapping[str, Any]],
    config: DataConfig,
    path: str,
    labels: Collection[str],
) -> Schema:
    """Return the schema of records. first: one of them, each array with one row. defaults: as of Store.

    data.features takes precedence over defaults. Without data.inputs, all features but the labels are inputs. Raises
    UserError.
    """
    available = ", ".join(first) or "nothing"
    weight = _weight(config)
    named = {"targets": config.targets, "inputs": config.inputs, "weight": weight, "features": config.features}
    for setting, names in named.items():
        for name in names:
            if name not in first:
                raise UserError(f"data.{setting}: the records of {path} have no {name}; they have {available}.")
    inputs = config.inputs or tuple(name for name in first if name not in labels)
    if not inputs:
        raise UserError(f"data.inputs: nothing is left for the model of {available}; name what it gets.")
    names = dict.fromkeys([*inputs, *config.targets, *weight, *config.features])
    features = {
        name: _build_feature(name, first[name], defaults.get(name, {}), config.features.get(name, {})) for name in names
    }
    for name, feature in features.items():
        has_own_names = bool(defaults.get(name, {}).get("class_names"))  # whose order is that of its labels
        if not has_own_names and not isinstance(first[name].flat[0] if first[name].size else None, bytes | str):
            warn_of_names_of_numbers(feature.class_names, f"data.features: {name}")
    return Schema(features, inputs, config.targets, where=path)


def _weight(config: DataConfig) -> tuple[str, ...]:
    return () if config.weight is None else (config.weight,)


def _build_feature(name: str, values: np.ndarray, defaults: Mapping[str, Any], settings: Any) -> Feature:
    where = f"data.features: {name}"
    if isinstance(settings, str):
        settings = {"type": settings}
    if not isinstance(settings, Mapping) or "type" in settings:
        return parse_feature(settings, where)
    found, named = defaults.get("class_names"), settings.get("class_names")
    if found and isinstance(named, list | tuple) and list(named) != list(found):
        raise UserError(
            f"{where}: class_names: {', '.join(map(str, named))}; the records have {', '.join(found)}, in this order."
        )
    settings = {**defaults, **settings}
    if settings.get("decode") == "image":
        return parse_feature({"type": "bytes", **settings}, where)
    if "max_length" in settings:
        return parse_feature({"type": _type_in_lists(where, values), **settings}, where)
    return parse_feature({**_stored_form(where, values, settings), **settings}, where)


def _stored_form(where: str, values: np.ndarray, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return type and shape of what the records hold."""
    value = values.flat[0] if values.size else values[0]
    shape = list(values.shape[1:])
    if isinstance(value, np.ndarray) and values.dtype == object:
        if "shape" not in settings:
            raise UserError(
                f"{where}: holds lists of any length. Give the most values that one has, like max_length: "
                f"{max(len(value), 1)}, or shape: [{len(value)}] if all have as many."
            )
        values, shape = value, []
    elif values.dtype == object or values.dtype.kind in "SU":
        if values.dtype == object and not isinstance(value, bytes | str):
            raise UserError(f"{where}: expected numbers or text; the first record holds {value!r:.80}.")
        return {"type": "int64" if settings.get("class_names") else "bytes", "shape": shape}
    dtype = _STORED_AS.get(values.dtype.name, values.dtype.name)
    if settings.get("class_names") and dtype in _RAW and "int" in dtype:
        dtype = "int64"  # as of records that hold the names
    if dtype in ("int64", "float32"):
        return {"type": "int64" if dtype == "int64" else "float", "shape": shape}
    if dtype not in _RAW:
        raise UserError(
            f"{where}: {values.dtype} is not supported; store it as one of int64, float32, {', '.join(_RAW)}."
        )
    return {"type": "bytes", "decode": "raw", "raw_dtype": dtype, "shape": shape}


def _type_in_lists(where: str, values: np.ndarray) -> str:
    dtype = np.asarray(values[0]).dtype
    if dtype.kind not in _IN_LISTS:
        raise UserError(f"{where}: {dtype} is not supported in lists; store whole numbers, floats or text.")
    return _IN_LISTS[dtype.kind]


def _is_ours(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("format") == _FORMAT


_DIGESTS = Artifact("digests of records", r"digests\.json|[0-9a-f]{16}\.json", content_matches=_is_ours)


def content_digests(entries: Mapping[str, Stamps], index_dir: str | None, storage: Storage) -> dict[str, str]:
    """Return a digest of what the files of each entry hold, in their order. Reads only files whose digest is not saved.

    entries: for each file, or folder with files, the files. Raises UserError if a file cannot be read.
    """
    by_folder: dict[str, dict[str, str]] = {}
    for path, files in entries.items():
        folder, name = _locate(path, files)
        by_folder.setdefault(folder, {})[name] = path
    digests: dict[str, str] = {}
    for folder, paths in by_folder.items():
        places = paths_beside(folder, NAME, index_dir)
        stamps = {name: _stamp(path, entries[path]) for name, path in paths.items()}
        for saved in map(_load, places):
            for name, path in paths.items():
                entry = saved.get(name)
                digest = entry.get("digest") if isinstance(entry, dict) and entry.get("stamp") == stamps[name] else None
                if isinstance(digest, str):
                    digests[path] = digest
        if missing := {name: path for name, path in paths.items() if path not in digests}:
            digests |= _read_all({path: entries[path] for path in missing.values()}, storage)
            found = {name: {"stamp": stamps[name], "digest": digests[path]} for name, path in missing.items()}
            save_to_first(places, partial(_save, found))
    return digests


def _locate(path: str, files: Stamps) -> tuple[str, str]:
    """Return the folder in whose file the digest of an entry is saved, and the entry's name there."""
    return (os.path.dirname(path), os.path.basename(path)) if path in files else (path, ".")


def _stamp(path: str, files: Stamps) -> str:
    facts = [(_name_in_entry(path, file, files), stamp.size, stamp.mtime_ns) for file, stamp in files.items()]
    return hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()


def _name_in_entry(path: str, file: str, files: Stamps) -> str:
    """Return the name of a file of an entry; "" of a file that is an entry itself, since its part has the name."""
    return "" if file == path else os.path.relpath(file, _locate(path, files)[0] or ".")


def _read_all(entries: Mapping[str, Stamps], storage: Storage) -> dict[str, str]:
    files = [file for stamps in entries.values() for file in stamps]
    max_threads = _REMOTE_FILES if any(map(is_remote, files)) else usable_cores()
    with ThreadPoolExecutor(min(len(files), max_threads)) as threads:
        results = threads.map(lambda file: _digest_file(file, storage), files)
        results = track(results, len(files), "reading files once, to identify them")
        digest_of_file = dict(zip(files, results, strict=True))
    digests = {}
    for path, stamps in entries.items():
        total = hashlib.sha256()
        for file in stamps:
            name = _name_in_entry(path, file, stamps).encode(errors="surrogateescape")
            total.update(name + b"\0" + digest_of_file[file])
        digests[path] = total.hexdigest()
    return digests


def _digest_file(path: str, storage: Storage) -> bytes:
    digest = hashlib.sha256()
    with reading(path), storage.opened(path) as (stamp, read):
        for offset in range(0, stamp.size, _PIECE):
            piece = read(_PIECE, offset)
            digest.update(google_crc32c.value(piece).to_bytes(4, "little"))
    return digest.digest()


def _load(place: Path) -> dict[str, Any]:
    content = read_json(place)
    saved = content.get("digests") if content.get("format") == _FORMAT else None
    return saved if isinstance(saved, dict) else {}


def _save(entries: Mapping[str, Any], place: Path) -> None:
    content = {"format": _FORMAT, "digests": {**_load(place), **entries}}
    write_atomically(place, json.dumps(content, indent=1) + "\n", _DIGESTS, sync=False)
