"""The one module that removes and renames: files, links and folders that this package has made, and nothing else.

What may go is described by a `Made`: how it is called, what kind of thing it is and what may lie in it. Whatever does
not fit stays where it is, and NotOurs says why. Does not decide what is no longer needed.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


class NotOurs(OSError):
    """Something in the way was not made by this package; `strerror` says what."""


@dataclass(frozen=True)
class Made:
    """What this package makes: `what` in words, and patterns that whole names must match."""

    what: str
    name: str
    kind: Literal["file", "link", "folder"] = "file"
    inside: tuple[str, ...] = ()
    """Of a folder, patterns of all paths in it, `/` between names, folders too."""
    is_ours: Callable[[Path], bool] = lambda path: True
    """Looks into what a name alone does not prove. May raise OSError."""


DRAFT = Made("an unfinished file", r"\..+\.[0-9a-f]{8}\.partial")


def draft_of(path: Path) -> Path:
    """Return a free, hidden name beside `path`, for a file or folder that is renamed to it once it is whole."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def check(path: Path, made: Made) -> list[Path]:
    """Return a path and all that lies under it, parents first; nothing where nothing is there.

    Raises NotOurs for anything that does not fit `made`.
    """
    if not os.path.lexists(path):
        return []
    kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file" if path.is_file() else "special file"
    if kind != made.kind:
        raise NotOurs(None, f"is a {kind}, not {made.what}", str(path))
    if not re.fullmatch(made.name, path.name) or not made.is_ours(path):
        raise NotOurs(None, f"is not {made.what}", str(path))
    return [path, *(_inside(path, made) if kind == "folder" else ())]


def remove(path: Path, made: Made) -> None:
    """Remove what fits `made`, if it is there. Raises NotOurs, before anything has gone, for what does not.

    Goes name by name, so a file that somebody adds meanwhile stays, with its folder.
    """
    for entry in reversed(check(path, made)):
        with suppress(FileNotFoundError):  # several ranks may tidy up together
            if entry.is_dir() and not entry.is_symlink():
                entry.rmdir()
            else:
                entry.unlink()


def replace(draft: Path, path: Path, made: Made) -> None:
    """Rename a draft to `path`, in the place of what fits `made`. Raises NotOurs, before any change, for other things.

    A folder goes only after its successor has its name, and comes back where that fails.
    """
    there = check(path, made)
    if not there or made.kind != "folder":
        draft.replace(path)
        return
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.replaced")
    path.rename(aside)
    try:
        draft.rename(path)
    except OSError:
        aside.rename(path)
        raise
    remove(aside, dataclasses.replace(made, name=re.escape(aside.name)))


def rename(path: Path, to: Path) -> Path:
    """Rename to a name that must be free; returns it. Raises FileExistsError."""
    if os.path.lexists(to):
        raise FileExistsError(None, "exists already", str(to))
    return path.rename(to)


def _inside(folder: Path, made: Made) -> Iterator[Path]:
    for where, folders, files in os.walk(folder, onerror=_raise):
        for entry in (Path(where, name) for name in [*folders, *files]):
            name = entry.relative_to(folder).as_posix()
            if entry.is_symlink() or not any(re.fullmatch(pattern, name) for pattern in made.inside):
                raise NotOurs(None, f"holds {name}, which is no part of {made.what}", str(folder))
            yield entry


def _raise(error: OSError) -> None:
    raise error
