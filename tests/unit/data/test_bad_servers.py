"""What an object store may do to one piece of a file: spoil the answer, give it slowly, hold another file by now."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_records import config, image_record, make_images, write_file

pytest.importorskip("moto")
pytest.importorskip("s3fs")

from s3_server import S3Server, serving

from horovod_train.data import storage
from horovod_train.data.dataset import open_records
from horovod_train.data.globs import matching
from horovod_train.data.storage import Storage
from horovod_train.errors import UserError

CONTENT = bytes(range(256)) * 40
URL = "s3://bucket/data/file"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "file").write_bytes(CONTENT)
    make_images(folder / "train", (40, 30))
    import s3fs

    with serving(folder) as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(storage, "_FIRST_PAUSE_S", 0.001)
        monkeypatch.setattr(storage, "_LONGEST_PAUSE_S", 0.01)
        s3fs.S3FileSystem.clear_instance_cache()  # another test's server had another port
        yield running


def read(kept: Storage) -> bytes:
    kept.stamp(URL)
    return kept.read(URL, 256, 512)


@pytest.mark.parametrize("how", ["503", "cut", "short", "slow"])
def test_a_spoilt_answer_is_asked_for_again(server: S3Server, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_ANSWER_WITHIN_S", 0.5)
    monkeypatch.setattr(storage, "_LEAST_BYTES_PER_S", 10**9)
    server.spoilt = iter([how, how])
    assert read(Storage()) == CONTENT[256:768]
    assert next(server.spoilt, None) is None


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("503", "Service Unavailable"),
        ("cut", "payload|closed|Response|Connection"),
        ("short", "512 bytes expected at byte 256, 256 came"),
        ("slow", "512 bytes did not come within 0 s"),
    ],
)
def test_a_store_that_spoils_every_answer_ends_the_reading(
    server: S3Server, how: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "slow":  # the others answer, though not as soon on a machine that does much else besides
        monkeypatch.setattr(storage, "_ANSWER_WITHIN_S", 0.3)
        monkeypatch.setattr(storage, "_LEAST_BYTES_PER_S", 10**9)
    server.spoilt = itertools.repeat(how)
    with pytest.raises(OSError, match=rf"({said}).*; tried for 0\.5 s \(data\.retry_s\)"):
        read(Storage(0.5))


def test_another_object_of_the_same_length_is_noticed_at_the_next_piece(server: S3Server, tmp_path: Path) -> None:
    kept = Storage()
    assert read(kept) == CONTENT[256:768]
    (tmp_path / "data" / "file").write_bytes(CONTENT[::-1])
    server.put(tmp_path / "data", "file")
    with pytest.raises(
        UserError, match=rf"^{URL}: was changed while in use: the version that it had is not there any more\."
    ):
        kept.read(URL, 0, 10)
    assert read(kept) == CONTENT[::-1][256:768]  # who looks at it anew gets the new one


def test_blocks_of_another_object_are_not_trained_on(server: S3Server, tmp_path: Path) -> None:
    data = config("s3://bucket/data/train", index_dir=str(tmp_path / "indexes"))
    load = open_records(data, "train").source.open()
    assert not load(0).faults
    path = tmp_path / "data" / "train" / "0.tfrecord"
    before = path.stat().st_size
    write_file(path, [image_record(200 + number) for number in range(40)])
    assert path.stat().st_size == before
    server.put(tmp_path / "data", "*.tfrecord")
    with pytest.raises(UserError, match=r"0\.tfrecord: was changed while in use"):
        load(0)


def test_credentials_that_expire_are_read_anew(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at sites that replace the file every hour; those that were never good are refused at once."""
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    def give(key: str) -> None:
        text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        (tmp_path / "credentials").write_text(text)

    give("first")
    kept = Storage()
    assert read(kept) == CONTENT[256:768]
    give("second")
    server.expired = {"first"}
    assert kept.read(URL, 512, 256) == CONTENT[512:768]
    give("third")
    server.expired = {"first", "second"}
    assert kept.stamp(URL).size == len(CONTENT), "S3 tells HEAD no reason"
    server.expired = {"first", "second", "third"}
    before = server.requests
    with pytest.raises(PermissionError, match="The provided token has expired"):
        kept.read(URL, 0, 10)
    assert server.requests - before == 2
    with pytest.raises(PermissionError, match="The provided token has expired"):
        kept.read(URL, 0, 10)
    assert server.requests - before == 3, "the store has not served the new ones"


@pytest.mark.parametrize("pattern", ["**/*.tfrecord", "data/**", "data/**/.*", "**/c/*", "*/train/**/**/*.tfrecord"])
def test_folders_of_any_depth_are_one_listing(server: S3Server, tmp_path: Path, pattern: str) -> None:
    for name in ("a/b/c/d.tfrecord", "a/.b/e.tfrecord", "a/f/.g", ".h/i", "train/j/k/l/m.tfrecord"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(b"1")
    server.put(tmp_path / "data", "**/*")
    Storage().exists("s3://bucket/data/file")
    before = server.requests
    found = matching(f"s3://bucket/{pattern}")
    requests = server.requests - before
    assert found == [path.replace(str(tmp_path), "s3://bucket") for path in matching(f"{tmp_path}/{pattern}")]
    assert requests <= 4
