"""A save copies the state once: into the same memory each time, and not while the save before still reads it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from horovod_train.checkpoint import manager
from horovod_train.checkpoint.layout import CHECKPOINTS, Facts, open_checkpoint, steps_in, verify
from horovod_train.checkpoint.manager import CheckpointStore, Store
from horovod_train.checkpoint.tensors import read_arrays, write
from horovod_train.config.settings import Config, Spec
from horovod_train.data.audit import Audit
from horovod_train.data.model_inputs import ModelInputs
from horovod_train.distributed.layer_contents import contents
from horovod_train.distributed.watchdog.heartbeat import Heartbeat
from horovod_train.output.run_dir import Output, RunOutput
from horovod_train.training.callbacks import load_callbacks
from horovod_train.training.hooks import every
from horovod_train.training.hooks.evaluate import build_callback_hooks
from horovod_train.training.hooks.save import Save, save_by_time
from horovod_train.training.open_run import Stopwatch
from horovod_train.training.state import Copies, TrainState
from horovod_train.training.steps.figures import Figures
from horovod_train.training.steps.optimizers import Optimizers
from horovod_train.training.sync import Local

VALUES: dict[str, np.ndarray] = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.array([1.5, -2.0], np.float16),
    "number": np.asarray(7, np.int64),
    "empty": np.zeros((0, 3), np.float32),
    "flags": np.array([True, False]),
}


def variables() -> dict[str, tf.Variable]:
    return {name: tf.Variable(value) for name, value in VALUES.items()}


@pytest.mark.parametrize("reserves", [False, True])
def test_copies_are_taken_into_the_same_memory(reserves: bool) -> None:
    copies, given = Copies(), variables()
    if reserves:
        copies.reserve(given)
    first = copies.take(given)
    for name, value in VALUES.items():
        assert (first[name].dtype, first[name].shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(first[name], value)
    given["matrix"].assign(-given["matrix"])
    np.testing.assert_array_equal(first["matrix"], VALUES["matrix"])  # a copy
    again = copies.take(given)
    assert all(again[name] is first[name] for name in VALUES)
    np.testing.assert_array_equal(again["matrix"], -VALUES["matrix"])


def test_arrays_of_every_kind_are_written_without_a_change(tmp_path: Path) -> None:
    """Those that the tensors share memory with, and those that have to be copied for that."""
    read_only = np.frombuffer(b"12345678", np.float32)
    others = {"read_only": read_only, "part": VALUES["matrix"][:, 1:], "bfloat16": np.ones(3, ml_dtypes.bfloat16)}
    facts = Facts(step=1, epoch=0, records=0, ranks=1, config={}, versions={})
    write(tmp_path / "a", {**VALUES, **others}, facts)
    saved = read_arrays(verify(tmp_path / "a"))
    assert saved.keys() == {*VALUES, *others}
    for name, value in {**VALUES, **others}.items():
        assert (saved[name].dtype, saved[name].shape) == (value.dtype, value.shape)
        assert saved[name].tobytes() == value.tobytes()


def test_the_watch_sees_a_large_save_go_on_until_its_disk_counts_as_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, may_end = 1000.0, threading.Event()
    monkeypatch.setattr(manager, "write", lambda *_: may_end.wait())
    monkeypatch.setattr("horovod_train.checkpoint.manager.time.perf_counter", lambda: now)
    store = CheckpointStore(tmp_path / CHECKPOINTS, keep=1)
    facts = Facts(step=1, epoch=0, records=0, ranks=1, config={}, versions={})
    store.save({"model/table": np.zeros(25_000_000, np.float32)}, facts)
    shown = []
    for now in (1000.0, 1001.0, 1002.0, 1003.0, 1009.0):  # noqa: B007
        shown.append(store.describe_write())
    assert shown == [f"writing 100 MB for {seconds} s" for seconds in (0, 1, 2, 2, 2)]
    may_end.set()
    store.wait()
    assert store.describe_write() == ""


class CheckedCopies(Copies):
    """Notes whether a save is under way when the next copy is taken."""

    def __init__(self, store: CheckpointStore) -> None:
        super().__init__()
        self.store, self.taken, self.taken_too_early = store, 0, 0

    def take(self, variables: Mapping[str, tf.Variable]) -> dict[str, np.ndarray]:
        self.taken += 1
        self.taken_too_early += self.store.step_under_way is not None
        return super().take(variables)


class Impatient(CheckpointStore):
    """Waits for nothing before the next copy is taken, as if a save forgot to."""

    def wait(self) -> str | None:
        return None


class Alone:
    """A group of one rank, whose sums are its own numbers."""

    rank, size, is_root, controller = 0, 1, True, "MPI"
    heartbeat = Heartbeat()

    def sum(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        return [np.asarray(array, np.float64) for array in arrays]

    average = sum

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        return value

    def to_root(self, rows: np.ndarray) -> np.ndarray:
        return rows


def run_of(store: Store) -> Any:
    """Return what Save needs of a run on one rank."""
    model = keras.Sequential([keras.Input((2000,)), keras.layers.Dense(4000)])
    optimizer, optimizers = keras.optimizers.SGD(), Optimizers({})
    optimizer.build(model.trainable_variables)
    optimizers.by_path["optimizer"] = optimizer
    callbacks = SimpleNamespace(digests=dict, state=dict, epoch_ended_at=0, train_ended_at=-1, hooks_left_at=-1)
    best = SimpleNamespace(metric="loss", value=tf.Variable(0.0), step=tf.Variable(-1))
    return SimpleNamespace(
        clock=Stopwatch(),
        checkpoint=None,
        config=Config(),
        group=Alone(),
        output=Output(),
        parts=SimpleNamespace(
            best=best,
            callbacks=callbacks,
            eval=None,
            evaluated=tf.Variable(-1),
            freezing=SimpleNamespace(trained=()),
            train=SimpleNamespace(
                fingerprint="",
                files="",
                class_names={},
                features={},
                steps_per_epoch=1,
                model_inputs=ModelInputs((), is_dict=False),
            ),
            train_step=SimpleNamespace(figures=Figures({}, []), skipped=0, skipped_in_a_row=0),
            eval_step=None,
            users_hooks=(),
        ),
        state=TrainState(model, optimizers),
        stopping=SimpleNamespace(note_save=lambda seconds: None),
        store=store,
    )


def save_in_a_row(store: CheckpointStore) -> CheckedCopies:
    """Save four steps, in each of which every weight is the number of the step; each is due while one is written."""
    run, copies = run_of(store), CheckedCopies(store)
    save = Save(run, Audit(), {})
    save._copies = copies
    for step in range(1, 5):
        for weight in run.state.model.weights:
            weight.assign(tf.fill(weight.shape, float(step)))
        run.state.step.assign(step)
        save(run, step)
    return copies


def test_a_save_that_is_due_while_one_is_written_waits_before_it_copies(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / CHECKPOINTS, keep=9)
    copies = save_in_a_row(store)
    assert (copies.taken, copies.taken_too_early) == (4, 0)
    assert store.wait() is None
    for step in range(1, 5):
        saved = read_arrays(open_checkpoint(str(tmp_path / "checkpoints" / f"step-{step:09}"), "test"))
        (kernel,) = (array for name, array in saved.items() if name.endswith("kernel"))
        np.testing.assert_array_equal(np.unique(kernel), [step])


def test_what_could_not_be_written_is_saved_again_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError(errno.EDQUOT, "Disk quota exceeded")]

    def failing(*given: Any) -> None:
        if failures:
            raise failures.pop()
        write(*given)

    monkeypatch.setattr(manager, "write", failing)
    store = CheckpointStore(tmp_path / CHECKPOINTS, keep=9)
    run = run_of(store)
    save = Save(run, Audit(), {})
    save.at_end(run, 0)
    assert store.wait() is None
    assert steps_in(store.checkpoints.folder) == []  # nothing has been trained
    run.state.step.assign(1)
    save(run, 1)
    assert "Disk quota exceeded" in (store.wait() or "")
    save(run, 1)
    assert steps_in(store.checkpoints.folder) == []
    save.at_end(run, 1)
    assert store.wait() is None
    assert steps_in(store.checkpoints.folder) == [1]


@pytest.mark.parametrize("by", ["callbacks", "hooks"])
def test_an_end_without_a_step_is_saved_once(tmp_path: Path, by: str) -> None:
    """As after a stop at the last step: the next start has only the end to do, and the one after that has nothing."""
    store = CheckpointStore(tmp_path / CHECKPOINTS, keep=9)
    run, written = run_of(store), []
    state: Mapping[str, Any] = {}
    run.outside_training = lambda *about: nullcontext()
    run.parts.users_hooks = (every(None, lambda run, step: None, at_end="done"),) if by == "hooks" else ()
    for _ in range(2):
        run.parts.callbacks = load_callbacks([Spec("user_callbacks:Halves")] if by == "callbacks" else [])
        run.parts.callbacks.restore(state, 0)
        for named in run.parts.callbacks.named:
            named.callback.set_model(run.state.model)
        save = Save(run, Audit(), {})
        for hook in build_callback_hooks(run, []):
            if hook.at_end == "done":
                hook.function(run, 0)
        save.at_end(run, 0)
        assert store.wait() is None
        found = open_checkpoint(str(tmp_path), "test")
        state = found.facts.callbacks
        written.append((tmp_path / "checkpoints" / found.folder.name).stat().st_ino)
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("average_every", "per_call", "steps"),
    [(None, 2, [2, 4, 6, 8, 10, 12]), (5, 2, [5, 10]), (2, 5, [6, 12]), (3, 3, [3, 6, 9, 12])],
)
def test_the_clock_decides_only_among_steps_at_which_ranks_exchange_anyway(
    tmp_path: Path, average_every: int | None, per_call: int, steps: list[int]
) -> None:
    """Each save of local steps averages the weights: at steps of the clock's the result would depend on the clock."""
    run = run_of(CheckpointStore(tmp_path / CHECKPOINTS, keep=9))
    if average_every:
        run.state.synchronization = Local(run.group, run.state.model, average_every)
    hook = save_by_time(run, 0.5, Save(run, Audit(), {}), steps_per_call=per_call)
    assert [step for step in range(1, 13) if hook.is_due(step)] == steps
    unasked = save_by_time(run, None, Save(run, Audit(), {}), steps_per_call=per_call)
    assert not any(map(unasked.is_due, range(1, 13)))


