"""Finds out how long the lists of all records are, once, and keeps that in a file. Needs TensorFlow to parse TFRecords.

Kept in `data.index_dir` or the user's cache folder, by the digest of what the records hold: copies have the same.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from horovod_train.config.settings import DataConfig
from horovod_train.data.cache_paths import paths_in_cache, save_to_first
from horovod_train.data.features import Feature
from horovod_train.data.order.buckets import Buckets
from horovod_train.data.reader import Reader, parse_all
from horovod_train.data.schema import Schema
from horovod_train.data.source import RecordSource
from horovod_train.errors import UserError
from horovod_train.output.files import open_atomically
from horovod_train.output.removal import Artifact

_MAGIC = b"\x93NUMPY"


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


_LENGTHS = Artifact("lengths of records", r"lengths-[0-9a-f]{16}\.npy", content_matches=_is_array)


def find_buckets(source: RecordSource, digest: str, schema: Schema, config: DataConfig) -> Buckets | None:
    """Return the lengths of all lists and how to bucket by them; None without data.bucket_by_length.

    digest: of the source. The first time this reads all records. Raises UserError for a feature that is no list.
    """
    by = config.bucket_by_length
    if by is None:
        return None
    lists = {name: feature for name, feature in schema.features.items() if feature.max_length}
    if by not in lists:
        there = ", ".join(lists) or "none is"
        raise UserError(
            f"data.bucket_by_length: {by} is no list; of the features of {schema.where} {there} (max_length)."
        )
    used = {*schema.inputs, *schema.targets, by}
    lists = {name: feature for name, feature in lists.items() if name in used}
    unique = hashlib.sha256(f"{digest} {lists!r}".encode()).hexdigest()[:16]
    places, shape = paths_in_cache(f"lengths-{unique}.npy", config.index_dir), (source.blocks.num_records, len(lists))
    lengths = _load(places, shape)
    if lengths is None:
        lengths = _measure(source, lists, config)
        save_to_first(places, partial(_save, lengths))
    return Buckets(tuple(lists), lengths, by, config.bucket_steps)


def _measure(source: RecordSource, lists: dict[str, Feature], config: DataConfig) -> np.ndarray:
    """Read all records; a bad one has no length, and is named when it is used."""
    reader, parser = Reader(source, config.read_threads), source.parser(lists)
    lengths = np.zeros((source.blocks.num_records, len(lists)), np.int32)
    for records, _, arrays, bad in parse_all(source, reader, parser, "reading records once, for their lengths"):
        usable = records[~np.isin(records, list(bad))]
        for column, (name, feature) in enumerate(lists.items()):
            if len(usable):
                lengths[usable, column] = lengths_of(feature, np.asarray(arrays[name]))
    return lengths


def lengths_of(feature: Feature, values: np.ndarray) -> np.ndarray:
    """Return the lengths of lists [records, max_length, …], without the padding at their ends: int64 [records]."""
    padding = b"" if feature.stored_dtype == "string" else np.asarray(feature.padding, values.dtype)
    differs = (values != padding).reshape(*values.shape[:2], -1).any(axis=2)
    return np.where(differs.any(axis=1), differs.shape[1] - np.argmax(differs[:, ::-1], axis=1), 0)


def _load(places: Sequence[Path], shape: tuple[int, int]) -> np.ndarray | None:
    for place in places:
        with contextlib.suppress(OSError, ValueError, EOFError):
            lengths = np.load(place, mmap_mode="r", allow_pickle=False)  # ranks of a host share its pages
            if lengths.shape == shape and lengths.dtype == np.int32:
                return lengths
    return None


def _save(lengths: np.ndarray, place: Path) -> None:
    with open_atomically(place, _LENGTHS, sync=False) as file:
        np.save(file, lengths)
