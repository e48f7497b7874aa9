"""Manages the checkpoints of a run: finds the one to start from, saves in the background, keeps newest and best.

Does not decide when to save, or which is best; see training.hooks. Only root has a store: it reads and writes, and the
other ranks get everything by broadcast. layout and tensors define the content of one checkpoint.
"""

from __future__ import annotations

import heapq
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import tensorflow as tf

from horovod_train.checkpoint.layout import (
    BEST,
    FORMER_BEST,
    MANIFEST,
    PREFIX,
    SAVED,
    STEP_NAME,
    Checkpoint,
    Damaged,
    Facts,
    find_start,
    lack_of_room,
    reason,
    step_name,
    step_of,
    steps_in,
    verify,
)
from horovod_train.checkpoint.tensors import sync, write
from horovod_train.errors import unusable
from horovod_train.output.files import (
    Artifact,
    begins,
    check,
    free_path,
    is_gone,
    json_text,
    must_be_writable,
    remove,
    remove_drafts,
    rename,
    replace,
    write_atomically,
)

_INSIDE = (re.escape(MANIFEST), rf"{PREFIX}[^/]*")
_CHECKPOINT = Artifact("a checkpoint", STEP_NAME, "folder", _INSIDE)
_HIDDEN = Artifact("a checkpoint", rf"\.{STEP_NAME}\.(replaced|removed|[0-9a-f]+\.partial)", "folder", _INSIDE)
_SAVED_HEAD = '{"step": '
_SAVED = Artifact("a run's newest step", re.escape(SAVED), content_matches=lambda path: begins(path, _SAVED_HEAD))
_LINK = Artifact(
    "a link to a checkpoint",
    rf"\.?({BEST}|{FORMER_BEST}{STEP_NAME})",
    "link",
    content_matches=lambda path: step_of(os.readlink(path)) is not None,
)

SLOWEST_BYTES_PER_S = 50e6
"""A disk that takes longer for a checkpoint counts as stuck."""

log = logging.getLogger(__name__)


class LongestTimes(list[float]):
    """The three longest times, in seconds, that something took: those by which stopping.usual_longest decides."""

    def add(self, seconds: float) -> None:
        self[:] = heapq.nlargest(3, [*self, seconds])


class Store:
    """A store without checkpoints, which ranks other than root have: finds nothing, writes nothing, never fails."""

    write_times: Sequence[float] = ()
    """Seconds that whole saves took: the longest."""

    @property
    def write_under_way_s(self) -> float:
        """Seconds since the save under way began; no more than the slowest disk takes: it may include a suspension."""
        return 0.0

    @property
    def step_under_way(self) -> int | None:
        """The step whose checkpoint is being written, if any."""
        return None

    def describe_write(self) -> str:
        """Return what is being written, for the watch; changes each second for as long as a slow disk may take."""
        return ""

    given_up: str | None = None
    """Why the run must end, because no later save is likely to succeed; None if one may."""

    def check_room(self, bytes_each: int, most: int) -> None:
        """Warn if the disk has no room for so many checkpoints. Raises UserError if it has none for one more."""

    def find(self, resume: str) -> Checkpoint | None:
        """Return the checkpoint to start from; see layout.find_start.

        auto renames newer damaged ones and reports that.
        """
        return None

    def seek_best_anew(self) -> None:
        """Keep the best checkpoint of before, if there is one: no best evaluation is known when the run starts."""

    def rewind(self, step: int, best: int | None = None) -> None:
        """Set aside the checkpoints after `step`: the run resumes from there, and "auto" must not find them.

        best: the step of the best one so far, at which the link must point; a kill may have come before. Raises
        UserError if checkpoints cannot be set aside.
        """

    def save(self, arrays: Mapping[str, np.ndarray], facts: Facts) -> None:
        """Start to write a checkpoint in the background; wait first for the previous save.

        arrays: copies that nothing changes until `wait` returns. Each failure is reported immediately.
        """

    def wait(self) -> str | None:
        """Wait until nothing is being written. Return why the last save failed; None if it did not or there is none."""
        return None

    def finish(self, timeout_s: float) -> None:
        """For a run that fails: wait for the checkpoint being written, and report the last good one."""