def test_a_save_that_did_not_wait_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_taken = threading.Event()

    def late(*given: Any) -> None:
        all_taken.wait(300)
        write(*given)

    monkeypatch.setattr(manager, "write", late)
    store = Impatient(tmp_path / "checkpoints", 9, lambda: True)
    assert save_in_a_row(store).taken_too_early == 3
    all_taken.set()
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(300)


def test_a_checkpoint_tells_the_rates_from_before_callbacks_set_them(tmp_path: Path) -> None:
    run = run_of(CheckpointStore(tmp_path / CHECKPOINTS, keep=9))
    run.state.optimizer.by_path["optimizer"].learning_rate = 0.5
    Save(run, Audit(), {})(run, 1)
    assert run.store.wait() is None
    assert list(open_checkpoint(str(tmp_path), "test").facts.built_rates.values()) == [pytest.approx(0.01)]


def test_a_checkpoint_tells_what_layers_hold_besides_weights(tmp_path: Path) -> None:
    run = run_of(CheckpointStore(tmp_path / CHECKPOINTS, keep=9))
    norm = run.state.model.layers[-1]
    norm.center = np.ones(3)
    held = contents(run.state.model)
    save = Save(run, Audit(), held)
    assert list(held) == [f"constant center of layer {norm.path}"]
    save(run, 1)
    assert run.store.wait() is None
    assert open_checkpoint(str(tmp_path), "test").facts.contents == held


