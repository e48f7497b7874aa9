"""A file system that does not answer for a while: the run ends with exit code 1, after which it is started again."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from made_records import config, make_images
from user_sources import Items

from horovod_train import main
from horovod_train.checkpoint.layout import find_start, verify
from horovod_train.commands import plan_model, predict
from horovod_train.config.settings import Config, DataConfig, Spec
from horovod_train.data.dataset import find_records, open_records
from horovod_train.data.pipeline import Ranks
from horovod_train.data.random_access.store import opening
from horovod_train.data.source import split_records
from horovod_train.data.storage import DEFAULT, open_file_system
from horovod_train.data.stream import open_stream
from horovod_train.distributed.launch import launcher
from horovod_train.errors import ReadFailed, RunError, UserError, reading
from horovod_train.output.lease import open_lease
from horovod_train.output.run_dir import check_writable


def fail_reads(monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> list[str]:
    """Let the first reads of files fail; return a list that gets the path of each TFRecord file that is opened."""
    pread, open_, left, opened = os.pread, os.open, [number] * times, list[str]()

    def read(*arguments: Any) -> bytes:
        if left:
            number = left.pop()
            raise OSError(number, os.strerror(number))
        return pread(*arguments)

    def noted(path: Any, *arguments: Any, **options: Any) -> int:
        opened.extend([str(path)] * str(path).endswith(".tfrecord"))
        return open_(path, *arguments, **options)

    monkeypatch.setattr(os, "pread", read)
    monkeypatch.setattr(os, "open", noted)
    return opened


def test_a_stale_handle_is_opened_anew_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_records(config(make_images(tmp_path / "train", (5,))), "train").source
    expected = split_records(source.open()(0).data)
    opened = fail_reads(monkeypatch, errno.ESTALE, 1)
    assert split_records(source.open()(0).data) == expected
    assert len(opened) == 2
    fail_reads(monkeypatch, errno.ESTALE, 1)
    assert DEFAULT.read(str(tmp_path / "train" / "0.tfrecord"), 0, 9)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ESTALE, ReadFailed), (errno.EIO, ReadFailed), (errno.ETIMEDOUT, ReadFailed), (errno.EACCES, UserError)],
)
def test_what_may_pass_is_not_a_mistake_in_the_data(
    number: int, kind: type[RunError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_records(config(make_images(tmp_path / "train", (5,))), "train").source
    fail_reads(monkeypatch, number, 99)
    said = rf"0\.tfrecord: cannot be read any more: {os.strerror(number)}\.$"
    with pytest.raises(RunError, match=said) as raised:
        source.open()(0)
    assert type(raised.value) is kind
    with pytest.raises(RunError) as raised, reading("dataset.json"):
        os.pread(0, 1, 0)
    assert (type(raised.value), raised.value.exit_code) == (kind, 1 if kind is ReadFailed else 2)


@pytest.mark.parametrize("name", ["", "0.tfrecord", "*.tfrecord"])
def test_a_file_system_that_does_not_answer_at_the_start_is_no_missing_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, stat = make_images(tmp_path / "train", (5,)), os.stat

    def fail(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(folder)):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(ReadFailed, match=rf"^data\.train: {folder}\S* cannot be read: Stale file handle\.$"):
        find_records(config(folder / name), "train")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["listdir", "open", "mkdir"])
def test_a_run_directory_that_does_not_answer_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Else launch would not start again, and the user would be told to choose another one, without its checkpoints."""

    def fail(path: Any, *_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    find: dict[str, Callable[[], Any]] = {
        "listdir": lambda: find_start(tmp_path / "checkpoints", "auto", verify),
        "open": lambda: open_lease(tmp_path),
        "mkdir": lambda: check_writable(str(tmp_path / "new")),
    }
    monkeypatch.setattr(os, call, fail)
    expected = UserError if number == errno.EACCES else ReadFailed
    with pytest.raises(RunError, match=os.strerror(number)) as raised:
        find[call]()
    assert type(raised.value) is expected
    assert ("another" in str(raised.value)) == (expected is UserError and call != "listdir")
    assert ("Start again" in str(raised.value)) == (expected is ReadFailed)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), ReadFailed("init_from: no answer")])
def test_a_file_of_keras_that_cannot_be_read_now_is_no_mistake(error: Exception) -> None:
    with pytest.raises(ReadFailed, match=r"Input/output error|no answer"), opening("a.keras", "Keras"):
        raise error


def test_a_store_that_cannot_be_opened_now_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(ReadFailed, match=r"^memory://a: memory:// cannot be opened: Connection refused\.$"):
        open_file_system("memory://a")


def test_plan_shows_what_may_pass_without_the_place_in_the_code() -> None:
    def fail() -> None:
        raise ReadFailed("data.train: no answer.")

    faults: list[str] = []
    plan_model._attempt(fail, faults, "model: ")
    assert faults == ["data.train: no answer."]


def test_predict_names_its_own_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ReadFailed("data.eval: new cannot be read: Stale file handle.")

    monkeypatch.setattr(predict, "choose_run", lambda _: (Config(), "checkpoint"))
    monkeypatch.setattr(predict, "look_before_start", fail)
    with pytest.raises(ReadFailed, match=r"^--data: new cannot be read"):
        predict.run(argparse.Namespace(data=["new"], out=str(tmp_path / "a.csv"), weights=None))


def test_a_file_that_is_gone_is_a_mistake_in_the_data(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train", (5,))
    source = open_records(config(folder), "train").source
    (folder / "0.tfrecord").unlink()
    with pytest.raises(UserError, match="cannot be read any more: No such file"):
        source.open()(0)


class Away(Items):
    """Its server does not answer for the last record; or, without records, when it is made."""

    def __init__(self, path: str, records: int = 9) -> None:
        if not records:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        super().__init__(path, records)

    def __getitem__(self, record: int) -> dict[str, Any]:
        if record == self.records - 1:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        return super().__getitem__(record)


@pytest.mark.parametrize(("records", "said"), [(9, "here: record 8: cannot be read: .*reset"), (0, "refused")])
def test_records_of_a_class_are_not_known_by_an_error_that_may_pass(records: int, said: str) -> None:
    data = config("here", source=Spec(f"{__name__}:Away", {"records": records}), on_bad_record="skip")
    with pytest.raises(ReadFailed, match=said):
        open_records(data, "train")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), ReadFailed),
        (tf.errors.UnavailableError(None, None, "the store does not answer"), ReadFailed),
        (ValueError("a mistake"), UserError),
    ],
)
def test_a_stream_that_gets_no_answer_is_started_again(error: Exception, kind: type[RunError]) -> None:
    data = DataConfig(dataset=Spec("user_streams:uneven"), global_batch_size=8)
    stream = open_stream(data, Ranks(0, 1), seed=1, training=True)
    assert stream is not None
    with pytest.raises(RunError, match=r"^data\.dataset: uneven\(rank=0, .*\): ") as raised, stream.explaining(0):
        raise error
    assert type(raised.value) is kind


def test_root_says_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks look for the records before they meet."""
    monkeypatch.setattr(launcher, "ROOT_REPORTS_FIRST_S", 0.0)
    monkeypatch.setattr(main, "_rank", lambda: 1)
    with pytest.raises(ReadFailed, match=r"^rank 1 \(.*\): data: no answer"), main._root_speaks_first():
        raise ReadFailed("data: no answer")
