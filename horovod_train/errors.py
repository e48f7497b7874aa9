"""How a run can fail: one exception class per exit code. main shows them."""

from __future__ import annotations

import builtins
import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from horovod_train.shown_text import error_line

START_AGAIN = 75
"""Exit code of a run that was asked to stop and has saved; EX_TEMPFAIL of sysexits.h. Started again, it goes on."""

STOPPED = 76
"""Exit code in place of START_AGAIN where the file STOP stopped the run: it would stop the next start too."""

SAVED = {0, START_AGAIN, STOPPED}
"""The exit codes of a rank that has lost nothing."""


class RunError(Exception):
    """Ends the run with `exit_code`; its text is one line that a user can act on; see shown_text."""

    exit_code = 1

    # Not in a constructor: where an exception has one of its own, TensorFlow's autograph raises one of its own instead.
    def __str__(self) -> str:
        return error_line(super().__str__())


class UserError(RunError):
    """Bad config, arguments or data: the line says where, what was expected, what came and what to do."""

    exit_code = 2


class ReadFailed(RunError):
    """Something cannot be read or written for a reason that may pass, such as a server that does not answer.

    Not a UserError, after which no launcher starts a run again.
    """


class InUse(RunError):
    """Another run has the run directory: perhaps an earlier start, on a host that was cut off and still trains."""

    exit_code = 73
    """EX_CANTCREAT of sysexits.h."""


class RanksDisagree(RunError):
    """The ranks hold different weights."""

    exit_code = 86


class RanksStartApart(RanksDisagree):
    """The ranks started with different data, config, code or versions: found before training."""

    exit_code = 2


class DivergedError(RunError):
    """The loss is no longer a finite number."""


class Stalled(RunError):
    """No rank made progress for too long."""

    exit_code = 87


class AlreadySaid(RunError):
    """The reason has been shown; only the exit code is left."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class FailedElsewhere(AlreadySaid):
    """Another rank failed and has reported why; this one exits silently."""


_PASSING = {
    *(errno.EIO, errno.ESTALE),
    *(errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET),
}
"""What file systems over a network give while their server does not answer."""


_PASSING_NAMES = {
    *("HTTPClientError", "ConnectionError", "EndpointConnectionError", "ConnectionClosedError"),  # botocore
    *("ConnectTimeoutError", "ResponseParserError"),
    *("ClientConnectionError", "ClientConnectorError", "ClientOSError", "ClientPayloadError"),  # aiohttp
    *("ServerTimeoutError", "ServerDisconnectedError", "ConnectionTimeoutError"),
    *("TransportError", "FSTimeoutError", "HttpError"),  # google.auth, fsspec, gcsfs
    *("ConnectError", "ReadError", "WriteError", "WriteTimeout", "PoolTimeout", "RemoteProtocolError"),  # httpx
    *("Timeout", "ReadTimeout", "ConnectTimeout", "ProxyError", "ChunkedEncodingError"),  # requests
    *("MaxRetryError", "NewConnectionError", "NameResolutionError", "ProtocolError", "ReadTimeoutError"),  # urllib3
    *("URLError", "IncompleteRead", "RemoteDisconnected"),  # urllib, http
    *("TimeoutError", "IncompleteReadError"),  # asyncio
}
"""Names of classes of errors that may pass. Names, because their packages need not be installed; also of subclasses,
because of what a stream raises the name alone is known."""
_ANSWERS = {"HTTPError", "HTTPStatusError", "HttpError", "ClientResponseError"}
"""Those of urllib and requests, httpx, gcsfs and aiohttp for what a server has answered."""


def passes_by_name(error: BaseException) -> bool:
    """Return whether an error is, by the name of its class, one of a network or a server."""
    return any(kind.__name__ in _PASSING_NAMES for kind in type(error).__mro__)


def status_may_change(status: int) -> bool:
    """Return whether a server may answer otherwise later; status: HTTP's, from 400 on."""
    return status >= 500 or status in (408, 425, 429)


def http_status(error: BaseException | None) -> int | None:
    """Return the status with which a server has answered, from 400 on, where clients of HTTP keep it."""
    response = getattr(error, "response", None)
    of_botocore = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    numbers = (getattr(error, "code", None), getattr(error, "status", None), getattr(response, "status_code", None))
    return next((number for number in (*numbers, of_botocore) if isinstance(number, int) and 400 <= number < 600), None)