def test_the_audit_is_on_disk_before_ranks_meet_for_the_last_time(tmp_path: Path) -> None:
    done: list[str] = []

    class Noting(Alone):
        def to_root(self, rows: np.ndarray) -> np.ndarray:
            done.append("ranks met")
            return rows

    run = run_of(CheckpointStore(tmp_path / CHECKPOINTS, keep=9))
    run.group = Noting()
    audit: Any = SimpleNamespace(flush=lambda: done.append("audit"))
    Save(run, audit, {})(run, 1)
    assert run.store.wait() is None
    assert done == ["audit", "ranks met"]


def note_synced(folder: Path, monkeypatch: pytest.MonkeyPatch, about: Callable[[Path], Any]) -> list[Any]:
    """What about says of each path below the folder when it has been written to disk, as a list that grows."""
    synced: list[Any] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_relative_to(folder):  # a thread of an earlier test may still be writing
            synced.append(about(path))

    monkeypatch.setattr(os, "fsync", noting)
    return synced


def test_all_of_a_checkpoint_is_on_disk_before_its_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = note_synced(tmp_path, monkeypatch, lambda path: path.name)
    write(tmp_path / "saved", VALUES, Facts(step=0, epoch=0, records=0, ranks=1, config={}, versions={}))
    assert synced == ["state.data-00000-of-00001", "state.index", "manifest.json", "saved"]


def test_the_name_of_a_checkpoint_is_on_disk_when_its_save_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = note_synced(tmp_path, monkeypatch, lambda path: (path.name, path.is_dir() and os.listdir(path)))
    store = CheckpointStore(tmp_path / CHECKPOINTS, keep=2)
    store.save(VALUES, Facts(step=1, epoch=0, records=0, ranks=1, config={}, versions={}))
    assert store.wait() is None
    assert ("checkpoints", ["step-000000001"]) in synced


def test_metrics_are_on_disk_before_the_checkpoint_that_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = note_synced(tmp_path, monkeypatch, lambda path: (path.name, path.stat().st_size))
    store = CheckpointStore(tmp_path / CHECKPOINTS, keep=9)
    run = run_of(store)
    run.output = RunOutput(tmp_path)
    run.output.append_metrics("train", 1, 0, {"loss": 1.0})
    save = Save(run, Audit(), {})
    run.state.step.assign(1)
    save(run, 1)
    assert store.wait() is None
    assert synced[0] == ("metrics.jsonl", (tmp_path / "metrics.jsonl").stat().st_size)
    assert len(synced) > 1
