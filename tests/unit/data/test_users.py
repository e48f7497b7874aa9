"""Records of a user's class are what it gave at that moment, whatever it does with its arrays later."""

from __future__ import annotations

import dataclasses
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_records import batches, config, pipeline

from horovod_train.config.settings import Spec
from horovod_train.errors import UserError

RECORDS = 600


class WithBuffer:
    """Gives each record in an array of its thread, which it uses again."""

    def __init__(self, path: str) -> None:
        self._own = threading.local()

    def __len__(self) -> int:
        return RECORDS

    def buffer(self, rows: int) -> Any:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = np.zeros((RECORDS, 3), np.float32)
        return self._own.buffer[:rows]

    def __getitem__(self, record: int) -> dict[str, Any]:
        row = self.buffer(1)[0]
        row[:] = record
        return {"x": row, "y": record}


class OfManyWithBuffer(WithBuffer):
    def read(self, records: np.ndarray) -> dict[str, Any]:
        rows = self.buffer(len(records))
        rows[:] = records[:, None]
        return {"x": rows, "y": records}


class Masked(WithBuffer):
    def __getitem__(self, record: int) -> dict[str, Any]:
        x = np.ma.masked_array(np.full(3, 1e20), mask=record == 5)
        return {"x": np.zeros(3) if record == 7 else x, "y": record}


class Tokens(WithBuffer):
    """Whole numbers; the first record has none."""

    def __getitem__(self, record: int) -> dict[str, Any]:
        return {"x": [2**24 + record] * (record % 3), "y": record}


def test_a_first_list_that_is_empty_does_not_say_that_numbers_are_floats(tmp_path: Path) -> None:
    (tmp_path / "entry").touch()
    data = config(tmp_path / "entry", source=Spec("test_users:Tokens"), inputs=("x",), targets=("y",), shuffle=False)
    data = dataclasses.replace(data, features={"x": {"max_length": 2}})
    first = batches(pipeline(data))[0]
    assert first.inputs.dtype == np.int64
    assert first.inputs[1].tolist() == [2**24 + 1, 0]


class Lists(WithBuffer):
    """Of three items; later a record has more, which is none of those by which the records are known."""

    has_grown = False

    def __getitem__(self, record: int) -> dict[str, Any]:
        return {"x": [1] * (9 if self.has_grown and record == 1 else 3), "y": record}


class Packed(WithBuffer):
    """Gives bytes that end in zeros, in lists."""

    def __getitem__(self, record: int) -> dict[str, Any]:
        return {"x": [b"ab\0", b"\0\0"], "y": record}


class ManyPacked(Packed):
    def read(self, records: np.ndarray) -> dict[str, Any]:
        return {"x": [self[0]["x"]] * len(records), "y": records}


class Exits(WithBuffer):
    def __getitem__(self, record: int) -> dict[str, Any]:
        if record in (0, 5):
            sys.exit(3)
        return super().__getitem__(record)


class Ragged(WithBuffer):
    """Gives lists of different lengths in one feature, and says by itself which records it has."""

    def fingerprint(self) -> str:
        return "ragged"

    def read(self, records: np.ndarray) -> dict[str, Any]:
        rows = np.empty(len(records), object)
        rows[:] = [[[1], [1, 2]]] * len(records)
        return {"x": rows, "y": records}


def data_of(source: type, **values: Any) -> Any:
    return config("here", source=Spec(f"test_users:{source.__name__}"), targets=("y",), **values)


@pytest.mark.parametrize("source", [WithBuffer, OfManyWithBuffer])
def test_a_class_may_use_its_arrays_again(source: type) -> None:
    for batch in batches(pipeline(data_of(source))):
        assert np.array_equal(batch.inputs, np.repeat(np.asarray(batch.targets, np.float32)[:, None], 3, axis=1))


@pytest.mark.parametrize("source", [Packed, ManyPacked])
def test_bytes_in_lists_keep_the_zeros_at_their_ends(source: type) -> None:
    for batch in batches(pipeline(data_of(source))):
        assert np.asarray(batch.inputs).tolist() == [[b"ab\0", b"\0\0"]] * len(batch.ids)


def test_masked_values_are_none(tmp_path: Path) -> None:
    made = pipeline(data_of(Masked))
    with pytest.raises(UserError, match=r"record 5: ValueError: it has masked values"), made.explaining():
        batches(made)
    found = batches(pipeline(data_of(Masked, on_bad_record="skip")))
    assert {int(number) for batch in found for number in batch.ids if number >= 0} == {*range(RECORDS)} - {5}


def test_a_record_that_calls_sys_exit_is_a_bad_record() -> None:
    found = batches(pipeline(data_of(Exits, on_bad_record="skip")))
    assert {int(number) for batch in found for number in batch.ids if number >= 0} == {*range(RECORDS)} - {0, 5}


def test_lists_of_different_lengths_in_a_feature_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"expected numbers or text; the first record holds \[\[1\], \[1, 2\]\]\."):
        pipeline(data_of(Ragged))


def test_a_list_that_has_grown_since_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = {"x": {"max_length": 9}, "y": {}}
    data = data_of(Lists, features=features, bucket_by_length="x", index_dir=str(tmp_path))
    assert {np.asarray(batch.inputs).shape[1] for batch in batches(pipeline(data))} == {3}
    monkeypatch.setattr(Lists, "has_grown", True)
    made = pipeline(data)
    with pytest.raises(UserError, match=r"record 1: its x is longer than .* Remove lengths-"), made.explaining():
        batches(made)
