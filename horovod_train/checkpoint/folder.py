"""The checkpoints of a run in one folder: names, listing, atomic renames, removal.

Writes no checkpoint itself (see tensors) and does not decide which to keep (see manager).
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from horovod_train.checkpoint.layout import BEST, STEP_NAME, read_at, step_name, step_of, steps_in
from horovod_train.checkpoint.manifest import MANIFEST
from horovod_train.checkpoint.tensors import PREFIX, Checkpoint, sync, verify
from horovod_train.output.removal import Artifact, check, remove, rename, replace

_INSIDE = (re.escape(MANIFEST), rf"{PREFIX}[^/]*")
_CHECKPOINT = Artifact("a checkpoint", STEP_NAME, "folder", _INSIDE)
_HIDDEN = Artifact("a checkpoint", rf"\.{STEP_NAME}\.(replaced|removed|[0-9a-f]+\.partial)", "folder", _INSIDE)
_LINK = Artifact(
    "a link to a checkpoint", rf"\.?{BEST}", "link", content_matches=lambda path: step_of(os.readlink(path)) is not None
)


class CheckpointSet:
    """The folders `step-000000460/` and so on.

    A name that begins with a dot is an unfinished save or removal, possibly of a process that died. A whole checkpoint
    gets its final name by one rename, after it has been synced. Methods raise OSError where the file system refuses.
    """

    def __init__(self, folder: Path, is_ours: Callable[[], bool]) -> None:
        self.folder, self._is_ours = folder, is_ours
        # The suffix is unique: a run that lost this folder to another run must not write into the other run's save.
        self._partial_suffix = f".{secrets.token_hex(4)}.partial"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, whole or not, newest first."""
        return steps_in(self.folder)

    def path_of(self, step: int) -> Path:
        return self.folder / step_name(step)

    def new_partial(self, step: int) -> Path:
        """Return a path to which a save of `step` may be written; make its parent folder."""
        if not self.folder.is_dir():
            self.folder.mkdir()  # no parents: if the run directory is gone, so is its disk
            sync(self.folder.parent)
        return self._hidden(step, self._partial_suffix)

    def put_in_place(self, partial: Path, step: int) -> None:
        """Rename a whole save to its final name, replacing an earlier checkpoint of that step."""
        if not self._is_ours():
            raise OSError(None, "another run has taken the directory")
        path, replaced_path = self.path_of(step), self._hidden(step, ".replaced")
        if check(path, _CHECKPOINT):
            remove(replaced_path, _HIDDEN)
            rename(path, replaced_path)  # clear_leftovers undoes this if the process dies here
        try:
            rename(partial, path)
        except OSError:
            if replaced_path.exists():
                rename(replaced_path, path)
            raise
        sync(self.folder)
        with suppress(OSError):  # clear_leftovers tries again
            remove(replaced_path, _HIDDEN)

    def remove_partial(self, partial: Path) -> None:
        """Remove what a failed save has written."""
        remove(partial, _HIDDEN)

    def mark_best(self, step: int) -> int:
        """Point the link at the best checkpoint; return its step.

        If the checkpoint of `step` was not saved, or saving failed, the link keeps pointing at the best saved one.
        """
        link = self.folder / BEST
        if self.path_of(step).exists():
            draft = link.with_name(f".{BEST}")
            remove(draft, _LINK)
            draft.symlink_to(step_name(step))
            replace(draft, link, _LINK)
        linked = step_of(os.readlink(link)) if link.is_symlink() else None
        return step if linked is None else linked

    def remove(self, steps: Iterable[int]) -> None:
        """Remove as many of these checkpoints as possible. Raises OSError for the first that cannot be removed."""
        failures: list[OSError] = []
        for step in steps:
            try:
                if self._is_ours() and check(self.path_of(step), _CHECKPOINT):
                    self._forget_best(step)
                    removed_path = self._hidden(step, ".removed")
                    rename(self.path_of(step), removed_path)  # one rename: a half-removed checkpoint would look damaged
                    remove(removed_path, _HIDDEN)
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _forget_best(self, step: int) -> None:
        """Remove the link if it points at this step, so that it never dangles."""
        link = self.folder / BEST
        with suppress(OSError):
            if step_of(os.readlink(link)) == step:
                remove(link, _LINK)

    def set_aside(self, step: int, suffix: str) -> Path:
        """Rename a checkpoint to `….suffix`, which later reads ignore; return its new path."""
        path, number = self.path_of(step), 1
        while (new_path := path.with_name(f"{path.name}.{suffix}{'' if number == 1 else f'-{number}'}")).exists():
            number += 1
        self._forget_best(step)
        return rename(path, new_path)

    def clear_leftovers(self) -> None:
        """Finish what a dead process began: restore replaced checkpoints, remove partial ones.

        Raises the first OSError, after all the others have been tried.
        """
        failures: list[OSError] = []
        for leftover in list(self.folder.glob(".step-*")):
            path = self.folder / leftover.name[1:].partition(".")[0]
            try:
                if leftover.suffix == ".replaced" and not path.exists():
                    rename(leftover, path)
                else:
                    remove(leftover, _HIDDEN)
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _hidden(self, step: int, suffix: str) -> Path:
        return self.folder / f".{step_name(step)}{suffix}"


def open_checkpoint(path: str, where: str) -> Checkpoint:
    """Return the verified checkpoint at a path: a checkpoint, or the newest in a checkpoints folder or run directory.

    Changes nothing there. where: the setting that the path came from, for the UserError if there is no whole one.
    """
    return read_at(path, where, verify)
