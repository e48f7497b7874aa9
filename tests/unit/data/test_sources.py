"""Records that are not in TFRecord files: sources that only these tests know have all that TFRecord files have."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_records import NumpyBatch, as_numpy, batches, config, pipeline

from horovod_train.config.settings import DataConfig
from horovod_train.data.audit import AuditLog, Start, audit
from horovod_train.data.dataset import SOURCES
from horovod_train.data.pipeline import Pipeline
from horovod_train.data.schema import Feature
from horovod_train.data.source import Arrays, Blocks, Data, LoadBlock, LoadedBlock, Parser, Part, split_records

Row = dict[str, Any]

MOST_WORDS = 9
ROWS: list[Row] = [{"words": list(range(n % (MOST_WORDS + 1))), "label": n % 10} for n in range(137)]
"""Record n has its number in its values, and another length than its neighbours."""
BLOCKS = [1, 30, 5, 64, 37]
SCHEMA: dict[str, Any] = {
    "features": {"words": {"type": "int64", "max_length": MOST_WORDS}, "label": {"type": "int64", "classes": 10}},
    "inputs": ("words",),
    "targets": ("label",),
}


class Columns:
    """Arrays by name, with a parser of their own. A RecordSource."""

    def __init__(self, path: str, rows: Sequence[Row]) -> None:
        self.path, self.rows = path, rows
        self.blocks = Blocks(np.array(BLOCKS), np.array(BLOCKS) * 50)
        self.parts = [Part(path, 0, len(rows), hashlib.sha256(repr(rows).encode()).hexdigest())]

    def open(self) -> LoadBlock:
        return self.load

    def parser(self, features: dict[str, Feature]) -> Parser:
        return ColumnsParser()

    def load(self, block: int) -> LoadedBlock:
        first, last = self.blocks.first_record[block : block + 2].tolist()
        return LoadedBlock(
            self.data(self.rows[first:last]), lambda place, why: f"{self.path}: record {first + place}: {why}.", {}
        )

    def data(self, rows: Sequence[Row]) -> Data:
        words = np.fromiter((row["words"] for row in rows), object, len(rows))
        return {"words": words, "label": np.array([row["label"] for row in rows])}


class ColumnsParser:
    def __init__(self) -> None:
        self.dtypes = {"words": "int64", "label": "int64"}
        self.shapes = {"words": (MOST_WORDS,), "label": ()}

    def parse(self, records: Data) -> Arrays | None:
        rows = split_records(records)
        if any(map(self.problem, rows)):
            return None
        words = [row["words"] + [0] * (MOST_WORDS - len(row["words"])) for row in rows]
        return {"words": np.array(words), "label": np.array([row["label"] for row in rows])}

    def problem(self, record: Row) -> str | None:
        return None if 0 <= record["label"] < 10 else f"feature label: received {record['label']}"


Stored = Callable[..., DataConfig]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    """Adds the line to SOURCES that another kind takes. Returns a config that reads these rows."""

    def store(rows: Sequence[Row], **values: Any) -> DataConfig:
        def open_memory(files: Sequence[str], config: DataConfig) -> Columns:
            return Columns(files[0], rows)

        monkeypatch.setitem(SOURCES, "*.memory", open_memory)
        (tmp_path / "rows.memory").touch()
        return config(tmp_path, shuffle_window=20, **SCHEMA, **values)

    return store


def read(made: Pipeline, epoch: int = 0) -> list[NumpyBatch]:
    with made.explaining():
        return batches(made, epoch)


@pytest.mark.parametrize("size", [1, 5])
def test_every_record_comes_once_with_its_own_values(stored: Stored, size: int) -> None:
    data, found = stored(ROWS), []
    for rank in range(size):
        for batch in read(pipeline(data, rank, size)):
            for number, words, label in zip(batch.ids.tolist(), batch.inputs, batch.targets, strict=True):
                if number >= 0:
                    row = ROWS[number]
                    assert words.tolist() == row["words"] + [0] * (MOST_WORDS - len(row["words"]))
                    assert label == row["label"]
                    found.append(number)
    assert sorted(found) == list(range(len(ROWS)))
    assert found != sorted(found)


def test_a_run_that_resumes_at_other_numbers_of_ranks_has_an_audit_without_gaps(stored: Stored, tmp_path: Path) -> None:
    """Stopped at 2 ranks inside the first epoch, at 3 inside the second, and ended at 1."""
    data = stored(ROWS)
    starts = [(2, (0, 0), (0, 7)), (3, (0, 7), (1, 4)), (1, (1, 4), (2, 0))]
    for size, (epoch, step), end in starts:
        for rank in range(size):
            made = pipeline(data, rank, size)
            start = Start(epoch, step, rank, size, made.num_records, 8, made.steps_per_epoch, made.content)
            log = AuditLog(str(tmp_path), start)
            position = (epoch, step)
            for batch in map(as_numpy, made.batches(epoch, step)):
                log.append(*position, batch.ids[None])
                position = divmod(position[0] * made.steps_per_epoch + position[1] + 1, made.steps_per_epoch)
                if position == end:
                    break
            log.close()
    epochs = audit(str(tmp_path))
    assert [(one.is_whole, one.sizes, one.missing, one.twice) for one in epochs] == [
        (True, (2, 3), [], []),
        (True, (3, 1), [], []),
    ]
