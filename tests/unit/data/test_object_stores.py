"""Records in an object store: fsspec's own in memory, which can be made to fail. A real S3 server: test_s3."""

from __future__ import annotations

import errno
import gzip
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from made_records import batches, config, ids, make_images, pipeline
from memory_store import called_before_reads

from horovod_train.config.loader import load
from horovod_train.data import storage
from horovod_train.data.dataset import open_records
from horovod_train.data.files import INDEX_NAME, paths_beside
from horovod_train.data.storage import Retries, Storage
from horovod_train.data.tfrecord_index import load_entries
from horovod_train.errors import ReadFailed, UserError
from horovod_train.main import main

NUMBERS = itertools.count()


class Store:
    """A folder of made records in memory, at a URL that no other test has."""

    def __init__(self, local: Path, shards: tuple[int, ...] = (300, 7, 23)) -> None:
        self.url = f"memory://bucket-{next(NUMBERS)}/data"
        self.local = make_images(local / "data" / "train", shards).parent
        self.files = fsspec.filesystem("memory")
        self.requests: list[str] = []
        self.put()

    def put(self) -> None:
        for path in self.local.rglob("*"):
            if path.is_file() and path.suffix != ".npz":
                self.files.pipe(f"{self.url}/{path.relative_to(self.local)}", path.read_bytes())

    @property
    def train(self) -> str:
        return f"{self.url}/train"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[str], None]]:
    return called_before_reads(monkeypatch)


def data(store: Store, tmp_path: Path, **values: Any) -> Any:
    return config(store.train, index_dir=str(tmp_path / "indexes"), **values)


def content(made: Any) -> list[tuple[np.ndarray, ...]]:
    return [(batch.inputs, batch.targets, batch.ids, batch.weights) for batch in made]


def same(one: Any, other: Any) -> bool:
    pairs = list(zip(content(one), content(other), strict=True))
    return all(np.array_equal(a, b) for left, right in pairs for a, b in zip(left, right, strict=True))


# --- what is read -------------------------------------------------------------------------------------------------


def test_records_are_those_of_the_same_files_on_disk_in_the_same_order(store: Store, tmp_path: Path) -> None:
    remote, local = data(store, tmp_path), config(store.local / "train")
    assert open_records(remote, "train").digest == open_records(local, "train").digest
    for epoch in (0, 1):
        assert same(batches(pipeline(remote), epoch), batches(pipeline(local), epoch))


