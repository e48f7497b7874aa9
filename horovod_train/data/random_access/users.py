"""Reads records by a user's own class, which `data.source` names."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from horovod_train.config.registry import call, load_function
from horovod_train.config.settings import Spec
from horovod_train.data.random_access.store import (
    Request,
    Store,
    describe_error,
    even_blocks,
    single_blocks,
    stack,
    try_read,
)
from horovod_train.data.source import Arrays
from horovod_train.errors import UserError, unreadable

SAMPLED_RECORDS = 64
"""The number of records that identify a source without `fingerprint`."""


class UsersStore(Store):
    """The records that an object of a user's class gives."""

    def __init__(self, path: str, request: Request, spec: Spec) -> None:
        """Build the object. Raises UserError for anything that is wrong with its class."""
        self.path, self.defaults, self._spec, self._request = path, dict[str, dict[str, Any]](), spec, request
        self._records = _build_records(path, spec)
        try:
            count = len(self._records)
        except Exception as error:
            raise unreadable(error)(f"{self._where}: its __len__ raises {describe_error(error)}.") from error
        self._reads_many = callable(getattr(self._records, "read", None))
        record_bytes = self._first_bytes(count) if count else 0.0
        if self._reads_many:
            self.blocks = even_blocks(count, int(record_bytes * count))
        else:
            self.blocks = single_blocks(count, record_bytes)
        self.size = int(record_bytes * count)
        if not hasattr(self._records, "fingerprint"):
            self.note = (
                f"{self._where} has no fingerprint(): {path} is identified by its number of records and "
                f"{SAMPLED_RECORDS} of them, so a change of others is not noticed."
            )

    def read(self, first: int, last: int) -> Arrays:
        arrays = self._read_many(first, last) if self._reads_many else self._read_singly(first, last)
        names = self._request.names or tuple(arrays)
        used = {name: arrays[name] for name in names if name in arrays}
        if not used:
            raise ValueError(f"it has none of {', '.join(names)}; it has {', '.join(arrays)}")
        return used

    def identity(self) -> str:
        facts = [self._spec.name, json.dumps(self._spec.options, sort_keys=True), self.blocks.num_records]
        total = hashlib.sha256()
        if getattr(self._records, "fingerprint", None) is None:
            self._add_sample(total)
        else:
            facts.append(self._fingerprint())
        total.update(repr(facts).encode())
        return total.hexdigest()

    def _first_bytes(self, count: int) -> float:
        """Return the bytes of one record, after reading the first and the last one.

        Raises UserError if there are fewer records than the class says. Any other record is read when it is needed.
        """
        sizes = [0.0]
        for record in dict.fromkeys([0, count - 1]):
            found = try_read(self, record, record + 1)
            if isinstance(found, IndexError):
                raise UserError(
                    f"{self._where}: its __len__ is {count}, but record {record} raises {describe_error(found)}. "
                    "Records are numbered from 0 to __len__ - 1."
                ) from found
            if isinstance(found, dict):  # else a bad record; data.on_bad_record says what to do about it
                with suppress(ValueError):  # values that are no numbers, or no text: refused where they are described
                    sizes.append(float(sum(map(_bytes_of, found.values()))))
        return max(sizes)

    def _read_singly(self, first: int, last: int) -> Arrays:
        records = (self._check_features(self._records[record]) for record in range(first, last))
        rows = [{name: _own(value) for name, value in features.items()} for features in records]
        if any(row.keys() != rows[0].keys() for row in rows):
            raise ValueError("records have other features than their neighbours")  # they are then read one by one
        return {name: stack([row[name] for row in rows]) for name in rows[0]}

    def _read_many(self, first: int, last: int) -> Arrays:
        features = self._check_features(self._records.read(np.arange(first, last)))
        arrays = {
            name: _own(values) if isinstance(values, np.ndarray) and values.ndim else stack(list(map(_own, values)))
            for name, values in features.items()
        }
        for name, array in arrays.items():
            if len(array) != last - first:
                raise UserError(
                    f"{self._where}: its read gives {len(array)} rows of {name} for {last - first} records. It must "
                    "give one row for each record, in their order."
                )
        return arrays

    def _check_features(self, features: Any) -> Mapping[str, Any]:
        if not isinstance(features, Mapping) or not features or not all(isinstance(name, str) for name in features):
            method, kind = "read" if self._reads_many else "__getitem__", type(features).__name__
            raise UserError(f"{self._where}: its {method} must return a dict of features by name; received a {kind}.")
        return features

    def _fingerprint(self) -> str:
        try:
            value = self._records.fingerprint()
        except Exception as error:
            raise unreadable(error)(f"{self._where}: its fingerprint raises {describe_error(error)}.") from error
        if not isinstance(value, str) or not value:
            raise UserError(
                f"{self._where}: its fingerprint must return a string that is not empty; received {value!r}."
            )
        return value

    def _add_sample(self, total: Any) -> None:
        count = self.blocks.num_records
        chosen = np.linspace(0, max(count - 1, 0), SAMPLED_RECORDS).astype(np.int64)
        for record in np.unique(chosen[chosen < count]).tolist():
            found = try_read(self, record, record + 1)
            if isinstance(found, BaseException):  # reading it again raises the same
                total.update(describe_error(found).encode())
            elif isinstance(found, dict):
                for name, values in sorted(found.items()):
                    total.update(f"{name} {values.dtype} {values.shape} ".encode())
                    total.update(_content(values))

    @property
    def _where(self) -> str:
        return f"data.source: {self._spec.name}"


def _build_records(path: str, spec: Spec) -> Any:
    factory = load_function(spec.name, "data.source")
    if not callable(factory):
        raise UserError(f"data.source: {spec.name} is no class, nor a function that returns records.")
    records = call(functools.partial(factory, path), spec, "data.source")
    missing = [] if hasattr(records, "__len__") else ["__len__"]
    if not hasattr(records, "__getitem__") and not callable(getattr(records, "read", None)):
        missing.append("__getitem__ or read")
    if missing:
        raise UserError(f"data.source: {spec.name} needs {' and '.join(missing)}; see docs/data.md.")
    return records


def _bytes_of(values: np.ndarray) -> int:
    if values.dtype != object:
        return values.nbytes
    encoded = (value.encode() if isinstance(value, str) else value for value in values.ravel())
    return sum(len(value) if isinstance(value, bytes) else np.asarray(value).nbytes for value in encoded)


def _content(values: np.ndarray) -> bytes:
    if values.dtype != object:
        return values.tobytes()
    encoded = (value if isinstance(value, bytes) else repr(np.asarray(value).tolist()).encode() for value in values)
    return b"\0".join(encoded)


def _own(value: Any) -> Any:
    """Return a copy of a record's feature: a class may use its arrays again. Raises ValueError for masked values."""
    if np.ma.is_masked(value):
        raise ValueError("it has masked values, which are no numbers")
    if isinstance(value, bytes | str):
        return value
    array = np.array(value)
    is_cut = array.dtype.kind == "S" and not isinstance(value, np.ndarray)  # numpy's own texts end at their last zero
    return np.array(value, object) if is_cut else array
