"""fsspec's store in memory, for tests that watch its reads or make them fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsspec
import pytest


def called_before_reads(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[str], None]]:
    """Functions that are called, the first one first, with the path of each piece that is read; they may raise."""
    kind, called = type(fsspec.filesystem("memory")), list[Callable[[str], None]]()
    read = kind.cat_file

    def cat_file(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        for function in called:
            function(path)
        return read(self, path, *arguments, **options)

    monkeypatch.setattr(kind, "cat_file", cat_file)
    return called
