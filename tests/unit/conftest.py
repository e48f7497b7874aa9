"""Fixtures of tests in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from horovod_train.output import logs


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What root's console has shown so far, in lines."""
    lines: list[str] = []
    with logs.to_console(is_root=True, show=lines.append):
        yield lines
