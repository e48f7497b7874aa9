"""Files by their path, on a local disk or in an object store: lists them, and reads pieces of them. Knows no format.

Only this knows fsspec and its drivers. Credentials, endpoints and time limits are the drivers' settings: their
environment variables and files, or fsspec's. A request to a server that fails is repeated, with growing pauses, until a
limit. Blocks of local TFRecord files are read without this.

For libraries that seek and read, a remote file is also a Python file object. Small pieces that a library reads, such as
headers, come from cached pages. Ranges that the caller knows in advance are loaded before, by several threads at the
same time, because most libraries let only one thread read at a time.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import io
import logging
import math
import os
import random
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakSet

from horovod_train.config.paths import is_remote
from horovod_train.config.registry import import_extra
from horovod_train.config.settings import DataConfig
from horovod_train.errors import (
    ReadFailed,
    RunError,
    UserError,
    http_status,
    one_line,
    passes_by_name,
    reading,
    status_may_change,
    unreadable,
)
from horovod_train.output.logs import ANY_RANK

_REMOTE_FILES = 32  # requested at the same time
_PIECE = 1 << 20
_REMOTE_PIECE = 4 << 20
_PAGE = 1 << 18
_GAP = 1 << 16
"""Ranges no further apart than this are loaded in one request: a request takes longer than so many bytes."""
_ANSWER_WITHIN_S = 30.0
_LEAST_BYTES_PER_S = 1 << 16
"""A request that takes longer than the former, and its bytes at this rate, has failed; drivers wait for each byte."""

_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "mtime", "modified", "LastModified", "created")
"""Keys of a driver's file information whose values change with the file, best first. All drivers have one of them."""

T = TypeVar("T")

ReadAt = Callable[[int, int], bytes]
"""(length, offset) → bytes of a file, fewer at its end."""
Range = tuple[int, int]
"""(offset, length) of bytes of a file."""
_BOTOCORE_OPTIONS = {
    "max_pool_connections": 64,  # for all threads that read, not ten
    # Retries repeats requests; pauses of botocore would delay the end of a process.
    "retries": {"total_max_attempts": 1},
}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_QUIET_S = 3.0
"""Shorter failures are not logged: servers fail now and then."""
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_OTHER_REGION = getattr(errno, "EREMCHG", errno.EINVAL)
"""What s3fs raises for a bucket that is elsewhere; macOS has no such number."""
_PERMANENT_NUMBERS = {errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, _OTHER_REGION}
log = logging.getLogger(__name__)


class Stamp(NamedTuple):
    """Identifies one version of a file: a changed file has another stamp."""

    size: int
    mtime_ns: int
    """Of a remote file a number that stands for its version instead, such as its ETag."""
    inode: tuple[int, int] = (0, 0)
    """Device and inode; zeros for a remote file."""

    @classmethod
    def of(cls, stat: os.stat_result) -> Stamp:
        return cls(stat.st_size, stat.st_mtime_ns, (stat.st_dev, stat.st_ino))


Stamps = Mapping[str, Stamp]
"""By a file's path, in the order of the files."""


def parent(folder: str) -> str | None:
    """Return the folder that a folder is in; None for a bucket."""
    if not is_remote(folder):
        return os.path.dirname(os.path.abspath(folder))
    above, _, name = folder.rstrip("/").rpartition("/")
    return above if name and not above.endswith("/") else None


def normalized(path: str) -> str:
    """Return the same text for two spellings of a path; symbolic links are not followed."""
    scheme, _, location = path.partition("://")
    return f"{scheme}://{os.path.normpath(location)}" if is_remote(path) else os.path.normpath(path)


def resolved(path: str) -> str:
    """Return the same text for all local paths to a file; for a remote one as normalized does."""
    return normalized(path) if is_remote(path) else os.path.realpath(path)


def check_unchanged(path: str, size: int, mtime_ns: int, now: Stamp) -> None:
    """Raise UserError if a file has another stamp than before."""
    if (now.size, now.mtime_ns) != (size, mtime_ns):
        raise changed(path, f"{size} bytes before, {now.size} now, or a newer date")


