"""What removes, removes what this package has made, and stops before anything else."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from horovod_train.output.files import Artifact, NotOurs, check, draft_of, remove, rename, replace

FOLDER = Artifact("a thing of ours", r"thing-\d+", "folder", ("facts", "parts", r"parts/\d+"))
FILE = Artifact("a note of ours", r"note-\d+", content_matches=lambda path: path.read_text().startswith("ours"))


@pytest.fixture
def thing(tmp_path: Path) -> Path:
    folder = tmp_path / "thing-1"
    (folder / "parts").mkdir(parents=True)
    for name in ("facts", "parts/1", "parts/2"):
        (folder / name).write_text(name)
    return folder


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_what_we_made_goes_whole(thing: Path, tmp_path: Path) -> None:
    remove(thing, FOLDER)
    (tmp_path / "note-1").write_text("ours, all of it")
    remove(tmp_path / "note-1", FILE)
    remove(tmp_path / "note-1", FILE)  # nothing there, nothing to do
    assert names(tmp_path) == set()


@pytest.mark.parametrize("stranger", ["notes.txt", "parts/best.keras", "parts/1.bak", "more/1"])
def test_a_folder_that_holds_anything_else_keeps_everything(thing: Path, stranger: str) -> None:
    (thing / stranger).parent.mkdir(exist_ok=True)
    (thing / stranger).write_text("mine")
    before = names(thing)
    with pytest.raises(NotOurs, match=f"holds {stranger.partition('/1')[0] if 'more' in stranger else stranger}"):
        remove(thing, FOLDER)
    assert names(thing) == before


def test_links_are_not_followed_and_not_ours(thing: Path, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far/1").write_text("mine")
    (thing / "parts/3").symlink_to(tmp_path / "far")
    with pytest.raises(NotOurs, match="holds parts/3"):
        remove(thing, FOLDER)
    (tmp_path / "thing-2").symlink_to(thing)
    with pytest.raises(NotOurs, match="is a link, not a thing of ours"):
        remove(tmp_path / "thing-2", FOLDER)
    assert (tmp_path / "far/1").read_text() == "mine"


def test_a_name_alone_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "note-1").write_text("theirs")
    (tmp_path / "thing-1").write_text("a file, not a folder")
    (tmp_path / "other").write_text("ours")
    for name, artifact in {"note-1": FILE, "thing-1": FOLDER, "other": FILE}.items():
        with pytest.raises(NotOurs):
            remove(tmp_path / name, artifact)
        with pytest.raises(NotOurs):
            replace(tmp_path / "draft", tmp_path / name, artifact)
    assert names(tmp_path) == {"note-1", "thing-1", "other"}


def test_what_is_replaced_goes_after_its_successor_has_the_name(thing: Path, tmp_path: Path) -> None:
    draft = draft_of(thing)
    draft.mkdir()
    (draft / "facts").write_text("new")
    replace(draft, thing, FOLDER)
    assert names(tmp_path) == {"thing-1", "thing-1/facts"}
    assert (thing / "facts").read_text() == "new"


def test_what_cannot_be_replaced_is_put_back(thing: Path, tmp_path: Path) -> None:
    before = names(tmp_path)
    with pytest.raises(FileNotFoundError):
        replace(tmp_path / "no such draft", thing, FOLDER)
    assert names(tmp_path) == before


def test_a_rename_takes_no_other_things_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        rename(tmp_path / "a", tmp_path / "b")
    assert os.readlink(tmp_path / "b") == "nowhere"


def test_nothing_is_there_fits_anything(tmp_path: Path) -> None:
    assert check(tmp_path / "none", FOLDER) == []


def test_what_another_rank_has_just_removed_is_gone_and_what_is_still_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may say that a file does not exist while it does; appending to it would mix two runs."""
    note, unlink = tmp_path / "note-1", Path.unlink

    def removed_by_another(path: Path) -> None:
        unlink(path)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    def not_removed(path: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    note.write_text("ours")
    monkeypatch.setattr(Path, "unlink", removed_by_another)
    remove(note, FILE)
    assert not note.exists()
    note.write_text("ours")
    monkeypatch.setattr(Path, "unlink", not_removed)
    with pytest.raises(FileNotFoundError):
        remove(note, FILE)
