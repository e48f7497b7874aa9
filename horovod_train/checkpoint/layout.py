"""Where checkpoints lie, which is the newest, and from which a run starts. Needs no TensorFlow.

The only place that knows how their folders are called. Callers say how thoroughly one is read: a run loads what it has
verified, explain verifies, plan reads the manifest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from horovod_train.checkpoint.manifest import MANIFEST, Damaged, reason
from horovod_train.errors import UserError

CHECKPOINTS = "checkpoints"
"""The folder of a run directory that holds them."""

BEST = "best"
"""A symbolic link beside the checkpoints to the best of them. For people: the record is in every manifest."""


class WithConfig(Protocol):
    """What tells of the config that a checkpoint was written under."""

    @property
    def config(self) -> Mapping[str, Any]: ...


Read = TypeVar("Read")
Written = TypeVar("Written", bound=WithConfig)


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's name; None for any other name, such as `step-000000460.abandoned`."""
    found = re.fullmatch(r"step-(\d{9,})", name)
    return int(found.group(1)) if found else None


def steps_in(folder: Path) -> list[int]:
    """Return the steps that there are checkpoints of in a checkpoints folder, whole or not, newest first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((step for name in names if (step := step_of(name)) is not None), reverse=True)


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoints, whole or not, that a path stands for, newest first.

    The path is a checkpoint, or else a checkpoints folder, or else a run directory. Raises OSError.
    """
    for folder in (path, path / CHECKPOINTS):
        if (folder / MANIFEST).exists() or (folder.is_dir() and step_of(folder.resolve().name) is not None):
            return [folder]
        if steps := steps_in(folder):
            return [folder / step_name(step) for step in steps]
    return []


def newest_whole(folder: Path, read: Callable[[Path], Read]) -> tuple[Read | None, dict[int, Damaged]]:
    """Return the newest checkpoint in a checkpoints folder that `read` does not find damaged.

    Beside it, by step, what is wrong with newer ones. Raises OSError.
    """
    damaged: dict[int, Damaged] = {}
    for step in steps_in(folder):
        try:
            return read(folder / step_name(step)), damaged
        except Damaged as error:
            damaged[step] = error
    return None, damaged


def read_at(path: str, where: str, read: Callable[[Path], Read]) -> Read:
    """Return what `read` makes of the checkpoint at a path: of the newest where the path stands for several.

    where: the setting that the path came from, for the UserError where there is none or that one is damaged.
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


def find_start(folder: Path, resume: str, read: Callable[[Path], Written]) -> tuple[Written | None, dict[int, Damaged]]:
    """Return the checkpoint that a run starts from: the newest whole one (auto), none (never), or the one at a path.

    folder: the run's checkpoints. A run that began at a path and is started again, as by a requeue, resumes from its
    own newest whole one.

    Beside it, by step, the damaged ones that auto passes over. Raises UserError for a path that holds no whole one,
    where all are damaged, and for "never" in a folder that holds some: they would be lost.
    """
    try:
        if resume == "never":
            if steps_in(folder):
                raise UserError(
                    f"checkpoint.resume: never, but {folder} holds checkpoints, which the run would replace. "
                    "Choose another --output-dir, remove them, or resume from them: --resume auto."
                )
            return None, {}
        own, damaged = newest_whole(folder, read)
    except OSError as error:
        raise UserError(f"checkpoint.resume: {resume}: cannot read {folder}: {reason(error)}.") from error
    if resume != "auto":
        is_again = own is not None and own.config.get("checkpoint", {}).get("resume") == resume
        return (own if is_again else read_at(resume, "checkpoint.resume", read)), {}
    if own is None and damaged:
        newest = max(damaged)
        raise UserError(
            f"checkpoint.resume: auto, but none of the {len(damaged)} checkpoint(s) in {folder} is whole; of the "
            f"newest, step {newest}, {damaged[newest]}. Choose another --output-dir, or remove them to start anew."
        )
    return own, damaged
