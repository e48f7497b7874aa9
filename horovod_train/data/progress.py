"""A progress bar over finished pieces of work, on a terminal only. Does not log."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], total: int, description: str) -> Iterator[T]:
    """Yield the items, and show a progress bar on standard error if that is a terminal."""
    if not sys.stderr.isatty() or total < 2:
        return iter(items)
    from rich.progress import track as rich_track

    from horovod_train.output.screen import Screen

    return iter(rich_track(items, description=description, total=total, console=Screen(stderr=True), transient=True))