def changed(path: str, how: str) -> UserError:
    return UserError(f"{path}: was changed while in use: {how}. Put it back as it was, or start again on the new file.")


def map_paths(function: Callable[[str], T], paths: Sequence[str]) -> list[T]:
    """Return the results for all paths, in order; remote paths are requested at the same time."""
    if not any(map(is_remote, paths)):
        return list(map(function, paths))
    with ThreadPoolExecutor(_REMOTE_FILES) as threads:
        return list(threads.map(function, paths))


def read_at(fd: int, length: int, offset: int) -> bytes:
    """Return bytes of an open file, fewer at its end. One call of the system gives at most 2 GiB."""
    data = os.pread(fd, length, offset)
    while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
        data += more
    return data


def reopen_if_stale(read: Callable[[], T], forget: Callable[[], None] = lambda: None) -> T:
    """Return what `read` returns; call it once more if its file's handle is stale, as after its server was restarted.

    forget: is called before, to close the file.
    """
    try:
        return read()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    forget()
    return read()


class Storage:
    """Several threads may use it. Methods raise OSError with a text, and UserError if a driver is missing.

    A request to a server is repeated if it fails; see Retries. Pieces of a remote file are those of the version that
    `stamp` has last seen, from stores that compare versions (_PINNED_BY): UserError says that the file was changed.
    """

    def __init__(self, retry_s: float = DataConfig.retry_s) -> None:
        """retry_s: how long a request to a remote file system that fails is repeated."""
        self._retries = Retries(retry_s)
        self._listed: dict[str, dict[str, bool]] = {}
        self._versions: dict[str, str] = {}
        """By URL, as the store compares it."""
        self._served: dict[type, Any] = {}
        """Of each driver's class the last object that a store has answered. fsspec's are equal if opened alike."""
        self._renewing = threading.Lock()

    def stamp(self, path: str) -> Stamp:
        if not is_remote(path):
            return Stamp.of(os.stat(path))
        info = self._request(path, lambda system, place: system.info(place))
        if info["type"] == "directory":  # it has a size of 0, as an empty file
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if version := info.get(_PINNED_BY.get(path.partition("://")[0], "")):
            self._versions[path] = str(version)
        version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
        return Stamp(int(info["size"]), int.from_bytes(hashlib.sha256(version.encode()).digest()[:8], "little") >> 1)

    def is_folder(self, path: str) -> bool:
        return self.kind(path) == "directory" if is_remote(path) else stat.S_ISDIR(_mode(path))

    def exists(self, path: str) -> bool:
        return bool(self.kind(path) if is_remote(path) else _mode(path))

    def kind(self, url: str) -> str:
        """Return "file", "directory", or "" if nothing is there, for a remote path."""
        return str(self._request(url, _kind))

    def names(self, folder: str) -> list[str]:
        """Return the names of what is in a folder, sorted; of a remote one as they were when this was first called."""
        if not is_remote(folder):
            return sorted(os.listdir(folder))
        if folder not in self._listed:
            self._listed[folder] = self.list_remote(folder)
        return sorted(self._listed[folder])

    def list_remote(self, folder: str) -> dict[str, bool]:
        """Return by name whether an entry of a remote folder is a folder."""
        entries = self._request(folder, lambda system, place: system.ls(place, detail=True))
        by_path = {str(entry["name"]).rstrip("/"): entry["type"] == "directory" for entry in entries}
        by_path.pop(open_file_system(folder)[1].rstrip("/"), None)  # some stores list an object for the folder
        return {path.rpartition("/")[2]: is_folder for path, is_folder in by_path.items()}

    def files_below(self, folder: str) -> list[str]:
        """Return the paths of all files of a store in a folder and below it, from the folder on, by one listing."""
        start = open_file_system(folder)[1].rstrip("/") + "/"
        paths = map(str, self._request(folder, lambda system, place: system.find(place)))
        return [path.removeprefix(start) for path in paths if path.startswith(start)]

    def read_all(self, path: str) -> bytes:
        if is_remote(path):
            return self.read(path, 0, self.stamp(path).size)
        return reopen_if_stale(Path(path).read_bytes)

    def read(self, path: str, offset: int, length: int) -> bytes:
        """Return bytes of a file; of a local one fewer at its end. A remote one must have them all."""
        if is_remote(path):
            return bytes(self._request(path, partial(self._fetch, path, offset, length))) if length else b""
        return reopen_if_stale(partial(_read_local, path, offset, length))

    def _fetch(self, url: str, offset: int, length: int, system: Any, place: str) -> bytes:
        """Make one request for bytes of a remote file. Raises OSError if another number of bytes came."""
        fetch = _FETCH.get(url.partition("://")[0], _fetch_unpinned)
        within_s = _ANSWER_WITHIN_S + length / _LEAST_BYTES_PER_S
        try:
            data = fetch(system, place, offset, offset + length, self._versions.get(url), within_s)
        except asyncio.TimeoutError as error:
            text = str(error) or f"{length} bytes did not come within {within_s:.0f} s"
            raise TimeoutError(errno.ETIMEDOUT, text) from error
        except OSError as error:
            # s3fs says HTTP 412 like this; gs answers 404 for a version that is gone.
            is_changed = error.errno == errno.EINVAL and "pre-condition" in str(error)
            if is_changed or (isinstance(error, FileNotFoundError) and url in self._versions):
                raise changed(url, "the version that it had is not there any more") from error
            raise
        if len(data) != length:
            raise OSError(errno.EIO, f"{length} bytes expected at byte {offset}, {len(data)} came")
        return data

    @contextmanager
    def opened(self, path: str) -> Iterator[tuple[Stamp, ReadAt]]:
        """Open a file to read it mostly from start to end."""
        if is_remote(path):
            stamp = self.stamp(path)
            with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
                yield stamp, _ReadAhead(self, path, stamp.size, thread)
        else:
            with open(path, "rb", buffering=0) as file:
                fd = file.fileno()
                yield Stamp.of(os.fstat(fd)), lambda length, offset: read_at(fd, length, offset)

    def read_pieces(self, path: str) -> Iterator[bytes]:
        """Yield the content of a file from its start to its end."""
        with self.opened(path) as (_, read):
            offset = 0
            while piece := read(_PIECE, offset):
                yield piece
                offset += len(piece)

    def _request(self, url: str, request: Callable[[Any, str], Any]) -> Any:
        """Return the answer of a remote file system: (file system, path in it) → answer."""

        def once() -> Any:
            system, place = open_file_system(url)
            try:
                answer = _ask(request, system, place)
            except PermissionError:
                if not self._has_new_credentials(url, system):
                    raise
                system, place = open_file_system(url)
                answer = _ask(request, system, place)
            self._served[type(system)] = system
            return answer

        return self._retries.call(url, once)

    def _has_new_credentials(self, url: str, system: Any) -> bool:
        """Have a driver that was refused read its credentials anew, if it was served with those that it has.

        A site may replace the file in which they are, every hour, but drivers read it once.
        """
        if url.partition("://")[0] not in _FETCH:
            return False
        with self._renewing:
            if self._served.get(type(system)) is system and open_file_system(url)[0] is system:
                type(system).clear_instance_cache()
                log.info(f"{url}: access is refused; reading the credentials anew", extra=ANY_RANK)
            return open_file_system(url)[0] is not system


