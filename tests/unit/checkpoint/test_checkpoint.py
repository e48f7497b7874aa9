"""Checkpoints: whole or not there, whatever is done to the process, the files or the disk."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import multiprocessing
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from conftest import HANGS_AFTER_S

from horovod_train.checkpoint import layout, manager, tensors
from horovod_train.checkpoint.layout import (
    CHECKPOINTS,
    MANIFEST,
    Best,
    Checkpoint,
    Damaged,
    Facts,
    find_start,
    most_at_once,
    newest_whole,
    open_checkpoint,
    pack,
    verify,
)
from horovod_train.checkpoint.manager import SLOWEST_BYTES_PER_S, CheckpointStore, Store
from horovod_train.checkpoint.tensors import load, read_arrays
from horovod_train.config.loader import as_dict
from horovod_train.config.loader import load as load_config
from horovod_train.config.settings import CheckpointConfig, Watched
from horovod_train.errors import ReadFailed, UserError
from horovod_train.output import logs
from horovod_train.tfrecord_framing import masked_crc

FILES = ["state.index", "state.data-00000-of-00001", MANIFEST]


MINIMAL = {"data": {"train": "t", "global_batch_size": 8}, "train": {"epochs": 3}}
CONFIG = {"seed": 1, "checkpoint": {"resume": "auto"}}


def facts(step: int, best: Best | None = None) -> Facts:
    return Facts(step=step, epoch=1, records=64, ranks=2, config=CONFIG, versions={"keras": "3"}, best=best)


def arrays(step: int) -> dict[str, np.ndarray]:
    """Every number in a checkpoint is its step."""
    return {
        "model/conv1/kernel": np.full((3, 5), step, np.float32),
        "optimizer/conv1/kernel_momentum": np.full((3, 5), step, np.float32),
        "progress/step": np.asarray(step, np.int64),
    }


_SAID: list[str] = []


@pytest.fixture(autouse=True)
def listening() -> Iterator[None]:
    _SAID.clear()
    with logs.to_console(is_root=True, show=_SAID.append):
        yield


class Run:
    """A run directory with a store, and what has been said since it was opened."""

    def __init__(self, directory: Path, keep: int = 3, is_ours: Callable[[], bool] = lambda: True) -> None:
        directory.mkdir(exist_ok=True)
        self.directory, self._first_line = directory, len(_SAID)
        self.folder = directory / CHECKPOINTS
        self.store = CheckpointStore(self.folder, keep, is_ours)

    @property
    def said(self) -> list[str]:
        return _SAID[self._first_line :]

    def save(self, *steps: int, best: Best | None = None) -> Run:
        for step in steps:
            self.store.save(arrays(step), facts(step, best))
            self.store.wait()
        return self

    def place(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}"

    def names(self) -> set[str]:
        return set(os.listdir(self.folder))

    def found(self) -> int:
        found = self.store.find("auto")
        assert found is not None
        assert np.all(read_arrays(found)["model/conv1/kernel"] == found.facts.step)
        return found.facts.step


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


# What is saved is what is read.


def test_what_is_saved_is_read_back_bit_for_bit(run: Run) -> None:
    draw = np.random.default_rng(1)
    saved = {
        "model/a": draw.normal(size=(3, 4)).astype(np.float32),
        "model/a#2": draw.normal(size=7).astype(ml_dtypes.bfloat16),
        "model/half": np.asarray([math.nan, -0.0, math.inf], np.float16),
        "optimizer/empty": np.zeros((0, 2), np.float64),
        "optimizer/flag": np.asarray(True),
        "progress/step": np.asarray(2**40 + 1, np.int64),
        "ranks/seeds": np.arange(4, dtype=np.uint32).reshape(2, 2),
    }
    told = facts(460, Best("eval/accuracy", 0.1 + 0.2, 300))
    run.store.save(saved, told)
    assert run.store.wait() is None
    found = run.store.find("auto")
    assert found is not None
    assert found.folder == run.place(460)
    assert found.facts == told
    back = read_arrays(found)
    assert back.keys() == saved.keys()
    for name, array in saved.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape), name
        assert back[name].tobytes() == array.tobytes(), name
    assert sorted(os.listdir(run.place(460))) == sorted(FILES)


def test_tensorflow_alone_reads_a_checkpoint(run: Run) -> None:
    run.save(7)
    kernel = tf.train.load_checkpoint(str(run.place(7) / "state")).get_tensor("model/conv1/kernel")
    assert np.array_equal(kernel, np.full((3, 5), 7, np.float32))


@pytest.mark.parametrize("dtype", [0, 99, 101, 21, 20])
def test_a_type_that_no_array_has_is_damage(run: Run, dtype: int) -> None:
    """None, one that TensorFlow does not know, a reference, a variant, a resource; several end the process if read."""
    run.store.save({"model/a": np.zeros(2, np.float32)}, facts(7))
    run.store.wait()
    folder = run.place(7)
    index, entry = (folder / "state.index").read_bytes(), b"\x08\x01\x12\x04\x12\x02\x08\x02"
    assert index.count(entry) == 1
    end = next(at for at in range(1, len(index)) if index[at : at + 4] == masked_crc(index[:at]).to_bytes(4, "little"))
    block = index[:end].replace(entry, bytes([8, dtype]) + entry[2:])
    (folder / "state.index").write_bytes(block + masked_crc(block).to_bytes(4, "little") + index[end + 4 :])
    content = json.loads((folder / MANIFEST).read_bytes())
    content["files"]["state.index"]["sha256"] = layout.sha256(folder / "state.index")
    (folder / MANIFEST).write_bytes(pack({key: value for key, value in content.items() if key != "sha256"}))
    with pytest.raises(Damaged, match=r"^cannot be read: "):
        read_arrays(verify(folder))


def test_load_assigns_and_returns_what_nobody_asked_for(run: Run) -> None:
    run.store.save({**arrays(7), "ranks/moving_mean": np.ones((2, 5), np.float32)}, facts(7))
    run.store.wait()
    found = run.store.find("auto")
    assert found is not None
    kernel = tf.Variable(tf.zeros((3, 5)))
    rest = load({"model/conv1/kernel": kernel}, found)
    assert np.all(kernel.numpy() == 7)
    assert rest.keys() == {"optimizer/conv1/kernel_momentum", "progress/step", "ranks/moving_mean"}


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("model/conv2/kernel", tf.zeros((3, 5)), "has no model/conv2/kernel; it was saved from another model"),
        ("ema/conv1/kernel", tf.zeros((3, 5)), "has no ema/conv1/kernel; it was saved without train.ema_decay"),
        ("exchange/settled_step", tf.zeros(()), "it was saved with another train.synchronization"),
        ("progress/step", tf.zeros((2,), tf.int64), r"progress/step is int64 \[\]; the model's is int64 \[2\]"),
        ("progress/step", tf.zeros((), tf.int32), r"progress/step is int64 \[\]; the model's is int32 \[\]"),
    ],
)
def test_another_model_is_refused_and_stays_as_it_was(run: Run, name: str, value: tf.Tensor, line: str) -> None:
    found = run.save(7).store.find("auto")
    assert found is not None
    kernel = tf.Variable(tf.zeros((3, 5)))
    with pytest.raises(UserError, match=line):
        load({"model/conv1/kernel": kernel, name: tf.Variable(value)}, found)
    assert np.all(kernel.numpy() == 0)


def test_weights_that_the_model_has_no_more_are_refused_unless_they_are_not_wanted(run: Run) -> None:
    saved = {f"model/block{number}/kernel": np.ones(2, np.float32) for number in range(3)} | arrays(7)
    run.store.save(saved, facts(7))
    run.store.wait()
    found = run.store.find("auto")
    assert found is not None
    kernel, block = tf.Variable(tf.zeros((3, 5))), tf.Variable(tf.zeros(2))
    variables = {"model/conv1/kernel": kernel, "model/block0/kernel": block}
    line = r"step-000000007: has model/block1/kernel, model/block2/kernel, which the model lacks; it was saved from"
    with pytest.raises(UserError, match=line):
        load(variables, found)
    assert np.all(kernel.numpy() == 0)
    load(variables, found, unwanted={"model/block1/kernel", "model/block2/kernel"})
    assert np.all(kernel.numpy() == 7)
    shutil.rmtree(found.folder)
    with pytest.raises(UserError, match=r"step-000000007: has been removed while this run was built, as by a run that"):
        load(variables, found)


# Damage.


def flip(position: float) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[int(position * (len(content) - 1))] ^= 1
        file.write_bytes(content)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "first byte": flip(0),
    "a byte inside": flip(0.5),
    "cut by a byte": lambda file: os.truncate(file, file.stat().st_size - 1),
    "cut to half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file: os.truncate(file, 0),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "deleted": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_newest_is_set_aside_and_the_one_before_used(
    run: Run, name: str, damage: Callable[[Path], object]
) -> None:
    run.save(1, 2, 3)
    damage(run.place(3) / name)
    again = Run(run.directory)
    assert again.found() == 2
    (line,) = again.said
    assert line.startswith(f"warning: {run.place(3)} is damaged: ")
    assert name in line
    assert line.endswith("It is now called step-000000003.damaged.")
    assert {name for name in run.names() if not name.startswith(".")} == {
        "step-000000001",
        "step-000000002",
        "step-000000003.damaged",
    }


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "names no files"),
        ({"/dev/zero": {"bytes": 0, "sha256": ""}}, "names '/dev/zero', which is not a file of this folder"),
        ({"../other": {"bytes": 0, "sha256": ""}}, "names '../other', which is not a file of this folder"),
        (["state.index"], "expected the entries of format 1, found others"),
        ("without index", "does not name state.index, which TensorFlow reads"),
    ],
    ids=["none", "absolute", "outside", "a list", "not all"],
)
def test_a_manifest_must_vouch_for_the_files_beside_it_that_are_read(run: Run, files: Any, said: str) -> None:
    path = run.save(3).place(3) / MANIFEST
    content = json.loads(path.read_text())
    del content["sha256"]
    kept = {name: entry for name, entry in content["files"].items() if name != "state.index"}
    path.write_bytes(pack(content | {"files": kept if files == "without index" else files}))
    with pytest.raises(Damaged, match=said):
        verify(run.place(3))


def test_a_checkpoint_of_before_files_and_names_were_noted_is_whole(run: Run) -> None:
    path = run.save(3).place(3) / MANIFEST
    content = json.loads(path.read_text())
    del content["sha256"], content["data_files"], content["class_names"]
    path.write_bytes(pack(content))
    facts = verify(run.place(3)).facts
    assert (facts.data_files, facts.class_names) == ("", {})


def test_whole_checkpoints_are_not_called_damaged(run: Run) -> None:
    run.save(1, 2, 3)
    again = Run(run.directory)
    assert again.found() == 3
    assert again.said == []


def test_every_byte_of_every_file_counts(run: Run) -> None:
    """One bit of each byte in turn; unchanged, the files pass."""
    run.save(1)
    passed = []
    for name in FILES:
        file = run.place(1) / name
        content = file.read_bytes()
        for position in range(len(content)):
            changed = bytearray(content)
            changed[position] ^= 1 << (position % 7)
            file.write_bytes(changed)
            with suppress(Damaged):
                verify(run.place(1))
                passed.append((name, position))
        file.write_bytes(content)
        verify(run.place(1))
    assert passed == []


def test_several_damaged_ones_are_passed_over(run: Run) -> None:
    run.save(1, 2, 3)
    flip(0.5)(run.place(3) / FILES[1])
    (run.place(2) / MANIFEST).unlink()
    again = Run(run.directory)
    assert again.found() == 1
    assert len(again.said) == 2
    assert again.save(2, 3).found() == 3  # the course goes on over the same steps


def test_where_all_are_damaged_the_run_does_not_quietly_start_anew(run: Run) -> None:
    run.save(1, 2)
    for step in (1, 2):
        (run.place(step) / "state.index").unlink()
    with pytest.raises(UserError, match=r"none of the 2 checkpoint\(s\) .* step 2: state.index is missing"):
        Run(run.directory).store.find("auto")
    assert {"step-000000001", "step-000000002"} <= run.names()


def test_a_later_format_is_refused_not_set_aside(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tensors, "FORMAT", 2)
        run.save(1)
    with pytest.raises(UserError, match="is in format 2; this version of horovod_train reads up to 1"):
        Run(run.directory).store.find("auto")
    assert run.place(1).exists()


# Where to start from.


@pytest.mark.parametrize("path", ["run", "run/checkpoints", "run/checkpoints/step-000000003", "run/checkpoints/best"])
def test_a_path_may_be_a_run_its_checkpoints_or_one_of_them(run: Run, tmp_path: Path, path: str) -> None:
    run.save(1, 2, 3, best=Best("eval/loss", 0.5, 3))
    found = Run(tmp_path / "other").store.find(str(tmp_path / path))
    assert found is not None
    assert found.facts.step == 3
    older = run.store.find(str(run.place(1)))
    assert older is not None
    assert older.facts.step == 1


@pytest.mark.parametrize("path", ["run", "run/checkpoints", "run/checkpoints/step-000000003"])
def test_a_damaged_one_at_a_path_is_the_users_to_replace(run: Run, tmp_path: Path, path: str) -> None:
    run.save(2, 3)
    (run.place(3) / MANIFEST).unlink()
    with pytest.raises(UserError, match=r"^checkpoint.resume: .*step-000000003 is damaged: manifest.json is missing"):
        Run(tmp_path / "other").store.find(str(tmp_path / path))
    assert run.place(3).exists()


def test_one_that_a_running_run_removes_for_a_newer_one_is_not_called_damaged(run: Run) -> None:
    """As `evaluate` of a run that still trains may meet it."""
    run.save(2)
    seen = []

    def read(folder: Path) -> Checkpoint:
        seen.append(folder.name)
        if len(seen) == 1:
            run.save(3)
            shutil.rmtree(folder)
        return verify(folder)

    assert open_checkpoint(str(run.directory), "--checkpoint", read).facts.step == 3
    shutil.rmtree(run.place(3))
    with pytest.raises(UserError, match=r"^--checkpoint: no checkpoint at"):
        open_checkpoint(str(run.place(3)), "--checkpoint")


def test_those_that_a_running_run_removes_while_they_are_listed_are_not_called_damaged(run: Run) -> None:
    """As `explain` and `plan` of a run that still trains may meet them, which read for minutes."""
    run.save(2, 3)

    def read(folder: Path) -> Checkpoint:
        if folder == run.place(3):
            run.save(4)
            for step in (2, 3):
                shutil.rmtree(run.place(step), ignore_errors=True)
        return verify(folder)

    newest, damaged = newest_whole(run.folder, read)
    assert newest is not None
    assert (newest.facts.step, damaged) == (4, {})


def test_a_run_that_saves_its_first_while_another_is_started_from_a_path_is_another_run(
    run: Run, tmp_path: Path
) -> None:
    """As `plan --resume PATH` of a run that has just begun may meet it: there is no damage to tell of."""
    run.save(2)
    other = Run(tmp_path / "other")

    def read(folder: Path) -> Checkpoint:
        other.save(1)
        return verify(folder)

    with pytest.raises(UserError, match="is of another run than the checkpoints in"):
        find_start(other.folder, str(run.directory), read)


@pytest.mark.parametrize("path", ["empty", "nowhere", "nowhere/step-000000003", "empty/file"])
def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "file").touch()
    with pytest.raises(UserError, match=r"^--checkpoint: no checkpoint at .*; expected a run directory"):
        open_checkpoint(str(tmp_path / path), "--checkpoint")


def test_a_run_that_began_at_a_path_goes_on_from_its_own_newest_when_it_is_started_again(run: Run) -> None:
    path = str(run.save(2).place(2))
    other = Run(run.directory.parent / "other")
    assert (begun := other.store.find(path)) is not None
    assert begun.folder == run.place(2)
    own = dataclasses.replace(facts(5), began_at=path)
    other.store.save(arrays(5), own)
    other.store.wait()
    again = other.store.find(f"{path}/")
    assert again is not None
    assert again.folder == other.place(5)
    assert [line for line in other.said if "choose another --output-dir" in line] == [
        f"checkpoint.resume: this run began at {path}/, and resumes from its own newest checkpoint. "
        "To begin there again, choose another --output-dir."
    ]
    by_auto = dataclasses.replace(facts(6), began_at=again.facts.began_at)
    other.store.save(arrays(6), by_auto)
    other.store.wait()
    other.place(5).rename(other.place(7))  # Its name is not that of its files: damaged, and newer than 6.
    (other.place(7) / "manifest.json").write_text("")
    assert (after_auto := other.store.find(path)) is not None
    assert after_auto.folder == other.place(6)
    assert f"{other.place(7).name}.damaged" in other.names()


@pytest.mark.parametrize("path", ["run", "run/checkpoints/step-000000002"])
def test_a_path_of_another_run_is_refused_in_a_folder_that_holds_checkpoints(run: Run, path: str) -> None:
    run.save(2)
    other = Run(run.directory.parent / "other").save(5)
    path = str(run.directory.parent / path)
    with pytest.raises(UserError, match=rf"^checkpoint\.resume: {path} is of another run than the .*other"):
        other.store.find(path)
    assert other.names() == {"step-000000005"}


def test_a_run_that_began_at_a_path_is_told_of_its_own_damaged_checkpoints(run: Run) -> None:
    """Requeued with the same words; what `auto` would say then too."""
    run.save(2)
    other = Run(run.directory.parent / "other").save(5)
    (other.place(5) / "manifest.json").write_text("")
    for resume in (str(run.directory), "auto"):
        other.save(6)
        (other.place(6) / "manifest.json").write_text("")
        with pytest.raises(UserError, match=rf"^checkpoint\.resume: {resume}, but none of the 2 .* is undamaged"):
            other.store.find(resume)


def test_never_refuses_a_folder_that_holds_some(run: Run) -> None:
    assert run.store.find("never") is None
    with pytest.raises(UserError, match=r"checkpoint.resume: never, but .* holds checkpoints"):
        run.save(1).store.find("never")


def test_a_course_that_was_left_is_not_found_again(run: Run) -> None:
    run.save(1, 2, 3)
    unwarned = Run(run.directory)
    assert unwarned.found() == 3
    again = Run(run.directory)
    found = again.store.find(str(run.place(1)))
    assert found is not None
    again.store.rewind(found.facts.step)
    assert again.found() == 1
    assert {"step-000000002.abandoned", "step-000000003.abandoned"} <= run.names()
    again.save(2).store.rewind(1)
    assert "step-000000002.abandoned-2" in run.names()


# What is kept.


@pytest.mark.parametrize(
    ("best_step", "kept"), [(None, {4, 5}), (1, {1, 4, 5}), (2, {2, 4, 5}), (5, {4, 5}), (99, {4, 5})]
)
def test_the_newest_and_the_best_are_kept(tmp_path: Path, best_step: int | None, kept: set[int]) -> None:
    best = None if best_step is None else Best("eval/loss", 0.5, best_step)
    run = Run(tmp_path / "run", keep=2).save(1, 2, 3, best=best)
    run = Run(run.directory, keep=2)
    found = run.store.find("auto")
    assert found is not None
    assert found.facts.best == best  # survives the resume
    run.save(4, 5, best=found.facts.best)
    assert {int(name[5:]) for name in run.names() if name.startswith("step-")} == kept
    if best_step in kept:
        assert (run.folder / "best").resolve() == run.place(best_step or 0)
    assert run.said == []


def test_a_best_that_was_not_saved_leaves_the_best_of_those_that_were(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", keep=1).save(1, 2, best=Best("eval/loss", 0.5, 1))
    run.save(4, 5, best=Best("eval/loss", 0.4, 3))
    assert run.names() == {"best", "step-000000001", "step-000000005"}
    run.save(6, 7, best=Best("eval/loss", 0.3, 6))
    assert run.names() == {"best", "step-000000006", "step-000000007"}


def test_nothing_is_removed_before_a_new_one_is_whole(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", keep=1).save(1)
    run.store.save({"unwritable": np.asarray([object()])}, facts(2))
    with pytest.raises(Exception, match="object"):
        run.store.wait()  # a mistake of ours is raised, not reported as a disk that failed
    assert Run(run.directory, keep=1).found() == 1
    assert run.names() == {"step-000000001"}


def test_a_checkpoint_of_the_same_step_is_replaced(run: Run) -> None:
    run.save(1, 2)
    run.store.save({**arrays(2), "more": np.ones(1)}, dataclasses.replace(facts(2), epoch=9))
    assert run.store.wait() is None
    found = run.store.find("auto")
    assert found is not None
    assert (found.facts.epoch, "more" in read_arrays(found)) == (9, True)
    assert run.names() == {"step-000000001", "step-000000002"}


def test_a_run_that_has_lost_its_directory_changes_nothing_in_it(tmp_path: Path) -> None:
    Run(tmp_path / "run").save(1, 2)
    late = Run(tmp_path / "run", keep=1, is_ours=lambda: False)
    late.save(3)
    assert "another run has taken the directory" in (late.store.wait() or "")
    assert late.names() == {"step-000000001", "step-000000002"}


def test_a_run_that_loses_its_directory_while_it_saves_removes_nothing_from_it(tmp_path: Path) -> None:
    Run(tmp_path / "run").save(1, 2)
    answers = iter([True])  # as its own checkpoint gets its name
    late = Run(tmp_path / "run", keep=1, is_ours=lambda: next(answers, False))
    late.save(3)
    assert late.names() == {"step-000000001", "step-000000002", "step-000000003"}


def test_other_ranks_have_every_method_and_no_effect() -> None:
    store = Store()
    public = {name for name in vars(CheckpointStore) if not name.startswith("_")}
    assert public <= {name for name in vars(Store) if not name.startswith("_")}
    store.rewind(0)
    assert (store.find("auto"), store.save(arrays(1), facts(1)), store.wait()) == (None, None, None)


# Training goes on meanwhile.


def test_saving_does_not_stop_the_caller_and_one_is_written_at_a_time(run: Run) -> None:
    big = {"w": np.ones(30_000_000, np.float32)}
    run.store.save(big, facts(1))
    assert not (run.place(1) / MANIFEST).exists()
    assert run.store.step_under_way == 1
    so_far = run.store.write_under_way_s
    assert 0 < so_far <= 4 * 30_000_000 / SLOWEST_BYTES_PER_S
    assert run.store.write_times == []
    run.store.save({"w": np.ones(1)}, facts(2))
    assert verify(run.place(1)).facts.step == 1  # the second save has waited for it
    assert run.store.write_times[0] >= so_far
    assert run.store.wait() is None
    assert run.store.step_under_way is None
    assert run.store.write_under_way_s == 0
    assert len(run.store.write_times) == 2


def test_a_run_that_fails_waits_for_the_checkpoint_that_is_being_written_and_names_it(run: Run) -> None:
    run.store.save({"w": np.ones(30_000_000, np.float32)}, facts(1))
    assert run.store.step_under_way == 1
    run.store.finish(600)
    assert verify(run.place(1)).facts.step == 1
    assert run.said == [
        "the run has failed; waiting for the checkpoint of step 1, which is being written",
        f"the last good checkpoint: {run.place(1)}",
    ]


def test_a_run_that_fails_waits_no_longer_than_the_watch_lets_it(run: Run) -> None:
    run.save(1)
    run.store.save({"w": np.ones(30_000_000, np.float32)}, facts(2))
    run.store.finish(0.0)
    assert run.said[1:] == [
        "warning: the checkpoint of step 2 was not written within 0 s.",
        f"the last good checkpoint: {run.place(1)}",
    ]
    run.store.wait()


def test_a_run_that_fails_before_it_has_saved_names_the_checkpoint_that_it_began_with(run: Run) -> None:
    run.save(1, 2)
    again = Run(run.directory)
    assert again.found() == 2
    again.store.finish(600)
    assert again.said == [f"the last good checkpoint: {run.place(2)}"]


def test_a_run_that_fails_before_its_first_checkpoint_has_nothing_to_say_of_one(run: Run) -> None:
    run.store.finish(600)
    assert run.said == []


# Disks.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path, leave_bytes: int) -> Path:
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "others").write_bytes(b"x" * (free - leave_bytes))
    return disk / "others"


@pytest.mark.parametrize("leave_bytes", [0, 4096, 300_000, 1_004_000])
def test_a_full_disk_keeps_the_last_good_one_and_the_next_save_tries_again(small_disk: Path, leave_bytes: int) -> None:
    """However far a save gets: no folder, an empty one, part of the data, the data without the manifest."""
    run = Run(small_disk / "run")

    def save(step: int) -> str | None:
        run.store.save({**arrays(step), "big": np.full(250_000, step, np.float32)}, facts(step))
        return run.store.wait()

    assert save(1) is None
    others = fill(small_disk, leave_bytes)
    failure = save(2)
    assert failure is not None
    assert failure.startswith(f"the checkpoint of step 2 was not written to {run.folder}: No space left on device")
    (line,) = run.said
    assert line == f"warning: {failure}. The last good one: {run.place(1)}. The next save tries again."
    assert run.names() == {"step-000000001"}  # nothing half-written takes up room
    assert Run(run.directory).found() == 1
    others.unlink()
    assert save(3) is None
    assert run.found() == 3
    assert len(run.said) == 1


def test_a_disk_that_turns_read_only(small_disk: Path) -> None:
    run = Run(small_disk / "run").save(1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    failure = run.save(2).store.wait()
    assert failure is not None
    assert "Read-only file system" in failure
    assert Run(run.directory).found() == 1
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert run.save(3).store.wait() is None


def test_a_save_that_fails_counts_whatever_the_disk_answers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS whose handles are stale: `Path.is_dir` raises that."""
    run.save(1)

    def stale(*_: Any, **__: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(manager, "write", stale)
    stat = os.stat
    monkeypatch.setattr(
        os, "stat", lambda path, **how: stale() if run.directory in (path, Path(path).parent) else stat(path, **how)
    )
    failure = run.save(2).store.wait()
    monkeypatch.undo()
    assert failure is not None
    assert "Stale file handle" in failure
    assert "Stale file handle" in run.said[-1]
    assert run.said[-1].endswith(f"The last good one: {run.folder / 'step-000000001'}. The next save tries again.")
    assert run.store.given_up is None  # the disk may come back


def test_checkpoints_on_a_disk_that_is_not_mounted_are_not_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path / "scratch")
    for resume in ("auto", "never"):
        with pytest.raises(UserError, match="checkpoints is a link to nothing: is its disk mounted"):
            layout.find_start(tmp_path / "checkpoints", resume, layout.read_manifest)


