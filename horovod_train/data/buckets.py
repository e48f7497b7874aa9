"""Batches of records whose lists are about equally long: the order of a lane's records, and the lengths of lists.

A lane's records of `steps` neighbouring steps are a *pool*; see sampler for lanes. Each lane sorts its own pool by
length, so that a step gets the k-th shortest record of every lane, and the steps of a pool come in an order drawn from
(seed, epoch). A lane still gives each of its records once, and a step's records do not depend on the number of ranks.

The lengths of all records are measured once and saved, in `data.index_dir` or the user's cache folder. The file is
named by the digest of what the records hold, so copies of the records share it. Parsing TFRecords needs TensorFlow.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from horovod_train.config.settings import DataConfig
from horovod_train.data import counter_rng
from horovod_train.data.files import paths_in_cache, save_to_first
from horovod_train.data.reader import Reader, parse_all
from horovod_train.data.schema import Feature, Schema
from horovod_train.data.source import RecordSource
from horovod_train.errors import UserError
from horovod_train.output.files import Artifact, open_atomically

_POOLS = 4  # so that the order of a pool's steps is independent of other draws; see sampler
_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True, eq=False)
class Buckets:
    """The lengths of all records' lists, and how they are used."""

    names: tuple[str, ...]
    """The features that are lists."""
    lengths: np.ndarray
    """int32 [records, names]: how long each list is, without what equals its padding at the end."""
    by: str
    """The feature by whose length records are sorted."""
    steps: int
    """The number of steps in a pool."""
    max_lengths: tuple[int, ...]
    """Of each list."""

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two Buckets that give the same order."""
        column = np.ascontiguousarray(self.lengths[:, self.names.index(self.by)], "<i4")
        digest = hashlib.sha256(f"{self.by} {self.steps} ".encode())
        digest.update(column.data)
        return digest.hexdigest()

    @cached_property
    def digest(self) -> str:
        """Equal for two Buckets of the same lengths of all lists: only then do ranks cut them alike."""
        digest = hashlib.sha256(repr(self.names).encode())
        digest.update(np.ascontiguousarray(self.lengths, "<i4").data)  # no copy: it may be a mapped file
        return digest.hexdigest()

    def pool(self, step: int, full_steps: int) -> tuple[int, int]:
        """Return the steps [first, last) of the pool that a step is in; a partial last step is in none."""
        first = step // self.steps * self.steps
        return first, min(first + self.steps, full_steps)

    def sort(self, records: np.ndarray, seed: int, epoch: int, first_step: int) -> np.ndarray:
        """Return the records of a pool, int64 [steps, lanes], in order of use. first_step: the first of the pool."""
        lengths = self.lengths[:, self.names.index(self.by)][records]
        by_length = np.argsort(lengths, axis=0, kind="stable")
        key = counter_rng.key(seed, epoch, _POOLS)
        step_order = counter_rng.permutation(key, np.arange(first_step, first_step + len(records)))
        return np.take_along_axis(records, by_length[step_order], axis=0)

    def widths(self, records: np.ndarray, real: np.ndarray) -> np.ndarray:
        """Return how long the lists of each step are once cut, at least 1: int64 [steps, names].

        That is as long as the longest one of those with the same max_length. Words and their tags stay of one length,
        where tags end in values that equal padding.

        records: of all lanes, int64 [steps, lanes]; real: bool, False for padding.
        """
        longest = np.where(real[:, :, None], self.lengths[records], 0).max(axis=1)
        go_together = np.equal.outer(self.max_lengths, self.max_lengths)
        return np.where(go_together, longest[:, None], 1).max(axis=2).clip(1).astype(np.int64)


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


_LENGTHS = Artifact("lengths of records", r"lengths-[0-9a-f]{16}\.npy", content_matches=_is_array)


def find_buckets(source: RecordSource, digest: str, schema: Schema, config: DataConfig) -> Buckets | None:
    """Return the lengths of all lists and how to bucket by them; None without data.bucket_by_length.

    digest: of the source. Reads all records unless their lengths are saved. Raises UserError if the feature is no list.
    """
    by = config.bucket_by_length
    if by is None:
        return None
    lists = {name: feature for name, feature in schema.features.items() if feature.max_length}
    if by not in lists:
        raise UserError(
            f"data.bucket_by_length: {by} is no list (a feature with max_length). "
            f"The lists of {schema.where}: {', '.join(lists) or 'none'}."
        )
    used = {*schema.inputs, *schema.targets, by}
    lists = {name: feature for name, feature in lists.items() if name in used}
    # 3: files of lower numbers may hold other lengths, of records that could not be read when they were measured.
    cache_key = hashlib.sha256(f"3 {digest} {lists!r}".encode()).hexdigest()[:16]
    places = paths_in_cache(f"lengths-{cache_key}.npy", config.index_dir)
    lengths = _load(places, (source.blocks.num_records, len(lists)))
    if lengths is None:
        lengths = _measure_lengths(source, lists, config)
        save_to_first(places, partial(_save, lengths))
    max_lengths = tuple(feature.max_length or 0 for feature in lists.values())
    return Buckets(tuple(lists), lengths, by, config.bucket_steps, max_lengths)


def _measure_lengths(source: RecordSource, lists: dict[str, Feature], config: DataConfig) -> np.ndarray:
    """Read all records; a bad one gets the full length, because it may be repaired, and is reported when it is used."""
    reader, parser = Reader(source, config.read_threads), source.parser(lists)
    full = np.array([feature.max_length for feature in lists.values()], np.int32)
    lengths = np.tile(full, (source.blocks.num_records, 1))
    for records, _, arrays, bad in parse_all(source, reader, parser, "reading records once, for their lengths"):
        usable = records[~np.isin(records, list(bad))]
        for column, (name, feature) in enumerate(lists.items()):
            if len(usable):
                lengths[usable, column] = lengths_of(feature, np.asarray(arrays[name]))
    return lengths


def lengths_of(feature: Feature, values: np.ndarray) -> np.ndarray:
    """Return the lengths of lists [records, max_length, …], without the padding at their ends: int64 [records]."""
    padding = b"" if feature.stored_dtype == "string" else np.asarray(feature.padding, values.dtype)
    is_item = (values != padding).reshape(*values.shape[:2], -1).any(axis=2)
    return np.where(is_item.any(axis=1), is_item.shape[1] - np.argmax(is_item[:, ::-1], axis=1), 0)


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
