"""Reads every record of a split and reports what is in it and what is wrong. Does not print; see commands/check_data.

Does not stop at the first fault: every record that can be reached is checked.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from horovod_train.config.settings import DataConfig
from horovod_train.data.dataset import check_counts, find_records
from horovod_train.data.decoding import image_problem
from horovod_train.data.diagnostics import name_faults
from horovod_train.data.features import Feature
from horovod_train.data.parsing import build_parser
from horovod_train.data.progress import track
from horovod_train.data.schema import Schema
from horovod_train.data.tfrecord.index import Index, open_index
from horovod_train.data.tfrecord.reader import Reader, as_list
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


def check_split(config: DataConfig, split: Literal["train", "eval"]) -> Report:
    """Read all records of `data.train` or `data.eval`. Raises UserError only if there are none to read."""
    files, schema = find_records(config, split)
    report = Report(", ".join(getattr(config, split)), files=len(files))
    readable = [name for name in files if os.access(name, os.R_OK)]
    report.bad += [f"{name}: cannot be read." for name in sorted({*files} - {*readable})]
    if not readable:
        return report
    try:
        index = open_index(readable, config.index_dir, allow_damage=True)
        report.bad += index.problems
        report.bytes, report.records = sum(source.size for source in index.files), index.num_records
        if len(readable) == len(files):
            check_counts(index, schema, getattr(config, split))
    except UserError as error:
        report.bad.append(str(error))
    if report.records:
        _Check(index, schema, config, report).run()
    return report


class _Check:
    """One pass over the records of whole files, in file order."""

    def __init__(self, index: Index, schema: Schema, config: DataConfig, report: Report) -> None:
        self._index, self._features, self._report = index, schema.features, report
        self._parser = build_parser(schema.features, config.parse)
        self._reader = Reader(index, config.stage_dir)
        self._digests = np.zeros(index.num_records, np.uint64)
        report.features = {name: self._summary(name) for name in self._parser.dtypes}

    def run(self) -> None:
        firsts = range(0, self._index.num_records, _CHUNK)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for first in track(firsts, len(firsts), f"checking {self._report.where}"):
                records = np.arange(first, min(first + _CHUNK, self._index.num_records))
                self._check(records, threads)
                self._reader.keep_only(self._index.block_of(records[-1:]).tolist())
        known = self._digests[self._digests != 0]
        self._report.duplicates = len(known) - len(np.unique(known))

    def _summary(self, name: str) -> FeatureSummary:
        dtype, shape = self._parser.dtypes[name], self._parser.shapes[name]
        counted = dtype.startswith(("int", "uint")) and shape == ()
        return FeatureSummary(dtype, shape, histogram={} if counted else None)

    def _check(self, records: np.ndarray, threads: Executor) -> None:
        found, faults = self._reader.read(records)
        arrays, bad, data = None if faults else self._parser.parse(found), {}, as_list(found)
        if arrays is None:
            bad = name_faults(self._reader, self._parser, records, data, faults)
            kept = [row for row, record in enumerate(records.tolist()) if record not in bad]
            data, records = [data[row] for row in kept], records[kept]
            arrays = self._parser.parse(data) if data else {}
        assert arrays is not None, "every record was checked, and together they still do not parse"
        for name, values in arrays.items():
            self._report.features[name].add(values)
            feature = self._features.get(name)
            if feature and feature.decode == "image":
                bad |= self._bad_images(name, feature, records, values.tolist(), threads)
        self._report.bad += [bad[record] for record in sorted(bad)]
        digests = b"".join(hashlib.blake2b(one, digest_size=8).digest() for one in data)
        self._digests[records] = np.frombuffer(digests, np.uint64)

    def _bad_images(
        self, name: str, feature: Feature, records: np.ndarray, files: Sequence[bytes], threads: Executor
    ) -> dict[int, str]:
        problems = threads.map(lambda file: image_problem(feature, file), files)
        return {
            record: self._reader.fault(record, f"feature {name}: {problem}").message
            for record, problem in zip(records.tolist(), problems, strict=True)
            if problem
        }
