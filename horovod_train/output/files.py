"""Files that a run keeps writing to for days: whole or not at all, and later if the disk is full now."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from horovod_train.output.removal import DRAFT, Made, draft_of, remove, replace

STOP_FILE = "STOP"
"""In a run directory it asks the run to end."""

MOST_HELD = 16_000_000
"""Bytes: tens of thousands of lines of metrics."""


def write_whole(path: Path, text: str, made: Made, *, sync: bool = True) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it.

    made: what an old one must be. sync: also after a power cut. Raises OSError; NotOurs where something else has the
    name.
    """
    draft = draft_of(path)
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        replace(draft, path, made)
    except OSError:
        with contextlib.suppress(OSError):
            remove(draft, DRAFT)
        raise


class Appender:
    """A file that pieces are appended to. A piece that cannot be written is held and tried again with the next one.

    unit: what the pieces are called. say: told when writing fails, when it works again, and at the end what is missing.
    at_once: so many bytes are gathered before they are written. most_held: the oldest pieces go where more are held.
    """

    def __init__(
        self,
        path: Path,
        say: Callable[[str], None],
        *,
        unit: str = "lines",
        at_once: int = 0,
        most_held: int = MOST_HELD,
    ) -> None:
        self.path, self._say, self._unit, self._at_once, self._most_held = path, say, unit, at_once, most_held
        self._held: deque[bytes] = deque()
        self._size = self._lost = 0
        self._is_failing = False
        self._cut_at: int | None = None
        """Where a write that failed began, until what it left there has been cut off."""

    def add(self, piece: bytes) -> None:
        self._held.append(piece)
        self._size += len(piece)
        if self._size > self._at_once:
            self.flush()
        while self._size > self._most_held:
            self._size -= len(self._held.popleft())
            self._lost += 1

    def flush(self, *, sync: bool = False) -> None:
        """Writes what is held. sync: and returns when it would survive a power cut."""
        try:
            self._write(b"".join(self._held), sync)
        except OSError as error:
            if not self._is_failing:
                self._say(
                    f"warning: {self.path} cannot be written: {error.strerror}. Held in memory; training goes on."
                )
            self._is_failing = True
            return
        if self._is_failing:
            lost = f"; {self._lost} are lost" if self._lost else ""
            self._say(f"{self.path} can be written again; {len(self._held)} {self._unit} caught up{lost}.")
        self._held.clear()
        self._size, self._lost, self._is_failing = 0, 0, False

    def close(self) -> None:
        self.flush(sync=True)
        self.say_what_is_missing()

    def say_what_is_missing(self) -> None:
        if self._is_failing:
            missing = self._lost + len(self._held)
            self._say(f"warning: {self.path} lacks its last {missing} {self._unit}: it cannot be written.")

    def _write(self, data: bytes, sync: bool) -> None:
        if self._cut_at is not None:
            self._cut(self._cut_at)
        try:
            # Without a buffer, which would try once more to write its rest when the file is closed.
            with self.path.open("ab", buffering=0) as file:
                self._cut_at = file.tell()
                while data:
                    data = data[file.write(data) :]
                if sync:
                    os.fsync(file.fileno())
        except OSError:
            # Half a piece would spoil the next one, and a whole one would come twice.
            if self._cut_at is not None:
                with contextlib.suppress(OSError):
                    self._cut(self._cut_at)
            raise
        self._cut_at = None

    def _cut(self, size: int) -> None:
        if self.path.is_file():
            os.truncate(self.path, size)
        self._cut_at = None


class Lines(Appender):
    """An Appender of lines of text."""

    def append(self, line: str) -> None:
        self.add(f"{line}\n".encode())

    def read(self) -> list[str]:
        """The lines in the file. Raises OSError."""
        return self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []

    def keep(self, is_kept: Callable[[str], bool], made: Made) -> None:
        """Takes back the lines that are not kept, of a file that is `made`. Raises OSError."""
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if is_kept(line)]
        if len(kept) < len(lines):
            write_whole(self.path, "".join(kept), made)
