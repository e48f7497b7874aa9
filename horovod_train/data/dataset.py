"""Finds the records of one split and what they hold, before any of them is read. Needs no TensorFlow."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from horovod_train.config.paths import is_remote
from horovod_train.config.settings import DataConfig
from horovod_train.data.files import check_named_once, fits, has_records, list_files, record_folders
from horovod_train.data.random_access import FILES, FOLDERS
from horovod_train.data.random_access.array_record import open_array_records
from horovod_train.data.random_access.images import ImageFolder, UnlabelledImages, are_images
from horovod_train.data.random_access.source import (
    OpenStore,
    RandomAccessRecords,
    class_names_in_config,
    open_described,
    without_labels,
)
from horovod_train.data.random_access.users import UsersStore
from horovod_train.data.reader import find_buckets
from horovod_train.data.sampler import Buckets, Order, Plan
from horovod_train.data.schema import (
    NO_SCALE,
    Feature,
    Schema,
    check_same_classes,
    check_weight,
    dump_schema,
    find_schema,
    schema_of_names,
)
from horovod_train.data.source import OpenSource, Part, RecordSource, digest_of, problems_of, same_content
from horovod_train.data.storage import Storage
from horovod_train.data.subsets import DataSet, Entry, Selection, fold_records, hold_out, mix, split_by_entry
from horovod_train.data.tfrecord import open_tfrecords
from horovod_train.errors import UserError

Split = Literal["train", "eval"]

SOURCES: dict[str, OpenSource] = {"*.tfrecord*": open_tfrecords, "*.array_record*": open_array_records}
"""Names of files of each kind, as a pattern → what opens them. Files of other names are opened as the first kind.

A dataset.json beside these files says what a record holds. Kinds that describe their records are in random_access.
"""


@dataclass(frozen=True)
class Records:
    """Where the records are and what each of them contains."""

    source: RecordSource
    schema: Schema
    setting: str
    """The config key that names them, `data.train` or `data.eval`."""
    notes: Sequence[str] = ()
    """What users should know before a run."""
    stored: Sequence[Part] = ()
    """The parts as they are stored, where the source repeats some records or leaves some out."""
    data_sets: Sequence[DataSet] = ()
    """The data sets that the records are from, in the order of the records."""
    describes_itself: bool = False
    """Whether the schema is that of the records, so that data.features need not name all of them."""
    lengths: str = ""
    """Digest of the lengths of lists, which each host keeps, with data.bucket_by_length; "" without."""

    @property
    def num_records(self) -> int:
        return self.source.blocks.num_records

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what identifies the parts: equal if a record's number means the same record."""
        return digest_of(self.source.parts)

    @property
    def problems(self) -> list[str]:
        """A sentence for each part that is not complete."""
        return problems_of(self.source.parts)

    def files(self) -> list[str]:
        """Return the file of each record, where each is a file; else nothing."""
        source = self.source
        while isinstance(source, Selection):
            source = source.source
        files = source.files() if isinstance(source, RandomAccessRecords) else []
        numbers = self.numbers() if files else None
        return files if numbers is None else [files[number] for number in numbers.tolist()]

    def numbers(self) -> np.ndarray | None:
        """Return the position of each record in its files: int64 [records]. None if they are 0, 1, …: all are read."""
        source = self.source
        numbers: np.ndarray | None = None
        while isinstance(source, Selection):
            numbers = source.numbers() if numbers is None else source.numbers()[numbers]
            source = source.source
        return numbers

    def find_buckets(self, config: DataConfig) -> Buckets | None:
        """Return how to sort the records by length; None without data.bucket_by_length. Raises UserError."""
        return find_buckets(self.source, self.digest, self.schema, config)

    @property
    def facts(self) -> dict[str, str]:
        """Return what must be equal on all ranks, by name."""
        schema_without_counts = dataclasses.replace(self.schema, counts={})
        schema_digest = hashlib.sha256(dump_schema(schema_without_counts).encode()).hexdigest()
        return {
            f"records of {self.setting}": self.digest,
            f"what a record of {self.setting} holds": schema_digest,
            f"lengths of lists of {self.setting} (each host keeps them: remove lengths-*.npy from data.index_dir, or "
            "from ~/.cache/horovod_train/index)": self.lengths,
        }


class SplitFiles(NamedTuple):
    """The files of a split, before they are opened."""

    files: list[str]
    """Folders too, if each is one data set. With data.source: the texts that its class is called with."""
    entries: list[Entry]
    """The data sets that the files are of."""
    open: Callable[[Sequence[str]], Records]
    """Opens some or all of them. Raises UserError for one that cannot be read."""
    notes: Sequence[str] = ()
    """What users should know before a run, besides the notes of the records."""


