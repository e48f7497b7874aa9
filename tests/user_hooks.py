"""Hooks as a user would keep them in a package of their own, named `user_hooks:function`."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from horovod_train.checkpoint import manager, tensors
from horovod_train.training.hooks import StopReason, at, every

called: list[int] = []
"""Steps at which `note` was called, on this rank."""


evaluated: list[list[int]] = []
"""And those at which `note_evaluated` was, each with the step of the last evaluation then."""


def note(run: Any, step: int) -> None:
    called.append(step)


def note_evaluated(run: Any, step: int) -> None:
    evaluated.append([step, int(run.parts.evaluated)])


def ask_rank_1_to_stop(run: Any, step: int) -> StopReason | None:
    return StopReason("rank 1 has had enough", restartable=True) if run.group.rank == 1 else None


def fail_while_others_meet(run: Any, step: int) -> None:
    if run.group.rank == 1:
        raise ValueError("the hook has slipped")
    run.group.sum([1.0])


def block_checkpoints(run: Any, step: int) -> None:
    """A file takes the place of the folder of checkpoints, so that no save succeeds from now on."""
    folder = run.output.directory and run.output.directory / "checkpoints"
    if folder and not folder.is_file():
        run.store.wait()
        folder.rename(folder.with_name("saved"))
        folder.write_text("in the way")


def lose_the_directory(run: Any, step: int) -> None:
    """Another run, of another host, takes the lease; the end waits until root has seen that.

    What this one has to tell of its steps until then is not for the other's files.
    """
    if run.output.directory:
        lease = run.output.directory / "lease.json"
        other = lease.with_name("other")
        other.write_text(json.dumps(json.loads(lease.read_text()) | {"host": "node12", "token": "another"}))
        other.rename(lease)
        assert not run.stopping.lease.is_ours()
        run.output.append_metrics("eval", step, 0, {"loss": 1.0})
        run.output.append_times(step, "late", {"compute": [1.0]})


def quit_while_others_meet(run: Any, step: int) -> None:
    if run.group.rank == 1:
        sys.exit(0)
    run.group.sum([1.0])


class Quits:
    """Metrics of which the first row ends the process; a file tells whether they are open."""

    def __init__(self, directory: Path) -> None:
        self._state = directory / "quits.txt"
        self._state.write_text("open")

    def rewind(self, step: int) -> None: ...

    def write(self, *row: Any) -> None:
        sys.exit(0)

    def close(self) -> None:
        self._state.write_text("closed")


class Halves:
    """Lacks two methods of a writer of metrics."""

    def __init__(self, directory: Path) -> None: ...

    def write(self, step: int, epoch: int, split: str, values: object) -> None: ...


class Steps:
    """Metrics of which the steps go to a file, and a word once it is closed."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "steps.txt"

    def rewind(self, step: int) -> None: ...

    def write(self, step: int, *row: Any) -> None:
        with self._file.open("a") as file:
            file.write(f"{step} ")

    def close(self) -> None:
        with self._file.open("a") as file:
            file.write("closed")


def terminate_at_exit(run: Any, step: int) -> None:
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)


def halve_weights(run: Any, step: int) -> None:
    note(run, step)
    for weight in run.state.model.trainable_variables:
        weight.assign(weight / 2)


def evaluate(run: Any, step: int) -> None:
    """Evaluate records of its own by the model's `evaluate`, and predict."""
    x = np.ones((8, 6), "float32")
    run.state.model.evaluate(x, np.zeros(8, "int64"), verbose=0)
    run.state.model.predict(x, verbose=0)


halves_at_end = every(None, halve_weights, at_end="always")
terminated_at_exit = every(None, terminate_at_exit, at_end="always")
note_every_5 = every(5, note)
note_evaluated_every_5 = every(5, note_evaluated)
stop_at_6 = at([6], ask_rank_1_to_stop)
enough_at_6 = at([6], lambda run, step: StopReason("rank 1 has seen enough") if run.group.rank == 1 else None)
stop_at_10 = at([10], ask_rank_1_to_stop)
stop_at_12 = at([12], ask_rank_1_to_stop)
stop_at_17 = at([17], lambda run, step: StopReason("that is enough", restartable=True))
never = every(0, note)
at_no_time = every(None, note)
at_another_end = every(None, note, at_end="finish")
twice_in_five = every(2.5, note)  # type: ignore[arg-type]
at_a_half = at([7.0], note)  # type: ignore[list-item]
not_a_function = 3


def takes_too_little(step: int) -> None:
    """Lacks the run."""


def keep_weights(run: Any, step: int) -> None:
    """Each rank's own weights, in a file of the run's directory."""
    weights = {weight.path.replace("/", "."): weight.numpy() for weight in run.state.model.weights}
    np.savez(Path(run.config.output_dir) / f"weights-{run.group.rank}-{step}.npz", **weights)


def hold_saves(run: Any, step: int) -> None:
    """From now on a save begins and then waits as long as there is a file `hold` in the run's directory."""
    write, hold = tensors.write, Path(run.config.output_dir) / "hold"

    def held(*given: Any) -> None:
        while hold.exists():
            hold.with_name("is-held").touch()
            time.sleep(0.01)
        write(*given)

    vars(manager)["write"] = held


hold_saves_from_60 = at([60], hold_saves)
keep_weights_every_step = every(1, keep_weights)
