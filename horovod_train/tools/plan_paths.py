"""For `plan`: the paths in a config that a run would write to or start from. Makes nothing there.

The records are looked at where they are opened; see plan_facts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from horovod_train.config import Config


def wrong_paths(config: Config) -> Iterator[str]:
    """A sentence for each path that the run could not write to or start from; makes nothing there."""
    if config.output_dir is None:
        yield "output_dir: is required: the folder that the run writes to. Give --output-dir DIR."
    else:
        yield from _unwritable(config.output_dir, "output_dir")
    if config.data.index_dir:
        yield from _unwritable(config.data.index_dir, "data.index_dir")
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not any(_manifests(Path(resume))):
        yield f"checkpoint.resume: no checkpoint at {resume}; expected a run directory, or a checkpoint in one."


def _manifests(path: Path) -> Iterator[Path]:
    for pattern in ("manifest.json", "step-*/manifest.json", "checkpoints/step-*/manifest.json"):
        yield from path.glob(pattern)


def _unwritable(path: str, where: str) -> Iterator[str]:
    place = Path(path)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        yield f"{where}: {path} cannot be made: {place} is no folder."
    elif not os.access(place, os.W_OK | os.X_OK):
        yield f"{where}: cannot write to {place}. Choose another folder."
