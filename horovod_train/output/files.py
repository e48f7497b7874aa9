"""Files that this package writes, atomically and again later if the disk is full now; and their removal.

The only module that removes, renames or empties files. It touches those that this package has made: an `Artifact`
describes what may be removed, by its name, its kind and its content. Anything else stays, and NotOurs says why. Does
not decide what is no longer needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import os
import re
import secrets
import stat
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from horovod_train.errors import UserError, unusable
from horovod_train.output.logs import ANY_RANK

STOP_FILE = "STOP"
"""A file of this name in a run directory asks the run to end."""

MAX_PENDING_BYTES = 16_000_000
"""Tens of thousands of lines of metrics."""

MOST_BYTES = 64 << 20
"""Of a file that is read as a whole, such as a manifest: those of ours are far smaller."""

log = logging.getLogger(__name__)


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


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read. Raises OSError, also for a pipe or a device, which may never end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EBADMSG, "it is a pipe, a socket or a device", str(path))
    return path.open("rb")


def read_whole(path: Path) -> bytes:
    """Return the content of a file that this package keeps small. Raises OSError, also for another kind of file."""
    with open_regular(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EBADMSG, f"it has more than {MOST_BYTES >> 20} MiB", str(path))
    return content


def parse_json(text: str | bytes) -> Any:
    """Return what JSON text holds. Raises ValueError, also for values that are nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no complete one."""
    try:
        content = parse_json(read_whole(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def begins(path: Path, head: str) -> bool:
    """Return whether a file begins like this. So does a shorter file that a kill has left.

    A power cut may leave NUL bytes, where the file system has kept the length of a file but not its data.
    """
    with path.open("rb") as file:
        beginning = file.read(len(head))
    return head.encode().startswith(beginning.rstrip(b"\0"))


def zip_members(path: Path) -> set[str]:
    """Return the names in a zip archive; empty for any other file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return set(archive.namelist())
    except (zipfile.BadZipFile, NotImplementedError):  # the latter of a version that Python does not read
        return set()


def is_gone(path: Path) -> bool:
    """Return whether there is nothing at a path; False where a disk that fails answers otherwise: it may come back."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def draft_of(path: Path) -> Path:
    """Return a free, hidden path next to `path`, for a file or folder that is renamed to `path` once it is whole."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")


def free_path(path: Path, ending: str = "") -> Path:
    """Return a path that is free: `path`, or path-2, path-3, … if it is taken; each with this ending."""
    names = itertools.chain([path.name], (f"{path.name}-{number}" for number in itertools.count(2)))
    return next(free for name in names if not os.path.lexists(free := path.with_name(name + ending)))


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


def write_atomically(path: Path, text: str, artifact: Artifact, *, sync: bool = True) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it; see open_atomically."""
    with open_atomically(path, artifact, sync=sync) as file:
        file.write(text.encode())


@contextlib.contextmanager
def open_atomically(path: Path, artifact: Artifact, *, sync: bool) -> Iterator[BinaryIO]:
    """Open a file to write that gets its name when the block ends, and disappears if the block raises.

    artifact: what an old file must be. sync: also survive a power cut. Raises OSError; NotOurs if the name is taken by
    something else.
    """
    draft = draft_of(path)
    try:
        with draft.open("xb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        replace(draft, path, artifact)
    finally:
        with contextlib.suppress(OSError):
            remove(draft, DRAFT)


@contextlib.contextmanager
def must_be_writable(path: Path) -> Iterator[None]:
    """Run a block that writes a file or folder of a run. Raises UserError if it cannot, or the file is not a run's."""
    try:
        yield
    except NotOurs as error:
        raise UserError(
            f"output_dir: {error.filename} {error.strerror}, and a run would replace it. Choose another: --output-dir."
        ) from error
    except OSError as error:
        raise unusable(f"output_dir: cannot write {path}", error, "Choose another: --output-dir.") from error