def test_a_run_directory_that_vanished_is_not_made_anew(run: Run) -> None:
    run.save(1)
    run.directory.rename(run.directory.with_name("elsewhere"))
    failure = run.save(2).store.wait()
    assert failure is not None
    assert f"No such file or directory: {run.folder}" in failure
    assert run.said[-1].endswith("The last good one: none. The run ends.")
    assert run.store.given_up is not None
    assert run.store.given_up.startswith(f"output_dir: {run.directory} is gone: removed, renamed or no longer mounted")
    assert not run.directory.exists()
    run.directory.with_name("elsewhere").rename(run.directory)
    assert run.save(3).store.wait() is None
    assert run.found() == 3
    assert run.store.given_up is None


def test_a_run_ends_after_so_many_failed_saves_in_a_row(run: Run) -> None:
    run.store = CheckpointStore(run.folder, 3, lambda: True, max_failed_saves=2)
    run.save(1)
    run.folder.rename(run.folder.with_name("elsewhere"))
    run.folder.write_text("in the way")
    run.save(2)
    assert run.store.given_up is None
    assert run.said[-1].endswith("The next save tries again.")
    run.folder.unlink()
    run.save(3)
    run.folder.rename(run.folder.with_name("away"))
    run.folder.write_text("in the way")
    run.save(4)
    assert run.store.given_up is None  # not in a row with the first
    failure = run.save(5).store.wait()
    assert run.said[-1] == f"warning: {failure}. The last good one: none. The run ends."
    assert run.store.given_up == (
        f"2 saves in a row have failed (checkpoint.max_failed_saves): {failure}. The last good one: none. "
        "See to the disk, then start again."
    )
    run.save(5)  # as the end of the run does, which says nothing new
    assert run.said.count(run.said[-1]) == 1


