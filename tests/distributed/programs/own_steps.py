"""Models with steps of their own, by the trainer and by `fit` in one process: own_steps.py OUT."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import user_steps
import yaml
from facts import leave, rel_error

from horovod_train import main
from horovod_train.distributed.launch import launcher

OUT = Path(sys.argv[1])
RANK = launcher.detect().rank
RECORDS, BATCH, STEPS = 74, 16, 20  # the last of 5 steps of an epoch has 10 records
ARRAYS: dict[str, Any] = user_steps.arrays(RECORDS)
EVAL: dict[str, Any] = user_steps.arrays(45, seed=1)
INPUTS = {
    "vae": ["image", "noise"],
    "wgan": ["image", "noise", "mix"],
    "contrastive": ["image", "views"],
    "pairs": ["image", "views"],
}


def config() -> Path:
    path = OUT / "c.yaml"
    if RANK == 0:
        np.savez(OUT / "train.npz", **ARRAYS)
        np.savez(OUT / "eval.npz", **EVAL)
        data = {"train": str(OUT / "train.npz"), "targets": [], "global_batch_size": BATCH, "shuffle": False}
        log = {"tensorboard": False, "progress": "plain", "every_steps": STEPS}
        sections = {"data": data, "train": {"max_steps": STEPS}, "log": log, "deterministic": True}
        partial = path.with_suffix(".tmp")
        partial.write_text(yaml.safe_dump(sections))
        partial.rename(path)
    while not path.exists():
        time.sleep(0.01)
    return path


CONFIG = config()


def train(model: str, into: str, *words: str) -> dict[str, Any]:
    """What a run of the trainer left: its lines of metrics and the digest of its weights; the code on every rank."""
    keras.utils.clear_session()
    given = [f"model=user_steps:{model}", f"data.inputs=[{', '.join(INPUTS[model])}]", *words]
    code = main.main(["--config", str(CONFIG), *given, "--output-dir", str(OUT / into)])
    if RANK or code:
        return {"code": code}
    rows = [json.loads(line) for line in (OUT / into / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((OUT / into / "summary.json").read_text())
    return {"code": code, "rows": rows, "sha256": summary["weights_sha256"], "ended": summary["ended"]}


def like_fit(
    model: str, *words: str, into: str = "", records: int = RECORDS, fit: dict[str, Any] | None = None
) -> dict[str, Any]:
    """How far the weights of a run are from those of `fit` on root alone, whose last batch of an epoch is smaller.

    records: that an epoch has. fit: more arguments of `fit`.
    """
    into = into or model
    found = train(model, into, "hooks=user_hooks:keep_weights", *words)
    if RANK or found["code"]:
        return found
    with np.load(OUT / into / f"weights-{RANK}-{STEPS}.npz") as kept:
        ours = flat([kept[path] for path in kept])
    options = {"contrastive": {"gathers": False}, "pairs": {"compiled": True}}.get(model, {})
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    alone = getattr(user_steps, model)(**options)
    start = flat(alone.get_weights())
    rows = {name: ARRAYS[name][:records] for name in INPUTS[model]}
    epochs = STEPS // -(-records // BATCH)
    alone.fit(rows, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **(fit or {}))
    theirs = flat(alone.get_weights())
    found |= {"error": float(np.max(np.abs(ours - theirs))), "moved": rel_error(start, theirs)}
    if model == "vae":
        alone.reset_metrics()
        found["evaluation"] = {key: float(value) for key, value in alone.test_step(EVAL).items()}
    return found


def flat(weights: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(weight) for weight in weights])


def resumed(model: str, *words: str) -> dict[str, Any]:
    """What a run ends with that was stopped after 7 steps."""
    train(model, f"{model}-resumed", "train.max_steps=7", *words)
    return train(model, f"{model}-resumed", *words)


def main_facts() -> dict[str, Any]:
    evaluated = [f"data.eval={OUT / 'eval.npz'}", "eval.every_epochs=2"]
    return {"vae": like_fit("vae", *evaluated), "wgan": like_fit("wgan"), "wgan resumed": resumed("wgan")}


if __name__ == "__main__":
    leave(RANK, main_facts())
