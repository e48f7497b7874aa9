"""Files that a run keeps writing to for days: whole or not at all, and later if the disk is full now."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

MOST_LINES_HELD = 100_000


def write_whole(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never half of it. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Lines:
    """A file that lines are appended to. What cannot be written is held and tried again with the next line.

    say: told once when writing fails and once when it works again.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self._say = path, say
        self._held: list[str] = []
        self._is_failing = False

    def append(self, line: str) -> None:
        self._held = [*self._held, line][-MOST_LINES_HELD:]
        self.flush()

    def flush(self) -> None:
        try:
            self._write("".join(f"{line}\n" for line in self._held).encode())
        except OSError as error:
            if not self._is_failing:
                self._say(
                    f"warning: {self.path} cannot be written: {error.strerror}. Held in memory; training goes on."
                )
            self._is_failing = True
            return
        if self._is_failing:
            self._say(f"{self.path} can be written again; {len(self._held)} lines caught up.")
        self._held, self._is_failing = [], False

    def read(self) -> list[str]:
        """The lines in the file. Raises OSError."""
        return self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []

    def keep(self, is_kept: Callable[[str], bool]) -> None:
        """Takes back the lines that are not kept. Raises OSError."""
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if is_kept(line)]
        if len(kept) < len(lines):
            write_whole(self.path, "".join(kept))

    def _write(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            before = file.tell()
            try:
                file.write(data)
                file.flush()
            except OSError:
                # Half a line would spoil the next one.
                with contextlib.suppress(OSError):
                    os.truncate(self.path, before)
                raise