def json_text(value: Any, indent: int | None = None) -> str:
    """Return JSON text; NaN and infinity, which JSON lacks, become null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(finite, indent=indent)


class Appender:
    """A file to which pieces are appended. A piece that cannot be written is kept in memory and tried with the next.

    unit: plural noun for pieces, in messages. write_from_bytes: write when there is more than this. max_pending_bytes:
    kept in memory; beyond them the oldest pieces are dropped. Logs when writing fails, when it works again, and at the
    end what is missing.
    """

    def __init__(
        self, path: Path, *, unit: str = "lines", write_from_bytes: int = 0, max_pending_bytes: int = MAX_PENDING_BYTES
    ) -> None:
        self.path, self._unit = path, unit
        self._write_from_bytes, self._max_pending_bytes = write_from_bytes, max_pending_bytes
        self._pending: deque[bytes] = deque()
        self._size = self._lost = 0
        self._is_failing = False
        self._cut_at: tuple[int, int] | None = None
        """Offsets at which a failed write began and was to end, until its partial data has been cut off."""

    @property
    def has_pending(self) -> bool:
        """Whether pieces are in memory that the file has not."""
        return bool(self._pending)

    def add(self, piece: bytes) -> None:
        self._pending.append(piece)
        self._size += len(piece)
        if self._size > self._write_from_bytes:
            self.flush()
        while self._size > self._max_pending_bytes:
            self._size -= len(self._pending.popleft())
            self._lost += 1

    def flush(self, *, sync: bool = False) -> None:
        """Write the pieces in memory. sync: return only when they would survive a power cut."""
        try:
            self._write(b"".join(self._pending), sync)
        except OSError as error:
            if not self._is_failing:
                consequence = f"New {self._unit} are kept in memory; training continues."
                self.report(logging.WARNING, f"{self.path} cannot be written: {error.strerror}. {consequence}")
            self._is_failing = True
            return
        if self._is_failing:
            lost = f"; {self._lost} are lost" if self._lost else ""
            written = f"{len(self._pending)} {self._unit} from memory are in it now{lost}."
            self.report(logging.INFO, f"{self.path} can be written again; {written}")
        self._pending.clear()
        self._size, self._lost, self._is_failing = 0, 0, False

    def close(self) -> None:
        self.flush(sync=True)
        self.report_missing()

    def report_missing(self) -> None:
        if self._is_failing:
            missing = self._lost + len(self._pending)
            text = f"{self.path} lacks its last {missing} {self._unit}: it cannot be written."
            self.report(logging.WARNING, text)

    def report(self, level: int, text: str) -> None:
        log.log(level, text, extra=ANY_RANK)

    def _write(self, data: bytes, sync: bool) -> None:
        if not data and not self.path.exists():
            return
        if self._cut_at is not None:
            self._cut(*self._cut_at)
        try:
            # Unbuffered: a buffer would try again to write the rest when the file is closed.
            with self.path.open("ab", buffering=0) as file:
                self._cut_at = file.tell(), file.tell() + len(data)
                while data:
                    data = data[file.write(data) :]
                if sync:
                    os.fsync(file.fileno())
        except OSError:
            # Half a piece would corrupt the next one, and a whole piece would appear twice.
            if self._cut_at is not None:
                with contextlib.suppress(OSError):
                    self._cut(*self._cut_at)
            raise
        self._cut_at = None

    def _cut(self, begin: int, end: int) -> None:
        if self.path.is_file() and begin < self.path.stat().st_size <= end:  # else another process has appended
            os.truncate(self.path, begin)
        self._cut_at = None


def each_line(path: Path) -> Iterator[str]:
    """Yield the lines that Lines has appended; a kill may have cut the last one short. Raises OSError.

    Only \\n ends a line. str.splitlines knows ten more ends, which text may hold.
    """
    with open_regular(path) as file:
        for line in file:
            yield line.removesuffix(b"\n").decode("utf-8", errors="replace")


def is_cut_short(path: Path) -> bool:
    """Return whether the last line of a file lacks its end, as after a power cut. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


class Lines(Appender):
    """An Appender of lines of text; each_line reads them."""

    def append(self, line: str) -> None:
        self.add(f"{line}\n".encode())

    def read(self) -> Iterator[str]:
        """Yield the lines in the file. Raises OSError."""
        return each_line(self.path) if self.path.exists() else iter(())

    def keep(self, is_kept: Callable[[str], bool], artifact: Artifact) -> None:
        """Remove the lines that are not kept, from a file that matches `artifact`. Raises OSError."""
        if not self.path.exists():
            return

        def lines() -> Iterator[tuple[bytes, bool]]:  # one at a time: a file may be larger than the memory
            with self.path.open("rb") as file:
                for line in file:
                    yield line, is_kept(line.removesuffix(b"\n").decode("utf-8", errors="replace"))

        if all(is_kept and line.endswith(b"\n") for line, is_kept in lines()):
            return
        with open_atomically(self.path, artifact, sync=True) as draft:
            draft.writelines(line.removesuffix(b"\n") + b"\n" for line, is_kept in lines() if is_kept)