def _ask(request: Callable[[Any, str], T], system: Any, place: str) -> T:
    """Make a request. Raises PermissionError where access is refused, whatever the driver raises for that."""
    try:
        return request(system, place)
    except Exception as error:
        if isinstance(error, PermissionError) or not _is_refused(error):
            raise
        raise PermissionError(errno.EACCES, describe(error)) from error


def _kind(system: Any, place: str) -> str:
    """Do as Storage.kind, once.

    A driver's isdir and exists return False also where the server does not answer.
    """
    try:
        return str(system.info(place)["type"])
    except FileNotFoundError:
        return ""
    except OSError as error:
        # S3 gives no reason for a refused look at an object, and may let a user list the folder alone.
        if not isinstance(error, PermissionError) and error.errno != errno.EINVAL:
            raise
        try:
            entries = system.ls(place, detail=True)
        except FileNotFoundError:
            entries = []
        if all(entry["name"] == place for entry in entries):
            raise
        return "directory"


def _mode(path: str) -> int:
    """Return the mode of a local file or folder, 0 where there is none. Raises OSError where none can know it now."""
    try:
        return os.stat(path).st_mode
    except (OSError, ValueError) as error:
        if unreadable(error) is ReadFailed:
            raise
        return 0


def _read_local(path: str, offset: int, length: int) -> bytes:
    # Opened again each time, because there may be more files than a process may have open.
    with open(path, "rb", buffering=0) as file:
        return read_at(file.fileno(), length, offset)


