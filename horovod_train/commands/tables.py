"""Standard output as all tools write it, with tables and, on a terminal, with colours."""

from __future__ import annotations

from rich.console import Console


def open_screen(*, launched: bool = False) -> Console:
    """Breaks no line. launched: no colours; mpirun gives its ranks a terminal even where its own output is a file."""
    return Console(soft_wrap=True, highlight=False, force_terminal=False if launched else None)
