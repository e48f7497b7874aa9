"""Runs with hooks of the user's own, all in one process on each rank: hooked.py OUT."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import user_hooks
import yaml
from facts import leave

from horovod_train import main
from horovod_train.distributed.launch import launcher

OUT = Path(sys.argv[1])
RANK = launcher.detect().rank


def write_records(folder: Path) -> None:
    folder.mkdir()
    rng = np.random.default_rng(1)
    with tf.io.TFRecordWriter(str(folder / "a.tfrecord")) as writer:
        for x in rng.normal(size=(40, 6)):
            label = tf.train.Feature(int64_list=tf.train.Int64List(value=[int(x.sum() > 0)]))
            values = tf.train.Feature(float_list=tf.train.FloatList(value=x))
            example = tf.train.Example(features=tf.train.Features(feature={"x": values, "y": label}))
            writer.write(example.SerializeToString())


def run(name: str, *hooks: str) -> dict[str, Any]:
    """What this rank saw of a run of 12 steps, and what its summary says."""
    keras.utils.clear_session()  # names as in a process of its own
    user_hooks.called.clear()
    words = [f"hooks={json.dumps([f'user_hooks:{hook}' for hook in hooks])}", "--output-dir", str(OUT / name)]
    code = main.main(["--config", str(OUT / "c.yaml"), *words])
    summary = json.loads((OUT / name / "summary.json").read_text()) if RANK == 0 else {}
    told = {key: summary.get(key) for key in ("steps", "ended", "weights_sha256")}
    return {"code": code, "called": list(user_hooks.called), **told}


if RANK == 0:
    write_records(OUT / "data")
    config = {
        "data": {
            "train": str(OUT / "data"),
            "features": {"x": {"type": "float", "shape": [6]}, "y": {"type": "int64"}},
            "inputs": "x",
            "targets": "y",
            "global_batch_size": 8,
        },
        "model": "user_models:tiny",
        "loss": {"name": "sparse_categorical_crossentropy", "options": {"from_logits": True}},
        "train": {"max_steps": 12},
        "deterministic": True,
        "log": {"tensorboard": False, "progress": "plain", "every_steps": 4},
    }
    (OUT / "c.tmp").write_text(yaml.safe_dump(config))
    (OUT / "c.tmp").rename(OUT / "c.yaml")
while not (OUT / "c.yaml").exists():
    time.sleep(0.01)
leave(
    RANK,
    {
        "without": run("without"),
        "noted": run("noted", "note", "note_every_5"),
        "stopped": run("stopped", "stop_at_6", "note"),
        "resumed": run("stopped", "stop_at_6", "note"),
    },
)
