"""Finds the files that the config's folders and globs stand for, and places to save what is known of them.

Indexes, digests and lengths of records are saved next to the records, in `data.index_dir`, or in the user's cache
folder, so that the next start need not read the records again. Does not know what any file holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import functools
import glob
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from horovod_train.config.paths import is_remote, link_to_nothing
from horovod_train.data.globs import files_and_folders
from horovod_train.data.storage import DEFAULT, Stamp, Stamps, Storage, normalized, parent, resolved
from horovod_train.errors import UserError, said_by_system, unreadable
from horovod_train.host import cache_folder
from horovod_train.output.files import Artifact, remove
from horovod_train.shown_text import listed

log = logging.getLogger(__name__)

INDEX_NAME = "index.npz"
"""An index of records, which may be in their folder; see tfrecord_index."""

_OURS = ("dataset.json", INDEX_NAME, "digests.json", "*.lock")
"""Names of files that we write beside records."""
_NOT_LISTED = (*_OURS, ".*")
"""Names of files in a folder that are never its records: a glob's wildcards leave hidden ones out too."""
_NO_RECORDS = (*_OURS, ".*", "_*", "README*", "LICENSE*", "*.md")
"""Names of files beside records that nobody takes for records."""
_COPIES = ("*.bak", "*~", "*.tmp", "*.crc")
"""Names that editors and programs give to copies and checksums of files, beside them."""
_SAY_AFTER_S = 10.0
"""Shorter waits for a lock are usual: ranks start together, and one of them scans the files."""
_LOCK = Artifact("a lock", r".+\.(npz|unpacked|dataset)\.lock")


class FileList(NamedTuple):
    """The files that folders and globs stand for: in the order given, and by name within each."""

    kind: str
    """The pattern that they fit."""
    files: list[str]
    counts: list[int]
    """How many of them each path stands for."""
    notes: list[str]
    """What else is in the folders, or fits the globs, and is not read."""


def list_files(paths: Sequence[str], setting: str, patterns: Collection[str], storage: Storage = DEFAULT) -> FileList:
    """Return the files that folders and globs stand for.

    All are of one kind: the first of `patterns` that fits any of the paths, or else the first. `setting` is the config
    key of the paths, for messages. Raises UserError if there are no files.
    """
    first = next(iter(patterns))
    try:
        entries = [(path, storage.is_folder(path)) for path in paths]
        fitting = (pattern for pattern in patterns if any(_fits(*entry, pattern, storage) for entry in entries))
        kind = next(fitting, first)
        lists, left_out = [], dict[str, str]()
        for path, is_folder in entries:
            if is_folder:
                names = _list_folder(path, setting, kind, patterns, storage)
                others, read = _left_out(path, kind, storage), kind
            else:
                names, others = _list_glob(path, setting, storage)
                read = f"files that are not {', '.join(_COPIES)}"
            lists.append(names)
            left_out[path] = left_out_note(path, others, read)
    except OSError as error:
        raise unreadable(error)(f"{setting}: {error.filename} cannot be read: {error.strerror}.") from error
    files = [name for names in lists for name in names]
    for path in {*paths} & {*files}:
        if gone := link_to_nothing(path):
            raise UserError(f"{setting}: {gone}")
    check_named_once(files, setting)
    for name in files:
        check_regular(name)
    return FileList(kind, files, [len(names) for names in lists], [note for note in left_out.values() if note])


def check_regular(path: str) -> None:
    """Raise UserError for a local named pipe, socket or device: opening it could wait for ever."""
    try:
        mode = stat.S_IFREG if is_remote(path) else os.stat(path).st_mode
    except OSError:
        return  # what opens it says what is wrong
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError(f"{path}: expected a regular file; it is a pipe, a socket or a device. Remove it.")


def loose_files(folder: str) -> list[str]:
    """Return the names of a local folder's own files that may be meant as records. Raises no error."""
    try:
        return sorted(entry.name for entry in os.scandir(folder) if not entry.is_dir() and not is_no_record(entry.name))
    except OSError:
        return []


def left_out_note(folder: str, names: Sequence[str], read: str) -> str:
    """Return a sentence for users about files that are not read; "" if there are none. read: which are read."""
    if not names:
        return ""
    what = "1 file is" if len(names) == 1 else f"{len(names)} files are"
    return f"{folder}: {what} left out: {listed(names, 3)}. Read are only {read}."


