"""The records of one split, found and understood, before anything is read from them. Needs no TensorFlow."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from horovod_train.config.settings import DataConfig
from horovod_train.data.files import list_files
from horovod_train.data.sampler import Order, Plan
from horovod_train.data.schema import Schema, dump_schema, find_schema, own_schema
from horovod_train.data.tfrecord.index import Index, open_index
from horovod_train.errors import UserError


@dataclass(frozen=True)
class Records:
    """Where the records are and what each holds."""

    index: Index
    schema: Schema
    setting: str
    """The key that names them, `data.train` or `data.eval`."""

    @property
    def facts(self) -> dict[str, str]:
        """What must be equal on all ranks, by name."""
        of_any_folder = dataclasses.replace(self.schema, counts={})
        kind = hashlib.sha256(dump_schema(of_any_folder).encode()).hexdigest()
        return {f"records of {self.setting}": self.index.digest, f"what a record of {self.setting} holds": kind}


def open_records(config: DataConfig, split: Literal["train", "eval"]) -> Records:
    """Finds the files of a split, their schema and index. Raises UserError for anything that is not as it should be.

    Scans files that have no fresh index: seconds per million records, once.
    """
    records = scan_records(config, split)
    check_counts(records.index, records.schema, getattr(config, split))
    return records


def look_before_start(config: DataConfig, split: Literal["train", "eval"], *, ranks: int) -> None:
    """Raises UserError for what can be seen to be wrong before TensorFlow is loaded.

    A rank among several leaves scanning until they have met: then one scans while the others wait.
    """
    if ranks == 1:
        open_records(config, split)
    else:
        find_records(config, split)


def scan_records(config: DataConfig, split: Literal["train", "eval"]) -> Records:
    """As open_records, but does not compare the records with the counts that `prepare` left."""
    files, schema = find_records(config, split)
    index = open_index(files, config.index_dir, allow_damage=config.on_bad_record == "skip")
    if not index.num_records:
        raise UserError(f"data.{split}: no file holds a record. {index.problems[0]}")
    return Records(index, schema, f"data.{split}")


def find_records(config: DataConfig, split: Literal["train", "eval"]) -> tuple[list[str], Schema]:
    """The files of a split and what their records hold. Opens none of them. Raises UserError."""
    setting = f"data.{split}"
    files = list_files(getattr(config, split), setting)
    if config.parse and config.features:
        raise UserError("data.parse: takes the place of data.features; give one of them.")
    if config.parse:
        return files, own_schema(config.inputs, config.targets)
    return files, find_schema(files, config.features, config.inputs, config.targets, setting)


def build_plan(records: Records, config: DataConfig, *, seed: int, training: bool, global_batch_size: int) -> Plan:
    """The order of the records. `training` shuffles as the config says; otherwise the files' order holds.

    Raises UserError where nothing is left to read.
    """
    order: Order = "lanes" if not training else "shuffled" if config.shuffle else "file"
    # A window over all records is held by each rank as a whole, so it must not be larger than the memory for it.
    record_bytes = int(records.index.blocks.length.sum()) / max(records.index.num_records, 1)
    window = min(config.shuffle_window, max(int(config.shuffle_mb * 1e6 / record_bytes), 1))
    drop = training and config.drop_remainder
    plan = Plan(records.index.blocks.records, global_batch_size, seed, order, window, drop, records.index.digest)
    if not plan.steps_per_epoch:
        raise UserError(
            f"data.drop_remainder: the {plan.num_records} records of {records.setting} do not fill one batch of "
            f"{global_batch_size}, so nothing would be read. Make the batch smaller or leave it out."
        )
    return plan


def check_room_to_shuffle(plan: Plan, records: Records, config: DataConfig, size: int) -> None:
    """A rank holds at least a block for each of its lanes, or else all records. Raises UserError."""
    lengths = records.index.blocks.length
    lanes, total, each = plan.rows_per_rank(size), int(lengths.sum()), float(lengths.mean())
    held_mb = math.ceil(min(lanes * each, total) / 1e6)
    if plan.order == "shuffled" and held_mb > config.shuffle_mb:
        raise UserError(
            f"data.shuffle_mb: must be at least {held_mb}; received {config.shuffle_mb}. A rank draws from as many "
            f"places of {records.setting} as its batch has records, {lanes}, and holds {each / 1e6:.2g} MB for each. "
            "Raise it, start more ranks, or give data.shuffle: false."
        )


def check_counts(index: Index, schema: Schema, folders: Sequence[str]) -> None:
    """A folder must hold what was written into it, or a file that is gone would not be noticed. Raises UserError.

    A folder with a file that is known to be damaged may hold fewer.
    """
    per_file = np.bincount(index.file, index.blocks.records, len(index.files)).astype(np.int64)
    for folder in filter(os.path.isdir, folders):
        inside = [os.path.dirname(source.path) == folder.rstrip("/") for source in index.files]
        found, expected = int(per_file[inside].sum()), schema.expected.get(folder.rstrip("/"))
        is_damaged = any(source.problem for source in itertools.compress(index.files, inside))
        if expected is None or found == expected.records or (is_damaged and found < expected.records):
            continue
        raise UserError(
            f"{folder}: holds {found} records; {expected.where} says {expected.records}. "
            "A file is missing or was added: write the folder again, or correct its counts."
        )
