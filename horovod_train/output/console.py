"""Standard output and error that never fail: a run continues if the disk is full or the reader has exited.

Text that cannot be written is lost, because there is no place to report it. Lines, tables and bars quote files,
libraries and users: none gives orders to the terminal or shows a password. For the run's own files see files.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, TextIO, TypeVar, cast

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from horovod_train.shown_text import printable, without_secrets

T = TypeVar("T")


def to_stdout(line: str) -> None:
    _write_line(sys.stdout, line)


def to_stderr(line: str) -> None:
    _write_line(sys.stderr, line)


def traceback_to_stderr(error: BaseException) -> None:
    to_stderr("".join(traceback.format_exception(error)).rstrip("\n"))


def _write_line(stream: TextIO, line: str) -> None:
    """Write in one piece: print writes the end of the line by itself, and another thread's line may come between."""
    shown = unfailing(stream)
    shown.write(f"{printable(without_secrets(line))}\n")
    shown.flush()


def unfailing(stream: TextIO) -> TextIO:
    """Return a stream whose failing writes and flushes do nothing."""
    return cast(TextIO, _Unfailing(stream))


class _Unfailing:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: closed
            try:
                self._stream.write(text)
            except UnicodeEncodeError:  # as where the locale knows ASCII only
                encoding = self._stream.encoding
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def let_go() -> None:
    """Before the process ends: write or drop what the streams still buffer.

    Otherwise Python tries again at exit and, if it cannot write, ends with exit code 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def plain(value: object) -> Text:
    """Return a cell of a table. No markup: a type is written list[str], and a metric may be named recall[cat]."""
    return Text(printable(without_secrets(str(value))))  # before it is measured


class Screen(Console):
    """A Console on which text gives no orders to the terminal. Colours are rich's own and stay."""

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments, **options):
            yield segment if segment.control else segment._replace(text=printable(without_secrets(segment.text)))


def track(items: Iterable[T], total: int, description: str) -> Iterator[T]:
    """Yield the items, and show a progress bar on standard error if that is a terminal."""
    if not sys.stderr.isatty() or total < 2:
        return iter(items)
    from rich.progress import track as rich_track

    return iter(rich_track(items, description=description, total=total, console=Screen(stderr=True), transient=True))