def open_records(config: DataConfig, split: Split, *, needs_labels: bool = True) -> Records:
    """Find the files of a split and open them. Raises UserError for anything that is wrong with them.

    needs_labels: whether targets and weight are used; else the schema has none, and the records need not have them.
    They are no inputs even where they have them, unless data.inputs names them. The first time may take long: TFRecord
    files without a current index are scanned.
    """
    records = scan_records(config, split, needs_labels=needs_labels)
    check_counts(records, config.paths(split))
    return records


def look_before_start(config: DataConfig, split: Split, *, ranks: int, needs_labels: bool = True) -> None:
    """Raise UserError for errors that are visible before TensorFlow is loaded.

    One rank among several does not scan yet: later one rank scans while the others wait.
    """
    look = open_records if ranks == 1 else find_records
    look(config, split, needs_labels=needs_labels)


def scan_records(config: DataConfig, split: Split, *, needs_labels: bool = True) -> Records:
    """Do as open_records, but do not compare the records with the counts that `prepare` recorded."""
    split_files = find_records(config, split, needs_labels=needs_labels)
    records = split_files.open(split_files.files)
    if not records.num_records:
        raise UserError(" ".join([f"data.{split}: no file holds a record.", *records.problems[:1]]))
    source = records.source
    if config.fold:
        source = fold_records(source, config.fold, is_left_out=split == "eval")
    elif config.eval_fraction:
        source = hold_out(source, config.eval_fraction, is_held_out=split == "eval")
    data_sets = split_by_entry(source, split_files.entries)
    if any(entry.repeats > 1 for entry in split_files.entries):
        source = mix(source, split_files.entries)
    notes = [*split_files.notes, *records.notes]
    if needs_labels and not config.source:  # others are identified by what their class says, or by names
        notes += _read_twice(setting=f"data.{split}", parts=records.source.parts)
    return dataclasses.replace(records, source=source, stored=records.source.parts, data_sets=data_sets, notes=notes)


def _read_twice(setting: str, parts: Sequence[Part]) -> Iterator[str]:
    """Yield a sentence if some files hold what others do."""
    pairs = [(path, first) for path, first in same_content(parts, parts) if path != first]
    if pairs:
        more = f", as are those of {len(pairs) - 1} more files" if len(pairs) > 1 else ""
        yield (
            f"{setting}: {pairs[0][0]} holds the same as {pairs[0][1]}, so its records are read twice{more}. Leave it "
            "out, or write repeats: 2 if that is meant."
        )


def find_records(config: DataConfig, split: Split, *, needs_labels: bool = True) -> SplitFiles:
    """Find the files of a split and choose what opens them. Opens none. Raises UserError."""
    if config.dataset:
        stream = config.dataset.name
        raise UserError(
            f"data.dataset: {stream} is a stream, which only training reads; records are needed here. Its evaluations "
            "are in metrics.jsonl of the run; predict --data PATH takes records in files."
        )
    setting, paths, repeats = f"data.{split}", config.paths(split), config.repeats(split)
    if config.parse and config.features:
        raise UserError("data.parse: takes the place of data.features; give one of them.")
    storage = Storage(config.retry_s)
    if config.source:
        open_store: OpenStore | None = partial(UsersStore, spec=config.source)
    else:
        by_class = needs_labels or bool(config.fold or config.eval_fraction)  # the parts are of records in their order
        open_store = _folder_opener(paths, storage, by_class=by_class)
    if open_store:
        check_named_once(paths, setting)
        kind, files, counts, notes = "", list(paths), [1] * len(paths), list[str]()
    else:
        kind, files, counts, notes = list_files(paths, setting, [*SOURCES, *FILES], storage)
        open_store = FILES.get(kind)
    entries = [Entry(*entry) for entry in zip(paths, counts, repeats, strict=True)]
    if open_store:
        uses = {"parse": "gets serialized records, of TFRecords", "stage_dir": "keeps blocks of TFRecords"}
        for key, use in uses.items():
            if getattr(config, key):
                raise UserError(f"data.{key}: {use}, and {setting}, {files[0]}, has none. Leave it out.")
        return SplitFiles(files, entries, partial(_open_stores, config, setting, needs_labels, open_store), notes)
    config = config if needs_labels else without_labels(config)
    if config.parse:
        schema = schema_of_names(config.inputs, config.targets)
    else:
        schema = find_schema(files, config, setting, storage, _why_tfrecords(files, kind))
        check_weight(config.weight, schema)
    if not needs_labels:
        schema = dataclasses.replace(schema, targets=())
    return SplitFiles(files, entries, lambda some: Records(SOURCES[kind](some, config), schema, setting), notes)


