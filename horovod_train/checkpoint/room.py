"""How many checkpoints a run saves and has at once, and whether the disk has room for them. Writes nothing."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from horovod_train.checkpoint.layout import steps_in
from horovod_train.config.settings import CheckpointConfig
from horovod_train.errors import UserError


def count_saves(config: CheckpointConfig, steps_per_epoch: int, total_steps: int) -> int:
    """Return how many checkpoints are saved, except saves that depend on the clock or on an evaluation."""
    every = [step for step in (config.every_steps, (config.every_epochs or 0) * steps_per_epoch) if step]
    return count_multiples(every, total_steps, with_last=True)


def count_multiples(every: Sequence[int], last: int, *, with_last: bool) -> int:
    """Return how many steps up to the last are a multiple of one of at most two numbers; with_last: or are the last."""
    count = sum(last // step for step in every)
    if len(every) == 2:
        count -= last // math.lcm(*every)
    return count + (with_last and all(last % step for step in every))


def most_at_once(config: CheckpointConfig, saves: int) -> int:
    """Return how many checkpoints exist at most. saves: of the run, by `count_saves`."""
    most = config.keep + (config.best is not None) + 1  # one more exists while it is being written
    has_others = config.every_minutes is not None or config.best is not None
    return most if has_others else min(saves, most)


def lack_of_room(folder: Path, bytes_each: int, most: int) -> str | None:
    """Return a sentence if a disk has less room than `most` checkpoints take, with those there; None if it has enough.

    folder: of the checkpoints; it need not exist yet. Raises UserError if there is no room for one more.
    """
    try:
        existing = len(steps_in(folder)) if folder.is_dir() else 0
        folder = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        disk = shutil.disk_usage(folder)
    except OSError:  # a save will report it
        return None
    needed = max(1, most - existing)
    if disk.total == 0 or disk.free >= needed * bytes_each:  # some file systems do not tell their size
        return None
    free, each, wanted = (_megabytes(count) for count in (disk.free, bytes_each, needed * bytes_each))
    if disk.free < bytes_each:
        raise UserError(
            f"output_dir: the disk of {folder} has {free} free; expected {each} or more, which one checkpoint takes. "
            "Free space there, or choose another --output-dir."
        )
    return (
        f"output_dir: the disk of {folder} has {free} free; checkpoints will take up to {wanted}, {each} each. Free "
        "space there, lower checkpoint.keep, or choose another --output-dir."
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
