"""Reads every record of a split and reports what is in it and what is wrong. Does not print; see commands/check_data.

Does not stop at the first fault: every record that can be reached is checked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from horovod_train.config.paths import is_remote
from horovod_train.config.settings import DataConfig
from horovod_train.data.dataset import Records, Split, check_counts, find_records
from horovod_train.data.parsing import build_parser
from horovod_train.data.reader import Reader, parse_all
from horovod_train.data.source import split_records
from horovod_train.data.transforms import image_problem
from horovod_train.errors import UserError

_MAX_CLASSES = 1000


@dataclass
class FeatureSummary:
    """The values of one feature over all good records, as they are stored, without those that are not finite.

    Strings and images have no numbers.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float | None = None
    high: float | None = None
    total: float = 0.0
    values: int = 0
    histogram: dict[int, int] | None = None
    """How often each value occurs, for a scalar integer with few different values."""

    def add(self, values: np.ndarray) -> None:
        if self.dtype == "string":
            return
        if values.dtype.kind == "f":
            values = values[np.isfinite(values)]
        if not values.size:
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
    """What one split holds, and its problems."""

    where: str
    files: int = 0
    bytes: int = 0
    records: int = 0
    notes: list[str] = field(default_factory=list)
    """What is left out, and what else users should know."""
    bad: list[str] = field(default_factory=list)
    """The sentence that names each bad record or file."""
    duplicates: int = 0
    """Records with exactly the bytes of an earlier one."""
    features: dict[str, FeatureSummary] = field(default_factory=dict)


def check_split(config: DataConfig, split: Split) -> Report:
    """Read all records of `data.train` or `data.eval`. Raises UserError only if there are none to read."""
    config = dataclasses.replace(config, on_bad_record="skip")  # opening would end at a bad first record
    split_files, paths = find_records(config, split), config.paths(split)
    report = Report(", ".join(paths), files=len(split_files.files), notes=list(split_files.notes))
    # Opening a remote file checks it.
    readable = [f for f in split_files.files if not split_files.are_paths or is_remote(f) or os.access(f, os.R_OK)]
    report.bad += [f"{name}: cannot be read." for name in sorted({*split_files.files} - {*readable})]
    if not readable:
        return report
    try:
        records = split_files.open(readable, allow_damage=True)
        report.bad += records.problems
        report.notes += records.notes
        report.bytes, report.records = sum(part.size for part in records.source.parts), records.num_records
        if len(readable) == len(split_files.files):
            check_counts(records, paths)
    except UserError as error:
        report.bad.append(str(error))
    if report.records:
        _check_records(records, config, report)
    return report


def _check_records(records: Records, config: DataConfig, report: Report) -> None:
    """Read all records in their order, and add to the report what is in them."""
    features, reader = records.schema.features, Reader(records.source)
    parser = build_parser(records.source, features, config)
    for name, dtype in parser.dtypes.items():
        is_counted = dtype.startswith(("int", "uint")) and parser.shapes[name] == ()
        report.features[name] = FeatureSummary(dtype, parser.shapes[name], histogram={} if is_counted else None)
    digests = np.zeros(records.num_records, np.uint64)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for numbers, data, arrays, bad in parse_all(records.source, reader, parser, f"checking {report.where}"):
            usable = ~np.isin(numbers, list(bad))
            stored, numbers = itertools.compress(split_records(data), usable), numbers[usable]
            digests[numbers] = np.frombuffer(b"".join(map(_digest, stored)), np.uint64)
            for name, values in arrays.items():
                report.features[name].add(values)
                for record, fault in _not_finite(numbers, np.asarray(values)):
                    bad.setdefault(record, reader.name_record(record, f"feature {name}: {fault}"))
                feature = features.get(name)
                if feature and feature.decode == "image":
                    problems = threads.map(partial(image_problem, feature), np.asarray(values).tolist())
                    for record, problem in zip(numbers.tolist(), problems, strict=True):
                        if problem:
                            bad[record] = reader.name_record(record, f"feature {name}: {problem}")
            report.bad += [bad[record] for record in sorted(bad)]
    usable_digests = digests[digests != 0]
    report.duplicates = len(usable_digests) - len(np.unique(usable_digests))


def _not_finite(numbers: np.ndarray, values: np.ndarray) -> Iterator[tuple[int, str]]:
    """Yield each record with a value that is not finite, and which. numbers: of the records, in the order of rows."""
    if values.dtype.kind != "f":
        return
    rows = values.reshape(len(values), -1)
    for row in np.flatnonzero(~np.isfinite(rows).all(axis=1)).tolist():
        (first,) = rows[row][~np.isfinite(rows[row])][:1].tolist()
        yield int(numbers[row]), f"expected finite numbers; the record holds {first}"


def _digest(record: Any) -> bytes:
    data = record if isinstance(record, bytes) else b"".join(map(_bytes_of_value, record.values()))
    return hashlib.blake2b(data, digest_size=8).digest()


def _bytes_of_value(value: Any) -> bytes:
    array = np.asarray(value)  # of objects for lists of text, whose bytes would be addresses
    content = repr(array.tolist()).encode(errors="surrogatepass") if array.dtype.hasobject else array.tobytes()
    return f"{array.dtype} {array.shape} ".encode() + content