class _ReadAhead:
    """Reads a remote file piece by piece, and loads the next piece while one is used."""

    def __init__(self, storage: Storage, url: str, size: int, thread: ThreadPoolExecutor) -> None:
        self._storage, self._url, self._size, self._thread = storage, url, size, thread
        self._pieces: dict[int, Future[bytes]] = {}

    def __call__(self, length: int, offset: int) -> bytes:
        end = min(offset + length, self._size)
        if end <= offset:
            return b""
        first, last = offset // _REMOTE_PIECE, (end - 1) // _REMOTE_PIECE
        self._pieces = {number: piece for number, piece in self._pieces.items() if first - 1 <= number <= last + 1}
        for number in range(first, last + 2):
            if number not in self._pieces and number * _REMOTE_PIECE < self._size:
                start = number * _REMOTE_PIECE
                length = min(_REMOTE_PIECE, self._size - start)
                self._pieces[number] = self._thread.submit(self._storage.read, self._url, start, length)
        joined = b"".join(self._pieces[number].result() for number in range(first, last + 1))
        return joined[offset - first * _REMOTE_PIECE : end - first * _REMOTE_PIECE]


_DRIVERS: dict[str, Callable[[str], object]] = {
    "s3": lambda where: import_extra("s3fs", "s3", where),
    "gs": lambda where: import_extra("gcsfs", "gs", where),
    "hdfs": lambda where: import_extra("pyarrow", "hdfs", where),
    "memory": lambda where: import_extra("fsspec", "s3", where),
}
"""Scheme of a URL → what imports its driver, or says how to install it."""

Fetch = Callable[[Any, str, int, int, str | None, float], bytes]
"""(file system, path in it, first byte, end, version or None for any, seconds) → the bytes between. Raises
asyncio.TimeoutError after these seconds, where the driver lets requests be ended."""


def _fetch_s3(system: Any, place: str, start: int, end: int, version: str | None, within_s: float) -> bytes:
    async def fetch() -> bytes:
        # As s3fs's open files do, but several threads may fetch from one file at the same time.
        bucket, key, _ = system.split_path(place)
        pinned = {} if version is None else {"IfMatch": version}
        answer = await system._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}", **pinned)
        async with answer["Body"] as body:
            return bytes(await body.read())

    return bytes(_waited_for(system, fetch, within_s))


def _fetch_gs(system: Any, place: str, start: int, end: int, version: str | None, within_s: float) -> bytes:
    pinned = {} if version is None else {"generation": version}
    return bytes(_waited_for(system, partial(system._cat_file, place, start=start, end=end, **pinned), within_s))


def _fetch_unpinned(system: Any, place: str, start: int, end: int, version: str | None, within_s: float) -> bytes:
    return bytes(system.cat_file(place, start=start, end=end))


def _waited_for(system: Any, request: Callable[[], Any], within_s: float) -> Any:
    from fsspec.asyn import sync

    return sync(system.loop, request, timeout=within_s)


_FETCH: Mapping[str, Fetch] = {"s3": _fetch_s3, "gs": _fetch_gs}
_PINNED_BY = {"s3": "ETag", "gs": "generation"}
"""What a driver calls the version of a file that a request may ask for."""


