"""The checkpoints of a run, side by side in one folder: their names, which is whole, putting in place, setting aside.

Writes no checkpoint itself (see tensors) and does not decide which to keep (see manager).
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from horovod_train.checkpoint.layout import BEST, read_at, step_name, step_of, steps_in
from horovod_train.checkpoint.manifest import MANIFEST
from horovod_train.checkpoint.tensors import PREFIX, Checkpoint, sync, verify
from horovod_train.output.removal import Made, check, remove, rename, replace

_INSIDE = (re.escape(MANIFEST), rf"{PREFIX}[^/]*")
_CHECKPOINT = Made("a checkpoint", r"step-\d{9,}", "folder", _INSIDE)
_HIDDEN = Made("a checkpoint", r"\.step-\d{9,}\.(replaced|removed|[0-9a-f]+\.partial)", "folder", _INSIDE)
_LINK = Made(
    "a link to a checkpoint", rf"\.?{BEST}", "link", is_ours=lambda path: step_of(os.readlink(path)) is not None
)


class CheckpointSet:
    """The folders `step-000000460/` and so on.

    A name that begins with a dot is a save or a removal under way, or one whose process died: a whole checkpoint gets
    its own name by one rename, after all of it has been synced. Methods raise OSError where the file system refuses.
    """

    def __init__(self, folder: Path, is_ours: Callable[[], bool]) -> None:
        self.folder, self._is_ours = folder, is_ours
        # A run that has lost this folder to another must not write into what that one has under way.
        self._partial_suffix = f".{secrets.token_hex(4)}.partial"

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, whole or not, newest first."""
        return steps_in(self.folder)

    def place(self, step: int) -> Path:
        return self.folder / step_name(step)

    def new_partial(self, step: int) -> Path:
        """Where a save of `step` may be written; makes the folder around it."""
        if not self.folder.is_dir():
            self.folder.mkdir()  # Not its parents: where the run directory has gone, so has its disk.
            sync(self.folder.parent)
        return self._hidden(step, self._partial_suffix)

    def put_in_place(self, partial: Path, step: int) -> None:
        """Gives a whole save its name, in place of an earlier checkpoint of that step."""
        if not self._is_ours():
            raise OSError(None, "another run has taken the directory")
        place, replaced = self.place(step), self._hidden(step, ".replaced")
        if check(place, _CHECKPOINT):
            remove(replaced, _HIDDEN)
            rename(place, replaced)  # clear_leftovers puts it back, should this process die here.
        try:
            rename(partial, place)
        except OSError:
            if replaced.exists():
                rename(replaced, place)
            raise
        sync(self.folder)
        with suppress(OSError):  # clear_leftovers tries again
            remove(replaced, _HIDDEN)

    def remove_partial(self, partial: Path) -> None:
        """Removes what a save that failed has written."""
        remove(partial, _HIDDEN)

    def mark_best(self, step: int) -> int:
        """Points the link at the best checkpoint; returns its step.

        Where the evaluation at `step` was best but was not saved, or that failed, it stays the best of those saved.
        """
        link = self.folder / BEST
        if self.place(step).exists():
            draft = link.with_name(f".{BEST}")
            remove(draft, _LINK)
            draft.symlink_to(step_name(step))
            replace(draft, link, _LINK)
        linked = step_of(os.readlink(link)) if link.is_symlink() else None
        return step if linked is None else linked

    def remove(self, steps: Iterable[int]) -> None:
        """Removes all that it can of these checkpoints. Raises OSError for the first that it cannot."""
        failures: list[OSError] = []
        for step in steps:
            try:
                if self._is_ours() and check(self.place(step), _CHECKPOINT):
                    self._forget_best(step)
                    removed = self._hidden(step, ".removed")
                    rename(self.place(step), removed)  # One rename: half a checkpoint would look like a damaged one.
                    remove(removed, _HIDDEN)
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _forget_best(self, step: int) -> None:
        """Removes the link where it points at this step, so that it never points at nothing."""
        link = self.folder / BEST
        with suppress(OSError):
            if step_of(os.readlink(link)) == step:
                remove(link, _LINK)

    def set_aside(self, step: int, why: str) -> Path:
        """Renames a checkpoint to `….why`, where nothing here looks at it again; returns its new name."""
        place, number = self.place(step), 1
        while (aside := place.with_name(f"{place.name}.{why}{'' if number == 1 else f'-{number}'}")).exists():
            number += 1
        self._forget_best(step)
        return rename(place, aside)

    def clear_leftovers(self) -> None:
        """Finishes what a dead process had begun: a checkpoint is put back, or all of it goes."""
        for path in self.folder.glob(".step-*"):
            place = self.folder / path.name[1:].partition(".")[0]
            if path.suffix == ".replaced" and not place.exists():
                rename(path, place)
            else:
                remove(path, _HIDDEN)

    def _hidden(self, step: int, suffix: str) -> Path:
        return self.folder / f".{step_name(step)}{suffix}"


def open_checkpoint(path: str, where: str) -> Checkpoint:
    """The checkpoint at a path, verified: its folder, or the newest in a checkpoints folder or a run directory.

    Changes nothing there. where: the setting that the path came from, for the UserError where there is no whole one.
    """
    return read_at(path, where, verify)
