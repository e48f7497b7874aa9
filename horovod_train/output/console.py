"""Standard output and error that never fail: a run continues if the disk is full or the reader has exited.

Commands call check_written at their end, because their text is their result. Lines, tables and bars quote files,
libraries and users: none gives orders to the terminal or shows a password. For the run's own files see files.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, ClassVar, TextIO, TypeVar, cast

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from horovod_train.errors import RunError
from horovod_train.shown_text import printable, without_secrets

T = TypeVar("T")


def to_stdout(line: str) -> None:
    _write_line(sys.stdout, line)


def to_stderr(line: str) -> None:
    _write_line(sys.stderr, line)


def path_to_stdout(path: str) -> None:
    """Write a path as a script opens it, whatever the locale."""
    stream: Any = sys.stdout
    stream.reconfigure(encoding=sys.getfilesystemencoding(), errors="surrogateescape")
    stream.write(f"{path}\n")


def traceback_to_stderr(error: BaseException) -> None:
    to_stderr("".join(traceback.format_exception(error)).rstrip("\n"))


def _write_line(stream: TextIO, line: str) -> None:
    """Write in one piece: print writes the end of the line by itself, and another thread's line may come between."""
    shown = unfailing(stream)
    shown.write(f"{printable(without_secrets(line))}\n")
    shown.flush()


def unfailing(stream: TextIO) -> TextIO:
    """Return a stream whose failing writes and flushes do nothing."""
    return stream if isinstance(stream, _Unfailing) else cast(TextIO, _Unfailing(stream))


class _Unfailing:
    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.failure = ""
        """Why text was lost; "" if none was, or only because the reader has closed its end."""
        self.has_reader = True

    def write(self, text: str) -> int:
        with self._noting():
            try:
                self.stream.write(text)
            except UnicodeEncodeError:  # as where the locale knows ASCII only
                encoding = self.stream.encoding
                self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._noting():
            self.stream.flush()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except ValueError:  # closed
            pass
        except OSError as error:
            if error.errno == errno.EPIPE:
                self.has_reader = False
            else:
                self.failure = self.failure or str(error.strerror)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __enter__(self) -> _Unfailing:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()  # the program still needs it

    def __getattr__(self, name: str) -> Any:
        if name == "stream":  # of a copy that has none yet
            raise AttributeError(name)
        return getattr(self.stream, name)


def make_streams_unfailing() -> None:
    """Make the streams of a program unfailing, and open those that are closed, to nothing; call it first.

    The next file that is opened would get the number of a closed one, and what libraries write to the console.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, this one
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # Open for as long as the process lives.
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # a locale that knows ASCII only would lose lines, or end us by them
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = unfailing(sys.stdout), unfailing(sys.stderr)


def has_reader() -> bool:
    """Return whether somebody may still read standard output: not once `head` has seen enough."""
    return not isinstance(sys.stdout, _Unfailing) or sys.stdout.has_reader


def check_written() -> None:
    """Raise RunError if text was lost on standard output, which is the result of a command."""
    sys.stdout.flush()
    if isinstance(sys.stdout, _Unfailing) and sys.stdout.failure:
        raise RunError(f"standard output: cannot be written: {sys.stdout.failure}. What was written is not whole.")


def let_go() -> None:
    """Before the process ends: write or drop what the streams still buffer.

    Otherwise Python tries again at exit and, if it cannot write, ends with exit code 120. Shows the cursor.
    """
    show_cursor()
    for shown in (sys.stdout, sys.stderr):
        stream = shown.stream if isinstance(shown, _Unfailing) else shown
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def plain(value: object) -> Text:
    """Return a cell of a table. No markup: a type is written list[str], and a metric may be named recall[cat]."""
    return Text(printable(without_secrets(str(value))))  # before it is measured


class Screen(Console):
    """A Console on which text gives no orders to the terminal. Colours are rich's own and stay.

    Nor do words between colons become emoji, as in `package.module:train: takes no option`.
    """

    without_cursor: ClassVar[IO[str] | None] = None
    """The terminal on which a bar hides the cursor now."""

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def show_cursor(self, show: bool = True) -> bool:
        is_terminal = super().show_cursor(show)
        if is_terminal:
            Screen.without_cursor = None if show else self.file
        return is_terminal

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments, **options):
            yield segment if segment.control else segment._replace(text=printable(without_secrets(segment.text)))


def show_cursor() -> None:
    """Show the cursor that a bar hides, where the process ends without the bar's own end."""
    if Screen.without_cursor is not None:
        with suppress(OSError, ValueError):
            os.write(Screen.without_cursor.fileno(), b"\x1b[?25h\n")


def can_redraw(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can draw over what it shows.

    TERM says which cannot, such as a shell in Emacs. With FORCE_COLOR rich also calls a file a terminal.
    """
    return stream.isatty() and not Screen(file=stream, force_terminal=True).is_dumb_terminal


def track(items: Iterable[T], total: int, description: str) -> Iterator[T]:
    """Yield the items, and show a progress bar on standard error if that is a terminal."""
    if not can_redraw(sys.stderr) or total < 2:
        yield from items
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    # rich's own `track` takes the description, which may name a folder, as markup with emoji.
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Screen(stderr=True), transient=True) as progress:
        yield from progress.track(items, total=total, description=description)