def test_an_old_checkpoint_with_a_file_of_the_users_stays_and_that_is_said_once(run: Run) -> None:
    run.store = CheckpointStore(run.folder, 1, lambda: True)
    run.save(1)
    run.store.wait()
    (run.place(1) / "notes.txt").write_text("mine")
    run.save(2, 3, 4)
    run.store.wait()
    assert (run.place(1) / "notes.txt").read_text() == "mine"
    assert len([line for line in run.said if "older checkpoints remain" in line]) == 1


def test_a_run_trains_on_after_any_number_of_failed_saves_if_it_is_asked_to(run: Run) -> None:
    run.folder.write_text("in the way")
    run.save(*range(1, 10))
    assert "File exists" in (run.store.wait() or "")
    assert run.store.given_up is None


def test_a_disk_without_room_for_one_checkpoint_is_refused_and_one_for_some_is_said(small_disk: Path) -> None:
    run = Run(small_disk / "run")
    run.store.check_room(1_000_000, most=4)
    assert run.said == []
    run.store.check_room(1_500_000, most=4)
    (line,) = run.said
    assert line.startswith(f"warning: output_dir: the disk of {run.directory} has 4.2 MB free; checkpoints will take ")
    assert "up to 6.0 MB, 1.5 MB each." in line
    with pytest.raises(UserError, match=r"has 4\.2 MB free; expected 4\.3 MB or more, which one checkpoint takes"):
        run.store.check_room(4_300_000, most=4)


