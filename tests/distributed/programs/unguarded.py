"""Runs that are stopped and resumed in one process, each with one guard switched off: what the tests must notice."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from facts import leave
from small_run import config_of

from horovod_train import main
from horovod_train.checkpoint import tensors
from horovod_train.distributed import consistency
from horovod_train.distributed.group import WorkerGroup
from horovod_train.distributed.launch import launcher
from horovod_train.training import initial_state, state
from horovod_train.training.steps import step

OUT = Path(sys.argv[1])
RANK = launcher.detect().rank
CONFIG = config_of(
    OUT,
    RANK == 0,
    num_records=52,  # which the batch does not divide
    optimizer="adam",
    lr_schedule={"base_lr": 0.01},
    train={"epochs": 10, "ema_decay": 0.9},
    log={"tensorboard": False, "progress": "plain"},
    checkpoint={"every_epochs": None, "every_steps": 9},
)
Patch = pytest.MonkeyPatch
answers: list[int] = []
broadcast = WorkerGroup.broadcast


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


def _broadcast_counters(group: WorkerGroup, variables: Sequence[tf.Variable]) -> None:
    """All else stays as each rank made it. Ranks that differed in the step would wait for each other."""
    broadcast(group, [variable for variable in variables if variable.dtype.is_integer])


def _count(group: WorkerGroup, facts: Mapping[str, str], when: str, *kind: type[Exception]) -> None:
    """In the place of consistency.check, which would end the process: notes how many different answers ranks give."""
    answers.append(len({str(rank_facts) for rank_facts in group.gather(dict(facts))}))


def lose(patch: Patch, prefix: str) -> None:
    """A resume leaves some variables as they are at a start."""

    def load(variables: dict[str, tf.Variable], *arguments: Any) -> Any:
        return tensors.load({name: v for name, v in variables.items() if not name.startswith(prefix)}, *arguments)

    patch.setattr(initial_state, "load", load)


GUARDS: dict[str, Callable[[Patch], None]] = {
    "all on": lambda patch: None,
    "seeds": lambda patch: patch.setattr(step.Seeds, "set", _nothing),
    "slots": lambda patch: lose(patch, "optimizer/"),
    "averages": lambda patch: lose(patch, "ema/"),
    "place in the data": lambda patch: lose(patch, "progress/records"),
    "own average of the loss": lambda patch: patch.setattr(state.TrainState, "restore_loss_average", _nothing),
    "broadcast": lambda patch: patch.setattr(WorkerGroup, "broadcast", _broadcast_counters),
}


def run(run_dir: Path, max_steps: int, *words: str) -> int:
    keras.utils.clear_session()  # names as in a process of its own
    words = (*words, f"train.max_steps={max_steps}", "--output-dir", str(run_dir))
    return main.main(["--config", str(CONFIG), *words])


def ending(run_dir: Path) -> str:
    """A digest of everything in the newest checkpoint."""
    found = max(path for path in (run_dir / "checkpoints").iterdir() if path.name.startswith("step-"))
    reader = tf.train.load_checkpoint(str(found / "state"))
    total = hashlib.sha256()
    for name in sorted(reader.get_variable_to_shape_map()):
        total.update(reader.get_tensor(name).tobytes())
    return total.hexdigest()


def without(*guards: str) -> dict[str, Any]:
    """How runs end that resume without one of these, beside one that is not stopped; and how often ranks differed."""
    codes = [run(OUT / "whole", 20), run(OUT / "begun", 9)]
    facts: dict[str, Any] = {"answers": {}, "codes": codes, "ends": {}, "resumed": {}}
    for name in guards:
        run_dir = OUT / name
        if RANK == 0:
            shutil.copytree(OUT / "begun", run_dir)
        with Patch.context() as patch:
            GUARDS[name](patch)
            patch.setattr(consistency, "check", _count)
            answers.clear()
            facts["resumed"][name] = run(run_dir, 20)
        facts["answers"][name] = max(answers)
        if RANK == 0:
            facts["ends"][name] = ending(run_dir)
    if RANK == 0:
        facts["whole"] = ending(OUT / "whole")
    return facts


if __name__ == "__main__":
    leave(RANK, without("all on", "broadcast"))
