"""Finds the records of one split and what they hold, before any of them is read. Needs no TensorFlow."""

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
    """Where the records are and what each of them contains."""

    index: Index
    schema: Schema
    setting: str
    """The config key that names them, `data.train` or `data.eval`."""

    @property
    def facts(self) -> dict[str, str]:
        """Return what must be equal on all ranks, by name."""
        of_any_folder = dataclasses.replace(self.schema, counts={})
        kind = hashlib.sha256(dump_schema(of_any_folder).encode()).hexdigest()
        return {f"records of {self.setting}": self.index.digest, f"what a record of {self.setting} holds": kind}


def open_records(config: DataConfig, split: Literal["train", "eval"]) -> Records:
    """Find the files of a split, their schema and their index. Raises UserError for anything that is wrong with them.

    Scans files that have no current index: seconds per million records, once.
    """
    records = scan_records(config, split)
    check_counts(records.index, records.schema, getattr(config, split))
    return records


def look_before_start(config: DataConfig, split: Literal["train", "eval"], *, ranks: int) -> None:
    """Raise UserError for errors that are visible before TensorFlow is loaded.

    One rank among several does not scan yet: later one rank scans while the others wait.
    """
    if ranks == 1:
        open_records(config, split)
    else:
        find_records(config, split)


def scan_records(config: DataConfig, split: Literal["train", "eval"]) -> Records:
    """Do as open_records, but do not compare the records with the counts that `prepare` recorded."""
    files, schema = find_records(config, split)
    index = open_index(files, config.index_dir, allow_damage=config.on_bad_record == "skip")
    if not index.num_records:
        raise UserError(f"data.{split}: no file holds a record. {index.problems[0]}")
    return Records(index, schema, f"data.{split}")


def find_records(config: DataConfig, split: Literal["train", "eval"]) -> tuple[list[str], Schema]:
    """Return the files of a split and what their records hold. Opens none of them. Raises UserError."""
    setting = f"data.{split}"
    files = list_files(getattr(config, split), setting)
    if config.parse and config.features:
        raise UserError("data.parse: takes the place of data.features; give one of them.")
    if config.parse:
        return files, own_schema(config.inputs, config.targets)
    return files, find_schema(files, config.features, config.inputs, config.targets, setting)


def build_plan(records: Records, config: DataConfig, *, seed: int, training: bool, global_batch_size: int) -> Plan:
    """Build the order of the records. `training` shuffles as the config says; otherwise the files' order is used.

    Raises UserError if no record is left to read.
    """
    order: Order = "lanes" if not training else "shuffled" if config.shuffle else "file"
    # Each rank keeps a window over all records as a whole in memory, so it must not be larger than the memory for it.
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
    """Raise UserError if memory is short: a rank keeps at least a block for each of its lanes, or else all records."""
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
    """Raise UserError if a folder holds other counts than were written into it, as when a file is missing.

    A folder with a file that is known to be damaged may hold fewer records.
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