def test_checkpoints_that_are_there_need_no_room_again(small_disk: Path) -> None:
    run = Run(small_disk / "run").save(1, 2, 3)
    fill(small_disk, 1_500_000)
    run.store.check_room(1_300_000, most=4)
    assert run.said == []
    for most in (3, 4):  # one more is there while it is written, however many are
        with pytest.raises(UserError, match=r"expected 1\.6 MB or more, which one checkpoint takes"):
            run.store.check_room(1_600_000, most=most)


def test_a_file_system_that_does_not_tell_its_size_has_room(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, used=0, free=0))
    run.store.check_room(10**12, most=4)
    assert run.said == []


@pytest.mark.parametrize(
    ("config", "saves", "most"),
    [
        (CheckpointConfig(), 10, 4),
        (CheckpointConfig(), 2, 2),
        (CheckpointConfig(every_minutes=5), 2, 4),
        (CheckpointConfig(keep=1, best=Watched()), 9, 3),
    ],
)
def test_one_more_checkpoint_than_are_kept_is_there_at_most(config: CheckpointConfig, saves: int, most: int) -> None:
    assert most_at_once(config, saves) == most


def test_a_checkpoints_folder_that_vanished_is_made_anew(run: Run) -> None:
    run.save(1)
    shutil.rmtree(run.folder)
    assert run.save(2).store.wait() is None
    run.folder.rename(run.folder.with_name("old"))
    run.folder.write_text("in the way")
    assert "File exists" in (run.save(3).store.wait() or "")


