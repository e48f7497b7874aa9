"""Runs with Keras callbacks that change what the trainer has, in one process: called_back_alone.py OUT."""

from __future__ import annotations

import json
import signal
from typing import Any

import keras
import user_hooks
from facts import leave
from hooked import OUT, RANK, called_back, resumed

VECTOR = ("data.shuffle=false", "model=user_models:vector", "lr_schedule.base_lr=0.3")
AVERAGED = (*VECTOR, "optimizer={name: sgd, options: {momentum: 0.9, use_ema: true, ema_momentum: 0.8}}")
FALLING = {"name": "EarlyStopping", "options": {"monitor": "falling", "mode": "max", "patience": 1}}
UNFROZEN = (
    "model={name: user_models:tiny, freeze: [dense/], unfreeze: {2: dense/}}",
    *("train.l2=0.01", "optimizer={name: sgd, options: {momentum: 0.9}}", "checkpoint.every_steps=5"),
)


def lines(name: str, **run: Any) -> dict[str, Any]:
    """What a run gives, with the losses of its lines by split and step."""
    rows = [json.loads(line) for line in (OUT / name / "metrics.jsonl").read_text().splitlines()]
    return run | {"losses": {f"{row['split']} {row['step']}": row["loss"] for row in rows}}


def meddling(**options: int) -> list[Any]:
    return [{"name": "user_callbacks:Meddles", "options": options}]


def stopping(method: str, **options: Any) -> list[Any]:
    return [{"name": "user_callbacks:StopsIn", "options": {"method": method, **options}}]


def starts_again(name: str, *given: Any) -> list[str]:
    """Where the link to the best points, before a kill could have prevented it and after another start of the run."""
    link = OUT / name / "checkpoints" / "best"
    before = link.readlink()
    link.unlink()
    called_back(name, *given)
    return [str(where) for where in (before, link.is_symlink() and link.readlink())]


INTERRUPTED = ("hooks=[user_hooks:note_evaluated_every_5]", "checkpoint.best={metric: loss}")
facts = {
    "adds": called_back("adds", ["user_callbacks:Adds", FALLING]),
    "evaluates": lines(
        "evaluates",
        **called_back("evaluates", ["user_callbacks:Evaluates"], "train.max_steps=10", "hooks=[user_hooks:evaluate]"),
    ),
    "halved": called_back("halved", ["user_callbacks:Halves"], *AVERAGED),
    "meddled": lines("meddled", **called_back("meddled", meddling(), *UNFROZEN)),
    "stopped": resumed("stopped", meddling(), *UNFROZEN, "hooks=[user_hooks:stop_at_17]"),
    "interrupted": lines("interrupted", **resumed("interrupted", meddling(interrupt_test=2), *UNFROZEN, *INTERRUPTED)),
    "hooks of interrupted": list(user_hooks.evaluated),
    "best of interrupted": starts_again("interrupted", meddling(interrupt_test=2), *UNFROZEN, *INTERRUPTED),
    "stops in a test": called_back("in a test", stopping("on_test_end"), "eval.every_steps=3"),
    "stops where an epoch begins": lines("begun", **called_back("begun", stopping("on_epoch_begin", first=2))),
    "stops at the start": called_back("at the start", stopping("on_train_begin")),
    "freezes": called_back("freezes", ["user_callbacks:Freezes"]),
    "keras": keras.__version__,
    "runs": str(OUT),
}
signal.alarm(0)  # see hooked
leave(RANK, facts)
