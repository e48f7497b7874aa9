"""Copies on a node-local disk: of our own making, for one user, and never in the way of the run."""

from __future__ import annotations

import gzip
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.filesize import decimal

from horovod_train.data.reader import Reader
from horovod_train.data.source import split_records
from horovod_train.data.tfrecord import StagedFiles, TFRecords
from horovod_train.data.tfrecord_index import open_index
from horovod_train.errors import UserError
from horovod_train.tfrecord_framing import frame

OTHER_BOOT = "0b9ec9b5-5a0f-4f2c-8d2f-0123456789ab"
COPY = "0123456789abcdef01234567.blocks"


def own_folder(stage: Path) -> Path:
    return stage / f".horovod_train-stage-{os.geteuid()}"


def write(folder: Path, files: int, *, packed: bool, records: int = 3) -> list[str]:
    """Record n of file f is `f n`, a thousand times."""
    folder.mkdir(exist_ok=True)
    paths = []
    for number in range(files):
        data = b"".join(frame(b"%d %d" % (number, record) * 1000) for record in range(records))
        path = folder / f"{number:04}.tfrecord{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(data) if packed else data)
        paths.append(str(path))
    return paths


def is_read(paths: list[str], stage: Path | None, records: int = 3) -> bool:
    """Whether a new reader gives every record as it was written."""
    index = open_index(paths)
    found, faults = Reader(TFRecords(index, str(stage) if stage else None)).read(np.arange(index.blocks.num_records))
    expected = [b"%d %d" % (number, record) * 1000 for number in range(len(paths)) for record in range(records)]
    return not faults and split_records(found) == expected


def test_neighbours_of_the_stage_stay(tmp_path: Path) -> None:
    """horovod_train-main is what GitHub calls an unpacked checkout of this project."""
    strangers = [
        "horovod_train-main/setup.py",
        f"horovod_train-{OTHER_BOOT}/best.keras",
        f".horovod_train-stage-{os.geteuid()}/notes/todo.txt",
        f".horovod_train-stage-{os.geteuid()}/{OTHER_BOOT}/best.keras",
    ]
    own_folder(tmp_path).mkdir(mode=0o700)
    for name in strangers:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    StagedFiles(str(tmp_path), [], {})
    assert all((tmp_path / name).read_text() == "mine" for name in strangers)


def test_copies_of_earlier_boots_go(tmp_path: Path) -> None:
    old = own_folder(tmp_path) / OTHER_BOOT
    old.mkdir(parents=True)
    own_folder(tmp_path).chmod(0o700)
    (old / COPY).write_bytes(b"old")
    StagedFiles(str(tmp_path), [], {})
    assert not old.exists()
    assert len(list(own_folder(tmp_path).iterdir())) == 1


def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path: Path) -> None:
    own_folder(tmp_path).mkdir()
    own_folder(tmp_path).chmod(0o777)
    with pytest.raises(UserError, match=r"data\.stage_dir: expected .* alone \(mode 700\); .* mode 777"):
        StagedFiles(str(tmp_path), [], {})
    own_folder(tmp_path).rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own_folder(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"data\.stage_dir: expected "):
        StagedFiles(str(tmp_path), [], {})


def test_a_folder_of_another_user_is_not_trusted_and_nobody_else_sees_ours(tmp_path: Path) -> None:
    StagedFiles(str(tmp_path), [], {})
    assert all(path.stat().st_mode & 0o077 == 0 for path in own_folder(tmp_path).rglob("*"))
    if os.geteuid() != 0:
        pytest.skip("giving a folder to another user needs root")
    os.chown(own_folder(tmp_path), 12345, 12345)
    with pytest.raises(UserError, match="belongs to user 12345"):
        StagedFiles(str(tmp_path), [], {})


def test_a_file_in_the_way_of_the_stage_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^data\.stage_dir: .*file cannot be used"):
        StagedFiles(str(tmp_path / "file"), [], {})