# kill -9.


def save_forever(directory: Path, careless: bool) -> None:
    """Goes on from what is there, as a run would; notes each step that it was told is whole. Killed from outside."""
    run = Run(directory, keep=2)
    found = run.store.find("auto")
    step = 1 if found is None else found.facts.step + 1
    with (directory / "whole").open("a", buffering=1) as whole:
        while True:
            content = {**arrays(step), **{f"big{i}": np.full(50_000, step, np.float32) for i in range(4)}}
            for _ in range(1 + step % 2):  # every other step twice, so that one is replaced too
                if careless:
                    run.folder.mkdir(exist_ok=True)
                    shutil.rmtree(run.place(step), ignore_errors=True)
                    tensors.write(run.place(step), content, facts(step))
                else:
                    run.store.save(content, facts(step, Best("eval/loss", 1 / step, step - step % 5)))
                    assert run.store.wait() is None
            whole.write(f"{step}\n")
            step += 1


def kill_savers(directory: Path, *, rounds: int, careless: bool = False) -> Iterator[set[str]]:
    """Starts savers and kills each at a random moment; yields what lies in the folder then."""
    # Forks of one process that has imported TensorFlow, which would take most of the time.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tensorflow", "horovod_train.checkpoint.manager"])
    draw = random.Random(1)
    directory.mkdir()
    whole = directory / "whole"
    whole.touch()
    for _ in range(rounds):
        before = whole.stat().st_size
        saver = processes.Process(target=save_forever, args=(directory, careless), daemon=True)
        saver.start()
        limit = time.monotonic() + HANGS_AFTER_S
        while whole.stat().st_size == before and saver.is_alive():
            assert time.monotonic() < limit
            time.sleep(0.002)
        assert saver.is_alive()
        time.sleep(draw.uniform(0, 0.1))
        saver.kill()
        saver.join()
        yield set(os.listdir(directory / "checkpoints"))


