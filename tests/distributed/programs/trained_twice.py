"""Trains in one process by `train`, trains on from there, starts the end again, there and on a rank, and evaluates.

trained_twice.py OUT CONFIG
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import horovod_train
import horovod_train.tensorflow as hvd
from horovod_train.main import main


def states() -> str:
    """The random states of Python and NumPy."""
    state = np.random.get_state(legacy=False)
    return repr([random.getstate(), state["state"]["key"].tolist(), state["state"]["pos"]])


def train(*words: Any, **values: Any) -> horovod_train.Trained:
    """Train, and note what the call leaves in this process: settings, a number drawn, and the name of a new layer."""
    before = states()
    trained = horovod_train.train(*words, **values)
    are_same = states() == before
    import keras  # after the first run, which sets the threads of TensorFlow

    policy, name = keras.config.dtype_policy().name, keras.layers.Dense(1).name
    drawn = float(keras.random.uniform(()))  # the first one takes a number of Python's
    left.append({"same_states": are_same, "policy": policy, "drawn": drawn, "name": name})
    return trained


out, path = sys.argv[1:]
before = dict(os.environ)
left: list[dict[str, Any]] = []
config = yaml.safe_load(Path(path).read_text()) | {"output_dir": f"{out}/run"}
found = []
for epochs in (1, 2):
    summary, model = train(config, f"train.epochs={epochs}")
    assert model is not None
    found.append({"steps": summary["steps"], "weights": float(sum(abs(w.numpy()).sum() for w in model.weights))})
files = [Path(out, "run", name) for name in ("config.yaml", "summary.json")]
written = [file.read_bytes() for file in files]
train(config, "train.epochs=2", "train.l2=0.1")
kept = [file.name for file, content in zip(files, written, strict=True) if file.read_bytes() == content]
changed = {*before.items()} ^ {*os.environ.items()}
variables = sorted({name for name, _ in changed})
train(config, "train.epochs=2", np=1)
hvd.init()
evaluated = main(["evaluate", f"{out}/run"])
facts = {"runs": found, "variables": variables, "kept": kept, "evaluated": evaluated, "left": left}
facts["horovod"] = hvd.is_initialized()
Path(out, "found.json").write_text(json.dumps(facts))