def test_packed_files_are_read_too(store: Store, tmp_path: Path) -> None:
    expected = batches(pipeline(config(store.local / "train", shuffle=False)))
    for path in (store.local / "train").glob("*.tfrecord"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    store.put()
    for stage in (None, str(tmp_path / "stage")):
        assert same(batches(pipeline(data(store, tmp_path, shuffle=False, stage_dir=stage))), expected)


def test_globs_files_and_lists_name_what_they_name_on_disk(store: Store, tmp_path: Path) -> None:
    for names in (["1.tfrecord"], ["*.tfrecord"], ["2.tfrecord", "0.tfrecord"]):
        found = open_records(load_data(tmp_path, [f"{store.train}/{name}" for name in names]), "train").source.parts
        there = open_records(load_data(tmp_path, [f"{store.local}/train/{name}" for name in names]), "train")
        assert [(Path(part.path).name, part.digest) for part in found] == [
            (Path(part.path).name, part.digest) for part in there.source.parts
        ]
        assert all(part.path.startswith("memory://bucket") for part in found)


def load_data(tmp_path: Path, train: list[str], *more: str) -> Any:
    words = ["data.global_batch_size=8", "train.epochs=1", f"data.index_dir={tmp_path / 'indexes'}", *more]
    return load([], [f"data.train=[{', '.join(train)}]", *words])[0].data


def test_a_store_and_a_disk_may_be_mixed(store: Store, tmp_path: Path) -> None:
    other = make_images(tmp_path / "other" / "train", (5,))
    records = open_records(load_data(tmp_path, [str(other), store.train]), "train")
    assert records.num_records == 335


def test_the_index_is_kept_and_files_that_change_are_scanned_again(
    store: Store, tmp_path: Path, asked: list[Callable[[str], None]]
) -> None:
    def scanned() -> set[str]:
        read = set[str]()
        asked[:] = [lambda path: read.add(Path(path).name)]
        open_records(data(store, tmp_path), "train")
        return read - {"dataset.json"}

    assert scanned() == {"0.tfrecord", "1.tfrecord", "2.tfrecord"}
    assert scanned() == set()
    make_images(store.local / "train", (300, 9, 23))
    store.files.pipe(f"{store.train}/1.tfrecord", (store.local / "train" / "1.tfrecord").read_bytes())
    assert scanned() == {"1.tfrecord"}
    (where,) = paths_beside(store.train, INDEX_NAME, str(tmp_path / "indexes"))
    assert set(load_entries(where)) == {"0.tfrecord", "1.tfrecord", "2.tfrecord"}
    assert not store.files.exists(f"{store.train}/index.npz")


def test_files_are_indexed_though_their_folder_is_not_listed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list only tells which entries of the index are of files that are gone."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(store.files), "ls", refuse)
    features = "data.features={label: {type: int64}}", "data.inputs=label"
    for number, records in enumerate((300, 7, 23)):
        named = load_data(tmp_path, [f"{store.train}/{number}.tfrecord"], *features)
        assert open_records(named, "train").num_records == records
    (where,) = paths_beside(store.train, INDEX_NAME, str(tmp_path / "indexes"))
    assert set(load_entries(where)) == {"0.tfrecord", "1.tfrecord", "2.tfrecord"}


def test_staged_blocks_are_not_read_again(store: Store, tmp_path: Path, asked: list[Callable[[str], None]]) -> None:
    staged = data(store, tmp_path, stage_dir=str(tmp_path / "stage"))
    first = batches(pipeline(staged))
    read: list[str] = []
    asked.append(read.append)
    assert same(batches(pipeline(staged)), first)
    assert {Path(path).name for path in read} <= {"dataset.json"}
    batches(pipeline(data(store, tmp_path)))
    assert any(path.endswith(".tfrecord") for path in read)


def test_requests_are_made_side_by_side(store: Store, tmp_path: Path, asked: list[Callable[[str], None]]) -> None:
    made = pipeline(data(store, tmp_path, read_threads=3, shuffle=False))
    together = threading.Barrier(3)

    def wait(path: str) -> None:
        if path.endswith(".tfrecord"):
            together.wait(timeout=300)  # broken, and an error, if fewer come

    asked.append(wait)
    blocks = len(open_records(data(store, tmp_path), "train").source.blocks.records)
    assert blocks == 4
    asked[:] = [lambda path: wait(path) if path.endswith(("0.tfrecord", "1.tfrecord")) else None]
    assert sorted(ids(batches(made))) == list(range(330))


# --- failures -----------------------------------------------------------------------------------------------------


def failing(times: int, error: Callable[[], Exception], only: str = ".tfrecord") -> Callable[[str], None]:
    left = itertools.chain(itertools.repeat(True, times), itertools.repeat(False))
    lock = threading.Lock()

    def fail(path: str) -> None:
        with lock:
            if path.endswith(only) and next(left):
                raise error()

    return fail


def test_requests_that_fail_are_repeated(
    store: Store, tmp_path: Path, asked: list[Callable[[str], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_FIRST_PAUSE_S", 0.001)
    expected = batches(pipeline(data(store, tmp_path)))
    asked.append(failing(9, lambda: OSError(errno.EIO, "500")))
    assert same(batches(pipeline(data(store, tmp_path))), expected)


def failing_looks(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Errors that the next looks at paths of the store raise, the last one first."""
    kind, errors = type(fsspec.filesystem("memory")), list[Exception]()
    info = kind.info

    def fail(self: Any, path: str, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return info(self, path, **options)

    monkeypatch.setattr(kind, "info", fail)
    return errors


def test_a_look_that_fails_is_repeated(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's own answer, that there is no folder, would make it a file of records."""
    monkeypatch.setattr(storage, "_FIRST_PAUSE_S", 0.001)
    errors = failing_looks(monkeypatch)
    for look, url, expected in (
        (Storage.is_folder, store.train, True),
        (Storage.is_folder, f"{store.train}/0.tfrecord", False),
        (Storage.exists, store.train, True),
        (Storage.exists, f"{store.train}/0.tfrecord", True),
        (Storage.exists, f"{store.train}/9.tfrecord", False),
    ):
        errors += [OSError("502"), TimeoutError()]
        assert look(Storage(30), url) is expected
        errors.append(OSError("502"))
        with pytest.raises(OSError, match="502; tried for 0 s"):
            look(Storage(0), url)


def test_a_user_may_have_the_right_to_list_a_folder_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As S3 allows: a policy for a prefix."""
    errors, kept = failing_looks(monkeypatch), Storage()
    for refused in (PermissionError("Forbidden"), OSError(errno.EINVAL, "Bad Request")):
        errors += [refused] * 4
        assert kept.is_folder(store.train)
        for name in ("0.tfrecord", "9.tfrecord"):
            with pytest.raises(OSError, match=r"Forbidden|Bad Request"):
                kept.is_folder(f"{store.train}/{name}")
        assert kept.exists(store.train)


def test_a_request_that_fails_for_good_ends_the_reading_in_one_line(
    store: Store, tmp_path: Path, asked: list[Callable[[str], None]]
) -> None:
    made = pipeline(data(store, tmp_path, retry_s=0.3))
    asked.append(failing(10**9, lambda: OSError(errno.EIO, "Internal\n Error")))
    with pytest.raises(ReadFailed) as raised, made.explaining():
        list(made.batches(0, 0, 1))
    said = str(raised.value)
    assert "\n" not in said
    assert ".tfrecord: cannot be read any more: Internal Error; tried for 0.3 s (data.retry_s)." in said


def test_what_no_time_cures_is_not_repeated(store: Store, tmp_path: Path, asked: list[Callable[[str], None]]) -> None:
    made = pipeline(data(store, tmp_path))
    tried: list[str] = []
    asked += [tried.append, failing(10**9, lambda: PermissionError("Access Denied"))]
    with pytest.raises(UserError, match="cannot be read any more: Access Denied"), made.explaining():
        list(made.batches(0, 0, 1))
    # The threads that read ahead may or may not have tried the other files.
    found = Counter(Path(path).name for path in tried)
    assert found
    assert found <= Counter({"0.tfrecord": 2, "1.tfrecord": 1, "2.tfrecord": 1})  # each block once


def test_when_one_thread_has_given_up_the_others_do_not_wait(said: list[str]) -> None:
    """The threads of a rank come one after another: if each waited for itself, a run would end after many limits."""
    kept = Retries(2.0)

    tried: list[None] = []

    def fail() -> None:
        tried.append(None)
        raise TimeoutError("no answer")

    with pytest.raises(OSError, match="no answer; tried for 2 s"):
        kept.call("s3://a/b", fail)
    assert len(tried) > 1
    tried.clear()
    for _ in range(20):
        with pytest.raises(OSError, match="no answer"):
            kept.call("s3://a/b", fail)
    assert len(tried) == 20
    assert kept.call("s3://a/b", lambda: 1) == 1
    answers = iter([TimeoutError("again"), None])

    def fail_once() -> int:
        if error := next(answers):
            raise error
        return 2

    assert kept.call("s3://a/b", fail_once) == 2  # after an answer they wait again


def test_a_request_under_way_while_the_process_is_suspended_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is reset when the process continues, and no request has been repeated by then."""
    suspended_s, answers = [0.0], iter([ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), None])
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + suspended_s[0])

    def request() -> int:
        suspended_s[0] += 3600.0
        if error := next(answers):
            raise error
        return 1

    assert Retries(120.0).call("s3://a/b", request) == 1


def test_an_outage_is_logged_once_and_so_is_its_end(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_QUIET_S", 0.0)
    monkeypatch.setattr(storage, "_FIRST_PAUSE_S", 0.001)
    kept, answers = Retries(60), iter([OSError("gone")] * 5 + [None])

    def answer() -> None:
        if error := next(answers):
            raise error

    kept.call("s3://a/b", answer)
    assert said == [
        "warning: s3://a/b: gone. Trying again for up to 60 s.",
        "warning: s3://a/b: can be read again, 0 s after that was logged.",
    ]


Refused: type[Exception] = type("EndpointConnectionError", (type("ConnectionError", (Exception,), {}),), {})
"""As of botocore: no OSError."""


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (OSError(errno.EIO, "500"), True),
        (OSError("no number"), True),
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (Refused("refused"), True),
        (FileNotFoundError(), False),
        (PermissionError("403"), False),
        (OSError(errno.EINVAL, "InvalidBucketName"), False),
        (OSError(errno.EREMCHG, "The bucket must be addressed using the specified endpoint"), False),
        (type("NoCredentialsError", (Exception,), {})("Unable to locate credentials"), False),
        (ValueError("a mistake of ours"), False),
    ],
)
def test_which_failures_may_pass(error: Exception, may_pass: bool) -> None:
    assert storage.may_pass(error) is may_pass


def test_a_file_that_changes_is_noticed_when_it_is_first_read(store: Store, tmp_path: Path) -> None:
    made = pipeline(data(store, tmp_path))
    store.files.pipe(f"{store.train}/0.tfrecord", (store.local / "train" / "2.tfrecord").read_bytes())
    with pytest.raises(UserError, match=r"/0\.tfrecord: was changed while in use"), made.explaining():
        list(made.batches(0, 0, 1))


def test_long_files_are_read_piece_by_piece_each_once(
    store: Store, asked: list[Callable[[str], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horovod_train.data.storage._REMOTE_PIECE", 1000)
    written = bytes(range(256)) * 40
    store.files.pipe(f"{store.url}/long", written)
    read: list[str] = []
    asked.append(read.append)
    with Storage().opened(f"{store.url}/long") as (stamp, read_at):
        assert stamp.size == len(written)
        found = b"".join(read_at(370, offset) for offset in range(0, len(written), 370))
    assert found == written
    assert len(read) == 11


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("{url}/nowhere", r"data\.train: {url}/nowhere does not exist; {url} does\."),
        ("{url}/train/*.gz", r"data\.train: {url}/train/\*\.gz matches no file\."),
        (
            "{url}",
            r"data\.train: {url} holds no \*\.tfrecord\* files\. Its folders have some: data\.train={url}/train\?",
        ),
        ("{url}/x.parquet", r"{url}/x\.parquet: cannot be read as Parquet: Parquet file size is 4 bytes"),
        ("{url}/train, {url}/train/0.tfrecord", r"data\.train: {url}/train/0\.tfrecord is named twice"),
    ],
)
def test_what_is_not_there_is_named(store: Store, tmp_path: Path, path: str, said: str) -> None:
    if path.endswith("parquet"):
        store.files.pipe(f"{store.url}/x.parquet", b"PAR1")
    with pytest.raises(UserError, match=f"^{said.format(url=store.url)}"):
        open_records(load_data(tmp_path, path.format(url=store.url).split(", ")), "train")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["data.train=ftp://a/b"],
            "data.train: expected a local path, or one that begins with s3://, gs://, ",
        ),
        (["data.train=s3://KEY:SECRET@b/c"], "data.train: must not hold a password or a key; received s3://…@b/c."),
        (["data.train=s3://"], "data.train: names no folder or file; received s3://."),
        (["data.train=here", "data.retry_s=9"], "data.retry_s: is for s3:// and other remote paths, and there are n"),
        (["data.train=s3://a", "data.retry_s=-1"], "data.retry_s: must be at least 0"),
        (["data.train=s3://a", "data.retry_s=600"], "data.retry_s: must be less than watch.stop_after_s (600)"),
        (["data.train=s3://a", "data.source=a:b", "data.retry_s=9"], "data.retry_s: is for s3:// and other"),
    ],
)
def test_bad_settings_get_one_line_without_secrets(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        load([], ["data.global_batch_size=8", "train.epochs=1", *words])
    assert str(raised.value).removeprefix("command line: ").startswith(said)
    assert "SECRET" not in str(raised.value)


def test_an_entry_for_a_users_class_may_be_any_text() -> None:
    entries = ["postgres://db.example/table", "select " + "a, " * 200]
    data = {"train": entries, "source": "tables:Table", "global_batch_size": 8}
    config, _ = load([{"data": data, "train": {"epochs": 1}}])
    assert list(config.data.paths("train")) == entries
    with pytest.raises(UserError, match="must not hold a password"):
        load([{"data": data | {"train": "postgres://me:SECRET@db.example/table"}, "train": {"epochs": 1}}])


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("ftp://host/x", "expected a local path, or one that begins with s3://, gs://"),
        ("s3://", "names no folder or file; received s3://."),
        ("s3://KEY:SECRET@b/c", "must not hold a password or a key; received s3://…@b/c."),
        ("memory://nowhere/new", "memory://nowhere/new"),
    ],
)
def test_predict_takes_records_of_a_store(capsys: pytest.CaptureFixture[str], path: str, said: str) -> None:
    """It looks for them there before TensorFlow is loaded."""
    words = ["--config", "digits_convnet", "--checkpoint", "nowhere", "--out", "x.npz", "--data", path]
    assert main(["predict", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --data: ")
    assert said in line
    assert "SECRET" not in line


def test_a_driver_that_is_not_installed_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"^gs://bucket/a: needs gcsfs .*pip install 'horovod_train\[gs\]'\.$"):
        open_records(load_data(tmp_path, ["gs://bucket/a"]), "train")