def unreadable(error: BaseException) -> type[RunError]:
    """Return the class of the error to raise for what cannot be read, by why it cannot: ReadFailed or UserError."""
    if (status := http_status(error)) is not None:
        may_pass = status_may_change(status)
    else:
        may_pass = isinstance(error, TimeoutError | ConnectionError) or passes_by_name(error)
        may_pass = may_pass or (isinstance(error, OSError) and error.errno in _PASSING)
    return ReadFailed if may_pass else UserError


def unreadable_as_told(text: str) -> type[RunError]:
    """Do as `unreadable` where an error of Python is known by its text alone: "ConnectionError: what it says"."""
    name = text.partition(":")[0].rpartition(".")[2]
    if name in _ANSWERS:
        answer = re.search(r"\b[45]\d\d\b", text)
        return ReadFailed if answer and status_may_change(int(answer[0])) else UserError
    kind, number = getattr(builtins, name, None), re.search(r"\[Errno (\d+)\]", text)
    may_pass = name in _PASSING_NAMES or (number is not None and int(number[1]) in _PASSING)
    may_pass = may_pass or (isinstance(kind, type) and issubclass(kind, TimeoutError | ConnectionError))
    return ReadFailed if may_pass else UserError


def said_by_system(error: OSError) -> str:
    """Return the text of the system's error, without a full stop; of too many open files also what to do."""
    advice = ". Raise their limit: ulimit -n" if error.errno == errno.EMFILE else ""
    return f"{os.strerror(errno.EMFILE) if advice else error.strerror or error}{advice}"


def unusable(what: str, error: OSError, advice: str) -> RunError:
    """Return the error to raise for a file or folder that cannot be read or written: a UserError, or ReadFailed.

    advice: what the user can do, unless it is to start again when the file system answers.
    """
    kind = unreadable(error)
    where = f": {error.filename}" if error.filename and str(error.filename) not in what else ""
    then = "Start again when its file system answers." if kind is ReadFailed else advice
    return kind(" ".join(filter(None, (f"{what}: {error.strerror or error}{where}.", then))))


_REFUSED_PATHS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Ask its owner for access, or name another."),
    errno.ENOSPC: "Free space there, or name another.",
    errno.EDQUOT: "Remove files of yours there, or name another.",
    errno.EROFS: "Name another.",
    errno.ENAMETOOLONG: "Give a shorter path.",
}
"""Numbers of errors with which the system refuses a path, and what to do. That a file is missing may be our mistake."""


def failure_of_path(error: OSError) -> RunError | None:
    """Return the error to raise where the system refuses a path or does not answer; None if that may be our mistake."""
    may_pass = unreadable(error) is ReadFailed
    if not isinstance(error.filename, str) or not (may_pass or error.errno in _REFUSED_PATHS):
        return None
    return unusable(error.filename, error, _REFUSED_PATHS.get(error.errno or 0, ""))


@contextmanager
def reading(path: str, when: str = "", *, text: bool = False) -> Iterator[None]:
    """Raise UserError, or ReadFailed, in a block that reads a file, or a folder, if it cannot be read.

    when: after "cannot be read" in the error. text: whether the file must be UTF-8.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        if not text:
            raise
        raise UserError(f"{path}: cannot be read{when}: not UTF-8 text.") from error
    except OSError as error:
        raise unreadable(error)(f"{path}: cannot be read{when}: {said_by_system(error)}.") from error


_OF_AUTOGRAPH = re.compile(r"in user code:\n\n(?: {4}.*\n)+?\n {4}(\w+): ?")


def without_autograph(text: str) -> str:
    """Return the text of an error without what AutoGraph puts before it: its traceback, and the error's class."""
    return _OF_AUTOGRAPH.sub("", text)


def kind_of(error: BaseException) -> str:
    """Return the name of an error's class; of one that AutoGraph raises, by its text, that of the user's error."""
    of_user = _OF_AUTOGRAPH.search(str(error))
    return of_user[1] if of_user else type(error).__name__


def one_line(error: object) -> str:
    """Return the text of an error as one line, also if it has several, as those of libraries have.

    TensorFlow begins some with the name that it gave to a function of a graph, which tells a user nothing. Keras prints
    some in bold.
    """
    text = re.sub(r"\{\{function_node [^{}]*\}\}|\x1b\[\d*m", "", str(error))
    return " ".join(without_autograph(text).split())
