"""The records of one split, found and understood, before anything is read from them. Needs no TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from horovod_train.config import DataConfig
from horovod_train.data.index import Index, list_files, open_index
from horovod_train.data.schema import Schema, find_schema
from horovod_train.errors import UserError


@dataclass(frozen=True)
class Records:
    """Where the records are and what each holds."""

    index: Index
    schema: Schema
    setting: str
    """The key that names them, `data.train` or `data.eval`."""


def open_records(config: DataConfig, split: Literal["train", "eval"]) -> Records:
    """Finds the files of a split, their schema and index. Raises UserError for anything that is not as it should be.

    Scans files that have no fresh index: seconds per million records, once.
    """
    setting, patterns = f"data.{split}", getattr(config, split)
    files = list_files(patterns, setting)
    schema = find_schema(files, config.features, config.inputs, config.targets, setting)
    index = open_index(files, config.index_dir)
    _check_counts(index, schema, patterns)
    return Records(index, schema, setting)


def _check_counts(index: Index, schema: Schema, folders: Sequence[str]) -> None:
    """A folder must hold what was written into it: otherwise nobody notices that a file is gone."""
    per_file = np.bincount(index.file, index.blocks.count, len(index.files))
    for folder in filter(os.path.isdir, folders):
        expected = schema.counts.get(os.path.basename(os.path.abspath(folder)))
        found = int(per_file[[os.path.dirname(source.path) == folder.rstrip("/") for source in index.files]].sum())
        if expected is not None and found != expected:
            raise UserError(
                f"{folder}: holds {found} records; {schema.where} says {expected}. "
                "A file is missing or was added: write the folder again, or correct its counts."
            )
