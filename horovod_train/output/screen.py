"""What rich draws, with text of others in it: names of metrics and files, lines of logs. Plain lines: see console."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from horovod_train.shown_text import printable, without_secrets


def plain(value: object) -> Text:
    """Return a cell of a table. No markup: a type is written list[str], and a metric may be named recall[cat]."""
    return Text(printable(without_secrets(str(value))))  # before it is measured


class Screen(Console):
    """A Console on which text gives no orders to the terminal. Colours are rich's own and stay."""

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments, **options):
            yield segment if segment.control else segment._replace(text=printable(without_secrets(segment.text)))