@pytest.mark.parametrize("rounds", [5, pytest.param(15, marks=pytest.mark.long)])
def test_kill_9_at_any_moment_leaves_whole_checkpoints(tmp_path: Path, rounds: int) -> None:
    hits = 0
    for number, names in enumerate(kill_savers(tmp_path / "run", rounds=10 * rounds), start=1):
        hits += any(name.endswith(".partial") for name in names)
        whole = int((tmp_path / "run" / "whole").read_text().splitlines()[-1])
        run = Run(tmp_path / "run", keep=2)  # as a run that starts: removes what was left
        assert not [name for name in run.names() if name.startswith(".step")]
        places = sorted(name for name in run.names() if name.startswith("step-"))
        for name in places:
            found = verify(run.folder / name)
            assert f"step-{found.facts.step:09d}" == name
            values = {float(value) for array in read_arrays(found).values() for value in np.unique(array)}
            assert values == {found.facts.step}
        # What was said to be whole is there, and at most one that was whole before it could be said.
        assert run.found() in (whole, whole + 1)
        assert run.said == []
        assert len(places) >= min(2, whole)
        # Until some have come inside a save; without those the test would show nothing.
        if number >= rounds and hits >= rounds // 5:
            break
    assert hits >= rounds // 5


@pytest.mark.long
def test_kill_9_damages_what_is_written_in_place(tmp_path: Path) -> None:
    """The same kills, of a saver that writes straight under the final name: the test above can fail."""
    damaged: list[str] = []
    for names in kill_savers(tmp_path / "run", rounds=30, careless=True):
        with suppress(Damaged):
            verify(tmp_path / "run" / "checkpoints" / max(names))
            continue
        damaged.append(max(names))
        break
    assert damaged


