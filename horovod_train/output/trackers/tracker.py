"""What a tracker of experiments must do. Does not decide when, and does not wait for it; see sender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

Ended = Literal["done", "stopped", "failed"]
"""How a start of a run ended. stopped: it has saved its state and can be started again."""


class Row(NamedTuple):
    """A line of metrics. split: "train" or "eval"; time: seconds since 1970; values: may be NaN or infinite."""

    step: int
    epoch: int
    split: str
    values: Mapping[str, float]
    time: float


class Tracker(Protocol):
    """Keeps the metrics of a run. Root makes it with the options of the config, which must not connect to anything.

    All other calls come from one thread, one after another. What they raise never ends training: ValueError and
    TypeError mean that the tracker refuses a row, which is left out; after any other exception the call is repeated.
    Only the first start of a run is refused if `start` raises.

    A tracker that can tell what it has kept may also have `last_steps() -> dict[str, int]`: by split, the last step.
    Otherwise the run directory remembers what was logged.
    """

    def start(self, directory: Path, run_id: str | None, step: int, config: Mapping[str, Any]) -> str:
        """Begin a run, or continue the run of that id at `step`; return its id.

        directory: of the run. config: all settings, as plain mappings, lists and scalars.
        """

    def log(self, row: Row) -> None:
        """Keep one row. Each step of a split is logged once, also if the run is resumed from an earlier step."""

    def finish(self, ended: Ended, files: Sequence[Path]) -> None:
        """Keep these files of the run directory, and return when all is kept."""
