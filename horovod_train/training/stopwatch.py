"""Measures training time, and the time for which hooks block training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stopwatch:
    """Measures training time, without evaluation, saving and the first call, which compiles."""

    seconds: float = 0.0
    steps: int = 0
    records: int = 0
    is_running: bool = False
    _lap: float = field(default=0.0, repr=False)
    _blocked: dict[str, float] = field(default_factory=dict, repr=False)

    def count(self, steps: int, records: int) -> None:
        """Add a finished call; the first one only starts the watch."""
        if self.is_running:
            self.steps += steps
            self.records += records
        else:
            self._lap, self.is_running = time.perf_counter(), True

    def read(self) -> tuple[float, int, int]:
        """Return seconds, steps and records so far."""
        if self.is_running:
            now = time.perf_counter()
            self.seconds, self._lap = self.seconds + now - self._lap, now
        return self.seconds, self.steps, self.records

    def s_per_step(self) -> float:
        """Return the mean seconds per step; 0 if nothing has been measured yet."""
        seconds, steps, _ = self.read()
        return seconds / steps if steps else 0.0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.read()
        yield
        self._lap = time.perf_counter()

    def note_blocked(self, name: str, seconds: float) -> None:
        """Note the time for which something has blocked training."""
        self._blocked[name] = self._blocked.get(name, 0.0) + seconds

    def take_blocked(self) -> dict[str, float]:
        """Return by name what was noted since the last call."""
        taken, self._blocked = self._blocked, {}
        return taken
