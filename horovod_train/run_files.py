"""Files that a run keeps writing to for days: whole or not at all, and later if the disk is full now."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from horovod_train.removal import DRAFT, Made, draft_of, remove, replace

STOP_FILE = "STOP"
"""In a run directory it asks the run to end."""

MOST_HELD = 16_000_000
"""Characters: tens of thousands of lines of metrics."""


def write_whole(path: Path, text: str, made: Made) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it.

    made: what an old one must be. Raises OSError; NotOurs where something else has the name.
    """
    draft = draft_of(path)
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        replace(draft, path, made)
    except OSError:
        with contextlib.suppress(OSError):
            remove(draft, DRAFT)
        raise


class Lines:
    """A file that lines are appended to. What cannot be written is held and tried again with the next line.

    say: told once when writing fails and once when it works again. at_once: so many characters are gathered before they
    are written. most_held: the oldest lines go where more are held.
    """

    def __init__(self, path: Path, say: Callable[[str], None], *, at_once: int = 0, most_held: int = MOST_HELD) -> None:
        self.path, self._say, self._at_once, self._most_held = path, say, at_once, most_held
        self._held: deque[str] = deque()
        self._size = self._lost = 0
        self._is_failing = False

    def append(self, line: str) -> None:
        self._held.append(f"{line}\n")
        self._size += len(line) + 1
        while self._size > self._most_held:
            self._size -= len(self._held.popleft())
            self._lost += 1
        if self._size > self._at_once:
            self.flush()

    def flush(self, *, sync: bool = False) -> None:
        """Writes what is held. sync: and returns when it would survive a power cut."""
        try:
            self._write("".join(self._held).encode(), sync)
        except OSError as error:
            if not self._is_failing:
                self._say(
                    f"warning: {self.path} cannot be written: {error.strerror}. Held in memory; training goes on."
                )
            self._is_failing = True
            return
        if self._is_failing:
            lost = f"; {self._lost} are lost" if self._lost else ""
            self._say(f"{self.path} can be written again; {len(self._held)} lines caught up{lost}.")
        self._held.clear()
        self._size, self._lost, self._is_failing = 0, 0, False

    def read(self) -> list[str]:
        """The lines in the file. Raises OSError."""
        return self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []

    def close(self) -> None:
        self.flush(sync=True)
        if self._is_failing:
            self._say(f"warning: {self.path} lacks its last {len(self._held)} lines: it cannot be written.")

    def keep(self, is_kept: Callable[[str], bool], made: Made) -> None:
        """Takes back the lines that are not kept, of a file that is `made`. Raises OSError."""
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if is_kept(line)]
        if len(kept) < len(lines):
            write_whole(self.path, "".join(kept), made)

    def _write(self, data: bytes, sync: bool) -> None:
        # Without a buffer, which would try once more to write its rest when the file is closed.
        with self.path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                while data:
                    data = data[file.write(data) :]
                if sync:
                    os.fsync(file.fileno())
            except OSError:
                # Half a line would spoil the next one.
                with contextlib.suppress(OSError):
                    os.truncate(self.path, before)
                raise
