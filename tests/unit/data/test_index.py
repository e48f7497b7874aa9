"""Where records start: found in any TFRecord files, kept, and found again when a file has changed."""

from __future__ import annotations

import errno
import fcntl
import gzip
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from made_records import config, image_record, make_images, write_file

from horovod_train.config.settings import DataConfig
from horovod_train.data import files as files_module
from horovod_train.data import tfrecord_index as index_module
from horovod_train.data.dataset import SOURCES, build_plan, open_records
from horovod_train.data.files import INDEX_NAME, hold_lock, list_files, paths_beside, save_to_first
from horovod_train.data.reader import Reader
from horovod_train.data.source import split_records
from horovod_train.data.tfrecord import TFRecords
from horovod_train.data.tfrecord_index import (
    BLOCK_BYTES,
    BLOCK_RECORDS,
    Entries,
    Extents,
    Index,
    load_entries,
    open_index,
    save_entries,
    scan,
)
from horovod_train.errors import UserError
from horovod_train.tfrecord_framing import frame


def read_all(index: Index, stage_dir: str | None = None) -> list[bytes]:
    records, faults = Reader(TFRecords(index, stage_dir)).read(np.arange(index.blocks.num_records))
    assert not faults
    return split_records(records)


def list_tfrecords(*paths: Path | str) -> list[str]:
    return list_files([str(path) for path in paths], "data.train", SOURCES)[1]


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that have been scanned so far."""
    names: list[str] = []
    monkeypatch.setattr(index_module, "scan", lambda path: (names.append(os.path.basename(path)), scan(path))[1])
    return names


def test_a_block_ends_at_256_records_or_a_mebibyte_or_the_file(tmp_path: Path) -> None:
    small = write_file(tmp_path / "a.tfrecord", [b"x"] * 600)
    large = write_file(tmp_path / "b.tfrecord", [bytes(400_000)] * 5 + [bytes(3_000_000)] + [b"y"])
    index = open_index([str(small), str(large)])
    assert index.blocks.records.tolist() == [BLOCK_RECORDS, BLOCK_RECORDS, 88, 2, 2, 1, 1, 1]
    assert index.file.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert (index.blocks.bytes[index.blocks.records > 1] <= BLOCK_BYTES).all()
    assert index.offset[3] == 0
    assert index.blocks.total_bytes == sum(map(os.path.getsize, [small, large]))


def test_every_record_is_found_with_its_number_in_its_file(tmp_path: Path) -> None:
    records = [bytes([number % 251]) * (number % 40) for number in range(700)]
    files = [write_file(tmp_path / "a.tfrecord", records[:300]), write_file(tmp_path / "b.tfrecord", records[300:])]
    index = open_index([str(file) for file in files])
    assert read_all(index) == records
    assert [index.number_in_file(number) for number in (0, 299, 300, 699)] == [0, 299, 0, 399]


def test_files_of_tensorflow_are_read_and_ours_by_tensorflow(tmp_path: Path) -> None:
    records = [b"", b"a", b"b" * 1000]
    theirs, ours = str(tmp_path / "theirs.tfrecord"), str(tmp_path / "ours.tfrecord")
    with tf.io.TFRecordWriter(theirs) as writer:
        for record in records:
            writer.write(record)
    Path(ours).write_bytes(b"".join(map(frame, records)))
    assert read_all(open_index([theirs])) == records
    assert [record.numpy() for record in tf.data.TFRecordDataset(ours)] == records


@pytest.mark.parametrize("packing", ["GZIP", "ZLIB"])
@pytest.mark.parametrize("staged", [True, False])
def test_packed_files_are_read_like_others(tmp_path: Path, packing: str, staged: bool) -> None:
    records = [image_record(number) for number in range(300)]
    plain = b"".join(map(frame, records))
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(
        gzip.compress(plain[:5000]) + gzip.compress(plain[5000:]) if packing == "GZIP" else zlib.compress(plain)
    )
    index = open_index([str(path)])
    assert index.files[0].packing == packing
    assert read_all(index, str(tmp_path / "stage") if staged else None) == records


def test_an_index_is_kept_and_used(tmp_path: Path, scanned: list[str]) -> None:
    folder = make_images(tmp_path / "train")
    first = open_records(config(folder), "train").source
    assert sorted(scanned) == ["0.tfrecord", "1.tfrecord", "2.tfrecord"]
    again = open_records(config(folder), "train").source
    assert len(scanned) == 3
    assert again.parts == first.parts
    assert np.array_equal(again.blocks.records, first.blocks.records)
    assert np.array_equal(again.blocks.bytes, first.blocks.bytes)


def test_only_a_changed_file_is_scanned_again(tmp_path: Path, scanned: list[str]) -> None:
    folder = make_images(tmp_path / "train")
    before = open_records(config(folder), "train")
    write_file(folder / "1.tfrecord", [image_record(0)] * 9)
    after = open_records(config(folder), "train")
    assert (before.num_records, after.num_records) == (70, 72)
    assert scanned[3:] == ["1.tfrecord"]


@pytest.mark.parametrize(
    ("save_every_s", "again"), [(-1.0, ["2.tfrecord"]), (300.0, ["0.tfrecord", "1.tfrecord", "2.tfrecord"])]
)
def test_a_long_scan_that_is_ended_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_every_s: float, again: list[str]
) -> None:
    folder = make_images(tmp_path / "train")
    monkeypatch.setattr(index_module, "_SAVE_EVERY_S", save_every_s)
    names: list[str] = []

    def scan_until(end: str) -> Callable[[str], Any]:
        def scan_it(path: str) -> Any:
            if os.path.basename(path) == end:
                raise SystemExit(1)
            names.append(os.path.basename(path))
            return scan(path)

        return scan_it

    monkeypatch.setattr(index_module, "scan", scan_until("2.tfrecord"))
    with pytest.raises(SystemExit):
        open_records(config(folder), "train")
    names.clear()
    monkeypatch.setattr(index_module, "scan", scan_until(""))
    assert open_records(config(folder), "train").num_records == 70
    assert sorted(names) == again


def test_a_file_of_the_same_size_but_another_time_is_scanned_again(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.tfrecord", [b"abc", b"defgh"])
    open_index([str(path)])
    write_file(path, [b"abcde", b"fgh"])
    os.utime(path, ns=(0, 12345))
    assert read_all(open_index([str(path)])) == [b"abcde", b"fgh"]


def test_an_unreadable_index_is_made_again(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train")
    open_records(config(folder), "train")
    (folder / "index.npz").write_bytes(b"half of a")
    assert open_records(config(folder), "train").num_records == 70


def test_the_index_of_a_read_only_folder_goes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_images(tmp_path / "train")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")

    def read_only(places: Sequence[Path], write: Callable[[Path], None]) -> None:
        save_to_first([Path(str(place).replace(str(folder), "/proc/no")) for place in places], write)

    monkeypatch.setattr(index_module, "save_to_first", read_only)
    open_records(config(folder), "train")
    assert not (folder / "index.npz").exists()
    assert len(list((tmp_path / "home").rglob("*.npz"))) == 1


def test_a_folder_whose_name_is_no_text_is_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_images(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert open_index(list_tfrecords(folder)).blocks.num_records == 70
    open_index(list_tfrecords(folder), str(tmp_path / "indexes"))
    assert len(list((tmp_path / "indexes").glob("*.npz"))) == 1


def test_a_stale_index_that_cannot_be_written_does_not_hide_the_fresh_one(
    tmp_path: Path, scanned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_images(tmp_path / "train")
    open_records(config(folder), "train")
    for file in folder.glob("*.tfrecord"):
        os.utime(file, ns=(0, 12345))  # as copied by a program that keeps no times
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(index_module, "save_to_first", lambda places, write: save_to_first(places[1:], write))
    open_records(config(folder), "train")
    assert len(scanned) == 6
    open_records(config(folder), "train")
    assert len(scanned) == 6


@pytest.mark.parametrize("staged", [True, False])
def test_a_packed_file_with_a_cut_record_is_read_up_to_it(tmp_path: Path, staged: bool) -> None:
    records = [image_record(number) for number in range(300)]
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(gzip.compress(b"".join(map(frame, records))[:-7]))
    index = open_index([str(path)])
    assert index.files[0].problem
    assert read_all(index, str(tmp_path / "stage") if staged else None) == records[:-1]


@pytest.mark.long
def test_a_damaged_index_is_never_believed(tmp_path: Path) -> None:
    """Each byte flipped in turn, in the headers of the zip file too: either what was kept comes back, or nothing."""
    folder = make_images(tmp_path / "train", shards=[3, 2])
    open_records(config(folder), "train")
    place = folder / "index.npz"
    whole, data = load_entries(place), place.read_bytes()
    assert whole
    for at in range(len(data)):
        place.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        found = load_entries(place)
        assert not found or _plain(found) == _plain(whole), at


def test_an_index_that_would_grow_when_read_is_made_again(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train")
    open_records(config(folder), "train")
    place = folder / "index.npz"
    whole = load_entries(place)
    with np.load(place) as saved:
        arrays = dict(saved)
    with zipfile.ZipFile(place, "a") as archive:  # many names for the same bytes
        archive.filelist.extend([archive.getinfo("facts.npy")] * 1000)
        archive.writestr("more.npy", b"")  # or the names are not written
    assert load_entries(place) == {}
    np.savez_compressed(place, **arrays)
    assert load_entries(place) == {}
    place.unlink()
    os.mkfifo(place)
    assert load_entries(place) == {}
    place.unlink()
    open_records(config(folder), "train")
    assert _plain(load_entries(place)) == _plain(whole)


def _plain(entries: Entries) -> dict[str, object]:
    return {name: (source, [column.tolist() for column in blocks]) for name, (source, blocks) in entries.items()}


def test_an_index_of_another_format_is_made_again(
    tmp_path: Path, scanned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_images(tmp_path / "train")
    with monkeypatch.context() as earlier:
        earlier.setattr(index_module, "_FORMAT", 1)
        open_records(config(folder), "train")
    open_records(config(folder), "train")
    open_records(config(folder), "train")
    assert len(scanned) == 2 * 3


def test_an_index_with_an_array_for_each_fact_is_made_again(tmp_path: Path, scanned: list[str]) -> None:
    folder = make_images(tmp_path / "train")
    texts = ("name", "packing", "digest", "problem")
    arrays: dict[str, Any] = {
        key: np.zeros(0, np.uint8) for key in (*texts, "blocks", "size", "mtime_ns", *Extents._fields)
    }
    np.savez(folder / INDEX_NAME, format=np.array(2), **arrays)
    open_records(config(folder), "train")
    open_records(config(folder), "train")
    assert len(scanned) == len(load_entries(folder / INDEX_NAME)) == 3


def test_names_that_are_not_text_are_kept(tmp_path: Path, scanned: list[str]) -> None:
    name = os.fsdecode(bytes(tmp_path / "a") + b"\xff.tfrecord")
    write_file(Path(name), [b"abc"])
    assert open_index([name]).files == open_index([name]).files
    assert len(scanned) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user that is not in passwd")
def test_a_user_without_home_and_passwd_entry_can_read() -> None:
    program = (
        "import os, sys\n"
        "from horovod_train.data.tfrecord_index import open_index\n"
        "os.setuid(54321)\n"
        "print(open_index(sys.argv[1:]).blocks.num_records)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = write_file(Path(folder, "a.tfrecord"), [b"abc"])
        command = [sys.executable, "-c", program, str(path)]
        said = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert said.stdout == "1\n"
    assert said.stderr.startswith("what was found in the records cannot be saved, so the next start reads them again: ")
    assert len(said.stderr.splitlines()) == 1


def test_of_several_processes_one_scans_and_the_others_wait_and_say_so(
    tmp_path: Path, scanned: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files_module, "_SAY_AFTER_S", 0)
    folder = make_images(tmp_path / "train")
    files, where = list_tfrecords(folder), paths_beside(str(folder), INDEX_NAME, None)
    with ThreadPoolExecutor() as threads:
        with hold_lock(where):
            other = threads.submit(open_index, files)
            while not caplog.messages:
                assert not other.done()
            save_entries(where[0], {os.path.basename(name): scan(name) for name in files})
        assert other.result().blocks.num_records == 70
    assert scanned == []
    assert caplog.messages == [f"waiting for {where[0]}.lock, which another process holds"]
    assert not list(folder.glob("*.lock"))


def test_a_process_that_holds_the_lock_and_saves_nothing_stops_no_other(
    tmp_path: Path, scanned: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(index_module, "_SAVE_EVERY_S", 0)
    folder = make_images(tmp_path / "train")
    files, (beside, *_) = list_tfrecords(folder), paths_beside(str(folder), INDEX_NAME, None)
    with hold_lock([beside]):
        assert open_index(files).blocks.num_records == 70
    assert len(scanned) == 3
    assert f"{beside}.lock is still held by another process" in caplog.text
    assert len(load_entries(beside)) == 3


def test_a_suspension_of_both_processes_is_no_time_in_which_the_other_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, place = [100.0], tmp_path / "index.npz"
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    other = ExitStack()
    other.enter_context(hold_lock([place]))

    def sleep_while_suspended(seconds: float) -> None:
        if clock[0] > 100.0:
            other.close()
        clock[0] += 3600.0

    monkeypatch.setattr(time, "sleep", sleep_while_suspended)
    with hold_lock([place], limit_s=900.0):
        assert place.with_name("index.npz.lock").exists()
    assert caplog.messages == []


def test_an_unlockable_folder_is_scanned_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert open_records(config(make_images(tmp_path / "train")), "train").num_records == 70


def test_a_link_in_place_of_the_lock_creates_no_file_elsewhere(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train")
    (folder / f"{INDEX_NAME}.lock").symlink_to(tmp_path / "elsewhere")
    assert open_records(config(folder), "train").num_records == 70
    assert not (tmp_path / "elsewhere").exists()
    assert (folder / INDEX_NAME).exists()


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_file_is_not_read_twice_by_another_path(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    folder = make_images(tmp_path / "train")
    link(folder / "0.tfrecord", tmp_path / "other.tfrecord")
    twice = DataConfig(
        train=(str(folder), str(tmp_path / "other.tfrecord")), features={"label": "int64"}, inputs=("label",)
    )
    with pytest.raises(UserError, match=r"other.tfrecord: is the same file as .*/0.tfrecord; .* Name it once"):
        open_records(twice, "train")


def test_a_file_whose_name_looks_like_a_glob_is_found(tmp_path: Path) -> None:
    path = write_file(tmp_path / "c[1].tfrecord", [b"a"])
    write_file(tmp_path / "c1.tfrecord", [b"b"])
    assert list_tfrecords(path) == [str(path)]


def test_index_dir_is_used_where_given(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "train")
    open_records(config(folder, index_dir=str(tmp_path / "indexes")), "train")
    assert not (folder / "index.npz").exists()
    assert len(list((tmp_path / "indexes").iterdir())) == 1


def test_an_index_dir_that_cannot_be_used_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_images(tmp_path / "train")
    open_records(config(folder, index_dir="/proc/none"), "train")
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "so the next start reads them again: /proc/none/" in said


def test_files_come_in_order_of_names_whatever_the_folder_gives(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_file(tmp_path / f"{name}.tfrecord", [name.encode()])
    assert read_all(open_index(list_tfrecords(tmp_path))) == [b"a", b"b", b"c"]
    patterns = [tmp_path / "c*", tmp_path / "[ab].tfrecord"]
    assert read_all(open_index(list_tfrecords(*patterns))) == [b"c", b"a", b"b"]


def test_many_files_are_scanned_by_processes_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_images(tmp_path / "train")
    files = list_tfrecords(folder)
    monkeypatch.setattr(index_module, "_MANY_BYTES", 0)
    assert open_index(files, str(tmp_path / "indexes")).blocks.records.tolist() == [40, 7, 23]


def test_a_window_is_no_larger_than_its_memory(tmp_path: Path) -> None:
    write_file(tmp_path / "a.tfrecord", [bytes(100_000 - 16)] * 40)
    for megabytes, records in ((2, 20), (1024, 10_000)):
        data = config(tmp_path, features={"a": "int64"}, inputs=("a",), shuffle_mb=megabytes)
        plan = build_plan(open_records(data, "train"), data, seed=1, training=True, global_batch_size=4)
        assert plan.shuffle_window == records


def test_an_index_npz_of_another_program_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    folder = make_images(tmp_path / "train")
    np.savez(folder / "index.npz", embeddings=np.arange(3))
    before = (folder / "index.npz").read_bytes()
    for _ in range(2):
        assert open_records(config(folder), "train").num_records == 70
    assert (folder / "index.npz").read_bytes() == before
    assert len(list((tmp_path / "home").rglob("*.npz"))) == 1
