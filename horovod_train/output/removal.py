"""Removes and renames files, links and folders that this package has made, and nothing else. No other module does.

An `Artifact` describes what may be removed: its name, its kind and its content. Anything else stays, and NotOurs says
why. Does not decide what is no longer needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


class NotOurs(OSError):
    """Something in the way was not made by this package; `strerror` describes it."""


@dataclass(frozen=True)
class Artifact:
    """A file, link or folder that this package writes: `what` in words, and patterns that whole names must match."""

    what: str
    name: str
    kind: Literal["file", "link", "folder"] = "file"
    inside: tuple[str, ...] = ()
    """For a folder: patterns of all paths in it, folders too, `/` between names."""
    content_matches: Callable[[Path], bool] = lambda path: True
    """Checks the content where the name alone is no proof. May raise OSError."""


DRAFT = Artifact("an unfinished file", r"\..+\.[0-9a-f]{8}\.partial")


def begins(path: Path, head: str) -> bool:
    """Return whether a file begins like this. So does a shorter file that a kill has left."""
    with path.open("rb") as file:
        beginning = file.read(len(head))
    return head.encode().startswith(beginning)


def zip_members(path: Path) -> set[str]:
    """Return the names in a zip archive; empty for any other file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return set(archive.namelist())
    except zipfile.BadZipFile:
        return set()


def draft_of(path: Path) -> Path:
    """Return a free, hidden path next to `path`, for a file or folder that is renamed to `path` once it is whole."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def check(path: Path, artifact: Artifact) -> list[Path]:
    """Return a path and everything under it, parents first; nothing if it does not exist.

    Raises NotOurs for anything that does not match `artifact`.
    """
    if not os.path.lexists(path):
        return []
    kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file" if path.is_file() else "special file"
    if kind != artifact.kind:
        raise NotOurs(None, f"is a {kind}, not {artifact.what}", str(path))
    if not re.fullmatch(artifact.name, path.name) or not artifact.content_matches(path):
        raise NotOurs(None, f"is not {artifact.what}", str(path))
    return [path, *(_inside(path, artifact) if kind == "folder" else ())]


def remove(path: Path, artifact: Artifact) -> None:
    """Remove what matches `artifact`, if it exists. Raises NotOurs, before any removal, if something does not match.

    Removes name by name, so a file added meanwhile stays, with its folder.
    """
    for entry in reversed(check(path, artifact)):
        try:
            if entry.is_dir() and not entry.is_symlink():
                entry.rmdir()
            else:
                entry.unlink()
        except FileNotFoundError:  # several ranks may clean up at the same time
            if os.path.lexists(entry):
                raise


def remove_drafts(folder: Path, artifact: Artifact) -> None:
    """Remove the drafts of files that match `artifact`, which killed processes have left, as far as possible.

    Call it where no process writes such files now. The content of a draft is the beginning of a file's.
    """
    draft = dataclasses.replace(artifact, name=rf"\.{artifact.name}\.[0-9a-f]{{8}}\.partial")
    for path in folder.glob(".*.partial"):
        with contextlib.suppress(OSError):  # what is not ours stays, and a draft does no harm
            remove(path, draft)


def replace(draft: Path, path: Path, artifact: Artifact) -> None:
    """Rename a draft to `path`, replacing what matches `artifact`. Raises NotOurs, before any change, otherwise.

    An old folder is removed only after the draft has its name, and is restored if that fails; if the restore fails
    too, the error says what the old folder is called now.
    """
    old_paths = check(path, artifact)
    if not old_paths or artifact.kind != "folder":
        draft.replace(path)
        return
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.replaced")
    path.rename(aside)
    try:
        draft.rename(path)
    except OSError as error:
        try:
            aside.rename(path)
        except OSError:
            raise OSError(error.errno, f"{error.strerror}, and what was there is now called {aside}") from error
        raise
    remove(aside, dataclasses.replace(artifact, name=re.escape(aside.name)))


def rename(path: Path, to: Path) -> Path:
    """Rename to a name that must be free; return it. Raises FileExistsError."""
    if os.path.lexists(to):
        raise FileExistsError(None, "exists already", str(to))
    return path.rename(to)


def _inside(folder: Path, artifact: Artifact) -> Iterator[Path]:
    for where, folders, files in os.walk(folder, onerror=_raise):
        for entry in (Path(where, name) for name in [*folders, *files]):
            name = entry.relative_to(folder).as_posix()
            if entry.is_symlink() or not any(re.fullmatch(pattern, name) for pattern in artifact.inside):
                raise NotOurs(None, f"holds {name}, which is no part of {artifact.what}", str(folder))
            yield entry


def _raise(error: OSError) -> None:
    raise error