@pytest.mark.parametrize(
    ("left", "found"),
    [
        ({".step-000000002.replaced": 2, ".step-000000002.ab.partial": 2}, 2),  # between the two renames
        ({".step-000000002.replaced": 2, "step-000000002": 2}, 2),  # after them
        ({".step-000000002.ab.partial": 2}, 1),  # before: complete, but nobody was told so
        ({".step-000000002.removed": 2}, 1),
    ],
)
def test_a_replacement_that_was_cut_short_loses_nothing(run: Run, left: dict[str, int], found: int) -> None:
    run.save(1, 2)
    whole = run.place(2).rename(run.directory / "whole")
    for name in left:
        shutil.copytree(whole, run.folder / name)
    again = Run(run.directory)
    assert again.found() == found
    assert not [name for name in run.names() if name.startswith(".")]
    assert json.loads((run.place(found) / MANIFEST).read_text())["step"] == found


# What others put there.


def test_what_others_put_into_a_checkpoint_keeps_it_and_is_said(run: Run) -> None:
    run.save(100, 200, 300)
    (run.place(100) / "notes.txt").write_text("mine")
    run.save(400, 500)
    assert run.names() == {run.place(step).name for step in (100, 300, 400, 500)}
    assert (run.place(100) / "notes.txt").read_text() == "mine"
    assert "holds notes.txt, which is no part of a checkpoint" in run.said[0]


def test_folders_that_only_look_like_leftovers_stay(run: Run) -> None:
    run.save(100)
    mine = [".step-000000001.mine", ".step-notes", ".step-000000002.removed"]
    for name in mine:
        (run.folder / name).mkdir()
        (run.folder / name / "notes.txt").write_text("mine")
    again = Run(run.directory)
    assert all((run.folder / name / "notes.txt").read_text() == "mine" for name in mine)
    assert "cannot remove what an interrupted save left" in again.said[0]
    assert again.found() == 100


def test_what_cannot_be_removed_keeps_no_replaced_checkpoint_away(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(100, 200)
    mine = run.folder / ".step-000000100.removed"
    (mine / "folder").mkdir(parents=True)
    run.place(200).rename(run.folder / ".step-000000200.replaced")
    found, glob = [mine, run.folder / ".step-000000200.replaced"], Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, name: found if name == ".step-*" else glob(self, name))
    again = Run(run.directory)
    assert "cannot remove what an interrupted save left" in again.said[0]
    assert again.found() == 200


def test_a_file_of_another_that_is_called_best_stays(run: Run) -> None:
    run.folder.mkdir()
    (run.folder / "best").write_text("mine")
    run.save(100, 200, best=Best("loss", 0.5, 100))
    assert (run.folder / "best").read_text() == "mine"
    assert len(run.said) == 1  # not at each save


def test_the_link_to_the_best_goes_with_what_it_points_at(run: Run) -> None:
    """As where a run goes on from before its best."""
    run.save(400).save(500, best=Best("loss", 0.4, 500))
    assert os.readlink(run.folder / "best") == run.place(500).name
    run.store.rewind(400)
    assert not os.path.lexists(run.folder / "best")


