"""Models with steps of their own, by the trainer and by `fit` in one process: own_steps.py OUT."""

from __future__ import annotations

import json
import signal
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
RECORDS, BATCH, STEPS = 74, 16, 20  # the last of 5 steps of an epoch has 10 records, where it is not dropped
ARRAYS: dict[str, Any] = user_steps.arrays(RECORDS)
INPUTS = {"wgan": ["image", "noise", "mix"], "contrastive": ["image", "views"]}


def config() -> Path:
    path = OUT / "c.yaml"
    if RANK == 0:
        np.savez(OUT / "train.npz", **ARRAYS)
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
    return {"code": code, "rows": rows, "sha256": summary["weights_sha256"]}


def like_fit() -> dict[str, Any]:
    """How far the contrastive model is from that of `fit` on root alone, which computes on the batch of all ranks.

    In whole batches: a rank without records would add the row that it computes instead to what is gathered.
    """
    found = train("contrastive", "contrastive", "data.drop_remainder=true", "hooks=user_hooks:keep_weights")
    if RANK or found["code"]:
        return found
    with np.load(OUT / "contrastive" / f"weights-{RANK}-{STEPS}.npz") as kept:
        ours = flat([kept[path] for path in kept])
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    alone = user_steps.contrastive(gathers=False)
    start = flat(alone.get_weights())
    rows = {name: ARRAYS[name][: RECORDS // BATCH * BATCH] for name in INPUTS["contrastive"]}
    alone.fit(rows, batch_size=BATCH, epochs=STEPS // (RECORDS // BATCH), shuffle=False, verbose=0)
    theirs = flat(alone.get_weights())
    return found | {"error": float(np.max(np.abs(ours - theirs))), "moved": rel_error(start, theirs)}


def flat(weights: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(weight) for weight in weights])


def trained_alone(rates: list[float], name: str) -> dict[str, Any]:
    """Digests of the weights after two steps without and with compression, of one network: the other's rate is 0."""
    model = f"model={{name: user_steps:wgan, options: {{rates: {rates}}}}}"
    words = (model, "train.max_steps=2")
    found = {by: train("wgan", f"{name}-{by}", *words, f"horovod.compression={by}") for by in ("none", "bf16")}
    return {by: run.get("sha256") for by, run in found.items()}


APART = ("model={name: user_steps:contrastive, options: {gathers: false}}", "data.drop_remainder=true")
# The last of the 4 steps of an epoch has 2 records: on three ranks one of them has none.
SHORT = ("data.global_batch_size=24", "train.max_steps=8")
facts: dict[str, Any] = {
    "short": train("contrastive", "short", *SHORT),
    "contrastive": like_fit(),
    "apart": train("contrastive", "apart", *APART),
    "critic": trained_alone([0.003, 0.0], "critic"),
    "generator": trained_alone([0.0, 0.003], "generator"),
    "diverging": train("wgan", "diverging", "model={name: user_steps:wgan, options: {spoils: true}}"),
}
signal.alarm(0)  # which ends a process that is still there some seconds after its run has failed
leave(RANK, facts)