def is_no_record(name: str, patterns: Sequence[str] = _NO_RECORDS) -> bool:
    """Return whether a file of this name lies beside records and is never meant as one."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _left_out(folder: str, pattern: str, storage: Storage) -> list[str]:
    """Return what is in a folder of records beside them: files of other names, and folders with records."""
    read = set(map(os.path.basename, _record_files(folder, pattern, storage)))
    if not is_remote(folder):
        others = [name for name in loose_files(folder) if name not in read]
        subfolders = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        for name in subfolders:
            with contextlib.suppress(OSError):  # it is not read: there may be no right to, as in lost+found
                others += [f"{name}/"] * bool(_record_files(os.path.join(folder, name), pattern, storage))
        return others
    # Whether a name is that of a folder would take a request for each; those of files have a suffix.
    names = [name for name in storage.names(folder) if "." in name and name not in read]
    return [name for name in names if not is_no_record(name)]


def check_named_once(files: Sequence[str], setting: str) -> None:
    """Raise UserError for a file that is named twice."""
    unique: set[str] = set()
    for name in map(normalized, files):
        if name in unique:
            raise UserError(f"{setting}: {name} is named twice; its records would be read twice. Name it once.")
        unique.add(name)


def check_different(entries: Iterable[Stamps]) -> None:
    """Raise UserError for two names of one file in different entries, whose records would be read twice."""
    by_stamp: dict[Stamp, str] = {}
    for stamps in entries:
        # Size and time too, not the inode alone: some network file systems use an inode number twice.
        names = {stamp: name for name, stamp in stamps.items() if stamp.inode[1]}
        for stamp, name in names.items():
            if stamp in by_stamp:
                raise UserError(
                    f"{name}: is the same file as {by_stamp[stamp]}; its records would be read twice. Name it once."
                )
        by_stamp.update(names)


def record_folders(path: str, patterns: Collection[str], storage: Storage = DEFAULT) -> list[str]:
    """Return the path itself, or if it is a folder without records, those of its subfolders that have some.

    Raises OSError for a folder that cannot be read, except a subfolder to which there is no right.
    """
    if not storage.is_folder(path) or has_records(path, patterns, storage):
        return [path]
    folders = []
    for entry in [os.path.join(path, name) for name in storage.names(path)]:
        with contextlib.suppress(PermissionError):  # as in lost+found
            folders += [entry] * (storage.is_folder(entry) and has_records(entry, patterns, storage))
    return folders or [path]


def has_records(folder: str, patterns: Collection[str], storage: Storage = DEFAULT) -> bool:
    """Return whether a folder has files of records in it."""
    return any(_record_files(folder, pattern, storage) for pattern in patterns)


def _fits(path: str, is_folder: bool, pattern: str, storage: Storage) -> bool:
    if is_folder:
        return bool(_record_files(path, pattern, storage))
    return fits(os.path.basename(path), pattern)


def fits(name: str, pattern: str) -> bool:
    """Return whether the name of a file is one of a kind; also in capitals, as Windows has written some."""
    return fnmatch.fnmatchcase(name.lower(), pattern)


def _is_copy(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in _COPIES)


def _without_copies(names: list[str]) -> list[str]:
    """Return what is read of names that fit: copies only where there is nothing else."""
    return [name for name in names if not _is_copy(name)] or names


def _record_files(folder: str, pattern: str, storage: Storage) -> list[str]:
    names = [name for name in storage.names(folder) if fits(name, pattern) and not is_no_record(name, _NOT_LISTED)]
    return [os.path.join(folder, name) for name in _without_copies(names)]


def _list_folder(folder: str, setting: str, pattern: str, patterns: Collection[str], storage: Storage) -> list[str]:
    if names := _record_files(folder, pattern, storage):
        return names
    subfolders = record_folders(folder, patterns, storage)
    if subfolders != [folder]:
        named = [path for path in subfolders if os.path.basename(path) == setting.rpartition(".")[2]]
        proposed = [*named, *subfolders][0]
        has = "some" if has_records(proposed, [pattern], storage) else "records"
        hint = f" Its folders have {has}: {setting}={proposed}?"
    elif content := storage.names(folder):
        hint = f" It holds {listed(content, 3)}; name other files with a glob."
    else:
        hint = " It is empty."
    raise UserError(f"{setting}: {folder} holds no {pattern} files.{hint}")


def _list_glob(pattern: str, setting: str, storage: Storage) -> tuple[list[str], list[str]]:
    """Return the files of a glob, and the names of copies and folders that fit it too and are not read; or a file.

    Copies are read where the glob ends as their names do, or fits nothing else.
    """
    if storage.exists(pattern):  # the name of a file may look like a glob
        return [pattern], []
    found, folders = files_and_folders(pattern, storage)
    names = [name for name in found if not is_no_record(os.path.basename(name), _OURS)]
    if folders and not names:
        raise UserError(f"{setting}: {pattern} fits folders only; name their files: {pattern.rstrip('/')}/*")
    if names:
        read = names if _is_copy(pattern) else _without_copies(names)
        unread = [] if "**" in pattern else [f"{os.path.basename(folder)}/" for folder in folders]  # ** looks into all
        return read, [*(os.path.basename(name) for name in names if name not in read), *unread]
    if glob.has_magic(pattern):
        raise UserError(f"{setting}: {pattern} matches no file.")
    existing: str | None = pattern
    while existing and not storage.exists(existing):
        existing = parent(existing) if is_remote(existing) else os.path.dirname(existing.rstrip("/"))
    raise UserError(f"{setting}: {pattern} does not exist{f'; {existing} does' if existing else ''}.")


def paths_beside(folder: str, name: str, index_dir: str | None) -> list[Path]:
    """Return where a file about the records of a folder may be, best first. name: the file's name in the folder."""
    digest = hashlib.sha256(resolved(folder).encode(errors="surrogateescape")).hexdigest()[:16]
    beside = [] if index_dir or is_remote(folder) else [Path(folder, name)]
    return [*beside, *paths_in_cache(f"{digest}{Path(name).suffix}", index_dir)]


