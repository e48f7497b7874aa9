"""Standard output for all commands, with tables and, on a terminal, with colours."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from horovod_train.output.screen import Screen, plain


def open_screen(*, launched: bool = False) -> Console:
    """Open a console that breaks no line. launched: without colours.

    mpirun gives its ranks a terminal even when its own output is a file.
    """
    return Screen(soft_wrap=True, highlight=False, force_terminal=False if launched else None)


def build_table(titles: Sequence[str], rows: Iterable[Sequence[object]], left: Collection[str]) -> Table:
    """Build a table without lines, whose columns are aligned to the right.

    left: titles of the columns of text, which are aligned to the left and take more lines where there is no room.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        is_text = title in left
        table.add_column(title, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for row in rows:
        table.add_row(*map(plain, row))
    return table