def test_packed_files_lie_in_the_stage_once(tmp_path: Path) -> None:
    paths = write(tmp_path / "data", 3, packed=True)
    for _ in range(2):
        assert is_read(paths, tmp_path / "stage")
    copies = [path for path in (tmp_path / "stage").rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert sorted(path.suffix for path in copies) == [".unpacked"] * 3


def test_staged_files_are_read_where_their_source_has_gone(tmp_path: Path) -> None:
    """So the copies do serve."""
    for packed in (False, True):
        paths = write(tmp_path / f"data-{packed}", 2, packed=packed)
        index = open_index(paths)
        readers = [Reader(TFRecords(index, str(tmp_path / "stage"))) for _ in range(2)]
        first, _ = readers[0].read(np.arange(6))
        for path in paths:
            Path(path).unlink()
        again, _ = readers[1].read(np.arange(6))
        assert split_records(first) == split_records(again)


@pytest.mark.parametrize("staged", [True, False])
def test_more_packed_files_than_a_process_may_hold_open(tmp_path: Path, few_descriptors: None, staged: bool) -> None:
    paths = write(tmp_path / "data", 250, packed=True)
    assert len(paths) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
    assert is_read(paths, tmp_path / "stage" if staged else None)


@pytest.mark.parametrize("packed", [True, False])
def test_a_full_stage_ends_the_copying_and_not_the_run(
    full_disk: Path, tmp_path: Path, packed: bool, said: list[str]
) -> None:
    """Each file alone is larger than the disk."""
    paths = write(tmp_path / "data", 3, packed=packed, records=40)
    assert is_read(paths, full_disk, records=40)
    *_, line = said
    assert line.startswith(f"warning: data.stage_dir: {full_disk}: No space left on device")
    assert not list(full_disk.rglob("*.partial"))


def test_flags_of_many_blocks_on_a_full_disk_do_not_end_the_process(full_disk: Path) -> None:
    """Where they were in mapped memory, the kernel did, by SIGBUS."""
    program = f"""
from horovod_train.data.tfrecord_index import ScannedFile
from horovod_train.data.tfrecord import StagedFiles
file = ScannedFile("a", 1, 1, "", "", "")
stage = StagedFiles({str(full_disk)!r}, [file], {{}})
for block in range(0, 200_000, 1000):
    assert stage.load(file, block, 0, 4) is None
    stage.save(file, block, 4 * block, b"data")
"""
    free = os.statvfs(full_disk).f_bavail * os.statvfs(full_disk).f_frsize
    (full_disk / "others").write_bytes(bytes(free - 2 * 4096))  # room for folders, not for all flags
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (finished.returncode, "Traceback" in finished.stderr) == (0, False), finished.stderr


def test_without_any_room_the_line_says_how_much_is_needed(
    full_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    paths = write(tmp_path / "data", 3, packed=True, records=40)
    index = open_index(paths)
    monkeypatch.setattr("tempfile.tempdir", str(full_disk))
    reader = Reader(TFRecords(index))
    (room,) = said
    needed = decimal(index.blocks.total_bytes)
    assert room.startswith(f"warning: 3 packed files take up to {needed} in {full_disk} once unpacked, on each rank")
    with pytest.raises(UserError, match=r"cannot be unpacked into .*: No space left on device\. All packed files toge"):
        reader.read(np.arange(index.blocks.num_records))


def test_a_full_disk_while_files_are_indexed_is_not_damage(
    full_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write(tmp_path / "data", 2, packed=True, records=400)
    monkeypatch.setattr("tempfile.tempdir", str(full_disk))
    said = rf"0000\.tfrecord\.gz: cannot be unpacked into {full_disk}: No space left on device\. Set TMPDIR to a "
    with pytest.raises(UserError, match=said):
        open_index(paths)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert [file.problem for file in open_index(paths).files] == ["", ""]


def test_plain_files_need_no_room(tmp_path: Path, said: list[str]) -> None:
    Reader(TFRecords(open_index(write(tmp_path / "data", 1, packed=False))))
    assert said == []


def test_a_copy_with_holes_is_read_from_the_source(tmp_path: Path) -> None:
    """A clean-up has removed the copy, and the next rank has written its block alone into a new one."""
    paths = write(tmp_path / "data", 1, packed=False, records=500)
    index = open_index(paths)
    assert len(index.blocks.records) > 1
    every = np.arange(index.blocks.num_records)
    first = Reader(TFRecords(index, str(tmp_path / "stage")))
    assert not first.read(every)[1]
    (copy,) = own_folder(tmp_path / "stage").glob("*/*.blocks")
    with copy.open("r+b") as file:
        file.write(bytes(int(index.blocks.bytes[0])))
    found, faults = Reader(TFRecords(index, str(tmp_path / "stage"))).read(every)
    assert not faults
    assert split_records(found) == [b"0 %d" % record * 1000 for record in range(500)]
    assert any(copy.read_bytes()[: int(index.blocks.bytes[0])])  # and is whole again


def test_a_copy_that_ends_early_is_read_from_the_source(tmp_path: Path) -> None:
    """A clean-up has removed the copy, and the next rank has written an earlier block alone into a new one."""
    paths = write(tmp_path / "data", 1, packed=False, records=500)
    index = open_index(paths)
    assert is_read(paths, tmp_path / "stage", records=500)
    (copy,) = own_folder(tmp_path / "stage").glob("*/*.blocks")
    os.truncate(copy, int(index.blocks.bytes[0]))
    assert is_read(paths, tmp_path / "stage", records=500)


def change(path: str, text: bytes) -> None:
    """Write three records of the lengths that were there, a second later."""
    before = os.stat(path)
    Path(path).write_bytes(b"".join(frame(b"%b %d" % (text, record) * 1000) for record in range(3)))
    assert os.stat(path).st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def test_a_file_that_has_changed_is_copied_anew(tmp_path: Path) -> None:
    """Though it has the size that it had."""
    paths = write(tmp_path / "data", 1, packed=False)
    assert is_read(paths, tmp_path / "stage")
    change(paths[0], b"7")
    found, faults = Reader(TFRecords(open_index(paths), str(tmp_path / "stage"))).read(np.arange(3))
    assert not faults
    assert split_records(found) == [b"7 %d" % record * 1000 for record in range(3)]


@pytest.mark.parametrize("staged", [False, True])
def test_a_file_that_changes_while_in_use_is_named(tmp_path: Path, staged: bool) -> None:
    paths = write(tmp_path / "data", 1, packed=False)
    reader = Reader(TFRecords(open_index(paths), str(tmp_path / "stage") if staged else None))
    change(paths[0], b"7")
    with pytest.raises(UserError, match=r"0000\.tfrecord: was changed while in use"):
        reader.read(np.arange(3))