class CheckpointStore(Store):
    """The checkpoints in one folder, written by one thread at a time."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        is_ours: Callable[[], bool] = lambda: True,
        max_failed_saves: int | None = None,
    ) -> None:
        """is_ours: whether the run still owns its directory (see lease); asked before anything is renamed or removed.

        max_failed_saves: in a row, after which the store gives up; None: it tries again at each save.

        Raises UserError if there is a saved.json that no run has written.
        """
        self.checkpoints, self.keep = CheckpointSet(folder, is_ours), keep
        self._max_failed_saves, self._failed_saves = max_failed_saves, 0
        self._writer: threading.Thread | None = None
        self._step = self._bytes = 0
        self._began = 0.0
        self.write_times: LongestTimes = LongestTimes()
        self._last_whole: Path | None = None
        self._warned_of: set[str] = set()
        self._failure: str | None = None
        self._said = ""
        self._unexpected_error: Exception | None = None
        with must_be_writable(folder.parent / SAVED):
            check(folder.parent / SAVED, _SAVED)
        remove_drafts(folder.parent, _SAVED)
        try:
            self.checkpoints.clear_leftovers()
        except OSError as error:
            log.warning(f"cannot remove what an interrupted save left: {reason(error)}.")

    @property
    def write_under_way_s(self) -> float:
        if self.step_under_way is None:
            return 0.0
        return min(time.perf_counter() - self._began, self._bytes / SLOWEST_BYTES_PER_S)

    @property
    def step_under_way(self) -> int | None:
        writer = self._writer  # the watchdog asks, too, while `wait` sets it to None
        return self._step if writer is not None and writer.is_alive() else None

    def describe_write(self) -> str:
        if self.step_under_way is None:
            return ""
        return f"writing {self._bytes / 1e6:.0f} MB for {self.write_under_way_s:.0f} s"

    def check_room(self, bytes_each: int, most: int) -> None:
        if lack := lack_of_room(self.checkpoints.folder, bytes_each, most):
            log.warning(lack)

    def find(self, resume: str) -> Checkpoint | None:
        start = find_start(self.checkpoints.folder, resume, verify)
        for step, damage in start.damaged.items():
            self._set_aside_damaged(step, damage)
        if start.note:
            log.info(start.note)
        if start.checkpoint is not None:
            self._last_whole = start.checkpoint.folder
        return start.checkpoint

    def seek_best_anew(self) -> None:
        try:
            self.checkpoints.keep_best()
        except OSError as error:
            log.warning(f"the best checkpoint of before cannot be kept: {reason(error)}.")

    def rewind(self, step: int, best: int | None = None) -> None:
        path = self.checkpoints.folder
        try:
            for later_step in [later_step for later_step in steps_in(path) if later_step > step]:
                path = self.checkpoints.path_of(later_step)
                new_name = self.checkpoints.set_aside(later_step, "abandoned").name
                log.warning(f"{path} is from before the resume at step {step}. It is now called {new_name}.")
        except OSError as error:
            what = f"{path}: is from before the resume at step {step}, and cannot be renamed"
            raise unusable(what, error, "Choose another --output-dir.") from error
        self._tell_newest()
        if best is not None:
            self._mark_best(best)

    def save(self, arrays: Mapping[str, np.ndarray], facts: Facts) -> None:
        self.wait()
        self._step, self._began = facts.step, time.perf_counter()
        self._bytes = sum(array.nbytes for array in arrays.values())
        # A daemon: a hanging file system must not keep the process from ending. A partial save is harmless.
        self._writer = threading.Thread(target=self._write, args=(arrays, facts), name="checkpoint", daemon=True)
        self._writer.start()

    def wait(self) -> str | None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._unexpected_error is not None:
            raise self._unexpected_error
        return self._failure

    def finish(self, timeout_s: float) -> None:
        if self._writer is not None and self.step_under_way is not None:
            log.info(f"the run has failed; waiting for the checkpoint of step {self._step}, which is being written")
            self._writer.join(timeout_s)
            if self._writer.is_alive():
                log.warning(f"the checkpoint of step {self._step} was not written within {timeout_s:g} s.")
        if self._last_whole is not None:
            log.info(f"the last good checkpoint: {self._last_whole}")

    def _write(self, arrays: Mapping[str, np.ndarray], facts: Facts) -> None:
        try:
            partial = self.checkpoints.new_partial(facts.step)
            try:
                write(partial, arrays, facts)
                self.checkpoints.put_in_place(partial, facts.step)
            except BaseException:
                with suppress(OSError):
                    remove(partial, _HIDDEN)
                raise
        except (OSError, tf.errors.OpError) as error:
            folder = self.checkpoints.folder
            self._failure = f"the checkpoint of step {facts.step} was not written to {folder}: {reason(error)}"
            last = self._last_whole if self._last_whole and not is_gone(self._last_whole) else "none"
            self._failed_saves += 1
            self.given_up = self._why_given_up(last)
            then = "The run ends" if self.given_up else "The next save tries again"
            said, self._said = self._said, f"{self._failure}. The last good one: {last}. {then}."
            if self._said != said:  # the end of a run tries once more
                log.warning(self._said)
        except Exception as error:
            self._unexpected_error = error  # the thread has no caller: wait() raises it
        else:
            self._failure, self._said, self._last_whole = None, "", self.checkpoints.path_of(facts.step)
            self.given_up, self._failed_saves = None, 0
            self._tell_newest()
            self._remove_old(facts)
            self.write_times.add(time.perf_counter() - self._began)

    def _tell_newest(self) -> None:
        with self._warning_once(SAVED, "cannot tell the newest checkpoint"):
            self.checkpoints.tell_newest()

    def _why_given_up(self, last: Path | str) -> str | None:
        """Return why the run ends after a save that has failed; None if the next one may succeed."""
        run_dir = self.checkpoints.folder.parent
        if is_gone(run_dir):
            return (
                f"output_dir: {run_dir} is gone: removed, renamed or no longer mounted, so that no checkpoint can be "
                "saved. Bring it back and start again, or start anew with another --output-dir."
            )
        if self._max_failed_saves is not None and self._failed_saves >= self._max_failed_saves:
            in_a_row = "a save has" if self._failed_saves == 1 else f"{self._failed_saves} saves in a row have"
            return (
                f"{in_a_row} failed (checkpoint.max_failed_saves): {self._failure}. The last good one: {last}. "
                "See to the disk, then start again."
            )
        return None

    def _remove_old(self, facts: Facts) -> None:
        with self._warning_once("checkpoint.keep", "older checkpoints remain, and the new ones are whole"):
            steps = steps_in(self.checkpoints.folder)
            # Without a best: that of an earlier start, whose checkpoint.best was another.
            best = self.checkpoints.linked_best() if facts.best is None else self._mark_best(facts.best.step)
            kept_steps = {facts.step, best, *self.checkpoints.former_bests().values(), *steps[: self.keep]}
            self.checkpoints.remove(step for step in steps if step not in kept_steps)

    def _mark_best(self, step: int) -> int:
        link = str(self.checkpoints.folder / BEST)  # some file systems have none
        with self._warning_once(link, f"cannot be made to point at step {step}"):
            return self.checkpoints.mark_best(step)
        return step

    @contextmanager
    def _warning_once(self, subject: str, what: str) -> Iterator[None]:
        """Say that the block has failed after this save, and not again after each of the others."""
        try:
            yield
        except OSError as error:
            if subject not in self._warned_of:
                log.warning(f"{subject}: {what}: {reason(error)}.")
            self._warned_of.add(subject)

    def _set_aside_damaged(self, step: int, damage: Damaged) -> None:
        path = self.checkpoints.path_of(step)
        try:
            new_name = self.checkpoints.set_aside(step, "damaged").name
            log.warning(f"{path} is damaged: {damage}. It is now called {new_name}.")
        except OSError as error:
            log.warning(f"{path} is damaged: {damage}. It cannot be renamed: {reason(error)}.")


class CheckpointSet:
    """The folders `step-000000460/` and so on.

    A name that begins with a dot is an unfinished save or removal, possibly of a process that died. A whole checkpoint
    gets its final name by one rename, after it has been synced. Methods raise OSError where the file system refuses.
    """

    def __init__(self, folder: Path, is_ours: Callable[[], bool]) -> None:
        self.folder, self._is_ours = folder, is_ours
        # The suffix is unique: a run that lost this folder to another run must not write into the other run's save.
        self._partial_suffix = f".{secrets.token_hex(4)}.partial"

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

    def tell_newest(self) -> None:
        """Write saved.json, or remove it if there is no checkpoint."""
        if not self._is_ours():
            return
        path = self.folder.parent / SAVED
        if steps := steps_in(self.folder):
            write_atomically(path, json_text({"step": steps[0]}) + "\n", _SAVED)
        else:
            remove(path, _SAVED)

    def mark_best(self, step: int) -> int:
        """Point the link at the best checkpoint; return its step.

        If the checkpoint of `step` was not saved, or saving failed, the link keeps pointing at the best saved one.
        """
        if self.path_of(step).exists() and self.linked_best() != step:
            self._link(BEST, step)
        linked = self.linked_best()
        return step if linked is None else linked

    def keep_best(self) -> None:
        """Link the best checkpoint by a second name, which stays when another becomes the best."""
        if (step := self.linked_best()) is not None:
            self._link(f"{FORMER_BEST}{step_name(step)}", step)

    def _link(self, name: str, step: int) -> None:
        draft = self.folder / f".{name}"
        remove(draft, _LINK)
        draft.symlink_to(step_name(step))
        replace(draft, self.folder / name, _LINK)

    def linked_best(self) -> int | None:
        """Return the step that the link to the best points at; None if there is no link."""
        link = self.folder / BEST
        return step_of(os.readlink(link)) if link.is_symlink() else None

    def former_bests(self) -> dict[Path, int | None]:
        """Return the links to former best ones, and the steps that they point at."""
        links = [link for link in self.folder.glob(f"{FORMER_BEST}*") if link.is_symlink()]
        return {link: step_of(os.readlink(link)) for link in links}

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
        """Remove links that point at this step, so that none dangles."""
        with suppress(OSError):
            for link, linked in {self.folder / BEST: self.linked_best(), **self.former_bests()}.items():
                if linked == step:
                    remove(link, _LINK)

    def set_aside(self, step: int, suffix: str) -> Path:
        """Rename a checkpoint to `….suffix`, which later reads ignore; return its new path."""
        path = self.path_of(step)
        self._forget_best(step)
        return rename(path, free_path(path.with_name(f"{path.name}.{suffix}")))

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
