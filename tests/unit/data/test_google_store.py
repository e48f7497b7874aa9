"""Records in Google Cloud Storage: its driver, and an emulator of the service on this machine's loopback."""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from made_records import batches, config, make_images, pipeline

os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # before the import: it asks the real service otherwise
pytest.importorskip("gcp_storage_emulator")
pytest.importorskip("gcsfs")

import gcsfs
from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage as Emulated

from horovod_train.data import storage
from horovod_train.data.dataset import open_records
from horovod_train.data.globs import matching
from horovod_train.data.storage import Storage
from horovod_train.errors import UserError

auth: Any = gcsfs.credentials.gauth.exceptions
BUCKET = "bucket"


class Versioned(RequestHandler):
    """Answers 404 where an older version is asked for, as the service does if it keeps none; the emulator would not."""

    spoilt: Iterator[int] = iter(())
    """What the next requests are answered in place of what they ask for."""

    def do_GET(self) -> None:
        if answer := next(self.spoilt, 0):
            self.send_error(answer)
            return
        asked = re.search(r"/b/([^/]+)/o/([^/?]+)\?.*\bgeneration=(\d+)", self.path)
        if asked and self.storage.get_file_obj(asked[1], unquote(asked[2]))["generation"] != asked[3]:
            self.send_error(404)
        else:
            super().do_GET()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A file system of gcsfs with an empty bucket."""
    stored = Emulated(use_memory_fs=True)
    create_bucket(BUCKET, stored)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Versioned, stored))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    gcsfs.GCSFileSystem.clear_instance_cache()
    yield gcsfs.GCSFileSystem(token="anon")
    gcsfs.GCSFileSystem.clear_instance_cache()
    server.shutdown()
    server.server_close()
    thread.join()


def put(store: Any, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            store.pipe(f"{BUCKET}/data/{path.relative_to(folder)}", path.read_bytes())


def test_records_are_those_of_the_same_files_on_disk_in_the_same_order(store: Any, tmp_path: Path) -> None:
    local = make_images(tmp_path / "data" / "train", (60, 7, 23))
    put(store, local.parent)
    remote = config(f"gs://{BUCKET}/data/train", index_dir=str(tmp_path / "indexes"))
    assert open_records(remote, "train").digest == open_records(config(local), "train").digest
    for found, expected in zip(batches(pipeline(remote), 1), batches(pipeline(config(local)), 1), strict=True):
        assert np.array_equal(found.ids, expected.ids)
        assert np.array_equal(found.inputs, expected.inputs)


def test_an_object_put_in_its_place_with_the_same_length_is_refused(store: Any) -> None:
    store.pipe(f"{BUCKET}/a", b"one version")
    storage, url = Storage(retry_s=5), f"gs://{BUCKET}/a"
    before = storage.stamp(url)
    assert storage.read(url, 4, 7) == b"version"
    store.pipe(f"{BUCKET}/a", b"two version")
    with pytest.raises(UserError, match=rf"^{url}: was changed while in use: the version that it had is not there"):
        storage.read(url, 0, 3)
    assert Storage().stamp(url) != before


@pytest.mark.parametrize("answer", [401, 403])
def test_refused_credentials_are_read_anew_once(store: Any, answer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store.pipe(f"{BUCKET}/a", b"content")
    kept, url = Storage(retry_s=60), f"gs://{BUCKET}/a"
    with pytest.raises(PermissionError), spoiling(monkeypatch, itertools.repeat(answer)):
        kept.stamp(url)
    assert kept.read(url, 0, 7) == b"content"
    with spoiling(monkeypatch, iter([answer])):
        assert kept.read(url, 0, 7) == b"content"
    asked = itertools.chain([answer] * 2, [0])
    with pytest.raises(PermissionError), spoiling(monkeypatch, asked):
        kept.read(url, 0, 7)
    assert list(asked) == [0], "a refusal is no failure that may pass"


@contextmanager
def spoiling(monkeypatch: pytest.MonkeyPatch, answers: Iterator[int]) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(Versioned, "spoilt", answers)
        yield


def late(why: Exception) -> Exception:
    """Return the error of a token that is not renewed, as of compute_engine.Credentials."""
    refresh: Exception = auth.RefreshError(why)
    refresh.__cause__ = why
    return refresh


@pytest.mark.parametrize(
    ("answer", "why", "may_pass"),
    [
        (400, None, False),
        (401, None, False),
        (401, auth.RefreshError("invalid_grant"), False),
        (401, auth.RefreshError("internal_failure", retryable=True), True),
        (401, late(auth.TransportError("the metadata server does not answer")), True),
        (403, None, False),
        (404, None, False),
        (429, None, True),
        (502, None, True),
        (503, None, True),
    ],
)
def test_which_answers_may_change(answer: int, why: Exception | None, *, may_pass: bool) -> None:
    try:
        gcsfs.retry.validate_response(answer, b'{"error": {"message": "Invalid Credentials"}}', "b/bucket/o/a")
    except Exception as error:
        error.__cause__ = why
        found = storage.may_pass(error)
    assert found is may_pass


def test_what_is_not_there_is_named(store: Any) -> None:
    with pytest.raises((FileNotFoundError, UserError), match="gs://bucket/none"):
        Storage(retry_s=5).stamp("gs://bucket/none")


@pytest.mark.parametrize("pattern", ["**/*.tfrecord", "data/**/b/*", "data/a/**", "data/no/**"])
def test_folders_of_any_depth_are_those_on_disk(store: Any, tmp_path: Path, pattern: str) -> None:
    for name in ("a/b/c/1.tfrecord", "a/.b/2.tfrecord", "3.tfrecord", "a/b/4"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(b"1")
    put(store, tmp_path / "data")
    expected = [path.replace(str(tmp_path), f"gs://{BUCKET}") for path in matching(f"{tmp_path}/{pattern}")]
    assert matching(f"gs://{BUCKET}/{pattern}") == expected
