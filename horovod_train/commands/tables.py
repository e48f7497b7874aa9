"""Standard output for all commands, with tables and, on a terminal, with colours."""

from __future__ import annotations

from rich.console import Console


def open_screen(*, launched: bool = False) -> Console:
    """Open a console that breaks no line. launched: without colours.

    mpirun gives its ranks a terminal even when its own output is a file.
    """
    return Console(soft_wrap=True, highlight=False, force_terminal=False if launched else None)
