"""Where checkpoints are, which is the newest, from which a run starts, how many there will be. Needs no TensorFlow.

The only module that knows the names of their folders. Writes nothing. The caller's `read` function decides how
thoroughly checkpoints are checked: a run verifies and loads, explain verifies, plan reads the manifest.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from horovod_train.checkpoint.manifest import MANIFEST, Checkpoint, Damaged, reason, verify
from horovod_train.config.settings import CheckpointConfig
from horovod_train.errors import UserError

CHECKPOINTS = "checkpoints"
"""Folder of a run directory with its checkpoints."""

BEST = "best"
"""Symbolic link, next to the checkpoints, to the best one. For people: every manifest records the best step."""

STEP_NAME = r"step-\d{9,}"
"""Pattern of the names of checkpoints."""


Read = Callable[[Path], Checkpoint]
"""How a checkpoint is read: `verify` or `read_manifest`."""


class ResumePoint(NamedTuple):
    """The checkpoint that a run starts from; by step, the damaged ones that are skipped."""

    checkpoint: Checkpoint | None
    damaged: Mapping[int, Damaged]
    instead_of: str = ""
    """The path in checkpoint.resume, if the run began there and resumes from its own newest checkpoint."""

    def explanation(self) -> str:
        """Return a line about `instead_of`; "" if there is nothing to say."""
        if not self.instead_of:
            return ""
        return (
            f"checkpoint.resume: this run began at {self.instead_of}, and resumes from its own newest checkpoint. "
            "To begin there again, choose another --output-dir."
        )


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's name; None for any other name, such as `step-000000460.abandoned`."""
    return int(name.removeprefix("step-")) if re.fullmatch(STEP_NAME, name) else None


def steps_in(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in a checkpoints folder, whole or not, newest first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((step for name in names if (step := step_of(name)) is not None), reverse=True)


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoints, whole or not, that a path stands for, newest first.

    The path is a checkpoint, a checkpoints folder or a run directory. Raises OSError.
    """
    for folder in (path, path / CHECKPOINTS):
        if (folder / MANIFEST).exists() or (folder.is_dir() and step_of(folder.resolve().name) is not None):
            return [folder]
        if steps := steps_in(folder):
            return [folder / step_name(step) for step in steps]
    return []


def newest_whole(folder: Path, read: Read) -> tuple[Checkpoint | None, dict[int, Damaged]]:
    """Return the newest checkpoint in a checkpoints folder that `read` accepts as not damaged.

    Also returns, by step, the damage of newer ones. Raises OSError.
    """
    damaged: dict[int, Damaged] = {}
    for step in steps_in(folder):
        try:
            return read(folder / step_name(step)), damaged
        except Damaged as error:
            damaged[step] = error
    return None, damaged


def open_checkpoint(path: str, where: str, read: Read = verify) -> Checkpoint:
    """Return the checkpoint at a path: a checkpoint, or the newest in a checkpoints folder or run directory.

    Changes nothing there. where: the setting that the path came from, for the UserError if there is none or it is
    damaged.
    """
    try:
        folder = next(iter(checkpoints_at(Path(path))), None)
        if folder is None:
            raise UserError(
                f"{where}: no checkpoint at {path}; expected a run directory, its checkpoints folder, or a "
                f"{step_name(0)} in that."
            )
        return read(folder)
    except Damaged as error:
        raise UserError(f"{where}: {folder} is damaged: {error}. Choose another checkpoint.") from error
    except OSError as error:
        raise UserError(f"{where}: cannot read {path}: {reason(error)}.") from error


def path_in(resume: str) -> str:
    """Return the path in checkpoint.resume; "" for auto and never."""
    return "" if resume in ("auto", "never") else resume


def find_start(folder: Path, resume: str, read: Read) -> ResumePoint:
    """Return the checkpoint that a run starts from: the newest whole one (auto), none (never), or the one at a path.

    folder: the run's checkpoints. A run that began at a path and is given it again, for example if it is requeued,
    resumes from the newest whole checkpoint in `folder`, also if it was resumed by auto meanwhile.

    Raises UserError for a path without a whole checkpoint, if all are damaged, and in a folder that has checkpoints for
    "never", because they would be lost, and for a path of another run, because two runs would be mixed.
    """
    try:
        if resume == "never":
            if steps_in(folder):
                raise UserError(
                    f"checkpoint.resume: never, but {folder} holds checkpoints, which the run would replace. "
                    "Choose another --output-dir, remove them, or resume from them: --resume auto."
                )
            return ResumePoint(None, {})
        checkpoint, damaged = newest_whole(folder, read)
    except OSError as error:
        raise UserError(f"checkpoint.resume: {resume}: cannot read {folder}: {reason(error)}.") from error
    if resume != "auto":
        began_at = checkpoint.facts.began_at if checkpoint else ""
        if began_at and os.path.abspath(began_at) == os.path.abspath(resume):
            return ResumePoint(checkpoint, damaged, instead_of=resume)
        start = open_checkpoint(resume, "checkpoint.resume", read)
        folders = {path.resolve().parent for path in checkpoints_at(Path(resume))}
        if steps_in(folder) and folder.resolve() not in folders:
            raise UserError(
                f"checkpoint.resume: {resume} is of another run than the checkpoints in {folder}. "
                "Choose another --output-dir, or resume from these: --resume auto."
            )
        return ResumePoint(start, {})
    if checkpoint is None and damaged:
        newest_step = max(damaged)
        raise UserError(
            f"checkpoint.resume: auto, but none of the {len(damaged)} checkpoint(s) in {folder} is undamaged; "
            f"the newest, step {newest_step}: {damaged[newest_step]}. Choose another --output-dir, or remove "
            "them to start anew."
        )
    return ResumePoint(checkpoint, damaged)


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