def open_file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, which it keeps for each server and process, and the URL's path in it."""
    scheme = url.partition("://")[0]
    _DRIVERS[scheme](url)
    fsspec = import_extra("fsspec", "s3", url)
    try:
        options: dict[str, Any] = {}
        if scheme == "s3":  # the user's settings take precedence
            of_user = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
            options = {"config_kwargs": _BOTOCORE_OPTIONS | of_user}
        # A cached listing would hide that files have changed.
        system, place = fsspec.core.url_to_fs(url.rstrip("/"), use_listings_cache=False, **options)
    except (RunError, MemoryError):
        raise
    except Exception as error:  # a driver may raise anything, such as for a profile that does not exist
        raise unreadable(error)(f"{url}: {scheme}:// cannot be opened: {describe(error)}.") from error
    return system, place


class Retries:
    """Several threads may use it. Once one request has been given up, every other fails at its next error.

    The run is about to end then, and a thread that reads training records must not delay it.
    """

    _in_use: ClassVar[WeakSet[Retries]] = WeakSet()

    def __init__(self, limit_s: float) -> None:
        """limit_s: how long a request is repeated; 0: it is made once."""
        self._limit_s = limit_s
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        self._logged_at: float | None = None
        self._in_use.add(self)

    @classmethod
    def give_up_all(cls) -> None:
        """Let each request that fails from now on fail at once, until one succeeds."""
        for retries in list(cls._in_use):
            retries._given_up.set()

    def call(self, url: str, request: Callable[[], T]) -> T:
        """Return what the request returns. Raises OSError, with its text, for a failure that does not pass.

        A RunError of the request is raised as it is.
        """
        failing_since, pause = math.inf, _FIRST_PAUSE_S
        while True:
            try:
                answer = request()
            except RunError:
                raise
            except Exception as error:  # drivers raise classes of their own
                # Not since the first request began: the process may have been suspended while that was under way.
                failing_since = min(failing_since, now := time.monotonic())
                tried_s = now - failing_since
                if not may_pass(error):
                    raise as_os_error(error, url) from error
                if self._given_up.is_set() or tried_s >= self._limit_s:
                    self.give_up_all()
                    text = f"{describe(error)}; tried for {self._limit_s:g} s (data.retry_s)"
                    raise OSError(errno.EIO, text, url) from error
                if tried_s > _QUIET_S:
                    self._note_failure(url, error)
                self._given_up.wait(random.uniform(0.5, 1.0) * pause)  # threads must not all try again at the same time
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._note_success(url)
                return answer

    def _note_failure(self, url: str, error: Exception) -> None:
        with self._lock:
            if self._logged_at is not None:
                return
            self._logged_at = time.monotonic()
        log.warning(f"{url}: {describe(error)}. Trying again for up to {self._limit_s:g} s.", extra=ANY_RANK)

    def _note_success(self, url: str) -> None:
        if self._logged_at is None and not self._given_up.is_set():
            return
        self._given_up.clear()
        with self._lock:
            logged_at, self._logged_at = self._logged_at, None
        if logged_at is not None:
            seconds = time.monotonic() - logged_at
            log.warning(f"{url}: can be read again, {seconds:.0f} s after that was logged.", extra=ANY_RANK)


def _is_refused(error: BaseException) -> bool:
    """Return whether a request failed because the user has no access, or none any more."""
    if _is_token_late(error):
        return False
    statuses = {http_status(error), http_status(error.__cause__)}  # s3fs's own errors have none
    return isinstance(error, PermissionError) or not statuses.isdisjoint((401, 403)) or _is_refused_as_told(error)


def _is_refused_as_told(error: BaseException) -> bool:
    """Do as _is_refused for what drivers tell by a text alone."""
    if not isinstance(error, OSError):
        return False
    # S3 answers 400 to credentials that have expired, and to HEAD, of which s3fs's info consists, no more than that.
    is_unexplained = error.errno == errno.EINVAL and error.strerror == "Bad Request"
    return is_unexplained or str(error).startswith("Forbidden: ")  # gcsfs