def paths_in_cache(name: str, index_dir: str | None) -> list[Path]:
    """Return where a file that is never next to the records may be: one path, or none."""
    if index_dir:
        return [Path(index_dir, name)]
    folder = cache_folder()
    return [folder / "index" / name] if folder else []


def save_to_first(places: Sequence[Path], save: Callable[[Path], None]) -> None:
    """Save at the first place that can be written. If none can, warn: the records are read again at the next start."""
    failures = []
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            save(place)
        except OSError as error:
            failures.append(f"{place}: {said_by_system(error)}")
        else:
            return
    _say_unsaved("; ".join(failures) or "there is no folder for a cache")


@functools.cache
def _say_unsaved(why: str) -> None:
    """Say it once: while many files are read, what was found is saved several times."""
    log.warning(
        f"what was found in the records cannot be saved, so the next start reads them again: {why}. "
        "data.index_dir can name another folder."
    )


@contextlib.contextmanager
def hold_lock(places: Sequence[Path], limit_s: float | None = None) -> Iterator[None]:
    """Lock a file by a second file next to it, so that only one of the processes that need the file writes it.

    places: where the file may be. Best effort: without a lock several processes may write it, and the last write stays.
    limit_s: how long to wait for another process that does not write the file before doing without a lock; None: until
    that has ended. A limit is for files that both may write without harm.
    """
    locks = (_open_lock(place, limit_s) for place in places)
    path, fd = next(filter(None, locks), (Path(), -1))
    try:
        yield
    finally:
        if fd >= 0:
            with contextlib.suppress(OSError):
                remove(path, _LOCK)
            os.close(fd)


def _open_lock(place: Path, limit_s: float | None) -> tuple[Path, int] | None:
    path = place.with_name(f"{place.name}.lock")
    # Seconds slept, which do not count those of a suspension, in which the other process may have been suspended too.
    waited_s = unwritten_s = 0.0
    written, is_said = _written_at(place), False
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)  # NFS locks only what is open for writing
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return path, fd
        except FileNotFoundError:
            pass  # its last holder has removed it
        except BlockingIOError:
            if (written_now := _written_at(place)) != written:
                written, unwritten_s = written_now, 0.0
            if limit_s is not None and unwritten_s >= limit_s:
                os.close(fd)
                log.warning(f"{path} is still held by another process, which writes nothing: going on without it")
                return None
            if not is_said and waited_s >= _SAY_AFTER_S:
                is_said = True
                log.warning(f"waiting for {path}, which another process holds")
            pause_s = 0.5 if is_said else 0.05
            time.sleep(pause_s)
            waited_s, unwritten_s = waited_s + pause_s, unwritten_s + pause_s
        except OSError:
            os.close(fd)
            return None
        os.close(fd)


def _written_at(place: Path) -> int:
    try:
        return place.stat().st_mtime_ns
    except OSError:
        return 0
