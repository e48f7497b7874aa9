"""Repeats requests to a server that fail, with growing pauses, until a limit. Knows no driver by import."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from typing import ClassVar, TypeVar
from weakref import WeakSet

from horovod_train.errors import UserError, one_line
from horovod_train.output.logs import ANY_RANK

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_QUIET_S = 3.0
"""Shorter failures are not logged: servers fail now and then."""

_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_PERMANENT_NUMBERS = {errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG}
_PASSING_NAMES = {
    *("HTTPClientError", "ConnectionError", "ResponseParserError"),  # botocore
    *("ClientConnectionError", "ClientPayloadError", "ServerTimeoutError"),  # aiohttp
    *("HttpError", "TransportError"),  # gcsfs, google.auth
    "TimeoutError",  # asyncio's class in Python 3.10
    "IncompleteReadError",
}
"""Names of error classes other than OSError that may pass. Names, because their packages need not be installed."""

log = logging.getLogger(__name__)


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

    def call(self, url: str, request: Callable[[], T]) -> T:
        """Return what the request returns. Raises OSError, with its text, for a failure that does not pass.

        A UserError of the request is raised as it is.
        """
        began, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                answer = request()
            except UserError:
                raise
            except Exception as error:  # drivers raise classes of their own
                tried_s = time.monotonic() - began
                if not may_pass(error):
                    raise as_os_error(error, url) from error
                if self._given_up.is_set() or tried_s >= self._limit_s:
                    for retries in list(self._in_use):
                        retries._given_up.set()
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


def may_pass(error: BaseException) -> bool:
    """Return whether a request that failed so may succeed later."""
    if isinstance(error, OSError):
        return not isinstance(error, _PERMANENT) and error.errno not in _PERMANENT_NUMBERS
    return any(cls.__name__ in _PASSING_NAMES for cls in type(error).__mro__)


def as_os_error(error: BaseException, url: str) -> OSError:
    """Return the error with a number and a text, which those of drivers may lack."""
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    if isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, describe(error), url)
    return OSError(errno.EIO, describe(error), url)


def describe(error: BaseException) -> str:
    """Return what a driver says, in one line without a full stop."""
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = one_line(message).rstrip(".")
    name = "" if isinstance(error, OSError) and text else type(error).__name__
    return ": ".join(filter(None, (name, text)))