def _why_tfrecords(files: Sequence[str], kind: str) -> str:
    """Return a sentence about a file that is read as TFRecords, and has another name; "" if there is none."""
    other = next((name for name in map(os.path.basename, files) if not fits(name, kind)), None)
    if other is None:
        return ""
    if pattern := next((pattern for pattern in FILES if fits(other, pattern)), None):
        return f"{other} is read as TFRecords: a glob must end as names of its kind do, {pattern}."
    return f"{other} is read as TFRecords, because its name fits none of {', '.join(FILES)}."


def _open_stores(
    config: DataConfig, setting: str, needs_labels: bool, open_store: OpenStore, files: Sequence[str]
) -> Records:
    """Open stores, which describe their records."""
    source, schema = open_described(files, open_store, config, setting, needs_labels=needs_labels)
    if needs_labels:
        check_weight(config.weight, schema)
    return Records(source, schema, setting, source.notes, describes_itself=True)


def _folder_opener(paths: Sequence[str], storage: Storage, *, by_class: bool) -> OpenStore | None:
    """Return what opens these folders if each is a data set of the same kind; None if they contain files of records.

    by_class: whether images must be in a folder for each class; else they may be anywhere in a folder, of a glob, or
    single files, in the same order.
    """
    kind: OpenStore | None = None
    try:
        if all(_is_readable_folder(path, storage) and not _has_record_files(path, storage) for path in paths):
            kinds = (opener for is_kind, opener in FOLDERS if all(is_kind(path, storage) for path in paths))
            kind = next(kinds, None)
        may_be_anywhere = kind in (None, ImageFolder) and not by_class
        if may_be_anywhere and are_images(paths) and not any(_has_tables(path, storage) for path in paths):
            return UnlabelledImages
    except OSError:
        return None  # list_files says what cannot be read
    return kind


def _is_readable_folder(path: str, storage: Storage) -> bool:
    return storage.is_folder(path) and (is_remote(path) or os.access(path, os.R_OK | os.X_OK))


def _has_tables(path: str, storage: Storage) -> bool:
    """Return whether this is a folder with files that may name its images, or hold records themselves."""
    return storage.is_folder(path) and (_has_record_files(path, storage) or has_records(path, FILES, storage))


def _has_record_files(folder: str, storage: Storage) -> bool:
    """Return whether a folder, or a subfolder of a local folder, has files of SOURCES."""
    in_folder = has_records(folder, SOURCES, storage)
    return in_folder or (not is_remote(folder) and record_folders(folder, SOURCES) != [folder])


def with_inputs_of(config: DataConfig, records: Records) -> DataConfig:
    """Return the config with the inputs of the training records, for other records of the same model.

    Left to its default, data.inputs would mean other features where those have one more. Texts of CSV files are
    declared, because in another file all of a column may read as numbers.
    """
    schema, texts = records.schema, dict[str, Any]()
    if records.describes_itself and all(fits(part.path, "*.csv") for part in records.source.parts):
        texts = {name: {"type": "bytes"} for name in schema.inputs if schema.features[name] == Feature("bytes")}
    return dataclasses.replace(config, inputs=config.inputs or schema.inputs, features={**texts, **config.features})


def beside_training(records: Records, training: Records, config: DataConfig) -> Records:
    """Return the records to evaluate on, with a note if some are trained on too, in files that both splits have.

    Raises UserError if a label of the records stands for another class than in the training records.
    """
    check_same_classes(training.schema.class_names, training.setting, records.schema.class_names, records.setting)
    is_parted = config.fold or config.eval_fraction
    pairs = [] if is_parted or config.source else same_content(records.stored, training.stored)
    if not pairs:
        return records
    more = f" ({len(pairs) - 1} more files are in both)" if len(pairs) > 1 else ""
    note = (
        f"{records.setting}: {pairs[0][0]} holds the records of {pairs[0][1]}, which are trained on{more}; evaluation "
        "would show what was learnt by heart. Give other records, or data.eval_fraction."
    )
    return dataclasses.replace(records, notes=[*records.notes, note])


def other_kinds(records: Records, trained: Mapping[str, Feature], where: str) -> Iterator[str]:
    """Yield a sentence for each feature that a model would get in another range than it was trained on.

    Either its scale and offset are others, or they are the same for integers here and floats there, or the reverse. A
    table's columns without a scale may well be either; pixels are from 0 to 255, or to 1.

    trained: the features of the training records, which `where` names.
    """
    for name, here in records.schema.features.items():
        if (there := trained.get(name)) is None or "string" in (here.stored_dtype, there.stored_dtype):
            continue
        is_other_kind = ("float" in here.stored_dtype) != ("float" in there.stored_dtype)
        scales = [feature.scale_settings() for feature in (here, there)]
        if scales[0] != scales[1] and not is_other_kind:
            yield f"{records.setting}: {name} has {scales[0]}, and {scales[1]} in {where}"
        elif is_other_kind and scales[0] == scales[1] and (scales[0] != NO_SCALE or len(here.shape) == 3):
            same = "its scale and offset are the same for both" if scales[0] != NO_SCALE else "neither is scaled"
            yield f"{records.setting}: {name} is {here.stored_dtype}, and {there.stored_dtype} in {where}; {same}"


