"""Reads every record of a split and reports what is in it and what is wrong. Does not print; see commands/check_data.

Does not stop at the first fault: every record that can be reached is checked.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from horovod_train.config.remote_paths import is_remote
from horovod_train.config.settings import DataConfig
from horovod_train.data.dataset import Records, Split, check_counts, find_records
from horovod_train.data.features import Feature
from horovod_train.data.parsing.serialized import build_parser
from horovod_train.data.progress import track
from horovod_train.data.reader import Reader, parse_usable
from horovod_train.data.source import one_by_one
from horovod_train.data.transforms.decoding import image_problem
from horovod_train.errors import UserError

_CHUNK = 4096
_MAX_CLASSES = 1000


@dataclass
class FeatureSummary:
    """The values of one feature over all good records, as they are stored. Strings and images have no numbers."""

    dtype: str
    shape: tuple[int, ...]
    low: float | None = None
    high: float | None = None
    total: float = 0.0
    values: int = 0
    histogram: dict[int, int] | None = None
    """How often each value occurs, for a scalar integer with few different values."""

    def add(self, values: np.ndarray) -> None:
        if self.dtype == "string" or not values.size:
            return
        low, high = float(values.min()), float(values.max())
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)
        self.total += float(values.sum(dtype=np.float64))
        self.values += values.size
        if self.histogram is not None:
            for value, count in zip(*(part.tolist() for part in np.unique(values, return_counts=True)), strict=True):
                self.histogram[value] = self.histogram.get(value, 0) + count
            if len(self.histogram) > _MAX_CLASSES:
                self.histogram = None

    @property
    def mean(self) -> float | None:
        return self.total / self.values if self.values else None


@dataclass
class Report:
    """What was found in one split."""

    where: str
    files: int = 0
    bytes: int = 0
    records: int = 0
    bad: list[str] = field(default_factory=list)
    """The sentence that names each bad record or file."""
    duplicates: int = 0
    """Records with exactly the bytes of an earlier one."""
    features: dict[str, FeatureSummary] = field(default_factory=dict)


def check_split(config: DataConfig, split: Split) -> Report:
    """Read all records of `data.train` or `data.eval`. Raises UserError only if there are none to read."""
    found, paths = find_records(config, split), config.paths(split)
    report = Report(", ".join(paths), files=len(found.files))
    readable = [name for name in found.files if not found.are_paths or _may_be_read(name)]
    report.bad += [f"{name}: cannot be read." for name in sorted({*found.files} - {*readable})]
    if not readable:
        return report
    try:
        records = found.open(readable, allow_damage=True)
        report.bad += records.problems
        report.bytes, report.records = sum(part.size for part in records.source.parts), records.num_records
        if len(readable) == len(found.files):
            check_counts(records, paths)
    except UserError as error:
        report.bad.append(str(error))
    if report.records:
        _Check(records, config, report).run()
    return report


def _may_be_read(path: str) -> bool:
    return is_remote(path) or os.access(path, os.R_OK)  # a store says it when it is asked


class _Check:
    """One pass over all records, in their order."""

    def __init__(self, records: Records, config: DataConfig, report: Report) -> None:
        self._blocks, self._features, self._report = records.source.blocks, records.schema.features, report
        self._parser = build_parser(records.source, records.schema.features, config)
        self._reader = Reader(records.source)
        self._digests = np.zeros(records.num_records, np.uint64)
        report.features = {name: self._summary(name) for name in self._parser.dtypes}

    def run(self) -> None:
        firsts = range(0, self._blocks.num_records, _CHUNK)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for first in track(firsts, len(firsts), f"checking {self._report.where}"):
                records = np.arange(first, min(first + _CHUNK, self._blocks.num_records))
                self._check(records, threads)
                self._reader.keep_only(self._blocks.containing(records[-1:]).tolist())
        known = self._digests[self._digests != 0]
        self._report.duplicates = len(known) - len(np.unique(known))

    def _summary(self, name: str) -> FeatureSummary:
        dtype, shape = self._parser.dtypes[name], self._parser.shapes[name]
        counted = dtype.startswith(("int", "uint")) and shape == ()
        return FeatureSummary(dtype, shape, histogram={} if counted else None)

    def _check(self, records: np.ndarray, threads: Executor) -> None:
        data, faults = self._reader.read(records)
        arrays, bad = parse_usable(self._parser, records, data, faults, self._reader.name_record)
        usable = ~np.isin(records, list(bad))
        stored, records = list(itertools.compress(one_by_one(data), usable)), records[usable]
        for name, values in arrays.items():
            self._report.features[name].add(values)
            feature = self._features.get(name)
            if feature and feature.decode == "image":
                bad |= self._bad_images(name, feature, records, np.asarray(values).tolist(), threads)
        self._report.bad += [bad[record] for record in sorted(bad)]
        self._digests[records] = np.frombuffer(b"".join(map(_digest, stored)), np.uint64)

    def _bad_images(
        self, name: str, feature: Feature, records: np.ndarray, files: Sequence[bytes], threads: Executor
    ) -> dict[int, str]:
        problems = threads.map(lambda file: image_problem(feature, file), files)
        return {
            record: self._reader.name_record(record, f"feature {name}: {problem}")
            for record, problem in zip(records.tolist(), problems, strict=True)
            if problem
        }


def _digest(record: Any) -> bytes:
    data = record if isinstance(record, bytes) else b"".join(map(_content, record.values()))
    return hashlib.blake2b(data, digest_size=8).digest()


def _content(value: Any) -> bytes:
    array = np.asarray(value)  # of objects for lists of text, whose bytes would be addresses
    own = repr(array.tolist()).encode(errors="surrogatepass") if array.dtype.hasobject else array.tobytes()
    return f"{array.dtype} {array.shape} ".encode() + own
