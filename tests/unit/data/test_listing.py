"""What folders and globs stand for: what Python's glob finds, and an error in place of fewer files."""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

from horovod_train.data.files import FileList, list_files, record_folders
from horovod_train.data.globs import matching
from horovod_train.data.random_access.images import images_at
from horovod_train.data.tfrecord_index import scan
from horovod_train.errors import ReadFailed, RunError, UserError

FILES = (
    *("a/1.tfrecord", "a/b/2.tfrecord", "a/.b/3.tfrecord", "a/.4.tfrecord"),
    *("c/b/5.tfrecord", "[c]/6.tfrecord", "7.md"),
)
PATTERNS = (
    *("*", "*/*.tfrecord", "**/*.tfrecord", "a/**", "**/b/*", "*/b/[2-5].tfrecord", "a/.*", "a/.*/*", "*/1.tfrecord"),
    *("[[]c]/*", "[c]/*/*", "no/*", "*/no/*", "7.md/*", "*/1.tfrecord/*", "a*/", "**", "**/**/2*", "a/b", "a/no"),
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).touch()
    return tmp_path / "tree"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_stands_for_what_pythons_glob_finds(
    pattern: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "link").symlink_to("a")
    (tree / "broken").symlink_to("nowhere")
    for place in (str(tree / pattern), pattern):
        monkeypatch.chdir(tree)
        assert matching(place) == sorted(glob.glob(place, recursive=True))


@pytest.mark.parametrize("pattern", [pattern for pattern in PATTERNS if not pattern.endswith(("/", "**"))])
def test_it_stands_for_the_same_in_a_store(pattern: str, tree: Path) -> None:
    url = f"memory://{tree.parent.name}/tree"
    for name in FILES:
        fsspec.filesystem("memory").pipe(f"{url}/{name}", b"")
    found = [path.removeprefix(url) for path in matching(f"{url}/{pattern}")]
    assert found == [path.removeprefix(str(tree)) for path in matching(str(tree / pattern))]


def broken_at(folder: str, number: int) -> Callable[..., Any]:
    """Lists folders as the system does, but this one breaks off at its first name."""
    scandir = os.scandir

    class Listed:
        def __init__(self, path: Any = ".") -> None:
            self.path, self.entries = str(path), scandir(path)

        def __iter__(self) -> Iterator[Any]:
            for entry in self.entries:
                if self.path.rstrip("/") == folder:
                    raise OSError(number, os.strerror(number), folder)
                yield entry

        def __enter__(self) -> Listed:
            return self

        def __exit__(self, *_: object) -> None:
            self.entries.close()

    return Listed


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("pattern", ["*/*.tfrecord", "**/*.tfrecord", "*/b/*", "a/*", "a/*/*"])
def test_a_folder_that_cannot_be_read_is_an_error(
    pattern: str, number: int, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tree / "a" if "b" not in pattern else tree / "a" / "b")
    monkeypatch.setattr(os, "scandir", broken_at(folder, number))
    with pytest.raises(RunError) as raised:
        list_files([str(tree / pattern)], "data.train", ["*.tfrecord*"])
    assert str(raised.value) == f"data.train: {folder} cannot be read: {os.strerror(number)}."
    assert raised.value.exit_code == (1 if number == errno.EIO else 2)


def test_images_of_a_glob_are_an_error_too(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tree / "c")
    monkeypatch.setattr(os, "scandir", broken_at(folder, errno.EIO))
    with pytest.raises(ReadFailed, match=f"{folder}: cannot be read: Input/output error"):
        images_at(str(tree / "*/*"))


