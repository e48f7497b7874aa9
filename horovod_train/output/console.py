"""Standard output and error, for a run that goes on when they take nothing: a full disk, a reader that has gone.

What cannot be written is lost, since there is nobody to be told. The run's own files are not like that: see files.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast


class _Unfailing:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def unfailing(stream: TextIO) -> TextIO:
    """The stream, but for writes and flushes that fail: they do nothing."""
    return cast(TextIO, _Unfailing(stream))


def to_stdout(line: str) -> None:
    print(line, file=unfailing(sys.stdout), flush=True)


def to_stderr(line: str) -> None:
    print(line, file=unfailing(sys.stderr), flush=True)


def let_go() -> None:
    """Before the process ends: what the streams still hold is written or lost.

    Python tries again in the end, and where it cannot write makes the exit code 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
