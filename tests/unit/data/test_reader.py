"""How many blocks are read at the same time, and how far ahead of need."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_records import config, make_images

from horovod_train.commands.bench import DelayedSource
from horovod_train.data.batch_source import StepRange
from horovod_train.data.dataset import build_plan, open_records
from horovod_train.data.pipeline import Loader, Ranks
from horovod_train.data.reader import Reader
from horovod_train.data.source import LoadBlock, LoadedBlock, RecordSource
from horovod_train.data.storage import Retries

SHARDS = (20,) * 30


class Watched(DelayedSource):
    """Notes the blocks in the order in which they are loaded; each load waits for `others`, if given."""

    def __init__(self, source: RecordSource, others: threading.Barrier | None = None) -> None:
        super().__init__(source, 0.0)
        self.loaded: list[int] = []
        self._others = others

    def open(self) -> LoadBlock:
        load = super().open()

        def noted(block: int) -> LoadedBlock:
            self.loaded.append(block)
            if self._others is not None:
                self._others.wait()
            return load(block)

        return noted


def loader(folder: Path, others: threading.Barrier | None = None, **values: Any) -> tuple[Loader, Watched]:
    """A loader whose chunks are of one step, and each step of records of one block."""
    data = config(folder, shuffle=False, **values)
    records = open_records(data, "train")
    watched = Watched(records.source, others)
    records = dataclasses.replace(records, source=watched)
    plan = build_plan(records, data, seed=1, training=True, global_batch_size=20)
    made = Loader(plan, watched, watched.parser(records.schema.features), Ranks(0, 1), data, {})
    return made, watched


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data") / "train", SHARDS)


@pytest.mark.parametrize("threads", [1, 4])
def test_as_many_blocks_are_read_at_the_same_time_as_asked(folder: Path, threads: int) -> None:
    made, _ = loader(folder, threading.Barrier(threads, timeout=300), read_threads=threads)
    chunks = [StepRange(0, step, step + 1) for step in range(4)]
    assert made.parse(*made.read(chunks[0], chunks[1:])).ids.tolist() == list(range(20))


def test_no_more_blocks_are_read_at_the_same_time_than_asked(folder: Path) -> None:
    made, _ = loader(folder, threading.Barrier(4, timeout=2), read_threads=3)
    chunks = [StepRange(0, step, step + 1) for step in range(4)]
    with pytest.raises(threading.BrokenBarrierError):
        made.read(chunks[0], chunks[1:])


def test_what_is_read_ahead_is_not_read_again(folder: Path) -> None:
    made, watched = loader(folder, read_threads=1)
    chunks = [StepRange(0, step, step + 1) for step in range(6)]
    for number in range(4):
        found = made.parse(*made.read(chunks[number], chunks[number + 1 : number + 3]))
        assert found.ids.tolist() == list(range(20 * number, 20 * number + 20))
    made.read(chunks[5], [])
    assert watched.loaded == [0, 1, 2, 3, 4, 5]


def test_a_process_that_ends_does_not_wait_for_what_is_read_ahead(folder: Path) -> None:
    """Of thirty blocks only those being loaded are loaded to their end, and requests that fail are not repeated."""
    is_loading, may_fail, retries = threading.Event(), threading.Event(), Retries(3600)

    class Failing(Watched):
        def open(self) -> LoadBlock:
            def load(block: int) -> LoadedBlock:
                self.loaded.append(block)
                return retries.call("s3://bucket/file", fail)

            return load

    def fail() -> LoadedBlock:
        is_loading.set()
        may_fail.wait()
        raise ConnectionError("no route to host")

    source = Failing(open_records(config(folder), "train").source)
    reader = Reader(source, threads=2)
    reader.read_ahead(range(30))
    is_loading.wait()
    reader.close()
    may_fail.set()
    with pytest.raises((OSError, CancelledError)):
        reader.read(np.arange(5))
    reader._threads.shutdown(wait=True)
    assert set(source.loaded) <= {0, 1}