@pytest.mark.parametrize("pattern", ["*/*.tfrecord", "**/*.tfrecord", "*/b/*.tfrecord"])
def test_a_folder_that_a_store_does_not_list_is_an_error(
    pattern: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, kind = f"memory://{tree.parent.name}/store", type(fsspec.filesystem("memory"))
    for name in FILES:
        fsspec.filesystem("memory").pipe(f"{url}/{name}", b"")
    ls, folder = kind.ls, f"{url}/a/b" if "b" in pattern else f"{url}/a"

    def fail(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        if folder.endswith(path.rstrip("/")):
            raise PermissionError("Access Denied")
        return ls(self, path, *arguments, **options)

    monkeypatch.setattr(kind, "ls", fail)
    with pytest.raises(RunError, match=re.escape(f"data.train: {folder} cannot be read: Access Denied.")):
        list_files([f"{url}/{pattern}"], "data.train", ["*.tfrecord*"])


def refuse(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a folder be one that may not be read, also for root."""
    listdir, scandir = os.listdir, os.scandir

    def refused(function: Callable[..., Any], path: Any = ".") -> Any:
        if str(path).rstrip("/") == str(folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return function(path)

    monkeypatch.setattr(os, "listdir", partial(refused, listdir))
    monkeypatch.setattr(os, "scandir", partial(refused, scandir))


@pytest.fixture
def mount(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a file system of its own: it has lost+found, which only its administrator reads."""
    (tree / "lost+found").mkdir()
    refuse(tree / "lost+found", monkeypatch)
    return tree


def test_a_folder_beside_records_that_cannot_be_read_is_not_theirs(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(tree / "a" / "b", monkeypatch)
    found = list_files([str(tree / "a")], "data.train", ["*.tfrecord*"])
    assert found.files == [str(tree / "a" / "1.tfrecord")]
    assert found.notes == [f"{tree / 'a'}: 1 file is left out: .b/. Read are only *.tfrecord*."]


def test_folders_of_records_are_found_beside_one_that_may_not_be_read(mount: Path) -> None:
    folders = [str(mount / "[c]"), str(mount / "a")]
    assert sorted(record_folders(str(mount), ["*.tfrecord*"])) == folders
    with pytest.raises(UserError, match=re.escape(f"data.train: {mount} holds no *.tfrecord* files. Its folders have")):
        list_files([str(mount)], "data.train", ["*.tfrecord*"])


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*/*.tfrecord", ["[c]/6.tfrecord", "a/1.tfrecord"]),
        ("**/*.tfrecord", ["[c]/6.tfrecord", "a/1.tfrecord", "a/b/2.tfrecord", "c/b/5.tfrecord"]),
        ("*/b/*", ["a/b/2.tfrecord", "c/b/5.tfrecord"]),
        ("*", ["7.md"]),
    ],
)
def test_no_wildcard_stands_for_lost_and_found(pattern: str, names: list[str], mount: Path) -> None:
    found = list_files([str(mount / pattern)], "data.train", ["*.tfrecord*"]).files
    assert found == [str(mount / name) for name in names]
    with pytest.raises(UserError, match=re.escape("lost+found cannot be read: Permission denied")):
        list_files([str(mount / "lost+found" / "*")], "data.train", ["*.tfrecord*"])


@pytest.mark.parametrize("scheme", ["", "memory:/"])
def test_a_glob_stands_for_files_of_records_alone(scheme: str, tmp_path: Path) -> None:
    folder = f"{scheme}{tmp_path}"
    for name in ("eval/0.tfrecord", "train/1.tfrecord", "dataset.json", "train/index.npz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        fsspec.filesystem("memory").pipe(f"memory:/{tmp_path}/{name}", b"")

    def listed(path: str) -> FileList:
        return list_files([f"{folder}/{path}"], "data.train", ["*.tfrecord"])

    found = [f"{folder}/{name}" for name in ("eval/0.tfrecord", "train/1.tfrecord")]
    assert listed("**").files == listed("*/*").files == listed("*/[01].*").files == found
    assert listed("*/1.tfrecord").files == found[1:]
    with pytest.raises(UserError, match=r"/\* fits folders only; name their files: .*/\*/\*$"):
        listed("*")
    with pytest.raises(UserError, match=r"Its folders have some: data\.train=.*/train\?$"):
        listed("")
    (tmp_path / "2.tfrecord").touch()
    fsspec.filesystem("memory").pipe(f"memory:/{tmp_path}/2.tfrecord", b"")
    assert listed("*").files == [f"{folder}/2.tfrecord"]
    assert "2 files are left out: eval/, train/." in listed("*").notes[0]


@pytest.mark.parametrize("scheme", ["", "memory:/"])
def test_a_folder_whose_name_is_that_of_a_file_is_no_empty_file(scheme: str, tmp_path: Path) -> None:
    """As Spark names the folders that it writes."""
    (tmp_path / "a.tfrecord").mkdir()
    fsspec.filesystem("memory").pipe(f"memory:/{tmp_path}/a.tfrecord/part-0", b"")
    (file,) = list_files([f"{scheme}{tmp_path}"], "data.train", ["*.tfrecord"]).files
    with pytest.raises(UserError, match=r"/a\.tfrecord: cannot be read: Is a directory\.$"):
        scan(file)