def with_class_names_of(config: DataConfig, records: Records) -> DataConfig:
    """Return the config with the class names of its only target, where the records have them, as folders of images do.

    TFRecords have theirs in dataset.json.
    """
    schema = records.schema
    names = schema.class_names.get(schema.targets[0]) if len(schema.targets) == 1 else None
    if not names or not records.describes_itself:
        return config
    (target,) = schema.targets
    settings = config.features.get(target, {})
    if not isinstance(settings, Mapping) or "class_names" in settings:
        return config
    features = {**config.features, target: {**settings, "class_names": list(names)}}
    return dataclasses.replace(config, features=features)


def class_names(config: DataConfig, named: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the names of the classes of the only target. named: those of records, by feature; else the config's."""
    named = {**class_names_in_config(config), **named}
    targets = config.targets or [name for name in named if name not in config.inputs]
    return tuple(named.get(targets[0], ())) if len(targets) == 1 else ()


def build_plan(records: Records, config: DataConfig, *, seed: int, training: bool, global_batch_size: int) -> Plan:
    """Build the order of the records. `training` shuffles as the config says; otherwise it is the same each time.

    With data.bucket_by_length the first call reads all records; see reader. Raises UserError if no record is left to
    read.
    """
    blocks = records.source.blocks
    if training:
        order: Order = "shuffled" if config.shuffle else "file"
    else:  # the same at any number of ranks: see build_split
        order = "lanes" if _mb_of_lanes(records, global_batch_size) <= config.shuffle_mb else "file"
    # Each rank keeps a window over all records as a whole in memory, so it must not be larger than the memory for it.
    record_bytes = blocks.total_bytes / max(blocks.num_records, 1)
    window = min(config.shuffle_window, max(int(config.shuffle_mb * 1e6 / max(record_bytes, 1)), 1))
    if blocks.are_single:
        window = 1  # the order of the blocks is that of the records: mixing would only keep more of them in memory
    drop = training and config.drop_remainder
    buckets = records.find_buckets(config) if training else None
    plan = Plan(blocks.records, global_batch_size, seed, order, window, drop, records.digest, buckets)
    if not plan.steps_per_epoch:
        raise UserError(
            f"data.drop_remainder: the {plan.num_records} records of {records.setting} do not fill one batch of "
            f"{global_batch_size}, so nothing would be read. Make the batch smaller or leave it out."
        )
    return plan


def check_room_to_shuffle(plan: Plan, records: Records, config: DataConfig, size: int) -> None:
    """Raise UserError if memory is short: a rank keeps at least a block for each of its lanes, or else all records."""
    lanes, mean = plan.rows_per_rank(size), float(records.source.blocks.bytes.mean())
    needed_mb = _mb_of_lanes(records, lanes)
    if plan.order == "shuffled" and needed_mb > config.shuffle_mb:
        raise UserError(
            f"data.shuffle_mb: must be at least {needed_mb}; received {config.shuffle_mb}. A rank draws from as many "
            f"places of {records.setting} as its batch has records, {lanes}, and holds {mean / 1e6:.2g} MB for each. "
            "Raise it, start more ranks, or give data.shuffle: false."
        )


def _mb_of_lanes(records: Records, lanes: int) -> int:
    """Return the MB of a block for each of so many lanes, or of all records."""
    blocks = records.source.blocks
    return math.ceil(min(lanes * float(blocks.bytes.mean()), blocks.total_bytes) / 1e6)


def check_counts(records: Records, folders: Sequence[str]) -> None:
    """Raise UserError if a folder holds other counts than were written into it, as when a file is missing.

    A folder with a file that is known to be damaged may hold fewer records.
    """
    for folder in (path for path in folders if is_remote(path) or os.path.isdir(path)):
        parts = records.stored or records.source.parts
        folder_parts = [part for part in parts if os.path.dirname(part.path) == folder.rstrip("/")]
        count, expected = sum(part.records for part in folder_parts), records.schema.expected.get(folder.rstrip("/"))
        if expected is None or count == expected.records or (problems_of(folder_parts) and count < expected.records):
            continue
        raise UserError(
            f"{folder}: holds {count} records; {expected.where} says {expected.records}. "
            "A file is missing or was added: write the folder again, or correct its counts."
        )