def _is_token_late(error: BaseException) -> bool:
    """Return whether a token could not be renewed now, for which gcsfs raises what it raises for an answer of 401."""
    refresh = error.__cause__
    if refresh is None or type(refresh).__name__ != "RefreshError":
        return False
    cause = refresh.__cause__
    return bool(getattr(refresh, "retryable", False)) or (cause is not None and passes_by_name(cause))


def may_pass(error: BaseException) -> bool:
    """Return whether a request that failed so may succeed later."""
    if _is_token_late(error):
        return True
    if _is_refused(error):
        return False
    if (status := http_status(error)) is not None:
        return status_may_change(status)
    if isinstance(error, OSError):
        return not isinstance(error, _PERMANENT) and error.errno not in _PERMANENT_NUMBERS
    return passes_by_name(error)


def as_os_error(error: BaseException, url: str) -> OSError:
    """Return the error with a number and a text, which those of drivers may lack."""
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    if isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, describe(error), url)
    return OSError(errno.EINVAL, describe(error), url)


def describe(error: BaseException) -> str:
    """Return what a driver says, in one line without a full stop."""
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = one_line(message).rstrip(".")
    name = "" if isinstance(error, OSError) and text else type(error).__name__
    return ": ".join(filter(None, (name, text)))


DEFAULT = Storage()


class Pages:
    """Reads pieces of a remote file, and caches the pages that contain short pieces. Several threads may use it."""

    def __init__(self, storage: Storage, url: str, max_pages: int = 4) -> None:
        """max_pages: cached pages, of 256 KiB each. Raises UserError, or ReadFailed, for a file that cannot be read."""
        self._storage, self.url = storage, url
        self._page = functools.lru_cache(max_pages)(lambda number: self.read(number * _PAGE, _PAGE))
        with reading(url):
            self.size = storage.stamp(url).size

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes in one request, fewer at the end of the file. Raises UserError, or ReadFailed."""
        with reading(self.url, " any more"):
            return self._storage.read(self.url, offset, max(min(length, self.size - offset), 0))

    def read_by_page(self, offset: int, length: int) -> bytes:
        """Do as read, but take short pieces from cached pages."""
        if length > _PAGE:
            return self.read(offset, length)
        first, last = offset // _PAGE, (offset + max(length, 1) - 1) // _PAGE
        joined = b"".join(self._page(number) for number in range(first, last + 1))
        return joined[offset - first * _PAGE : offset - first * _PAGE + length]


class RemoteFile(io.RawIOBase):
    """A remote file that is open for reading. Methods raise UserError, or ReadFailed, if it cannot be read.

    Only one thread at a time may seek and read. All may use `loaded` at the same time.
    """

    def __init__(self, pages: Pages) -> None:
        """pages: of the file; several RemoteFiles may share them."""
        self._pages, self._position = pages, 0
        self._of_thread = threading.local()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._pages.size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._read(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    @contextmanager
    def loaded(self, ranges: Sequence[Range]) -> Iterator[None]:
        """Load ranges. What this thread reads of them inside the block comes from memory."""
        self._of_thread.pieces = [(offset, self._pages.read(offset, length)) for offset, length in _join(ranges)]
        try:
            yield
        finally:
            self._of_thread.pieces = []

    def _read(self, offset: int, length: int) -> bytes:
        for start, piece in getattr(self._of_thread, "pieces", []):
            if start <= offset and offset + length <= start + len(piece):
                return bytes(piece[offset - start : offset - start + length])
        return self._pages.read_by_page(offset, length)


def _join(ranges: Sequence[Range]) -> list[Range]:
    """Return the ranges sorted, with ranges near each other joined."""
    joined: list[Range] = []
    for offset, length in sorted(ranges):
        if joined and offset <= sum(joined[-1]) + _GAP:
            start, joined_length = joined[-1]
            joined[-1] = (start, max(joined_length, offset + length - start))
        else:
            joined.append((offset, length))
    return joined
