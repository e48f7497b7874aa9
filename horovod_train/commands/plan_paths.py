"""For `plan`: the paths in a config that a run would write to. Creates nothing there.

plan_facts checks the records when it opens them; plan_resume checks the checkpoint to resume from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from horovod_train.config.settings import Config


def wrong_paths(config: Config) -> Iterator[str]:
    """Yield a sentence for each path that the run could not write to. Creates nothing there."""
    if config.output_dir is None:
        yield "output_dir: is required: the folder that the run writes to. Give --output-dir DIR."
    else:
        yield from _unwritable(config.output_dir, "output_dir")
    if config.data.index_dir:
        yield from _unwritable(config.data.index_dir, "data.index_dir")


def _unwritable(path: str, where: str) -> Iterator[str]:
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        yield f"{where}: {path} cannot be made: {place} is no folder."
    elif not os.access(place, os.W_OK | os.X_OK):
        yield f"{where}: cannot write to {place}. Choose another folder."