def test_a_start_makes_the_link_to_the_best_that_a_kill_has_prevented(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run may have come to its end with that save, so that no other one does."""
    run.save(100, 200, best=Best("loss", 0.5, 100))
    monkeypatch.setattr(run.store, "_remove_old", lambda facts: None)  # which comes after the rename
    run.save(300, best=Best("loss", 0.4, 300))
    link = run.folder / "best"
    again = Run(run.directory)
    assert again.found() == 300
    assert os.readlink(link) == run.place(100).name  # a start that is refused has changed nothing
    again.store.rewind(300, best=300)
    assert os.readlink(link) == run.place(300).name
    made = link.lstat().st_ino
    Run(run.directory).store.rewind(300, best=300)
    assert link.lstat().st_ino == made
    Run(run.directory).store.rewind(200, best=100)  # as with the path of an older one
    assert os.readlink(link) == run.place(100).name
    Run(run.directory).store.rewind(200, best=150)  # which was not saved
    assert os.readlink(link) == run.place(100).name
    assert not [line for line in again.said if "cannot" in line]


def test_the_best_of_before_stays_where_the_best_is_sought_anew(tmp_path: Path) -> None:
    """As with another metric, or other records to evaluate on: no later value says that it is the worse model."""
    run = Run(tmp_path / "run", keep=1).save(100, best=Best("accuracy", 0.5, 100)).save(200)
    run.store.seek_best_anew()
    assert "former-best-step-000000100" in run.names()  # from now on, whenever the run is killed
    run.save(300)
    run.save(400, best=Best("loss", 0.5, 400))
    run.save(500, best=Best("loss", 0.4, 500)).save(600)
    former = {"former-best-step-000000100", "step-000000100"}
    assert run.names() == {"best", *former, "step-000000500", "step-000000600"}
    assert os.readlink(run.folder / "former-best-step-000000100") == "step-000000100"
    run.store.seek_best_anew()
    run.save(700, best=Best("mae", 0.5, 700))
    former |= {"former-best-step-000000500", "step-000000500"}
    assert run.names() == {"best", *former, "step-000000700"}
    run.store.rewind(400)  # nothing dangles
    assert run.names() == {"former-best-step-000000100", "step-000000100"} | {
        f"step-000000{step}.abandoned" for step in (500, 700)
    }


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew_unasked(tmp_path: Path) -> None:
    """As after a scratch disk was cleared: its metrics would be lost too. A killed run has no summary.json."""
    run = Run(tmp_path / "run").save(1).save(2)
    (run.directory / "summary.json").write_text('{"steps": 184, "finished": true}')
    assert run.found() == 2
    shutil.rmtree(run.folder)
    for step in (184, 2):
        refused = rf"came to step {step}, but not its checkpoints.*or say so: --resume never"
        with pytest.raises(UserError, match=refused):
            run.store.find("auto")
        (run.directory / "summary.json").unlink(missing_ok=True)
    other = Run(tmp_path / "other").save(7)
    with pytest.raises(UserError, match=r"came to step 2, but not its checkpoints.*or choose another --output-dir"):
        run.store.find(str(other.place(7)))
    assert run.store.find("never") is None
    run.store.rewind(0)
    assert run.store.find("auto") is None
    assert run.store.find(str(other.place(7))) is not None


def test_the_newest_step_is_told_beside_the_checkpoints(tmp_path: Path) -> None:
    run = Run(tmp_path / "run").save(100).save(200)
    saved = run.directory / "saved.json"
    assert json.loads(saved.read_text()) == {"step": 200}
    run.store.rewind(100)
    assert json.loads(saved.read_text()) == {"step": 100}
    draft = run.directory / ".saved.json.01234567.partial"
    draft.write_text('{"st')
    Run(tmp_path / "run")
    assert not draft.exists()


def test_a_file_of_the_users_with_that_name_is_not_replaced(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    (run.directory / "saved.json").write_text("[]")
    with pytest.raises(UserError, match=r"saved\.json is not a run's newest step, and a run would replace it"):
        Run(tmp_path / "run")


def test_the_best_stays_where_a_run_goes_on_without_one_until_it_has_another(tmp_path: Path) -> None:
    """As where checkpoint.best is left out, or names another metric."""
    run = Run(tmp_path / "run", keep=1).save(100, best=Best("loss", 0.5, 100)).save(200, 300)
    assert run.names() == {"best", "step-000000100", "step-000000300"}
    run.save(400, best=Best("accuracy", 0.5, 400)).save(500)
    assert run.names() == {"best", "step-000000400", "step-000000500"}
    (run.folder / "best").unlink()
    run.save(600)
    assert run.names() == {"step-000000600"}


def test_settings_that_the_version_of_then_had_not_are_todays_defaults(run: Run) -> None:
    run.save(100)
    told = verify(run.place(100)).facts
    assert told.setting("checkpoint.resume") == "auto"
    assert told.setting("seed") == 1
    assert told.setting("checkpoint.best") is None
    assert told.setting("data.global_batch_size") is None
    assert told.setting("early_stopping.metric") == "loss"
    assert dataclasses.replace(told, config={}).setting("checkpoint.resume") == "auto"
    found = run.store.find(str(run.directory))  # not "auto", so it must have begun elsewhere
    assert found is not None


def test_a_file_system_that_fails_for_a_moment_damages_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(1)
    failures, sha256 = [OSError(errno.ESTALE, "Stale file handle")] * 2, layout.sha256

    def failing(path: Path) -> str:
        if failures:
            raise failures.pop()
        return sha256(path)

    monkeypatch.setattr(layout, "sha256", failing)
    monkeypatch.setattr(layout, "_PAUSES_S", (0.0, 0.0))
    assert run.found() == 1
    assert not failures
    failures += [OSError(errno.EACCES, "Permission denied")] * 3
    with pytest.raises(UserError, match=r"checkpoint\.resume: auto: cannot read .*: Permission denied"):
        Run(run.directory).store.find("auto")
    assert run.names() == {run.place(1).name}
    failures += [OSError(errno.EIO, "Input/output error")] * 3
    again = r"none of the 1 checkpoint\(s\) .* can be read; the newest, step 1: Input/output error. Start again"
    with pytest.raises(ReadFailed, match=again):  # not a call to remove them
        Run(run.directory).store.find("auto")


def test_a_checkpoint_is_read_again_when_its_file_system_answers_before_an_older_one_is_taken(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A soft mount of NFS answers EIO for some seconds; a sector that is lost does so for ever."""
    run.save(1, 2, 3)
    monkeypatch.setattr(layout, "_PAUSES_S", ())
    failing, sha256 = [run.place(3), run.place(2)], layout.sha256

    def read(path: Path) -> str:
        if path.parent in failing:
            failing.remove(path.parent)
            raise OSError(errno.EIO, "Input/output error")
        return sha256(path)

    monkeypatch.setattr(layout, "sha256", read)
    assert run.found() == 3
    assert run.names() == {run.place(step).name for step in (1, 2, 3)}
    failing += [run.place(3), run.place(3), run.place(2)]
    assert run.found() == 2
    assert run.names() == {run.place(1).name, run.place(2).name, f"{run.place(3).name}.damaged"}


def test_settings_that_matter_are_compared_with_those_of_then() -> None:
    then, _ = load_config([MINIMAL], ["optimizer={name: sgd, options: {momentum: 0.9}}", "train.l2=0.1"])
    changed, _ = load_config(
        [MINIMAL],
        [
            "optimizer={name: sgd, options: {nesterov: true}}",
            "train.epochs=5",
            "data.source={name: 'a:B'}",
            "data.eval=b",
            "model.options.blocks=2",
            "output_dir=elsewhere",
            "log.every_steps=7",
            "checkpoint={keep: 9, best: {metric: loss}}",
            "data.read_threads=1",
        ],
    )
    kept = dataclasses.replace(facts(7), config=json.loads(json.dumps(as_dict(then))))
    assert kept.changes(then) == {}
    changes = kept.changes(changed)
    assert changes == {
        "data.source.name": "unset → a:B",
        "data.eval": '[] → ["b"]',
        "model.options.blocks": "unset → 2",
        "optimizer.options.momentum": "0.9 → unset",
        "optimizer.options.nesterov": "unset → true",
        "train.epochs": "3 → 5",
        "train.l2": "0.1 → 0.0",
        "checkpoint.best.metric": "unset → loss",
        "checkpoint.best.mode": "unset → min",
    }
    assert kept.changes(changed, ["model", "train.l2"]).keys() == {"model.options.blocks", "train.l2"}
    earlier = dataclasses.replace(kept, config={"train": {"l2": 0.1}})  # of a version that had few settings
    assert earlier.changes(then, ["train.l2", "train.synchronization", "data.retry_s"]) == {}
